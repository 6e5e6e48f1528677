"""`sdc train`: one copy, the reference that twins are compared with, or one that checks or protects itself."""

from collections.abc import Mapping
from typing import Any

from sdc.train.config import TrainConfig
from sdc.train.methods import Aggregation, parse_aggregation
from sdc.train.placement import Placement

from .aggregated import AggregatedPrograms
from .checked import check_options, describe_run, faults, transform
from .errors import usage_errors
from .options import TrainOptions
from .output import finish
from .programs import Programs
from .session import Plan, execute


def train(options: TrainOptions) -> int:
    """Trains and returns the exit code."""
    check_options(options, twin=None)
    with usage_errors():
        aggregation = None if options.aggregate is None else parse_aggregation(options.aggregate)

    def programs(config: TrainConfig, placement: Placement) -> Programs:
        simulated, abft = tuple(faults(options, layers=config.model.layers, twin=None)), transform(options)
        if aggregation is None:
            return Programs(config, placement, faults=simulated, abft=abft)
        return AggregatedPrograms(
            config, placement, faults=simulated, abft=abft, aggregation=aggregation, seed=options.seed,
            steps=options.steps,
        )  # fmt: skip

    plan = Plan(kind="train", programs=programs, manifest=lambda layers: _describe(options, aggregation, layers))
    return finish(options, execute(options, plan))


def _describe(options: TrainOptions, aggregation: Aggregation | None, layers: int) -> Mapping[str, Any]:
    """What the manifest says of the suspect, the checks and the aggregation."""
    told = describe_run(options, layers, twin=None)
    if aggregation is None:
        return told
    suspect = told["suspect"]
    simulated = [*suspect["faults"], *aggregation.simulated]
    name = suspect["name"] or ("aggregation" if simulated else None)
    return {
        **told,
        "aggregate": aggregation.text,
        "suspect": {"name": name, "simulated": bool(simulated), "faults": simulated},
    }
