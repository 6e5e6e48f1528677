"""The process of a command: its standard output, and its end with one message and an exit code.

A command may be ended at any moment by an error, the loss of a peer or of the runtime, SIGINT (Ctrl-C), or SIGTERM
(from a scheduler).
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

# Flags of this process's command whose name differs from that of the setting.
FLAGS: dict[str, str] = {"folder": "run"}
# Errors of a full or broken disk.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EINTR)
# Maximum length of a line of a message, and the number of characters shown from the start of a longer one: quoted text
# can have any length, and the remedy comes last.
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
    """Declares the names of flags that differ from the names of their settings; positional arguments are in capitals
    (RUN)."""
    FLAGS.clear()
    FLAGS.update({"folder": "run", **names})


def flag(error: SettingError) -> str:
    """Returns the error message of a setting, under the name of its flag."""
    name = FLAGS.get(error.setting, error.setting)
    if not name.isupper():
        name = "--" + name.replace("_", "-")
    return f"{name} {error.given}: {error.problem}" if error.given is not None else f"{name}: {error.problem}"


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turns errors that occur while input is read into usage errors (exit code 2)."""
    try:
        yield
    except SettingError as error:
        raise CommandError(flag(error)) from error
    except PermissionError as error:
        said = f"{error.filename or 'a path'} cannot be used ({error.strerror})"
        raise CommandError(f"{said}; make it accessible for this user, or choose another path") from error
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error


@contextmanager
def run_errors(folder: object, *, resumable: bool = True) -> Iterator[None]:
    """Turns errors of a run into exit codes: 2 for wrong input or a full or broken disk, 3 for an inconclusive run.

    Files written so far remain readable. The message states the command's folder and, if the command has the flag
    `--resume`, how to resume.
    """
    from sdc.multihost import Unreachable

    try:
        yield
    except (train.Incomparable, twins.NotComparable, campaigns.NotDeterministic, Unreachable) as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        first_line = str(error).partition("\n")[0]
        raise CommandError(
            f"the devices have too little memory for this run ({first_line}); use a smaller configuration, more "
            "ranks, or fewer states on one device"
        ) from error
    except train.NotWritten as error:
        raise CommandError(f"{error} with --resume") from error
    except ValueError as error:
        raise CommandError(flag(error) if isinstance(error, SettingError) else str(error)) from error
    except OSError as error:
        # Only the folder or one above it is missing; a missing file inside the folder is a failure of this tool.
        no_place = False
        if error.errno in (errno.ENOTDIR, errno.ENOENT) and error.filename is not None and folder is not None:
            place = Path(str(folder)).absolute()
            no_place = Path(str(error.filename)).absolute() in (place, *place.parents)
        if not no_place and error.errno not in FULL:
            raise
        then = "continue with --resume" if resumable else "run the command again"
        remedy = "choose another place" if no_place else f"make room there, then {then}"
        raise CommandError(f"cannot write to {folder or 'the run folder'} ({error.strerror}); {remedy}") from error


def keep_standard_output() -> None:
    """Keeps Gloo's connection messages out of the command's standard output."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(own, "w", encoding="utf-8")


def silence() -> None:
    """Discards standard output from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def printing() -> Iterator[None]:
    """Discards standard output once it cannot be written. A reader that closes the pipe, such as `| head`, does not
    change the exit code; a full disk does, unless the code is graver (`cli.run`)."""
    try:
        yield
    except OSError as error:
        silence()
        if not isinstance(error, BrokenPipeError):
            onward.unprinted = f"cannot write to standard output ({error.strerror})"


def write(text: str) -> None:
    with printing():
        print(text, flush=True)


def give_up(message: str) -> None:
    """Ends the process immediately, because the main thread may wait forever in a collective or the compiler."""
    shown = "\x1b[?25h\n" if os.isatty(2) else ""  # a bar hides the cursor
    code, sentences = int(Exit.INCONCLUSIVE), [message, onward.how()]
    if (last := onward.last_words) is not None:
        onward.last_words = None  # a second call, from another thread, adds nothing
        found: list[tuple[int, str]] = []
        _in_time(lambda: found.append(last(message)))
        code, sentences = (found[0][0], [found[0][1]]) if found else (code, sentences)
    label = "inconclusive" if code == Exit.INCONCLUSIVE else "corrupt"
    os.write(2, f"{shown}sdc: {label}: {'. '.join(filter(None, sentences))}\n".encode())
    if (lock := sys.modules.get("sdc.records.lock")) is not None:
        _in_time(lock.release_all)
    os._exit(code)


