"""The program of a trace: the step with digests of the selected values, and perhaps one simulated fault."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

import sdc
from sdc.program import Selector
from sdc.records import program_fingerprint
from sdc.twins import SITES, encode, sites_table

from .. import Simulation, fetch
from .device import Placed, plain, scalar_row
from .protocol import Rows


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
