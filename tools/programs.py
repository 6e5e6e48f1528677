"""The compiled programs of a run: the step, wrapped in the tools, and what is compared after it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

import sdc
from sdc.program.reports import Reports
from sdc.record.determinism import program_fingerprint
from sdc.record.records import MISMATCHES
from sdc.train.config import TrainConfig
from sdc.train.flags import tally_flags
from sdc.train.parallel import DATA, MODEL
from sdc.train.placement import RANKS, TWIN, Placement
from sdc.train.step import (
    BATCH_SPEC,
    Metrics,
    TrainState,
    abstract_state,
    device_step,
    init_state,
    metrics_specs,
    state_specs,
)
from sdc.train.tally import tally, total
from sdc.twins._lockstep import Compare
from sdc.twins.agreement import agreement, squared_distance
from sdc.twins.digests import tree_digest

NONE = Reports((), ())


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a run, and what they run on.

    Attributes:
        config: what is trained.
        placement: where.
        sync: `compute`, `params`, or `none`; None for a run without twins.
        compare: see `lockstep`.
        faults: simulated.
        abft: how products are checked; None not to check them.
    """

    details: ClassVar[str] = MISMATCHES
    """Name of the file of details that the record has beside `steps.jsonl`."""

    config: TrainConfig
    placement: Placement
    sync: str | None = None
    compare: Compare = "gated"
    faults: tuple[sdc.Fault, ...] = ()
    abft: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    def begin(self, manifest: Mapping[str, Any], folder: Path | None) -> None:
        """Told what runs, before the first step; `folder` is the run folder in the process that writes it."""

    def ended(self) -> bool:
        """Whether what was found ends the run early."""
        return False

    def conclusion(self, state: Any) -> Mapping[str, Any]:
        """What is to be added to the summary, given the last state; called in every process."""
        return {}

    @property
    def device_step(self) -> Callable[..., Any]:
        """`(state, tokens) -> (state, metrics)` on one device."""
        return functools.partial(device_step, config=self.config)

    @property
    def state_specs(self) -> Any:
        """Partition of the state of one twin."""
        return state_specs(self.config)

    @property
    def metrics_specs(self) -> Any:
        """Partition of the metrics of one twin."""
        return metrics_specs(self.config)

    def describe(self, metrics: Any) -> Mapping[str, Any]:
        """What the line of a step says of the metrics, besides the scalars that all runs have."""
        return {}

    def initial_state(self, seed: int) -> Any:
        """The state before the first step, the same for every twin and mesh."""
        init = jax.jit(
            lambda key: self.placement.stack(init_state(self.config, key)), out_shardings=self.state_shardings
        )
        return init(jax.random.key(seed))

    @functools.cached_property
    def state_shardings(self) -> Any:
        return self.placement.sharding(self.placement.spec(self.state_specs))

    def abstract_state(self) -> Any:
        """Shapes, types and shardings of the state."""
        stacked = jax.eval_shape(self.placement.stack, abstract_state(self.config))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), stacked, self.state_shardings
        )

    def abstract_batch(self) -> jax.ShapeDtypeStruct:
        """Shape, type and sharding of a batch."""
        shape = (self.config.microsteps, self.config.batch_size, self.config.sequence_length + 1)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(self.placement.mesh, BATCH_SPEC))

    @functools.cached_property
    def plain(self) -> Callable[..., Any]:
        """`(state, tokens) -> (state, metrics)` on global arrays, without twins and tools."""
        specs = self.state_specs
        return self.placement.map(self.device_step, stacked=specs, shared=BATCH_SPEC, out=(specs, self.metrics_specs))

    @functools.cached_property
    def step(self) -> jax.stages.Wrapped:
        """`(state, (tokens, key)) -> (state, metrics, reports)`, jitted."""
        plain = self.device_step
        # Faults are those of the hardware: in the sums of a product, before they are rounded and checked.
        wide = plain if self.abft is None else sdc.checksums.accumulators(plain)

        def fn(state: Any, shared: tuple[Any, Any]) -> Any:
            tokens, key = shared
            moment = sdc.Moment(key, state.step)
            injected = sdc.inject(wide, self.faults) if self.faults else lambda _, *args: (wide(*args), NONE)

            def unchecked(*args: Any) -> Any:
                return injected(*args), NONE

            checked = unchecked if self.abft is None else self.abft(injected)
            if self.sync == "compute":
                twins = sdc.lockstep(checked, TWIN, compare=self.compare)
                ((out, events), flags), mismatches = twins(moment, state, tokens)
            else:
                ((out, events), flags), mismatches = checked(moment, state, tokens), NONE
            return *out, (mismatches, events, flags)

        specs = self.state_specs
        mapped = self.placement.map(fn, stacked=specs, shared=(BATCH_SPEC, P()), out=(specs, self.metrics_specs, RANKS))
        return jax.jit(mapped, donate_argnums=0)

    @functools.cached_property
    def observe(self) -> jax.stages.Wrapped:
        """`(state, gradient) -> (state, reports)`, jitted: twins compared after the step, and the suspect repaired."""
        specs = state_specs(self.config)
        gradient_specs = metrics_specs(self.config).gradient
        model = self.placement.mesh.shape[MODEL]
        replicas = [1 if MODEL in spec else model for spec in jax.tree.leaves(gradient_specs)]

        def distance(tree: Any, agreed: Any) -> Any:
            leaves = jax.tree.leaves(tree)
            zeros = jnp.zeros(lax.axis_size(TWIN), jnp.float32)
            return lax.cond(
                agreed.differs,
                lambda: squared_distance(leaves, TWIN, replicas, agreed.reference),
                lambda: zeros,
            )

        def norm(tree: Any) -> Any:
            parts = zip(jax.tree.leaves(tree), replicas, strict=True)
            return lax.psum(sum(jnp.sum(jnp.square(leaf)) / count for leaf, count in parts), (DATA, MODEL))

        def fn(stacked: tuple[TrainState, Any], _: None) -> Any:
            state, gradient = stacked
            gradients = agreement(jax.tree.leaves(gradient), TWIN)
            params = agreement(jax.tree.leaves(state.params), TWIN)
            squares = {
                "gradient_difference": distance(gradient, gradients),
                "parameter_difference": distance(state.params, params),
                "parameter_norm": norm(state.params),
            }
            _, gradient_mismatch = sdc.synchronize(gradient, TWIN, repair=False, compare=self.compare, agreed=gradients)
            state, mismatch = sdc.synchronize(state, TWIN, repair=self.sync != "none", compare=self.compare)
            return state, {"squares": squares, "gradient": gradient_mismatch, "state": mismatch}

        mapped = self.placement.map(fn, stacked=(specs, gradient_specs), shared=None, out=(specs, RANKS))
        return jax.jit(lambda state, gradient: mapped((state, gradient), None), donate_argnums=0)

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the StableHLO of the programs; nothing is compiled or run."""
        state, tokens = self.abstract_state(), self.abstract_batch()
        key = jax.eval_shape(jax.random.key, 0)
        lowered = self.step.lower(state, (tokens, key))
        prints = {"step": program_fingerprint(lowered)}
        if self.sync is not None:
            metrics = jax.eval_shape(self.step, state, (tokens, key))[1]
            shardings = self.placement.sharding(self.placement.spec(metrics_specs(self.config).gradient))
            gradient = jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                metrics.gradient,
                shardings,
            )
            prints["observe"] = program_fingerprint(self.observe.lower(state, gradient))
        return prints

    def state_digest(self, state: Any) -> list[str]:
        """64-bit digest of the state of each twin, in hexadecimal: equal for equal bits, on any mesh."""
        digest = tree_digest if self.placement.twins is None else jax.vmap(tree_digest)
        rows = np.atleast_2d(fetch(jax.jit(digest)(state)))
        return [f"{int(a):08x}{int(b):08x}" for a, b in rows]

    def advance(
        self, state: Any, tokens: Any, key: Any, step: int
    ) -> tuple[Any, Mapping[str, Any], Sequence[Mapping[str, Any]]]:
        """One step and its line in the record."""
        state, metrics, reports = self.step(state, (tokens, key))
        scalars: Metrics = metrics._replace(gradient=None)
        if self.sync is None:
            scalars, (_, events, flags) = fetch((scalars, reports))
            # There is one copy, where a tally expects twins.
            sites, rows = tally(NONE, jax.tree.map(lambda x: x[None], events), step=step)
            row = scalar_row(scalars, rate=float(scalars.learning_rate))
            row |= {"sites": sites} if sites else {}
            return state, {**row, **self.describe(scalars), **self._flags(flags)}, rows
        state, observed = self.observe(state, metrics.gradient)
        scalars, (mismatches, events, flags), observed = fetch((scalars, reports, observed))
        sites, rows = tally(mismatches, events, step=step)
        squares = {name: np.sqrt(value[:, 0, 0].astype(np.float64)) for name, value in observed["squares"].items()}
        difference, norms = squares["gradient_difference"][0], scalars.gradient_norm.astype(np.float64)
        reference = int(np.argmin(difference))
        signal = norms[reference]
        row = {
            **scalar_row(scalars, rate=float(scalars.learning_rate[0])),
            "sites": sites,
            "state": total(observed["state"]),
            "gradient": total(observed["gradient"]),
            "gradient_difference": difference,
            # Equation (5) of the study is the largest of these over the steps.
            "noise_to_signal": np.where(difference == 0, 0.0, difference / signal if signal else np.inf),
            "parameter_difference": squares["parameter_difference"][0],
            "parameter_norm": squares["parameter_norm"],
        }
        return state, row | self._flags(flags), rows

    def _flags(self, flags: Reports) -> dict[str, Any]:
        """What the line of a step says of its products."""
        return {} if self.abft is None else {"abft": tally_flags(flags, twins=self.sync is not None)}


def fetch(tree: Any) -> Any:
    """Global arrays as NumPy arrays, in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def scalar_row(metrics: Metrics, *, rate: float) -> dict[str, Any]:
    """The scalars of a step, one number per twin, as a line of `steps.jsonl` has them."""
    return {
        "loss": np.atleast_1d(metrics.loss),
        "gradient_norm": np.atleast_1d(metrics.gradient_norm),
        "learning_rate": rate,
    }