def _in_time(action: Callable[[], None]) -> None:
    """Waits at most 2 s for an action, which hangs if its storage no longer responds."""
    doing = threading.Thread(target=action, daemon=True)
    doing.start()
    doing.join(2.0)


@dataclasses.dataclass
class Onward:
    """The place of a command's record, and how to resume the command."""

    folder: Path | None = None  # folder of the run; None if the command makes none
    resumable: bool = True  # whether the command has the flag `--resume`
    unprinted: str = ""  # why standard output is incomplete
    last_words: Callable[[str], tuple[int, str]] | None = None
    """Function that is called with the reason when the process ends: writes what is known so far, and returns the exit
    code and a message."""

    def how(self) -> str:
        """Returns a sentence that states the folder and how to resume."""
        if self.folder is None:
            return ""
        # One of these exists as soon as anything is recorded: in the folder, or in that of a stage of a comparison.
        names = ("manifest.json", "result.json", "pair.json", "pool.json", "*/manifest.json")
        if not any(path.is_file() for name in names for path in self.folder.glob(name)):
            return "Nothing is on record; run the command again"
        there = f"The record is in {self.folder}"
        if not self.resumable:
            return there
        words = ["sdc", *sys.argv[1:]]
        if words[1:2] != ["trace"] and not any(word.partition("=")[0] == "--run" for word in words):
            words += ["--run", str(self.folder)]
        return f"{there}; continue with: {shlex.join(words if '--resume' in words else [*words, '--resume'])}"


onward = Onward()  # for the command that this process runs


def leave_at_once(code: int) -> None:
    """Exits without the runtime's shutdown if this process is one of several: the shutdown would wait for lost
    peers."""
    if "jax" not in sys.modules:
        return
    from jax._src import distributed

    if distributed.global_state.client is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _lost() -> None:
    """Ends the process when process 0 is lost, with one line instead of the runtime's stack trace."""
    cluster = sys.modules.get("sdc.train.cluster")
    give_up("the runtime lost a peer; the run has no verdict" if cluster is None else cluster.unreachable())


_ABORTED = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: _lost())
_TERMINATED = ctypes.CFUNCTYPE(None)(_lost)  # kept alive as long as the module: the C libraries hold their addresses


def end_aborts_well() -> None:
    """Makes the process end with one line and exit code 3 when the runtime aborts because process 0 is lost.

    Python's own signal handlers do not run during an abort, so the handlers are functions of the C libraries. The
    runtime can call a function instead of aborting (`cluster.joined`), but jaxlib 0.10 fails to convert its argument,
    and C++ ends the process.
    """
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _ABORTED)
    with contextlib.suppress(OSError, AttributeError):  # another C++ library
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(_TERMINATED)


# Python runs a signal handler in its main thread, between two bytecode instructions: not while that thread compiles or
# waits in a collective; and an exception that the handler raises in a callback is lost. So a thread of its own receives
# signals.

# Seconds after which another signal ends the process immediately; until then it may be the same signal, sent to a
# process group.
AGAIN = 1.0

_gentle: Callable[[str], None] | None = None


def listen() -> None:
    """Starts the thread that receives signals. A signal ends the process immediately, unless the command uses `gently`.

    No data is lost: files are written atomically, and each line is written as soon as its contents are known. The
    handler raises no exception in the main thread: it would be lost in a callback or an import, and would crash the
    process during a compilation.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # signals belong to the program that calls this one
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the thread receives it
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reading,), daemon=True, name="signals").start()


def gently(on_signal: Callable[[str], None]) -> None:
    """Passes the name of the first signal to a function instead of ending the process; the second signal ends it."""
    global _gentle
    _gentle = on_signal


def deaf() -> None:
    """Ignores signals from now on, because the command has ended and its exit code is known."""
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
