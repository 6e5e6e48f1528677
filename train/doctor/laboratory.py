"""Child processes that run operations, each in its own environment and within a time limit.

A child (`python -m sdc.train.doctor.laboratory`) reads a request as JSON from standard input, and writes one line of
JSON to standard output. Any other output, for example from Gloo or an operation, is redirected to standard error.
"""

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from .results import Answer
from .surroundings import changed

CHILD = (sys.executable, "-m", "sdc.train.doctor.laboratory")
SUITE = "sdc.train.doctor.operations:standard"
LAST = 300  # maximum number of characters quoted from a child's last output


class ChildFailed(RuntimeError):
    """A child process gave no answer. `unknown` lists the flags that XLA rejected in that process."""

    def __init__(self, reason: str, unknown: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.unknown = unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request to a child process for measurements."""

    suite: str = SUITE  # `MODULE:FUNCTION`, a function of `options` that returns operations
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Sequence[str] | None = None  # names of the operations to run; None for all
    runs: int = 3  # number of runs of each operation
    devices: int | None = None  # CPU devices to simulate; None for the existing devices


def ask(request: Request, environ: Mapping[str, str], *, limit: float, command: Sequence[str] = CHILD) -> Answer:
    """Starts a child process, and returns its answer."""
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=dict(environ),
                start_new_session=True,  # so that the child's own children can be killed with it
            )
        except OSError as error:
            raise ChildFailed(f"a process could not be started ({error.strerror})") from error
        try:
            out, _ = process.communicate(json.dumps(dataclasses.asdict(request)).encode(), timeout=limit)
        except BaseException as ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # a process blocked in a driver dies only when the driver returns
                process.wait(5.0)
            for pipe in filter(None, (process.stdin, process.stdout)):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            if isinstance(ended, subprocess.TimeoutExpired):
                raise ChildFailed(f"a process gave no answer within {limit:.0f} s and was killed") from None
            raise
        if (code := process.returncode) != 0:
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
            words = _last_words(said)
            raise ChildFailed(f"a process ended with {how}" + (f": {words}" if words else ""), unknown_flags(words))
    try:
        return msgspec.json.decode(out, type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ChildFailed(f"a process printed {out[:40]!r} instead of a result ({error})") from error


def unknown_flags(words: str) -> tuple[str, ...]:
    """Returns the flags that XLA rejected, according to a process's last output."""
    found = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", words)
    return tuple(word.partition("=")[0] for word in found[1].split() if word.startswith("--")) if found else ()


def _last_words(said: Any) -> str:
    """Returns the last informative line of an output. This need not be the last line, because a runtime that crashes
    prints the reason above the stack addresses."""
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - 20_000))
    lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if unknown_flags(line) or re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (telling or lines or [""])[-1][:LAST]


UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
CACHED = {
    "JAX_ENABLE_COMPILATION_CACHE": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
LONGEST = 150.0  # maximum seconds per process


@dataclasses.dataclass
class Laboratory:
    """Starts processes and keeps track of the remaining time."""

    environ: Mapping[str, str]  # the examined environment
    request: Request
    seconds: float  # total time limit, counted from construction
    workers: int = 1  # number of concurrent processes; 1 if processes cannot share devices
    report: Callable[[str], None] = lambda text: None  # receives a description of the next measurement
    command: Sequence[str] = CHILD  # command of the child process

    def __post_init__(self) -> None:
        self._ends = time.monotonic() + self.seconds

    def ask(
        self,
        what: str,
        changes: Mapping[str, str | None],
        *,
        only: Sequence[str] | None = None,
        cache: str | None = None,
    ) -> Answer:
        """Takes measurements in a separate process, and returns the answer of this process; `cache` is a folder that
        keeps every compiled program."""
        asked = dict(changes)
        compiling = UNCACHED if cache is None else {**CACHED, "JAX_COMPILATION_CACHE_DIR": cache}
        while True:
            left = self._ends - time.monotonic()
            if left <= 0:
                raise ChildFailed(f"the time limit of {self.seconds:g} s has passed")
            self.report(what)
            environ = changed(self.environ, {**compiling, **asked})
            request = dataclasses.replace(self.request, only=only)
            try:
                return ask(request, environ, limit=min(left, LONGEST), command=self.command)
            except ChildFailed as failed:
                unknown = set(failed.unknown) & set(asked)
                if not unknown:
                    raise
                asked = {name: value for name, value in asked.items() if name not in unknown}

    def together(self, jobs: Sequence[Callable[[], Answer]]) -> list[Answer | ChildFailed]:
        """Runs several jobs, concurrently if the devices allow it, and returns the answer or failure of each."""

        def run(job: Callable[[], Answer]) -> Answer | ChildFailed:
            try:
                return job()
            except ChildFailed as failed:
                return failed

        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(run, jobs))


def main() -> None:
    """Serves as the child process: carries out the request, and prints the answer."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # End if the parent is killed, since then no process reads the result (PR_SET_PDEATHSIG).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    request = Request(**json.loads(sys.stdin.buffer.read()))
    began, hits = time.monotonic(), 0
    import jax

    def count(event: str, **_: Any) -> None:
        nonlocal hits
        hits += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_listener(count)
    if request.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", request.devices)
    from sdc.records import environment
    from sdc.schema import Environment

    from .operations import measure

    module, _, name = request.suite.partition(":")
    operations = getattr(importlib.import_module(module), name)(request.options)
    chosen = [each for each in operations if request.only is None or each.name in request.only]
    rows = measure(chosen, jax.local_devices(), runs=request.runs)
    answer = Answer(
        format="jax-sdc doctor child",
        environment=msgspec.convert(environment(), Environment),
        operations=rows,
        hits=hits,
        seconds=time.monotonic() - began,
    )
    answers.write(msgspec.json.encode(answer))
    answers.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # shutdown of the runtime can hang, and no work is left


if __name__ == "__main__":
    main()
