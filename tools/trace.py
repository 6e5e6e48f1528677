"""`sdc trace`: the digests of every step of a run, for comparison with another run's, at once or later."""

from sdc.program.selectors import parse_selector
from sdc.twins.traces import read_trace

from .errors import CommandError, usage_errors
from .options import TraceOptions
from .output import finish
from .session import Plan, execute
from .simulate import parse_simulation
from .traced import TracePrograms


def trace(options: TraceOptions) -> int:
    """Traces a run and returns the exit code."""
    with usage_errors():
        where = parse_selector(options.where)
        simulation = None if options.simulate is None else parse_simulation(options.simulate)
        golden = None if options.against is None else read_trace(options.against)
    if simulation is not None and simulation.fault and not 0 <= simulation.step < options.steps:
        raise CommandError(f"--simulate step={simulation.step}: the run has the steps 0 to {options.steps - 1}")
    faults = [simulation.text] if simulation is not None and simulation.fault else []
    plan = Plan(
        kind="trace",
        programs=lambda config, placement: TracePrograms(
            config, placement, where=where, simulation=simulation, golden=golden
        ),
        manifest=lambda layers: {
            "where": where.text,
            "against": None if golden is None else str(golden.path),
            "suspect": {"name": "custom" if faults else None, "simulated": bool(faults), "faults": faults},
        },
    )
    return finish(options, execute(options, plan))
