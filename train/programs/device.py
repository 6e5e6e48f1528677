"""The base class of the programs of a run, the step of one device, and functions that apply this step."""

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
    """The record of one step.

    Attributes:
        row: the line in `steps.jsonl`, without the step number.
        details: lines in the accompanying file.
    """

    row: Mapping[str, Any]
    details: Sequence[Mapping[str, Any]] = ()


# A transformation of a step into a step that also returns reports, as `(out, reports)`
Transform: TypeAlias = Callable[[Callable[..., Any]], Callable[..., tuple[Any, Reports[Any]]]]


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceStep:
    """A training step of one device, to be called with the mesh axes bound, and the partition of its arrays over
    devices.

    Attributes:
        config: the configuration.
        fn: `(state, tokens) -> (state, metrics)` on one device; the state has a field `step`.
        state_specs: partition of the state.
        metrics_specs: partition of the metrics.
        init: returns the initial state, in its global shape, from a random key; JAX can trace this function.
        describe: returns the fields that the metrics add to a step's line, besides the scalars common to all runs.
        conclude: returns the fields that the final state adds to the summary.
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
    """Returns the reference step, with parameters sharded over all ranks (ZeRO-1).

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
    """Returns the step, without instrumentation, as a function `(state, tokens) -> (state, metrics)` of global
    arrays."""
    specs = work.state_specs
    return placement.map(work.fn, stacked=specs, shared=BATCH_SPEC, out=(specs, work.metrics_specs))


def initial_state(work: DeviceStep, placement: Placement, seed: int) -> Any:
    """Returns the state before the first step, which is the same for every twin and every mesh."""
    shardings = placement.sharding(placement.spec(work.state_specs))
    init = jax.jit(lambda key: placement.stack(work.init(key)), out_shardings=shardings)
    return init(jax.random.key(seed))


def described(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def described_batch(config: TrainConfig, placement: Placement) -> jax.ShapeDtypeStruct:
    shape = (config.microsteps, config.batch_size, config.sequence_length + 1)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(placement.mesh, BATCH_SPEC))


def place_batch(tokens: Int[np.ndarray, "microsteps batch length"], placement: Placement) -> Array:
    """Places a global batch on the mesh; every process has the whole batch and places its own part."""
    sharding = NamedSharding(placement.mesh, BATCH_SPEC)
    return jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])


@dataclasses.dataclass(frozen=True, eq=False)
class Program(abc.ABC):
    """The computation of a run. Steps are numbered from 0; every process calls every method.

    A program is made for a placement, and compiled by `executables` or at its first step. `step` and `observe` consume
    the state and return the next state.

    Attributes:
        work: the step of one copy.
        placement: the layout over devices.
        donate: whether a step reuses the memory of its input state, which cannot be used afterwards.
    """

    work: DeviceStep
    placement: Placement
    _: dataclasses.KW_ONLY
    donate: bool = True

    @functools.cached_property
    @abc.abstractmethod
    def compiled(self) -> jax.stages.Wrapped:
        """Jitted function `(state, (tokens, beside)) -> (state, metrics, ...)`."""

    @abc.abstractmethod
    def beside(self) -> Any:
        """Returns the shapes and types of the inputs of a step other than state and tokens."""

    @abc.abstractmethod
    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        """Runs a step. Returns the next state and the output of the step, as arrays on the devices."""

    def observe(self, state: Any, out: Any) -> tuple[Any, Any]:
        """Compares, and possibly repairs, the state after a step. Returns the state and the observations."""
        return state, None

    @abc.abstractmethod
    def rows(self, number: int, out: Any, seen: Any) -> StepRows:
        """Returns the record of a step, made from the outputs of `step` and `observe`."""

    def init(self, seed: int) -> Any:
        return initial_state(self.work, self.placement, seed)

    def abstract(self) -> Any:
        """Returns the shapes, types and shardings of the state, for restoring a checkpoint."""
        stacked = jax.eval_shape(self.placement.stack, self.work.abstract())
        return described(stacked, self.placement.sharding(self.placement.spec(self.work.state_specs)))

    @functools.cached_property
    def lowered(self) -> Mapping[str, jax.stages.Lowered]:
        """Lowered functions of a step, by name."""
        return {"step": self.compiled.lower(*self.inputs)}

    @functools.cached_property
    def executables(self) -> Mapping[str, jax.stages.Compiled]:
        """Compiled functions of a step, and the compiled `digest`, by name.

        All processes compile these functions before any collective runs: on CPUs (Gloo), a process gives up after
        waiting in a collective for 30 s while another process compiles. Processes compile at different speeds, for
        example because only one of them has a warm cache.
        """
        digest = (_digest if self.placement.twins is None else _digest_of_each).lower(self.abstract())
        return {name: lowered.compile() for name, lowered in {**self.lowered, "digest": digest}.items()}

    def fingerprint(self) -> dict[str, str]:
        """Returns the SHA-256 of the StableHLO of the program, without compiling or running it."""
        return {name: program_fingerprint(lowered) for name, lowered in self.lowered.items()}

    def digest(self, state: Any) -> list[str]:
        """Returns 64-bit digests of the state in hexadecimal, one for each twin. States with equal bits have equal
        digests on any mesh."""
        rows = np.atleast_2d(fetch(self.executables["digest"](state)))
        return [f"{int(a):08x}{int(b):08x}" for a, b in rows]

    def files(self) -> Mapping[str, Any]:
        """Returns additional files of the record, by name, which are written before the first step."""
        return {}

    def conclude(self, state: Any) -> Mapping[str, Any]:
        """Returns the fields that the final state adds to the summary."""
        return self.work.conclude(state)

    @property
    def batch(self) -> jax.ShapeDtypeStruct:
        return described_batch(self.work.config, self.placement)

    @property
    def inputs(self) -> tuple[Any, tuple[Any, Any]]:
        """Shapes, types and shardings of the inputs of `compiled`."""
        return self.abstract(), (self.batch, self.beside())

    def jitted(
        self, fn: Callable[[Any, Any], Any], shared: Any, *reports: Any, donate: bool | None = None
    ) -> jax.stages.Wrapped:
        """Places and jits a per-device function of `(state, (tokens, shared))` that returns state, metrics and
        reports; by default, `donate` is that of the program."""
        specs = self.work.state_specs
        out = (specs, self.work.metrics_specs, *reports)
        mapped = self.placement.map(fn, stacked=specs, shared=(BATCH_SPEC, shared), out=out)
        return self.placement.jit(mapped, donate=self.donate if donate is None else donate)


_digest, _digest_of_each = jax.jit(tree_digest), jax.jit(jax.vmap(tree_digest))


def scalar_row(metrics: Any) -> dict[str, Any]:
    """Returns the scalars of a step, with one number per twin, as in a line of `steps.jsonl`."""
    return {
        "loss": np.atleast_1d(metrics.loss),
        "gradient_norm": np.atleast_1d(metrics.gradient_norm),
        "learning_rate": float(np.ravel(metrics.learning_rate)[0]),
    }
