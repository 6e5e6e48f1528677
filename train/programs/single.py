"""Programs of one copy: the plain reference run, one that checks its own products, and a trace."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import sdc
from sdc.program import Selector
from sdc.records import program_fingerprint
from sdc.twins import SITES, encode, sites_table

from .device import NONE, Placed, Rows, Transform, instrument, plain, scalar_row
from .placement import RANKS, fetch
from .simulation import Simulation
from .tallies import tally, tally_flags


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


@dataclasses.dataclass(frozen=True, eq=False)
class TraceProgram(Placed):
    """Trains one copy and takes the digests of selected values at every step.

    Attributes:
        work: the step.
        placement: where the program runs, without twins.
        where: the values whose digests each step returns.
        simulation: the simulated fault, or None for a program that can have none.
        donate: whether a step takes the memory of the state that it is given.
    """

    where: Selector
    simulation: Simulation | None = None
    donate: bool = True

    @functools.cached_property
    def _plain(self) -> Any:
        return plain(self.work, self.placement)

    @functools.cached_property
    def sites(self) -> list[sdc.Site]:
        """The sites of the trace, in program order."""
        return sdc.sites(self._plain, self.abstract(), self.batch, where=self.where)

    @functools.cached_property
    def compiled(self) -> jax.stages.Wrapped:
        """`(state, (tokens, strike)) -> (state, metrics, digests)`, jitted."""

        def fn(state: Any, shared: tuple[Any, Any]) -> Any:
            tokens, strike = shared

            def struck(state: Any, tokens: Any) -> Any:
                return sdc.strike(self._plain, self.where)(strike, state, tokens)[0]

            step = self._plain if self.simulation is None else struck
            (state, metrics), digests = sdc.fingerprint(step, self.where)(state, tokens)
            return state, metrics, digests

        return self.placement.jit(fn, donate=self.donate)

    def _strike(self, number: int) -> Any:
        return None if self.simulation is None else self.simulation.strike(self.sites, number)

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        state, metrics, digests = self.compiled(state, (batch, self._strike(number)))
        return state, (metrics._replace(gradient=None), digests)

    def rows(self, number: int, out: Any, seen: Any) -> Rows:
        metrics, digests = fetch(out)
        return Rows(scalar_row(metrics, rate=float(metrics.learning_rate)), [encode(number, digests)])

    def fingerprint(self) -> dict[str, str]:
        return {"step": program_fingerprint(self.compiled.lower(self.abstract(), (self.batch, self._strike(0))))}

    def files(self) -> Mapping[str, Any]:
        digests = jax.eval_shape(self.compiled, self.abstract(), (self.batch, self._strike(0)))[2]
        return {SITES: sites_table(digests)}

    def conclude(self, state: Any) -> Mapping[str, Any]:
        return {"verdict": None, "reason": "a trace by itself compares nothing; compare it with sdc diff"}
