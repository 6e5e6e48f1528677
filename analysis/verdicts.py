"""Verdicts by gravity: what several runs come to is the gravest of them."""

from collections.abc import Iterable

GRAVITY = ("corrupt", "inconclusive", "clean", None)


def order(verdict: str | None) -> int:
    """The place of a verdict, the gravest first."""
    return GRAVITY.index(verdict)


def gravest(verdicts: Iterable[str | None]) -> str | None:
    """The gravest of some verdicts."""
    return min(verdicts, key=order, default=None)
