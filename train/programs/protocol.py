"""The protocol of programs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .. import Placement


class Rows(NamedTuple):
    """What the record has of a step.

    Attributes:
        row: the line in `steps.jsonl`, but for the number of the step.
        details: lines in the file beside it.
    """

    row: Mapping[str, Any]
    details: Sequence[Mapping[str, Any]] = ()


class Program(Protocol):
    """What a run executes. Steps are numbered from 0; every process calls every method.

    A program is made for a placement and compiled at its first step. `step` and `observe` take the state over and
    return the next one; whether the old one can still be used afterwards is up to the program's `donate`.
    """

    @property
    def placement(self) -> Placement:
        """Where it runs."""

    def init(self, seed: int) -> Any:
        """The state before the first step."""

    def abstract(self) -> Any:
        """Shapes, types and shardings of the state, to restore one into."""

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        """Runs a step. Returns the next state, and what the step says of itself: arrays on the devices."""

    def observe(self, state: Any, out: Any) -> tuple[Any, Any]:
        """Compares, and perhaps repairs, the state after a step. Returns the state and what was seen."""

    def rows(self, number: int, out: Any, seen: Any) -> Rows:
        """What the record has of a step, from what `step` and `observe` said."""

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the StableHLO of what runs; nothing is compiled or run."""

    def digest(self, state: Any) -> list[str]:
        """64-bit digests of the state in hexadecimal, one for each twin: equal for equal bits, on any mesh."""

    def files(self) -> Mapping[str, Any]:
        """Further files of the record by name, written before the first step."""

    def conclude(self, state: Any) -> Mapping[str, Any]:
        """What the last state adds to the summary."""
