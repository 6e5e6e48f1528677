"""Runs `sdc` in a process of its own, forked from one that has imported everything already."""

import atexit
import contextlib
import fcntl
import json
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 240.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.tools.warm"])
FOLDER = tempfile.mkdtemp()
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


class Turn:
    """The right to run a burn-in, or several processes that compile the same programs at once. One worker of the suite
    has it at a time; otherwise, four times as many processes as cores could exceed `LIMIT`."""

    held: "weakref.ref[Turn] | None" = None

    def __init__(self) -> None:
        self.lock = open(Path(tempfile.gettempdir()) / f"jax-sdc-tests-{os.getuid()}.lock", "w")  # noqa: SIM115 - until all have ended
        deadline = time.monotonic() + LIMIT  # a failed test keeps its turn
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)

    def __del__(self) -> None:
        self.lock.close()

    @classmethod
    def take(cls) -> "Turn":
        """Waits for the turn, unless this worker has it already."""
        turn = cls.held() if cls.held else None
        if turn is None:
            turn = cls()
            cls.held = weakref.ref(turn)
        return turn


class Started:
    """A running command."""

    def __init__(self, arguments: tuple[str, ...], largest_file: int | None, turn: Turn | None = None) -> None:
        self.arguments, self.turn = arguments, turn
        folder = Path(tempfile.mkdtemp(dir=FOLDER))
        self.out, self.err = (folder / name for name in ("out", "err"))
        environment = {key: value for key, value in os.environ.items() if key not in ("NPROC", "JAX_NUM_CPU_DEVICES")}
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
        # The parent of all commands inherits the environment of the first command.
        os.environ |= {key: environment[key] for key in set(environment) - set(os.environ)}
        self.process = CONTEXT.Process(
            target=_command, args=(arguments, environment, str(self.out), str(self.err), largest_file)
        )
        self.process.start()

    @property
    def ended(self) -> bool:
        return not self.process.is_alive()

    def send(self, how: signal.Signals) -> None:
        """Sends a signal to the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, how)

    def kill(self) -> None:
        """Kills the process, which cannot clean up."""
        with contextlib.suppress(ProcessLookupError):  # already killed
            self.send(signal.SIGKILL)
        self.process.join()
        self.turn = None

    def end(self) -> tuple[int, str, str]:
        """Waits for the end; returns exit code, standard output and standard error."""
        self.process.join(LIMIT)
        self.turn = None
        assert self.ended, f"{self.arguments} takes more than {LIMIT} s: {self.err.read_text()[-2000:]}"
        assert self.process.exitcode is not None
        return self.process.exitcode, self.out.read_text(), self.err.read_text()


def _command(
    arguments: tuple[str, ...], environment: dict[str, str], out: str, err: str, largest_file: int | None
) -> None:
    """Runs the process of a command."""
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the process's life
    sys.argv = ["sdc", *arguments]
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    from sdc.tools.cli import main

    main()


def start(*arguments: object, largest_file: int | None = None) -> Started:
    """Starts a command; a limit on the size of its files simulates a full disk."""
    words = tuple(map(str, arguments))
    # Burn-ins in processes of their own lock the devices of this host.
    return Started(words, largest_file, Turn.take() if words[:1] == ("burnin",) else None)


def sdc(*arguments: object, largest_file: int | None = None) -> tuple[int, str, str]:
    """Runs a command; returns exit code, standard output and standard error."""
    return start(*arguments, largest_file=largest_file).end()


def summary(*arguments: object, code: int) -> dict[str, Any]:
    """Runs a command with --json and returns its summary, which must be all of the standard output."""
    got, out, err = sdc(*arguments, "--json")
    assert got == code, err
    result = json.loads(out)
    assert isinstance(result, dict)
    return result


def lines(folder: Path, name: str = "steps.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def several(count: int, *arguments: object) -> list[Started]:
    """Starts the processes of one run on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared, turn = ("--coordinator", f"127.0.0.1:{port}", "--processes", count), Turn.take()
    return [Started(tuple(map(str, (*arguments, *shared, "--process", number))), None, turn) for number in range(count)]


def kill_when(process: Started, ready: Callable[[], bool]) -> None:
    """Kills a process as soon as a condition holds."""
    wait(process, ready)
    process.kill()


def wait(process: Started, ready: Callable[[], bool]) -> None:
    """Waits until a condition holds; fails if the process ends first."""
    deadline = time.monotonic() + LIMIT
    while not ready():
        assert not process.ended, process.end()
        assert time.monotonic() < deadline
        time.sleep(0.05)
