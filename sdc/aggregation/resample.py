"""The order of samples when some are dropped: those come back before the next epoch begins.

Giladi et al. (arXiv:2306.10598), section 4.5: "resampling dropped samples before starting a new epoch".
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int


class Resampling:
    """An endless iterator over the numbers of samples, whose position can be saved.

    Each epoch has every sample once, in an order of its own, and then once more what was dropped in it, until nothing
    is left. Numbers that do not fill a step at the end of an epoch begin the next one, so that none is lost.

    Args:
        size: samples in the data set.
        workers: N.
        micro_batches: M, of a full step of one worker.
        batch: samples of a micro-batch.
        seed: decides the order of each epoch.

    Raises:
        ValueError: a number is below 1, or a step needs more samples than there are.
    """

    def __init__(self, size: int, *, workers: int, micro_batches: int, batch: int, seed: int) -> None:
        self.size, self.shape, self.seed = size, (workers, micro_batches, batch), seed
        if min(size, *self.shape) < 1 or seed < 0:
            raise ValueError(
                f"size={size}, workers={workers}, micro_batches={micro_batches}, batch={batch}, seed={seed}: "
                "expected numbers of at least 1, and a seed of at least 0"
            )
        if int(np.prod(self.shape)) > size:
            raise ValueError(
                f"a step of {workers} workers × {micro_batches} micro-batches × {batch} samples needs more than the "
                f"{size} samples that there are; give more data or a smaller batch"
            )
        self._epoch = 0
        self._queue: list[int] = self._order()
        self._dropped: list[int] = []
        self._last: np.ndarray | None = None

    def __iter__(self) -> "Resampling":
        return self

    def __next__(self) -> Int[np.ndarray, "workers micro_batches batch"]:
        needed = int(np.prod(self.shape))
        while len(self._queue) < needed:
            if self._dropped:
                self._queue, self._dropped = self._queue + self._dropped, []
            else:
                self._epoch += 1
                self._queue = self._queue + self._order()
        step, self._queue = self._queue[:needed], self._queue[needed:]
        self._last = np.asarray(step, np.int64).reshape(self.shape)
        return self._last.copy()

    def drop(self, completed: Sequence[int]) -> None:
        """Tells what became of the last step.

        Args:
            completed: micro-batches that each worker completed; the samples of the others come back.

        Raises:
            ValueError: no step was handed out since the last call, or the numbers do not fit.
        """
        workers, micro_batches, _ = self.shape
        if self._last is None:
            raise ValueError("no step was handed out since the last call of drop; call next first")
        if len(completed) != workers or not all(0 <= count <= micro_batches for count in completed):
            raise ValueError(f"completed={list(completed)}: expected {workers} numbers from 0 to {micro_batches}")
        for rows, count in zip(self._last, completed, strict=True):
            self._dropped.extend(rows[count:].ravel().tolist())
        self._last = None

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON can hold it; a step that was handed out counts as done."""
        return {"epoch": self._epoch, "queue": list(self._queue), "dropped": list(self._dropped)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position.

        Raises:
            ValueError: it is not of a data set of this size.
        """
        numbers = [*state["queue"], *state["dropped"]]
        if not all(0 <= number < self.size for number in numbers):
            raise ValueError(f"a position with sample {max(numbers)} does not fit a data set of {self.size} samples")
        self._epoch, self._last = int(state["epoch"]), None
        self._queue, self._dropped = list(state["queue"]), list(state["dropped"])

    def _order(self) -> list[int]:
        return np.random.default_rng((self.seed, self._epoch)).permutation(self.size).tolist()
