"""One copy: the plain reference run, or one that checks its own products or aggregates in another way."""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import sdc
from sdc.records import program_fingerprint

from .. import RANKS, fetch, tally_flags
from ..tally import tally
from .device import NONE, Placed, Transform, instrument, scalar_row
from .protocol import Rows


@dataclasses.dataclass(frozen=True, eq=False)
class SingleProgram(Placed):
    """Trains one copy.

    Attributes:
        work: the step.
        placement: where the program runs, without twins.
        faults: the simulated faults.
        checks: how products are checked; None not to check them.
        seed: seed of the run; the faults draw from the next one.
        donate: whether a step takes the memory of the state that it is given.
    """

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

        return self.jitted(fn, P(), RANKS, donate=self.donate)

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        del number
        state, metrics, reports = self.compiled(state, (batch, jax.random.key(self.seed + 1)))
        return state, (metrics._replace(gradient=None), reports)

    def rows(self, number: int, out: Any, seen: Any) -> Rows:
        metrics, (events, flags) = fetch(out)
        # There is one copy, where a tally expects twins.
        sites, rows = tally(NONE, jax.tree.map(lambda x: x[None], events), step=number)
        row = scalar_row(metrics, rate=float(metrics.learning_rate)) | ({"sites": sites} if sites else {})
        row |= self.work.describe(metrics)
        return Rows(row | ({} if self.checks is None else {"abft": tally_flags(flags, twins=False)}), rows)

    def fingerprint(self) -> dict[str, str]:
        lowered = self.compiled.lower(self.abstract(), (self.batch, jax.eval_shape(jax.random.key, 0)))
        return {"step": program_fingerprint(lowered)}
