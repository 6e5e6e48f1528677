"""How processes agree, as steps that need neither JAX nor a clock.

A step is a generator that yields requests (to a store of keys and values, or to wait), receives their answers, and
returns its result. `sdc.multihost.perform` performs the requests with the store of JAX's runtime, which is in process
0; tests perform them in simulated time, with delays, deaths and partitions.
"""

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

Result = TypeVar("Result")

LIMIT = 1800.0  # seconds to wait for a peer that is alive but does not answer, for example while it compiles
_WAIT = 0.5  # seconds; waits are split into intervals of this length, so that signals are handled in between


class Unreachable(RuntimeError):
    """Processes cannot be joined, or a peer was lost: no conclusion about the hardware is possible."""


class Pause(NamedTuple):
    """Waits; answered with the time after the wait, in seconds of a clock that never jumps."""

    seconds: float = 0.0


class Set(NamedTuple):
    """Writes a value; without `overwrite`, the first value of a key stays."""

    key: str
    value: str
    overwrite: bool = True


class Get(NamedTuple):
    """Waits for a value; answered with None if there is none in time."""

    key: str
    seconds: float


class Read(NamedTuple):
    """Reads all keys below a folder at one moment; answered with a dictionary."""

    folder: str


class Drop(NamedTuple):
    """Removes a key."""

    key: str


Request: TypeAlias = Pause | Set | Get | Read | Drop
# A request to the store that fails raises a RuntimeError at its `yield`.
Steps: TypeAlias = Generator[Request, Any, Result]


def unanswered(peer: int, at: str) -> Unreachable:
    """Returns the error about a peer that is alive but does not come to a meeting."""
    where = f" ({at})" if at else ""
    return Unreachable(f"process {peer} is alive but did not answer within {LIMIT:g} s{where}; check its output")


def exchange(text: str, number: int, me: int, count: int, *, at: str = "") -> Steps[list[str]]:
    """Exchanges one text of each process, in the meeting with this number; returns the texts in process order."""
    yield Set(f"sdc/said/{number}/{me}", text)
    deadline = (yield Pause()) + LIMIT
    said: list[str] = []
    while (peer := len(said)) < count:
        answer = yield Get(f"sdc/said/{number}/{peer}", _WAIT)
        if answer is not None:
            said.append(answer)
        elif (yield Pause()) > deadline:
            raise unanswered(peer, at)
    if number:  # all processes have arrived here, so all have read the previous texts
        yield Drop(f"sdc/said/{number - 1}/{me}")
    return said
