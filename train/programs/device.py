"""What every program of a run can do, what one device computes in a step, and the tools around it."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from sdc.program import Reports
from sdc.records import program_fingerprint
from sdc.twins import tree_digest

from .config import TrainConfig
from .placement import Placement, fetch
from .step import BATCH_SPEC, device_step, init_state, metrics_specs, state_specs


class StepRows(NamedTuple):
    """What the record has of a step.

    Attributes:
        row: the line in `steps.jsonl`, but for the number of the step.
        details: lines in the file beside it.
    """

    row: Mapping[str, Any]
    details: Sequence[Mapping[str, Any]] = ()


# A transformation of a step into one that returns `(out, reports)` too
Transform: TypeAlias = Callable[[Callable[..., Any]], Callable[..., tuple[Any, Reports]]]


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceStep:
    """A training step of one device under bound mesh axes, and how its arrays are cut for the devices.

    Attributes:
        config: what is trained.
        fn: `(state, tokens) -> (state, metrics)` on one device; the state has a number `step`.
        state_specs: partition of the state.
        metrics_specs: partition of the metrics.
        init: the state of global shape from a random key, traceable.
        describe: what the line of a step says of the metrics, besides the scalars that all runs have.
        conclude: what the last state adds to the summary.
    """

    config: TrainConfig
    fn: Callable[[Any, Any], tuple[Any, Any]]
    state_specs: Any
    metrics_specs: Any
    init: Callable[[Array], Any]
    describe: Callable[[Any], Mapping[str, Any]] = lambda metrics: {}
    conclude: Callable[[Any], Mapping[str, Any]] = lambda state: {}

    def abstract(self) -> Any:
        return jax.eval_shape(self.init, jax.random.key(0))


def sharded(config: TrainConfig) -> DeviceStep:
    """The reference step, whose parameters are sharded over all ranks (ZeRO-1).

    Example:
        >>> from sdc.train import get_config
        >>> from sdc.train.programs import sharded
        >>> sharded(get_config("tiny")).abstract().step.dtype.name
        'int32'
    """
    return DeviceStep(
        config,
        functools.partial(device_step, config=config),
        state_specs(config),
        metrics_specs(config),
        functools.partial(init_state, config),
    )


def plain(work: DeviceStep, placement: Placement) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`(state, tokens) -> (state, metrics)` on global arrays, without any tool."""
    specs = work.state_specs
    return placement.map(work.fn, stacked=specs, shared=BATCH_SPEC, out=(specs, work.metrics_specs))


def initial_state(work: DeviceStep, placement: Placement, seed: int) -> Any:
    """The state before the first step, the same for every twin and mesh."""
    shardings = placement.sharding(placement.spec(work.state_specs))
    init = jax.jit(lambda key: placement.stack(work.init(key)), out_shardings=shardings)
    return init(jax.random.key(seed))


def described(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def described_batch(config: TrainConfig, placement: Placement) -> jax.ShapeDtypeStruct:
    shape = (config.microsteps, config.batch_size, config.sequence_length + 1)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(placement.mesh, BATCH_SPEC))


def place_batch(tokens: Int[np.ndarray, "microsteps batch length"], placement: Placement) -> Array:
    """A global batch on the mesh; each process takes its part of the batch that all of them hold."""
    sharding = NamedSharding(placement.mesh, BATCH_SPEC)
    return jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])


@dataclasses.dataclass(frozen=True, eq=False)
class Program(abc.ABC):
    """What a run executes. Steps are numbered from 0; every process calls every method.

    A program is made for a placement and compiled at its first step. `step` and `observe` take the state over and
    return the next one.

    Attributes:
        work: the step of one copy.
        placement: where it runs.
        donate: whether a step takes the memory of the state that it is given, which cannot be used afterwards.
    """

    work: DeviceStep
    placement: Placement
    _: dataclasses.KW_ONLY
    donate: bool = True

    @functools.cached_property
    @abc.abstractmethod
    def compiled(self) -> jax.stages.Wrapped:
        """`(state, (tokens, beside)) -> (state, metrics, ...)`, jitted."""

    @abc.abstractmethod
    def beside(self) -> Any:
        """Shapes and types of what a step takes beside the tokens."""

    @abc.abstractmethod
    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        """Runs a step. Returns the next state, and what the step says of itself: arrays on the devices."""

    def observe(self, state: Any, out: Any) -> tuple[Any, Any]:
        """Compares, and perhaps repairs, the state after a step. Returns the state and what was seen."""
        return state, None

    @abc.abstractmethod
    def rows(self, number: int, out: Any, seen: Any) -> StepRows:
        """What the record has of a step, from what `step` and `observe` said."""

    def init(self, seed: int) -> Any:
        return initial_state(self.work, self.placement, seed)

    def abstract(self) -> Any:
        """Shapes, types and shardings of the state, to restore one into."""
        stacked = jax.eval_shape(self.placement.stack, self.work.abstract())
        return described(stacked, self.placement.sharding(self.placement.spec(self.work.state_specs)))

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the StableHLO of what runs; nothing is compiled or run."""
        return {"step": program_fingerprint(self.compiled.lower(*self.inputs))}

    def digest(self, state: Any) -> list[str]:
        """64-bit digests of the state in hexadecimal, one for each twin: equal for equal bits, on any mesh."""
        rows = np.atleast_2d(fetch((_digest if self.placement.twins is None else _digest_of_each)(state)))
        return [f"{int(a):08x}{int(b):08x}" for a, b in rows]

    def files(self) -> Mapping[str, Any]:
        """Further files of the record by name, written before the first step."""
        return {}

    def conclude(self, state: Any) -> Mapping[str, Any]:
        """What the last state adds to the summary."""
        return self.work.conclude(state)

    @property
    def batch(self) -> jax.ShapeDtypeStruct:
        return described_batch(self.work.config, self.placement)

    @property
    def inputs(self) -> tuple[Any, tuple[Any, Any]]:
        """Shapes, types and shardings of what `compiled` takes."""
        return self.abstract(), (self.batch, self.beside())

    def jitted(self, fn: Callable[[Any, Any], Any], shared: Any, *reports: Any) -> jax.stages.Wrapped:
        """Places a per-device function of `(state, (tokens, shared))` that returns state, metrics and reports."""
        specs = self.work.state_specs
        out = (specs, self.work.metrics_specs, *reports)
        mapped = self.placement.map(fn, stacked=specs, shared=(BATCH_SPEC, shared), out=out)
        return self.placement.jit(mapped, donate=self.donate)


_digest, _digest_of_each = jax.jit(tree_digest), jax.jit(jax.vmap(tree_digest))


def scalar_row(metrics: Any) -> dict[str, Any]:
    """The scalars of a step, one number per twin, as a line of `steps.jsonl` has them."""
    return {
        "loss": np.atleast_1d(metrics.loss),
        "gradient_norm": np.atleast_1d(metrics.gradient_norm),
        "learning_rate": float(np.ravel(metrics.learning_rate)[0]),
    }
