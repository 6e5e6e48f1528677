"""Kills: sends a signal to a process of a command at any moment, reads the record, and resumes the run to its end."""

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sdc.records import read_record
from tests.tools.command import Started, several, start

from .tally import Tally, verdict_of

LIMITS = {signal.SIGKILL: 20.0, signal.SIGSTOP: 20.0, signal.SIGTERM: 25.0, signal.SIGINT: 25.0}
"""Time limits in seconds for all processes to end: 15 after a loss, 10 and a checkpoint to stop, more on two cores."""
WARM = 0.5
"""Duration of a run that need not compile, relative to one that must."""
TIMEOUT = 10
"""Seconds for which a process waits for one that was killed before they joined; with its start, within `LIMITS`."""
MINI = ("--config", "mini", "--steps", 12, "--checkpoint-every", 3)
KEPT = "JAX_COMPILATION_CACHE_DIR"
RUNS: dict[str, tuple[int, tuple[object, ...]]] = {
    "twin compute": (1, ("twin", *MINI, "--model", 2)),
    "twin params, suspect": (1, ("twin", *MINI, "--sync", "params", "--suspect", "node11")),
    "twin none, two processes": (2, ("twin", *MINI, "--sync", "none")),
    "twin params, two processes": (2, ("twin", *MINI, "--sync", "params")),
    "twin compute, two processes, suspect": (2, ("twin", *MINI, "--suspect", "node11")),
    "train": (1, ("train", *MINI, "--data", 2)),
    "train, two processes": (2, ("train", *MINI, "--data", 2)),
    "trace": (1, ("trace", *MINI, "--where", "probes")),
    "campaign": (
        1,
        ("campaign", "--config", "mini", "--steps", 6, "--injections", 40, "--batch", 5, "--where", "probes"),
    ),
}
"""Number of processes, and the command."""


def run(count: int, seed: int) -> Tally:
    """Makes `count` kills, spread over the commands, the signals and the moments."""
    tally, draw = Tally("kills"), random.Random(seed)
    os.environ[KEPT] = tempfile.mkdtemp()  # set before the parent of all commands starts
    whole = {name: _whole(*each) for name, each in RUNS.items()}
    for number in range(count):
        name = list(RUNS)[number % len(RUNS)]
        how = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)[number // len(RUNS) % 4]
        moment = draw.uniform(0.0, whole[name]["seconds"]) * (1.0 if number % 2 else WARM)
        victim, cold = draw.randrange(RUNS[name][0]), bool(number % 2)
        _trial(tally, name, how, moment, victim, whole[name], cold=cold)
        tally.trials += 1
        print(f"  kill {tally.trials} of {count}: {name}, {how.name} after {moment:.1f} s", flush=True)
    return tally


@contextlib.contextmanager
def _nothing_kept(cold: bool) -> Iterator[None]:
    """Removes the compilation cache for the block if `cold`: half of the killed runs compile everything."""
    kept, aside = Path(os.environ[KEPT]), Path(f"{os.environ[KEPT]}-aside")
    if cold:
        kept.rename(aside)
    yield
    if cold:
        shutil.rmtree(kept, ignore_errors=True)
        aside.rename(kept)


def _whole(processes: int, words: Sequence[object]) -> dict[str, Any]:
    """Runs the command without a kill; returns its duration, exit code and results."""
    folder = Path(tempfile.mkdtemp()) / "run"
    started = time.monotonic()
    ended = [process.end() for process in _start(processes, words, folder)]
    seconds = time.monotonic() - started
    assert {code for code, *_ in ended} <= {0, 1}, ended
    return {"seconds": seconds, "code": ended[0][0], "found": _found(folder)}


def _found(folder: Path) -> dict[str, Any]:
    """Returns the results that must not depend on interruptions."""
    record = read_record(folder)
    summary = record.summary or {}
    lines = [{key: row[key] for key in row if key not in ("seconds", "discarded")} for row in record.lines]
    return {"digest": summary.get("state_digest"), "lines": lines, "details": record.details}


def _start(processes: int, words: Sequence[object], folder: Path, *more: object) -> list[Started]:
    run = ("--run", folder) if words[0] != "trace" else ()
    command = (words[0], *((folder,) if words[0] == "trace" else ()), *words[1:], *run, *more)
    return [start(*command)] if processes == 1 else several(processes, *command, "--timeout", TIMEOUT)


def _trial(
    tally: Tally, name: str, how: signal.Signals, moment: float, victim: int, whole: dict[str, Any], *, cold: bool
) -> None:
    processes, words = RUNS[name]
    folder = Path(tempfile.mkdtemp()) / "run"
    where = f"{name}, {how.name} to process {victim} after {moment:.2f} s, {folder}"
    with _nothing_kept(cold):
        running = _start(processes, words, folder)
        time.sleep(moment)
        if running[victim].ended:
            tally.note("had ended before")
        else:
            running[victim].send(how)
            if how is signal.SIGSTOP and processes == 1:
                time.sleep(1.0)
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    running[victim].send(signal.SIGCONT)  # resumes it
        _await(tally, running, how, victim, whole, where)
    resumable = (folder / "manifest.json").is_file()
    if resumable:
        said = verdict_of(folder)
        tally.note(f"record {said}")
        compared = words[0] == "twin"  # the others have no verdict, and end with 0
        if said == "clean" and compared and (whole["code"] or not (folder / "summary.json").is_file()):
            tally.fail("false clean", where)
        if said == "corrupt" and not whole["code"]:
            tally.fail("false corrupt", where)
        if said == "refused":
            tally.fail("odd exit code", f"the record is refused: {where}")
    # The lock of a killed process would belong to another host; here it belongs to this host and is taken over.
    again = [process.end() for process in _start(processes, words, folder, *(("--resume",) if resumable else ()))]
    for code, _, err in again:
        tally.read(err, f"resumed: {where}")
        if code != whole["code"]:
            tally.fail("odd exit code", f"{code} when resumed: {where}: {err[-1000:]}")
            return
    if _found(folder) != whole["found"]:
        tally.fail("other bits", where)


def _await(
    tally: Tally, running: list[Started], how: signal.Signals, victim: int, whole: dict[str, Any], where: str
) -> None:
    """Checks how all processes of a run end after one was struck."""
    alone = len(running) == 1
    deadline = time.monotonic() + (120.0 if alone and how is signal.SIGSTOP else LIMITS[how])
    for number, process in enumerate(running):
        stopped = how is signal.SIGSTOP and number == victim and not alone
        process.process.join(0.1 if stopped else max(0.1, deadline - time.monotonic()))
        if not process.ended:
            if not stopped:
                tally.fail("hang", f"process {number} of {where}: {process.err.read_text()[-500:]}")
            process.kill()
        code, err = process.process.exitcode, process.err.read_text()
        tally.read(err, where)
        tally.note(f"exit {code}")
        if code not in (0, 1, 3, -signal.SIGKILL) or (code in (0, 1) and code != whole["code"]):
            tally.fail("odd exit code", f"{code} of process {number} of {where}: {err[-500:]}")
