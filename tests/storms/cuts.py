"""Cuts: two processes in network namespaces of their own lose the network between them. Needs root and `ip`."""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sdc.tools.bench._twins import ADDRESSES, LINKS, ip, two_hosts

from .tally import Tally

LIMIT, START = 17.0, 180.0
"""Time limits in seconds: from a cut to the end of both processes, and until the first step."""
COMMAND = "import tests.train.runs; from sdc.tools.cli import main; main()"


def run(count: int, seed: int) -> Tally:
    """Makes `count` cuts, of the link at either end or of the route to the other, during steps or compilation."""
    tally, draw = Tally("cuts"), random.Random(seed)
    for number in range(count):
        with two_hosts() as (names, _):
            _trial(tally, draw, names, compiling=number % 4 == 3)
        tally.trials += 1
    return tally


def _trial(tally: Tally, draw: random.Random, names: tuple[str, str], *, compiling: bool) -> None:
    folder = Path(tempfile.mkdtemp())
    words = ["twin", "--config", "mini", "--steps", "100000", "--sync", "params", "--run", str(folder / "run"),
             "--coordinator", f"{ADDRESSES[0]}:4321", "--processes", "2"]  # fmt: skip
    processes, errors = [], [folder / f"err-{number}" for number in range(2)]
    for number, name in enumerate(names):
        command = ["ip", "netns", "exec", name, sys.executable, "-c", COMMAND, *words, "--process", str(number)]
        with errors[number].open("wb") as err:
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, env=environment))
    there = folder / "run" / ("manifest.json" if compiling else "steps.jsonl")
    deadline = time.monotonic() + START
    while not (there.is_file() and there.stat().st_size):
        assert time.monotonic() < deadline, [file.read_text()[-2000:] for file in errors]
        assert all(process.poll() is None for process in processes), [file.read_text()[-2000:] for file in errors]
        time.sleep(0.05)
    time.sleep(draw.uniform(0.0, 2.0))
    side = draw.randrange(2)
    how = draw.choice(["link", "way"])
    if how == "link":
        ip("-n", names[side], "link", "set", LINKS[side], "down")
    else:
        ip("-n", names[side], "route", "add", "blackhole", f"{ADDRESSES[1 - side]}/32")
    cut = time.monotonic()
    where = f"the {how} of process {side}{' while compiling' if compiling else ''}, {folder}"
    for number, process in enumerate(processes):
        try:
            code = process.wait(max(0.1, cut + LIMIT - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
            tally.fail("hang", f"process {number}: {where}: {errors[number].read_text()[-500:]}")
        err = errors[number].read_text()
        tally.read(err, where)
        tally.note(f"exit {code}")
        if code != 3:
            tally.fail("odd exit code", f"{code} of process {number}: {where}: {err[-500:]}")
        elif f"process {1 - number} was lost" not in err and "process 0 was lost" not in err:
            tally.note("the peer was not named")
    if (folder / "run" / "summary.json").exists():
        tally.fail("false clean", f"the record has ended: {where}")
