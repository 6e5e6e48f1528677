"""What losing parts of a run's state would cost, as its record and its log have it."""

import logging
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdc.checkpoints import Outlook, Timings

LOG = logging.getLogger("sdc.checkpoints")
LOST = (0.125, 0.5, 1.0)
"""Fractions of the state of which the cost is told."""
TELLING = 0.5
"""The one of them that the log tells of,"""
TIMES = 2.0
"""when it has become so many times what was told last, or so many times less."""
DIGITS = 4
"""Of speeds in the record."""


class Predictions:
    """Makes fields of the record of what a running checkpoint knows, and tells of it in the log now and then."""

    def __init__(self, checkpoint_every: int) -> None:
        """Begins.

        Args:
            checkpoint_every: steps from one full checkpoint to the next, if there were any: a rollback to it loses half
                of them on average.
        """
        self._rollback = checkpoint_every / 2
        self._newest: dict[str, Any] | None = None
        self._said: dict[str, Any] | None = None
        self._told = math.nan

    def row(self, outlook: "Outlook", timings: "Timings | None") -> dict[str, Any]:
        """What the record has of an outlook: plain numbers. It is told in the log if it is news."""
        converging = outlook.convergence
        moving = bool(outlook.speeds.any())
        found: dict[str, Any] = {
            "step": outlook.step, "every": outlook.every,
            "c": None if converging is None else converging.c,
            "interval": None if converging is None else list(converging.interval),
            "distance": None if converging is None else converging.distance,
            "losses": [outlook.loss(fraction)._asdict() for fraction in LOST] if moving else [],
            "rollback": self._rollback, "bytes": sum(outlook.sizes),
            "speeds": [float(f"{speed:.{DIGITS}g}") for speed in outlook.profile()] if moving else [],
            "timings": None if timings is None else timings._asdict(),
        }  # fmt: skip
        self._newest = found
        cost = outlook.loss(TELLING).steps
        if moving and not self._told / TIMES < cost < self._told * TIMES:
            self._tell(found)
        return found

    def end(self) -> None:
        """Tells how things stand at the end."""
        if self._newest is not None and self._newest["losses"] and self._newest is not self._said:
            self._tell(self._newest)

    def _tell(self, found: dict[str, Any]) -> None:
        import jax

        cost = next(one for one in found["losses"] if one["fraction"] == TELLING)
        self._told, self._said = cost["steps"], found
        if jax.process_index() == 0:
            bound = "" if cost["bound"] is None else f", at most {cost['bound']:.3g} by theorem 3.2"
            LOG.info(
                "after %d steps, losing half of the state would cost %.3g steps if it is given back alone%s, and %.3g "
                "by a rollback of everything, on average",
                found["step"], cost["steps"], bound, found["rollback"],
            )  # fmt: skip
