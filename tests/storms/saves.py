"""Saves: kills a process that saves certified and running checkpoints at any moment, and checks what it reported.

A verified checkpoint must stay and restore the saved bits. A running checkpoint must equal a simple model in memory
after the finished saves, or after the save in progress.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from sdc.checkpoints import CertificateError, Certified, Damaged, RunningCheckpoint, certify

from .bits import bits_of
from .tally import Tally

EACH = 10
"""Kills in one folder, one after another."""
KEPT = 2
"""Number of checkpoints to keep."""
LONGEST = 1.5
"""Maximum seconds from the first save to the kill."""
CHILD = "import sys; from tests.storms.saves import go_on; go_on(sys.argv[1])"


def state(step: int) -> dict[str, Any]:
    """Returns the state of a step: all numbers change with it, and those of one row by more."""
    w = jnp.arange(256.0).reshape(32, 8) + step
    params = {"w": w.at[step % 32].add(100.0 * step), "b": jnp.full(8, float(step))}
    return {
        "params": params,
        "trace": {"w": -w, "b": params["b"]},
        "key": jax.random.key(step),
        "step": jnp.int32(step),
    }


def opened(folder: Path) -> Certified:
    """Returns a certified checkpointer that keeps two checkpoints."""
    policy = ocp.training.preservation_policies.LatestN(KEPT)
    return certify(
        ocp.training.Checkpointer(folder / "certified", preservation_policy=policy, cleanup_tmp_directories=True)
    )


def go_on(where: str) -> None:
    """Saves until the process is killed, and prints each finished save."""
    folder = Path(where)
    running = RunningCheckpoint(folder / "running", state(0), moving="params", rows=4)
    with opened(folder) as checkpointer:
        first = max([0, *(checkpoint.step for checkpoint in checkpointer.checkpoints)]) + 1
        print("begun", flush=True)
        for step in range(first, first + 1000):
            blocks = running.save(state(step), step)
            if running.wait():
                _say(running=step, blocks=[*blocks, running.partition.choices])
            checkpointer.save(step, state(step))
            _say(certified=step)
            if step % 3 == 0:
                checkpointer.load(step, state(0))
                _say(verified=step)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def run(count: int, seed: int) -> Tally:
    """Makes `count` kills."""
    tally, draw = Tally("saves"), random.Random(seed)
    for begin in range(0, count, EACH):
        folder = Path(tempfile.mkdtemp())
        said: dict[str, Any] = {"certified": 0, "verified": 0, "steps": {}}
        for _ in range(min(EACH, count - begin)):
            _killed(folder, draw.uniform(0, LONGEST), said)
            tally.trials += 1
            _certified(tally, folder, said)
            _running(tally, folder, said)
        print(f"  saves: {tally.trials} of {count}, {said['certified']} steps", flush=True)
        shutil.rmtree(folder)
    return tally


def _killed(folder: Path, seconds: float, said: dict[str, Any]) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    for line in child.communicate()[0].splitlines():
        try:
            what = json.loads(line)
        except ValueError:  # incomplete line
            continue
        said |= {name: step for name, step in what.items() if name in ("certified", "verified")}
        said["steps"] |= dict.fromkeys(what.get("blocks", ()), what.get("running"))


def _certified(tally: Tally, folder: Path, said: dict[str, Any]) -> None:
    with opened(folder) as checkpointer:
        steps = [checkpoint.step for checkpoint in checkpointer.checkpoints]
        for step in steps:
            try:
                if bits_of(checkpointer.load(step, state(0))) != bits_of(state(step)):
                    tally.fail("other bits", f"certified {step}")
                tally.note("restored")
            except CertificateError as error:
                if isinstance(error, Damaged) and error.remains and sum(other > step for other in steps) >= KEPT:
                    tally.note("remains")  # two newer ones exist: killed during deletion
                    continue
                tally.note("not certified")
                if step <= said["certified"]:
                    tally.fail("false corrupt", f"certified {step} was saved: {error}")
        if said["certified"] and said["certified"] not in steps and max(steps, default=0) <= said["certified"]:
            tally.fail("false clean", f"step {said['certified']} was saved, but found {steps}")
        if said["verified"] and not any(step >= said["verified"] for step in steps):
            tally.fail("false clean", f"step {said['verified']} was verified, but found {steps}")


def _running(tally: Tally, folder: Path, said: dict[str, Any]) -> None:
    reader = RunningCheckpoint.read(folder / "running", state(0), moving="params", rows=4)
    found = reader.recover(list(range(len(reader.cut.blocks))), state(0))
    for block, pieces in enumerate(reader.cut.blocks):
        step = found.steps.get(block, 0)
        alone = reader.recover([block], state(0)).state
        expected = _with(state(0), state(step), pieces)
        if bits_of(alone) != bits_of(expected):
            tally.fail("other bits", f"block {block} of step {step}")
        if step < said["steps"].get(block, 0):
            tally.fail("false clean", f"block {block} is of step {step}, but step {said['steps'][block]} was saved")
        tally.note("blocks")
        said["steps"][block] = step  # a save in progress may count


def _with(old: Any, new: Any, pieces: Any) -> Any:
    rows = {piece.name: piece for piece in pieces}

    def one(path: Any, a: Any, b: Any) -> Any:
        piece = rows.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        if piece is None:
            return a
        return b if a.ndim == 0 else a.at[piece.start : piece.stop].set(b[piece.start : piece.stop])

    return jax.tree_util.tree_map_with_path(one, old, new)
