"""The program of a trace: the step with digests of the selected values, and perhaps one simulated fault."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax

import sdc
from sdc.program.reports import Reports
from sdc.program.selectors import Selector
from sdc.record.determinism import program_fingerprint
from sdc.record.records import TRACE
from sdc.train.step import Metrics, TrainState
from sdc.twins._first_difference import FirstDifference
from sdc.twins.traces import Trace, check_comparable, encode, write_sites

from .cluster import everyone
from .programs import Programs, fetch, scalar_row
from .simulate import Simulation


@dataclasses.dataclass(frozen=True)
class TracePrograms(Programs):
    """The programs of a trace.

    Attributes:
        where: the values whose digests each step returns.
        simulation: the simulated fault, or None for a program that can have none.
        golden: a recorded trace to compare with, or None.
    """

    details: ClassVar[str] = TRACE
    where: Selector = dataclasses.field(kw_only=True)
    simulation: Simulation | None = None
    golden: Trace | None = None
    _found: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def sites(self) -> list[sdc.Site]:
        """The sites of the trace, in program order."""
        return sdc.sites(self.plain, self.abstract_state(), self.abstract_batch(), where=self.where)

    @functools.cached_property
    def step(self) -> jax.stages.Wrapped:
        """`(state, (tokens, strike)) -> (state, metrics, digests)`, jitted."""

        def fn(state: TrainState, shared: tuple[Any, Any]) -> Any:
            tokens, strike = shared

            def struck(state: TrainState, tokens: Any) -> Any:
                return sdc.strike(self.plain, self.where)(strike, state, tokens)[0]

            step = self.plain if self.simulation is None else struck
            (state, metrics), digests = sdc.fingerprint(step, self.where)(state, tokens)
            return state, metrics, digests

        return jax.jit(fn, donate_argnums=0)

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the StableHLO of the step; nothing is compiled or run."""
        return {"step": program_fingerprint(self.step.lower(self.abstract_state(), self._shared(0)))}

    def begin(self, manifest: Mapping[str, Any], folder: Path | None) -> None:
        """Writes the list of sites, and refuses a golden trace of something else."""
        if folder is not None:
            write_sites(folder, jax.eval_shape(self.step, self.abstract_state(), self._shared(0))[2])
        if self.golden is not None:
            check_comparable(self.golden.manifest, json.loads(json.dumps(dict(manifest), default=str)))

    def advance(
        self, state: TrainState, tokens: Any, key: Any, step: int
    ) -> tuple[TrainState, Mapping[str, Any], Sequence[Mapping[str, Any]]]:
        """One step, its line in the record and its digests."""
        state, metrics, digests = self.step(state, (tokens, self._shared(step)[1]))
        scalars: Metrics
        scalars, digests = fetch((metrics._replace(gradient=None), digests))
        if self.golden is not None:
            self._compare(self.golden, step, digests)
        row = scalar_row(scalars, rate=float(scalars.learning_rate))
        return state, row, [encode(step, digests)]

    def ended(self) -> bool:
        """Whether the run parts from the golden trace."""
        return self.golden is not None and bool(json.loads(everyone(json.dumps("first" in self._found))[0]))

    def conclusion(self, state: Any) -> Mapping[str, Any]:
        """The verdict of the comparison with the golden trace."""
        del state
        if self.golden is None:
            return {"verdict": None, "reason": "a trace by itself compares nothing; compare it with sdc diff"}
        steps, first = self._found.get("steps", 0), self._found.get("first")
        if first is not None:
            step, place = first
            return {"verdict": "corrupt", "reason": f"it parts from {self.golden.path} at step {step}: {place}"}
        if not steps:
            return {"verdict": "inconclusive", "reason": f"{self.golden.path} has none of its steps"}
        return {"verdict": "clean", "reason": f"{steps:,} steps agree with {self.golden.path} in every digest"}

    def _compare(self, golden: Trace, step: int, digests: Reports) -> None:
        if step not in golden.lines:
            return
        self._found["steps"] = self._found.get("steps", 0) + 1
        place: FirstDifference | None = sdc.first_difference(golden[step], digests)
        if place is not None:
            self._found["first"] = step, place

    def _shared(self, step: int) -> tuple[Any, Any]:
        strike = None if self.simulation is None else self.simulation.strike(self.sites, step)
        return self.abstract_batch(), strike
