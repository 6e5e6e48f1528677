"""Messages between the processes of a run, through which all processes agree on which branch to take.

Messages go through the key-value store of JAX's distributed runtime, not through a collective on the devices, so that a
process that diverges from its peers can be identified and every wait has a timeout.
"""

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import jax
from jax._src import distributed

Result = TypeVar("Result")

LIMIT = 1800.0  # seconds to wait for a peer that is alive but does not answer, for example while it compiles
_WAIT_MS = 500  # milliseconds; waits are split into intervals of this length, so that signals are handled in between

_said = itertools.count()


class PeerError(Exception):
    """An error in another process, with the first line of its message."""


class Unreachable(RuntimeError):
    """Processes cannot be joined, or a peer was lost: no conclusion about the hardware is possible."""


def everyone(text: str, *, at: str = "") -> list[str]:
    """Exchanges strings between all processes, each of which must call this function; returns them in process order.

    Raises `Unreachable` if a peer does not answer within `LIMIT` seconds.
    """
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
            raise Unreachable(f"process {peer} is alive but did not answer within {LIMIT:g} s{where}; check its output")
    if number:  # all processes have arrived here, so all have read the previous texts
        client.key_value_delete(f"sdc/said/{number - 1}/{me}")
    return said


def together(action: Callable[[], Result]) -> Result:
    """Runs `action` in all processes; if it fails in one process, the others raise `PeerError` instead of waiting."""
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


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, cut to 200 characters and never empty."""
    return str(error).partition("\n")[0][:200] or type(error).__name__
