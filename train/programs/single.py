"""Programs of one copy: the plain reference run, one that checks its own products, and a trace."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

import sdc
from sdc.program import Selector
from sdc.twins import SITES, encode, sites_table

from .device import NONE, Instrumented, Program, Rows, plain, scalar_row
from .placement import fetch
from .simulation import Simulation
from .tallies import tally, tally_flags


@dataclasses.dataclass(frozen=True, eq=False)
class SingleProgram(Instrumented):
    """Trains one copy.

    Attributes:
        work: the step.
        placement: where the program runs, without twins.
        donate: whether a step takes the memory of the state that it is given.
        faults: the simulated faults.
        checks: how products are checked; None not to check them.
        seed: seed of the run; the faults draw from the next one.
    """

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        state, (metrics, reports) = super().step(state, batch, number)
        return state, (metrics._replace(gradient=None), reports)

    def rows(self, number: int, out: Any, seen: Any) -> Rows:
        metrics, (_, events, flags) = fetch(out)
        # There is one copy, where a tally expects twins.
        sites, rows = tally(NONE, jax.tree.map(lambda x: x[None], events), step=number)
        row = scalar_row(metrics) | ({"sites": sites} if sites else {}) | dict(self.work.describe(metrics))
        return Rows(row | ({} if self.checks is None else {"abft": tally_flags(flags, twins=False)}), rows)


@dataclasses.dataclass(frozen=True, eq=False)
class TraceProgram(Program):
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

    def beside(self) -> Any:
        return self._strike(0)

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        state, metrics, digests = self.compiled(state, (batch, self._strike(number)))
        return state, (metrics._replace(gradient=None), digests)

    def rows(self, number: int, out: Any, seen: Any) -> Rows:
        metrics, digests = fetch(out)
        return Rows(scalar_row(metrics), [encode(number, digests)])

    def files(self) -> Mapping[str, Any]:
        digests = jax.eval_shape(self.compiled, self.abstract(), (self.batch, self.beside()))[2]
        return {SITES: sites_table(digests)}

    def conclude(self, state: Any) -> Mapping[str, Any]:
        return {"verdict": None, "reason": "a trace by itself compares nothing; compare it with sdc diff"}
