"""What the processes of a run tell each other, so that all take the same way."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

Result = TypeVar("Result")


class PeerError(Exception):
    """What another process could not do, in its words."""


def everyone(text: str) -> list[str]:
    """The texts of all processes, in their order. All processes call it.

    Example:
        >>> from sdc.train.multihost import everyone
        >>> everyone("ready")
        ['ready']
    """
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(data.size))
    padded = np.zeros(max(1, int(lengths.max())), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def together(action: Callable[[], Result]) -> Result:
    """Does something in all processes, and fails in all of them if it failed in one: no peer is left waiting.

    Args:
        action: done by each process.

    Returns:
        This process's result.

    Raises:
        Exception: what `action` raised here.
        PeerError: it raised in another process.

    Example:
        >>> from sdc.train.multihost import together
        >>> together(lambda: 1 + 1)
        2
    """
    failure = None
    try:
        result = action()
    except Exception as error:
        failure = error
    words = everyone(first_line(failure) if failure else "")
    if failure:
        raise failure
    for word in words:
        if word:
            raise PeerError(word)
    return result


def first_line(error: Exception) -> str:
    """An error in one line of at most 200 characters, never empty."""
    return str(error).partition("\n")[0][:200] or type(error).__name__
