"""The cost of fingerprints, injection, rewriting and campaigns.

`sdc bench transform`: the cost of a step, and of tracing, rewriting and compiling programs of many layers, relative to
the plain step. `sdc bench campaign`: the cost of injections through one program, compared with a separate run for each
injection.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sdc
from sdc.campaigns import Campaign
from sdc.faults import BitFlip
from sdc.nodes import node_faults
from sdc.program import arithmetic, direction, named, operations, primitive, probes, products
from sdc.train import CampaignJob, Loaded, TrainConfig, Workload, get_config, make_campaign
from sdc.train.programs import Placement, initial_state, place, plain, sharded
from sdc.twins import digest

from . import harness
from ._foreign import FOREIGN, ROWS, WIDTH, foreign_steps
from .command import BenchOptions

TRANSFORM_BARS = {
    "fingerprint_products": 1.10,
    "fingerprint_probes": 1.03,
    "inject_one_fault": 1.02,
    "densest_node_over_uniform": 1.02,
    "rewriting_share_fingerprint_products": 0.20,
    "rewriting_share_fingerprint_probes": 0.20,
    "rewriting_share_inject_one_fault": 0.20,
    "digest_float32": 1.5,
    "digest_bfloat16": 2.0,
    "tracing_96_layers_fingerprint": 3.0,
    "tracing_96_layers_inject": 3.0,
    "tracing_96_layers_abft": 6.0,
    "tracing_4000_sites_seconds": 10.0,
    "compiling_96_layers_detect": 2.0,
    "compiling_96_layers_correct": 3.0,
    "compiling_96_layers_again": 2.0,
    "compiling_tiny_detect": 2.0,
    "compiling_tiny_correct": 3.0,
    "compiling_tiny_again": 2.0,
    **{f"compiling_{name}_again": 2.0 for name in FOREIGN},
    **{f"compiling_{name}_fingerprint": 1.5 for name in ("96_layers", "tiny", *FOREIGN)},
    **{f"lowering_{name}_inject": 5.0 for name in ("96_layers", "tiny", *FOREIGN)},
    "compiling_nnx_lockstep": 2.5,
}
ELEMENTS = 16 * 2**20  # elements of the array whose digest is timed
LAYERS = 96
OPERATIONS = 4000
ALONE = 3  # injections that also run separately


def measure_transform(options: BenchOptions) -> dict[str, Any]:
    """Measures the step in each dtype, and tracing and compiling in float32."""
    result: dict[str, dict[str, float]] = {}
    for dtype in options.dtypes:
        x = jax.random.normal(jax.random.key(0), (ELEMENTS // 1024, 1024)).astype(dtype)
        runs = harness.compiled({"plain": lambda x: jnp.sum(x, dtype=jnp.float32), f"digest_{dtype}": digest}, x)
        result[dtype] = _steps(harness.config_of(options, dtype), options.steps) | harness.ratios(
            harness.take_turns(runs, 3 * options.steps)
        )
    result.setdefault("float32", {}).update(_unrolled(options.steps))
    return result


def _steps(config: TrainConfig, steps: int) -> dict[str, float]:
    """Returns ratios of step times, and the time that rewriting adds, as a share of lowering and compiling."""
    step, arguments = harness.reference_step(config)
    moment = sdc.Moment(jax.random.key(0), jnp.int32(0))
    # One backward matrix product; at this rate, the fault strikes a few of its elements.
    site = sdc.sites(step, *arguments, where=primitive("dot_general") & direction("bwd"))[0]
    one = named(site.name)
    fault = sdc.Fault(BitFlip(), 1e-6, one)
    densest, uniform = (node_faults(name, layers=config.model.layers) for name in ("node11", "node11:uniform"))
    variants: dict[str, Callable[..., Any]] = {
        "plain": step,
        "fingerprint_products": sdc.fingerprint(step, primitive("dot_general")),
        "fingerprint_probes": sdc.fingerprint(step, probes),
        "inject_one_fault": lambda *args: sdc.inject(step, [fault])(moment, *args),
        "inject_densest_node": lambda *args: sdc.inject(step, densest)(moment, *args),
        "inject_densest_node_uniform": lambda *args: sdc.inject(step, uniform)(moment, *args),
        "strike_one_site": lambda *args: sdc.strike(step, one)(sdc.no_strike(), *args),
    }
    traced = {name: min(harness.tracing_seconds(fn, *arguments) for _ in range(3)) for name, fn in variants.items()}
    started = time.perf_counter()
    runs = harness.compiled({"plain": variants.pop("plain")}, *arguments)
    whole = time.perf_counter() - started
    seconds = harness.take_turns(runs | harness.compiled(variants, *arguments), steps)
    return {
        "plain_seconds": statistics.median(seconds["plain"]),
        **harness.ratios(seconds),
        "densest_node_over_uniform": harness.ratio(
            seconds["inject_densest_node_uniform"], seconds["inject_densest_node"]
        ),
        **{
            f"rewriting_share_{name}": (traced[name] - traced["plain"]) / whole
            for name in ("fingerprint_products", "fingerprint_probes", "inject_one_fault")
        },
        "lower_and_compile_seconds": whole,
    }


def _unrolled(times: int) -> dict[str, float]:
    """Returns times of tracing and compiling relative to the plain step, and seconds for a step of 4,000 sites."""
    moment = sdc.Moment(jax.random.key(0), jnp.int32(0))
    faults = [sdc.Fault(BitFlip(), 1e-6, products)]
    layers = [jnp.full((WIDTH, WIDTH), 0.01)] * LAYERS, jnp.ones((ROWS, WIDTH))
    variants: dict[str, Callable[..., Any]] = {
        "plain": _layers,
        "fingerprint": sdc.fingerprint(_layers, products),
        "inject": lambda *args: sdc.inject(_layers, faults)(moment, *args),
        "abft": sdc.abft(_layers),
    }
    turns = [{name: harness.tracing_seconds(fn, *layers) for name, fn in variants.items()} for _ in range(times)]
    tracing = {name: statistics.median(turn[name] for turn in turns) for name in variants}
    found = {f"tracing_96_layers_{name}": tracing[name] / tracing["plain"] for name in list(variants)[1:]}
    found["tracing_4000_sites_seconds"] = harness.tracing_seconds(
        sdc.fingerprint(_operations, operations), jnp.ones(WIDTH)
    )
    subjects = {"96_layers": (_layers, layers), "tiny": harness.reference_step(get_config("tiny")), **foreign_steps()}
    for name, (step, arguments) in subjects.items():
        found |= {f"{what}_{name}_{tool}": ratio for (what, tool), ratio in _compiling(step, arguments).items()}
    step, arguments = subjects["nnx"]
    twins = jax.tree.map(lambda x: jnp.stack([x, x]), arguments)
    plain, locked = (jax.vmap(fn, axis_name="twin") for fn in (step, sdc.lockstep(step, "twin", where=products)))
    found["compiling_nnx_lockstep"] = _compiling_seconds(locked, twins) / _compiling_seconds(plain, twins)
    return found


def _compiling(step: Callable[..., Any], arguments: Any) -> dict[tuple[str, str], float]:
    """Returns the time of lowering, and of lowering and compiling, relative to the plain step."""
    moment = sdc.Moment(jax.random.key(0), jnp.int32(0))
    faulty = {
        name: sdc.inject(step, [sdc.Fault(BitFlip(), 1e-6, where)])
        for name, where in (("products", products), ("all", operations & arithmetic))
    }
    lowered, whole = _lowering_seconds(step, arguments), _compiling_seconds(step, arguments)
    again: Any = sdc.abft(step, examine="again")
    compiling = {
        "detect": _compiling_seconds(sdc.abft(step), arguments),
        "correct": _compiling_seconds(sdc.abft(step, mode="correct"), arguments),
        "again": harness.seconds_of(lambda: again.lower(*arguments).compile(), anew=True),
        "fingerprint": _compiling_seconds(sdc.fingerprint(step, products), arguments),
        "inject": _compiling_seconds(functools.partial(faulty["products"], moment), arguments),
    }
    return {
        **{("compiling", tool): seconds / whole for tool, seconds in compiling.items()},
        ("lowering", "inject"): _lowering_seconds(functools.partial(faulty["all"], moment), arguments) / lowered,
    }


def _lowering_seconds(step: Callable[..., Any], arguments: Any) -> float:
    return harness.seconds_of(lambda: jax.jit(lambda *args: step(*args)).lower(*arguments), anew=True)


def _compiling_seconds(step: Callable[..., Any], arguments: Any) -> float:
    return harness.seconds_of(lambda: harness.compiled({"": lambda *args: step(*args)}, *arguments), anew=True)


def _layers(weights: list[Any], x: Any) -> Any:
    """Executes a step of a network with unrolled layers: 3 matrix products for each layer but the first."""

    def loss(weights: list[Any]) -> Any:
        y = x
        for w in weights:
            y = y + jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def _operations(x: Any) -> Any:
    for _ in range(OPERATIONS // 2):
        x = jnp.sin(x) + x
    return x


def measure_campaign(options: BenchOptions) -> dict[str, Any]:
    """Measures injections through one program and as separate runs, with the reference workload."""
    injections = 10 * options.steps
    job = CampaignJob(workload=Workload(config=str(options.config)), injections=injections, batch=1)
    loaded = job.load()
    placement = place(twins=None, data=1, model=1, devices=jax.devices()[:1])
    started = time.perf_counter()
    runner = make_campaign(job, loaded, placement)
    setup = time.perf_counter() - started
    started = time.perf_counter()
    rows = list(runner.run(range(injections)))
    together = (time.perf_counter() - started) / injections
    alone = float(np.mean([_alone(loaded, placement, runner, number) for number in range(ALONE)]))
    process = float(np.mean([_process(loaded.config.name, runner, number) for number in range(ALONE)]))
    return {
        "float32": {
            "setup_seconds": setup,
            "seconds_per_injection": together,
            "seconds_per_run_of_its_own": process,
            "seconds_per_program_of_its_own": alone,
            "speedup": process / (together + setup / 1000),
            "speedup_without_start_up": alone / together,
            "injections_in_10_minutes": (600 - setup) / together,
            "steps_per_injection": float(np.mean([1 + row["followed"] for row in rows])),
        }
    }


def _process(config: str, runner: Campaign, number: int) -> float:
    """Returns the duration of a process that trains for the steps of one injection: a separate run costs at least this
    much."""
    steps = runner.plan(number).step + 1 + runner.follow
    with tempfile.TemporaryDirectory() as folder:
        return harness.command_costs(["train", "--config", config, "--steps", steps, "--run", f"{folder}/run"])[0]


def _alone(loaded: Loaded, placement: Placement, runner: Campaign, number: int) -> float:
    """Returns the duration of one injection as a separate run from step 0, which compiles a step with this fault."""
    work = sharded(loaded.config)
    whole, start = plain(work, placement), initial_state(work, placement, runner.seed)
    injection = runner.plan(number)
    where = named(injection.row["site"])
    nothing = sdc.no_strike(room=int(np.size(injection.strike.elements)), axes=sorted(injection.strike.device))

    def step(hit: Any, state: Any, tokens: Any) -> Any:
        strike = jax.tree.map(lambda a, b: jax.numpy.where(hit, a, b), injection.strike, nothing)
        return sdc.strike(whole, where)(strike, state, tokens)[0]

    def train() -> None:
        run, state = jax.jit(step), start
        for place_in_time in range(injection.step + 1 + runner.follow):
            state, metrics = run(place_in_time == injection.step, state, runner.batches[place_in_time])
            float(metrics.loss)

    return harness.seconds_of(train, anew=True)


BENCHMARKS = {
    "transform": harness.Benchmark(measure_transform, TRANSFORM_BARS),
    "campaign": harness.Benchmark(measure_campaign, {"speedup": 10.0, "injections_in_10_minutes": 1000.0}),
}
