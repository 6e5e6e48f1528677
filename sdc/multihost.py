"""Messages between the processes of a run, through which all processes agree on which branch to take.

Messages go through the key-value store of JAX's distributed runtime, not through a collective on the devices, so that a
process that diverges from its peers can be identified and every wait has a timeout.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed

from .exchanges import Drop, Get, Pause, Read, Request, Result, Set, Steps, Unreachable as Unreachable, exchange

_said = itertools.count()


class PeerError(Exception):
    """An error in another process, with the first line of its message."""


def perform(steps: Steps[Result], client: Any, pause: Callable[[float], object] = time.sleep) -> Result:
    """Performs the requests of `steps` with a client of the runtime's store, and returns their result."""
    answer, failure = None, None
    while True:
        try:
            request = steps.send(answer) if failure is None else steps.throw(failure)
        except StopIteration as end:
            result: Result = end.value
            return result
        answer, failure = None, None
        try:
            answer = _answer(request, client, pause)
        except jax.errors.JaxRuntimeError as error:
            failure = error


def _answer(request: Request, client: Any, pause: Callable[[float], object]) -> Any:
    match request:
        case Pause(seconds):
            if seconds:
                pause(seconds)
            return time.monotonic()
        case Read(folder):
            return dict(client.key_value_dir_get(f"{folder}/"))
        case Drop(key):
            return client.key_value_delete(key)
        case Set(key, value, overwrite):
            expected = "ALREADY_EXISTS"
        case Get(key, seconds):
            expected = "DEADLINE_EXCEEDED"
    try:
        if isinstance(request, Set):
            return client.key_value_set(key, value, allow_overwrite=overwrite)
        return str(client.blocking_key_value_get(key, int(1000 * seconds)))
    except jax.errors.JaxRuntimeError as error:
        if expected not in str(error):
            raise
        return None


def everyone(text: str, *, at: str = "") -> list[str]:
    """Exchanges strings between all processes, each of which must call this function; returns them in process order.

    Raises `Unreachable` if a peer does not answer within `sdc.exchanges.LIMIT` seconds.
    """
    client = distributed.global_state.client
    if client is None or jax.process_count() == 1:
        return [text]
    return perform(exchange(text, next(_said), jax.process_index(), jax.process_count(), at=at), client)


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
