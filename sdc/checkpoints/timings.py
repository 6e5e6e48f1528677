"""How long saves of a running checkpoint took: what advice on how to save needs to know."""

import statistics
from collections import deque
from typing import NamedTuple

KEPT = 31
"""Saves that a median is taken of, at most."""
LEAST = 3
"""Saves that it needs: programs are compiled during the first."""


class Timings(NamedTuple):
    """Medians of the last saves, of this process.

    Attributes:
        held: seconds for which a save holds up the training, however much it takes.
        whole: seconds in addition, for a save of everything.
        bandwidth: bytes of the state that all processes together write in a second.
    """

    held: float
    whole: float
    bandwidth: float


class Stopwatch:
    """Takes the times of saves.

    Example:
        >>> from sdc.checkpoints.timings import Stopwatch
        >>> watch = Stopwatch()
        >>> for _ in range(3):
        ...     watch.held(0.25, 0.125, share=0.5)
        ...     watch.written(2.0, 1024)
        >>> watch.timings
        Timings(held=0.25, whole=0.25, bandwidth=512.0)
    """

    def __init__(self) -> None:
        self._held, self._whole, self._bandwidth = (deque[float](maxlen=KEPT) for _ in range(3))

    def held(self, fixed: float, copying: float, *, share: float) -> None:
        """A save held up its caller.

        Args:
            fixed: seconds for what is done at every save.
            copying: seconds for what depends on how much is saved.
            share: that was saved, of the bytes.
        """
        if share > 0:
            self._held.append(fixed)
            self._whole.append(copying / share)

    def written(self, seconds: float, size: int) -> None:
        """A save of so many bytes was written by all processes, in the background."""
        if seconds > 0 and size > 0:
            self._bandwidth.append(size / seconds)

    @property
    def timings(self) -> Timings | None:
        """The medians; None before enough was saved."""
        kept = (self._held, self._whole, self._bandwidth)
        return Timings(*map(statistics.median, kept)) if min(map(len, kept)) >= LEAST else None
