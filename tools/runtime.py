"""The process around a command: its standard output and its end, in one clear line and with an exit code.

The end may be an error, the loss of a peer or of the runtime, or SIGINT (Ctrl-C) or SIGTERM (a scheduler), whatever the
command does at that moment.
"""

import contextlib
import ctypes
import dataclasses
import errno
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sdc import campaigns, train, twins
from sdc._lazy import jax
from sdc.settings import SettingError
from sdc.verdict import Exit

# Flags of the command that this process runs whose name is not that of the setting.
FLAGS: dict[str, str] = {"folder": "run"}
# What a full or broken disk answers.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
# Characters of a line of a message, and how many are shown at its beginning where it is longer: what a message quotes
# can be of any length, and its remedy stands at the end.
LONGEST, SHOWN = 4_000, 3_000


class CommandError(Exception):
    """Ends a command with a message and an exit code."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        lines = message.split("\n")
        for number, line in enumerate(lines):
            if (more := len(line) - LONGEST) > 0:
                lines[number] = f"{line[:SHOWN]} ... ({more:,} characters) ... {line[SHOWN + more :]}"
        super().__init__("\n".join(lines))
        self.code = code


def name_flags(names: Mapping[str, str]) -> None:
    """Says which settings have a flag of another name; an argument that has no flag is in capitals (RUN)."""
    FLAGS.clear()
    FLAGS.update({"folder": "run", **names})


def flag(error: SettingError) -> str:
    """What is wrong with a setting, under the name of its flag."""
    name = FLAGS.get(error.setting, error.setting)
    if not name.isupper():
        name = "--" + name.replace("_", "-")
    return f"{name} {error.given}: {error.problem}" if error.given is not None else f"{name}: {error.problem}"


@contextmanager
def usage_errors() -> Iterator[None]:
    """What goes wrong while input is read is the user's to mend: exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise CommandError(flag(error) if isinstance(error, SettingError) else str(error)) from error


@contextmanager
def run_errors(folder: object, *, resumable: bool = True) -> Iterator[None]:
    """What ends a run: input that is wrong, a full or broken disk (2), or what leaves nothing to say (3).

    What was written stays readable. The message names the folder that the command writes to, and says how to go on with
    it where the command has the flag `--resume`.
    """
    from sdc.multihost import Unreachable

    try:
        yield
    except (train.Incomparable, twins.NotComparable, campaigns.NotDeterministic, Unreachable) as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        said = str(error).partition("\n")[0]
        raise CommandError(
            f"the devices have too little memory for this run ({said}); take a smaller configuration, more ranks, or "
            "fewer states on one device"
        ) from error
    except train.NotWritten as error:
        raise CommandError(f"{error} with --resume") from error
    except ValueError as error:
        raise CommandError(flag(error) if isinstance(error, SettingError) else str(error)) from error
    except OSError as error:
        # A path that is missing and is the folder or above it; what is missing inside of a folder is a failure of ours.
        no_place = False
        if error.errno in (errno.ENOTDIR, errno.ENOENT) and error.filename is not None and folder is not None:
            place = Path(str(folder)).absolute()
            no_place = Path(str(error.filename)).absolute() in (place, *place.parents)
        if not no_place and error.errno not in FULL:
            raise
        then = "continue with --resume" if resumable else "give the command again"
        remedy = "name another place" if no_place else f"make room there, then {then}"
        raise CommandError(f"cannot write to {folder or 'the run folder'} ({error.strerror}); {remedy}") from error


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


@dataclasses.dataclass
class Onward:
    """Where the record of a command is, and how to go on with it."""

    folder: Path | None = None  # of the run; None for a command that makes none
    resumable: bool = True  # whether the command has the flag `--resume`
    last_words: Callable[[str], tuple[int, str]] | None = None
    """Given why the process ends at once, writes what is known so far, and returns the exit code and what to say."""

    def how(self) -> str:
        """Both, in a sentence."""
        if self.folder is None:
            return ""
        # One of these is there as soon as something is on record.
        if not any((self.folder / name).is_file() for name in ("manifest.json", "result.json")):
            return "Nothing is on record; give the command again"
        there = f"The record is in {self.folder}"
        if not self.resumable:
            return there
        words = ["sdc", *sys.argv[1:]]
        if words[1:2] != ["trace"] and not any(word.partition("=")[0] == "--run" for word in words):
            words += ["--run", str(self.folder)]
        return f"{there}; continue with: {shlex.join(words if '--resume' in words else [*words, '--resume'])}"


onward = Onward()  # of the command that this process runs


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
_TERMINATED = ctypes.CFUNCTYPE(None)(_lost)  # kept alive as long as the module: the C libraries hold their addresses


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

# Seconds after which another signal is somebody's impatience; until then it may be the same one, sent to a group.
AGAIN = 1.0

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
        signal.signal(number, lambda *_: None)  # the thread has heard of it
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


def _wait(reading: int) -> None:
    first: float | None = None
    while True:
        (number,) = os.read(reading, 1)
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
