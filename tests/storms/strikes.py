"""Strikes: changes bits of live arrays of burn-ins and pairs from outside.

A PASS is allowed only if the value was dead: if the program gives the same bits with the changed value as without it.
"""

import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sdc.burnin.judgement import BURN_IN
from sdc.burnin.pair import PAIR_FORMAT
from sdc.burnin.programs import bits_of, equal_bits
from sdc.burnin.results import RESULT
from sdc.burnin.workloads.workload import workloads
from sdc.records import read_record
from tests.tools.command import CONTEXT, Started, several, start

from .flips import HOOK, TURN, flip, flip_state, wait_for
from .tally import Tally

FAMILIES = ("matrix", "attention", "reductions", "ordering", "memory")
BURN = ("burnin", "--devices", 2, "--dtypes", "float32", *(word for name in FAMILIES for word in ("--only", name)))
LIMIT = 400.0
"""Time limit in seconds for a burn-in or pair, which compiles three stages if the hosts differ."""
COMPARE = ("pair", "--config", "mini", "--steps", 12)


def run(count: int, seed: int) -> Tally:
    """Makes `count` strikes, in turn in burn-ins and pairs."""
    CONTEXT.set_forkserver_preload(["tests.tools.warm", "tests.storms.hooked"])
    # Only pairs use the cache; they compile three stages.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp())
    tally, draw = Tally("strikes"), random.Random(seed)
    whole: list[Any] | None = None
    for number in range(count):
        folder = Path(tempfile.mkdtemp())
        if number % 2:
            if whole is None:
                (verdict, _, whole) = _compare(Path(tempfile.mkdtemp()), None, draw, tally)
                assert verdict == "clean"
            verdict, struck, digest = _compare(folder, number // 2 % 2, draw, tally)
            dead = digest == whole
        else:
            verdict, struck, dead = _burn(folder, draw, tally)
        what = "pair" if number % 2 else "burn-in"
        tally.note(f"{what}: {verdict}{', the value was dead' if verdict == 'clean' and dead else ''}")
        if verdict == "clean" and not dead:
            tally.fail("false clean", f"{what}, {struck}, {folder}")
        tally.trials += 1
    return tally


def _burn(folder: Path, draw: random.Random, tally: Tally) -> tuple[str, str, bool]:
    """Strikes data of a workload that will run again; returns the verdict, what was struck, and whether it was dead."""
    every = workloads("quick", jax.devices()[:1], ("float32",), only=FAMILIES)
    turn = draw.randrange(len(every))  # in the first round, before the workload's own first run or after it
    os.environ |= {HOOK: str(folder), TURN: str(turn)}
    process = start(*BURN, "--run", folder / "run")
    try:
        wait_for(folder / "here-0", [process])
        assert process.process.pid is not None
        places = json.loads((folder / "here-0").read_text())
        (name, leaf), address, size = draw.choice([place for place in places if place[2]])
        offset, bit = draw.randrange(size), draw.randrange(8)
        flip(process.process.pid, address + offset, bit)
        (folder / "go-0").touch()
        _join([process], tally, f"{name}, {folder}")
    finally:
        process.kill()
    struck = f"bit {bit} of byte {offset} of argument {leaf} of {name}, before turn {turn}"
    verdict = str(BURN_IN.read(folder / "run" / RESULT).verdict)
    workload = next(each for each in every if each.name == name)
    right = [np.array(each) for each in jax.tree.leaves(workload.inputs())]
    wrong = [each.copy() for each in right]
    bits_of(wrong[leaf]).view(np.uint8)[offset] ^= np.uint8(1 << bit)
    structure = jax.tree.structure(workload.inputs())
    outputs = [jax.jit(workload.run)(*jax.tree.unflatten(structure, each)) for each in (right, wrong)]
    return verdict, struck, equal_bits(*outputs)


def _compare(
    folder: Path, victim: int | None, draw: random.Random, tally: Tally
) -> tuple[str, str | None, list[Any] | None]:
    """Strikes the state of a host of a pair; returns the verdict, what was struck, and the digests in the end."""
    os.environ |= {HOOK: str(folder)}
    os.environ.pop(TURN, None)
    processes = several(2, *COMPARE, "--run", folder / "run")
    struck = None
    try:
        for number in range(2):
            wait_for(folder / f"here-{number}", processes)
        if victim is not None:
            pid = processes[victim].process.pid
            assert pid is not None
            struck = f"process {victim}: {flip_state(pid, json.loads((folder / f'here-{victim}').read_text()), draw)}"
        for number in range(2):
            (folder / f"go-{number}").touch()
        _join(processes, tally, f"{struck}, {folder}")
    finally:
        for process in processes:
            process.kill()
    verdict = str(PAIR_FORMAT.read(folder / "run").verdict)
    record = read_record(folder / "run" / "1-step")
    return verdict, struck, None if record.summary is None else record.summary.get("state_digest")


def _join(processes: list[Started], tally: Tally, where: str) -> None:
    deadline = time.monotonic() + LIMIT
    for process in processes:
        process.process.join(max(0.1, deadline - time.monotonic()))
        if not process.ended:
            tally.fail("hang", where)
            process.kill()
        tally.read(process.err.read_text(), where)
