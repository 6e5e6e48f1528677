"""What each host of a pool sends the others in a step where all agree, counted in the compiled programs."""

import math

import jax

from sdc.train import FullLoad, TrainConfig, Workload
from sdc.train.programs import TWIN, TwinProgram, described, place

from .collectives import collectives


def pool_bytes(config: TrainConfig, *, twins: int = 3) -> int:
    """Bytes of digests that each host hands to the others in a step in which nothing differs, at each of its ranks.

    They are counted in what the compiler made of the programs: arrays in collectives between twins, that run always,
    all of them outside of the loop over microsteps. An array has a row for each host; what of it crosses the network is
    up to the collective, at most twice the array.

    Args:
        config: what is trained; one device for each twin must be there.
        twins: number of hosts.

    Example:
        >>> from sdc.tools.bench._pool import pool_bytes
        >>> from sdc.train.programs.config import get_config
        >>> pool_bytes(get_config("tiny"), twins=2)
        32
    """
    placement = place(twins=twins, data=1, model=1, devices=jax.devices()[:twins])
    program = FullLoad(workload=Workload(config=config), twins=twins).program(config, placement, donate=True)
    assert isinstance(program, TwinProgram)
    state, shared = program.abstract(), (program.batch, jax.eval_shape(jax.random.key, 0))
    metrics = jax.eval_shape(program.compiled, state, shared)[1]
    gradient = described(metrics.gradient, placement.sharding(placement.spec(program.work.metrics_specs.gradient)))
    step = program.compiled.lower(state, shared).compile().as_text() or ""
    observe = program.compiled_observation.lower(state, gradient).compile().as_text() or ""
    assert placement.mesh.axis_names[0] == TWIN
    return math.ceil((_crossing(step, twins) + _crossing(observe, twins)) / twins)


def _crossing(text: str, twins: int) -> int:
    part = range(twins)
    return sum(sum(one.sizes) for one in collectives(text) if not one.conditional and one.crosses(part))
