"""Pairs and pools with hosts in network namespaces: healthy, faulty, cut off, killed, stopped. Needs root and `ip`."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sdc.burnin.pair import PAIR_FORMAT, Pair
from sdc.records.storage import RecordError
from sdc.tools.bench._twins import ADDRESSES, LINKS, ip, two_hosts

from .cuts import COMMAND, LIMIT
from .tally import Tally

FAULT = ("--fault", "bitflip,rate=1e-3,site=fwd/ffn")
ENDLESS = "100000"
START = 600.0
"""Time limit in seconds for the first step, and for all three stages."""


class Trial(NamedTuple):
    """The events of a comparison, and its expected end.

    Attributes:
        hosts: number of processes; the last one may be faulty.
        faulty: whether the last one is faulty.
        harm: what happens to a process once there are steps; None lets the comparison finish.
        code: exit code of the surviving processes.
    """

    hosts: int
    faulty: bool
    harm: str | None
    code: int


TRIALS = (
    Trial(2, False, None, 0),
    Trial(2, True, None, 1),
    Trial(3, True, None, 1),
    Trial(2, False, "cut", 3),
    Trial(3, True, "cut", 1),
    Trial(3, False, "SIGKILL", 3),
    Trial(3, True, "SIGSTOP", 1),
    Trial(2, False, "SIGSTOP", 3),
)


def run(count: int, seed: int) -> Tally:
    """Runs `count` comparisons, of each kind in turn."""
    tally, draw = Tally("pairs"), random.Random(seed)
    # Equal programs are compiled once for all trials.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp())
    for number in range(count):
        with two_hosts() as (names, _):
            _trial(tally, draw, names, TRIALS[number % len(TRIALS)])
        tally.trials += 1
    return tally


def _trial(tally: Tally, draw: random.Random, names: tuple[str, str], trial: Trial) -> None:
    folder = Path(tempfile.mkdtemp())
    steps = "2" if trial.harm is None else ENDLESS
    words = ["pair" if trial.hosts == 2 else "pool", "--config", "mini", "--steps", steps, *FAULT[: 2 * trial.faulty],
             "--run", str(folder / "run"), "--coordinator", f"{ADDRESSES[0]}:4321",
             "--processes", str(trial.hosts)]  # fmt: skip
    processes, errors = [], [folder / f"err-{number}" for number in range(trial.hosts)]
    for number in range(trial.hosts):
        name = names[min(number, 1)]
        command = ["ip", "netns", "exec", name, sys.executable, "-c", COMMAND, *words, "--process", str(number)]
        with errors[number].open("wb") as err:
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, env=environment))
    where, left, limit = f"{trial}, {folder}", list(range(trial.hosts)), START
    if trial.harm is not None:
        there = folder / "run" / "1-step" / "steps.jsonl"
        _await(lambda: there.is_file() and there.stat().st_size > 0, processes, errors)
        time.sleep(draw.uniform(0.0, 2.0))
        limit = LIMIT
        if trial.harm == "cut":
            ip("-n", names[0], "link", "set", LINKS[0], "down")
        else:
            victim = draw.randrange(trial.hosts)
            left.remove(victim)
            processes[victim].send_signal(getattr(signal, trial.harm))
    deadline = time.monotonic() + limit
    for number in left:
        try:
            code = processes[number].wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            tally.fail("hang", f"process {number} of {where}")
            continue
        if code != trial.code:
            tally.fail("odd exit code", f"{code} of process {number} of {where}: {errors[number].read_text()[-500:]}")
        if "Traceback" in errors[number].read_text():
            tally.fail("traceback", f"process {number} of {where}")
    for process in processes:
        process.kill()
        process.wait()
    try:
        _judge(tally, trial, PAIR_FORMAT.read(folder / "run"), where)
    except (OSError, RecordError) as error:
        tally.fail("odd exit code", f"no result ({error}) of {where}")


def _await(ready: Callable[[], bool], processes: list["subprocess.Popen[bytes]"], errors: list[Path]) -> None:
    deadline = time.monotonic() + START
    while not ready():
        assert time.monotonic() < deadline, [file.read_text()[-2000:] for file in errors]
        assert all(process.poll() is None for process in processes), [file.read_text()[-2000:] for file in errors]
        time.sleep(0.05)


def _judge(tally: Tally, trial: Trial, found: Pair, where: str) -> None:
    if found.verdict.code != trial.code:
        tally.fail("false clean" if trial.code else "false corrupt", f"{found.sentences[0]} of {where}")
    if trial.hosts > 2 and found.suspects != [found.hosts[-1].host] * trial.faulty:
        tally.fail("false corrupt", f"{found.suspects} of {where}")
    if (found.lost is None) != (trial.harm is None):
        tally.fail("odd exit code", f"lost: {found.lost} of {where}")
    tally.note(
        f"{found.kind}, {'faulty' if trial.faulty else 'healthy'}, {trial.harm or 'left alone'}: "
        f"{found.verdict.acceptance}"
    )
