"""The process around a command: its standard output and its end, also when a peer or the runtime is lost, or when
SIGINT (Ctrl-C) or SIGTERM (a scheduler) comes, whatever the command does at that moment."""

import contextlib
import ctypes
import dataclasses
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from sdc.verdict import Exit


def keep_standard_output() -> None:
    """Gloo tells its connections on standard output, which belongs to the command: nobody needs to read that."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(own, "w", encoding="utf-8")


def give_up(message: str) -> None:
    """Ends the process at once: the main thread may wait in a collective, or in the compiler, for ever."""
    shown = "\x1b[?25h\n" if os.isatty(2) else ""  # a bar hides the cursor
    code, told = int(Exit.INCONCLUSIVE), [message, onward.how()]
    if (last := onward.last_words) is not None:
        onward.last_words = None  # whoever comes second, from another thread, has nothing to add
        found: list[tuple[int, str]] = []
        _in_time(lambda: found.append(last(message)))
        code, told = (found[0][0], [found[0][1]]) if found else (code, told)
    label = "inconclusive" if code == Exit.INCONCLUSIVE else "corrupt"
    os.write(2, f"{shown}sdc: {label}: {'. '.join(filter(None, told))}\n".encode())
    if (lock := sys.modules.get("sdc.records.lock")) is not None:
        _in_time(lock.release_all)
    os._exit(code)


def _in_time(action: Callable[[], None]) -> None:
    """Does something, unless storage that is gone never answers."""
    doing = threading.Thread(target=action, daemon=True)
    doing.start()
    doing.join(2.0)


RECORDS = ("manifest.json", "result.json")
"""Files of which one is there as soon as something is on record."""


@dataclasses.dataclass
class Onward:
    """Where the record of a command is, and how to go on with it."""

    folder: Path | None = None  # of the run; None for a command that makes none
    resumable: bool = True  # whether the command has the flag `--resume`
    last_words: Callable[[str], tuple[int, str]] | None = None
    """Given why the process ends at once, writes what is known so far, and returns the exit code and what to say."""

    def command(self) -> str:
        """The command line that goes on."""
        words = ["sdc", *sys.argv[1:]]
        named = words[1:2] == ["trace"] or any(word.partition("=")[0] == "--run" for word in words)
        if not named and self.folder is not None:
            words += ["--run", str(self.folder)]
        return shlex.join(words if "--resume" in words else [*words, "--resume"])

    def how(self) -> str:
        """Both, in a sentence."""
        if self.folder is None:
            return ""
        if not any((self.folder / name).is_file() for name in RECORDS):
            return "Nothing is on record; give the command again"
        there = f"The record is in {self.folder}"
        return f"{there}; continue with: {self.command()}" if self.resumable else there


onward = Onward()
"""Of the command that this process runs."""


def leave_at_once(code: int) -> None:
    """Ends a process of several without the runtime's farewell, which would wait for lost peers."""
    if "jax" not in sys.modules:
        return
    from jax._src import distributed

    if distributed.global_state.client is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _lost() -> None:
    """The runtime ends the process when process 0 is lost; what it says of that is a stack trace."""
    cluster = sys.modules.get("sdc.train.cluster")
    give_up("the runtime gave up on a lost peer; nothing can be said" if cluster is None else cluster.unreachable())


_ABORTED = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: _lost())
_TERMINATED = ctypes.CFUNCTYPE(None)(_lost)
"""Kept alive as long as the module: the C libraries hold their addresses."""


def end_aborts_well() -> None:
    """Lets the end that the runtime makes when process 0 is lost be one line and exit code 3.

    Python's own signal handlers do not run in an abort, so this one is set below it. The runtime can call a function
    instead of aborting (`cluster.joined`), but jaxlib 0.10 fails to convert its argument, and C++ ends the process.
    """
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _ABORTED)
    with contextlib.suppress(OSError, AttributeError):  # another C++ library
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(_TERMINATED)


# Python runs a signal's handler in its main thread, between two of its own operations: not while that thread compiles
# or waits in a collective, and in a callback an exception from it gets lost. So a thread hears of the signal at once.

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
