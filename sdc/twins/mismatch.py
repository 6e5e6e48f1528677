"""What twins in lock-step differ in at one site."""

from typing import NamedTuple

from jaxtyping import Array, UInt32

from .compare import Difference, merge as merge_differences


class Mismatch(NamedTuple):
    """What the twins differ in at one site.

    Attributes:
        difference: one row per twin, compared with the reference (whose own row is zero); the same on every twin.
        undecided: how often no majority of three or more twins agreed, so that the reference was a guess.
        unrepeated: of lock-step with one exchange a step (`exchange="step"`), else None. One number per twin: how often
            its digest was the first to differ, while the repetition found nothing there. Such a difference was real;
            its size is not known, and `difference` does not count it.
    """

    difference: Difference
    undecided: UInt32[Array, "*rows"]
    unrepeated: UInt32[Array, "*rows twins"] | None = None


def merge(total: Mismatch, new: Mismatch) -> Mismatch:
    """The mismatches of two iterations taken together."""
    unrepeated = None
    if total.unrepeated is not None and new.unrepeated is not None:
        unrepeated = total.unrepeated + new.unrepeated
    return Mismatch(merge_differences(total.difference, new.difference), total.undecided + new.undecided, unrepeated)
