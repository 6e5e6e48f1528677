"""One copy: the plain reference run, or one that checks its own products or aggregates in another way."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import sdc
from sdc.record.determinism import program_fingerprint

from ..flags import tally_flags
from ..placement import RANKS, Placement
from ..processes import fetch
from ..step import BATCH_SPEC
from ..tally import tally
from .device import (
    NONE,
    DeviceStep,
    Transform,
    described_batch,
    described_state,
    initial_state,
    instrument,
    scalar_row,
    state_digest,
)
from .protocol import Rows


@dataclasses.dataclass(frozen=True, eq=False)
class SingleProgram:
    """Trains one copy.

    Attributes:
        work: the step.
        placement: where, without twins.
        faults: simulated.
        checks: how products are checked; None not to check them.
        seed: of the run; the faults draw from the next one.
        donate: whether a step takes the memory of the state that it is given.
    """

    work: DeviceStep
    placement: Placement
    faults: tuple[sdc.Fault, ...] = ()
    checks: Transform | None = None
    seed: int = 0
    donate: bool = True

    @functools.cached_property
    def compiled(self) -> jax.stages.Wrapped:
        """`(state, (tokens, key)) -> (state, metrics, (events, flags))`, jitted."""
        instrumented = instrument(self.work.fn, self.faults, self.checks)

        def fn(state: Any, shared: tuple[Any, Any]) -> Any:
            tokens, key = shared
            out, events, flags = instrumented(sdc.Moment(key, state.step), state, tokens)
            return *out, (events, flags)

        specs = self.work.state_specs
        out = (specs, self.work.metrics_specs, RANKS)
        mapped = self.placement.map(fn, stacked=specs, shared=(BATCH_SPEC, P()), out=out)
        return jax.jit(mapped, donate_argnums=0 if self.donate else ())

    @functools.cached_property
    def _key(self) -> Any:
        return jax.random.key(self.seed + 1)

    def init(self, seed: int) -> Any:
        return initial_state(self.work, self.placement, seed)

    def abstract(self) -> Any:
        return described_state(self.work, self.placement)

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        del number
        state, metrics, reports = self.compiled(state, (batch, self._key))
        return state, (metrics._replace(gradient=None), reports)

    def observe(self, state: Any, out: Any) -> tuple[Any, None]:
        return state, None

    def rows(self, number: int, out: Any, seen: Any) -> Rows:
        metrics, (events, flags) = fetch(out)
        # There is one copy, where a tally expects twins.
        sites, rows = tally(NONE, jax.tree.map(lambda x: x[None], events), step=number)
        row = scalar_row(metrics, rate=float(metrics.learning_rate)) | ({"sites": sites} if sites else {})
        row |= self.work.describe(metrics)
        return Rows(row | ({} if self.checks is None else {"abft": tally_flags(flags, twins=False)}), rows)

    def fingerprint(self) -> dict[str, str]:
        batch = described_batch(self.work.config, self.placement)
        lowered = self.compiled.lower(self.abstract(), (batch, jax.eval_shape(jax.random.key, 0)))
        return {"step": program_fingerprint(lowered)}

    def digest(self, state: Any) -> list[str]:
        return state_digest(state, self.placement)

    def files(self) -> Mapping[str, Any]:
        return {}

    def conclude(self, state: Any) -> Mapping[str, Any]:
        return self.work.conclude(state)
