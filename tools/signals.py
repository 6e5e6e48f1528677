"""SIGINT (Ctrl-C) and SIGTERM (a scheduler) end a command well, whatever it does at that moment.

Python runs a signal's handler in its main thread, between two of its own operations: not while that thread compiles or
waits in a collective, and in a callback an exception from it gets lost. So a thread hears of the signal at once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from .runtime import give_up

AGAIN = 1.0
"""Seconds after which another signal is somebody's impatience; until then it may be the same one, sent to a group."""

_gentle: Callable[[str], None] | None = None


def listen() -> None:
    """Begins to listen. A signal ends the process at once, unless a command is to be told gently; see `gently`.

    Nothing is lost by that: files are written whole, and lines as soon as they are known. An exception in the main
    thread would get lost in a callback or an import, and end the process in the middle of a compilation with a crash.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # signals belong to somebody else's program
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _handle)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reading,), daemon=True, name="signals").start()


def gently(tell: Callable[[str], None]) -> None:
    """From now on the first signal does not end the process: a function is told its name. The second one does."""
    global _gentle
    _gentle = tell


def deaf() -> None:
    """The command has ended, and says so with its exit code: what comes now comes too late."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _handle(number: int, _: FrameType | None) -> None:
    """Does nothing; the thread has heard of the signal."""


def _wait(reading: int) -> None:
    first: float | None = None
    while True:
        for number in os.read(reading, 1):
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            now, name = time.monotonic(), signal.Signals(number).name
            if first is not None:
                if now - first > AGAIN:
                    give_up(f"interrupted again, by {name}")
                continue
            first = now
            if _gentle is None:
                give_up(f"interrupted by {name}")
            else:
                _gentle(name)
