"""What the processes of a run tell each other, so that all take the same way.

Words go through the key-value store of JAX's distributed runtime, not through a collective on the devices: a process
that takes another way than its peers is told apart, and a wait has an end.
"""

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import jax
from jax._src import distributed

Result = TypeVar("Result")

LIMIT = 1800.0  # seconds to wait for a peer that is alive but does not come, as one that still compiles
_WAIT_MS = 500  # a wait is cut into parts of so many milliseconds, so that signals are seen in between

_said = itertools.count()


class PeerError(Exception):
    """What another process could not do, in its words."""


class Unreachable(RuntimeError):
    """Processes that cannot be joined, or a peer that was lost: nothing can be said of the hardware."""


def everyone(text: str, *, at: str = "") -> list[str]:
    """The texts of all processes, in their order. All call it; `Unreachable` if a peer does not come within `LIMIT`."""
    client = distributed.global_state.client
    if client is None or jax.process_count() == 1:
        return [text]
    number, me = next(_said), jax.process_index()
    client.key_value_set(f"sdc/said/{number}/{me}", text)
    deadline = time.monotonic() + LIMIT
    said: list[str] = []
    while (peer := len(said)) < jax.process_count():
        try:
            said.append(str(client.blocking_key_value_get(f"sdc/said/{number}/{peer}", _WAIT_MS)))
            continue
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if time.monotonic() > deadline:
            where = f" ({at})" if at else ""
            raise Unreachable(f"process {peer} lives but did not come within {LIMIT:g} s{where}; look at its output")
    if number:  # all are here, so all have heard what was said before
        client.key_value_delete(f"sdc/said/{number - 1}/{me}")
    return said


def together(action: Callable[[], Result]) -> Result:
    """Does something in all processes, and fails in all if it failed in one, there as a `PeerError`: no peer waits."""
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
