"""A failure of a training that really saves: figure 9 of Qiao et al., ICML 2019, and what saving costs."""

import tempfile
import time
from typing import Any

import jax
import numpy as np

from sdc.checkpoints import RunningCheckpoint

from .scar_workloads import Subject

AFTER, ITERATIONS = 7, 24
"""Iterations after which half is lost, and of the whole training."""
WAYS = {"SCAR": (0.25, 1), "traditional": (1.0, 4)}
"""Fraction of the bytes that a save writes, and iterations from one to the next."""


def overhead(subject: Subject, seed: int) -> dict[str, Any]:
    """Trains three times: without a failure, with SCAR, and with full checkpoints that are restored as a whole."""
    task = subject.task

    @jax.jit
    def one(state: Any, k: Any) -> Any:
        new = task.step(state, k)
        return new, task.loss(new)

    first = task.init(jax.random.key(seed))
    jax.block_until_ready(one(first, 0))
    found: dict[str, Any] = {"after": AFTER, "undisturbed": _train(one, first, float(task.loss(first)))}
    rng = np.random.default_rng([seed, 9])
    for name, (fraction, every) in WAYS.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            RunningCheckpoint(
                folder, first, fraction=fraction, moving=lambda name: name in task.moving, rows=1,
                distance=task.distance,
            ) as running,
        ):  # fmt: skip
            state, losses, steps, saves = first, [float(task.loss(first))], [], []
            for k in range(ITERATIONS):
                began = time.perf_counter()
                state, loss = one(state, k)
                losses.append(float(loss))
                steps.append(time.perf_counter() - began)
                if k + 1 == AFTER:
                    cut = running.partition
                    lost = [int(block) for block in rng.permutation(cut.choices)[: cut.choices // 2]]
                    state = running.recover(lost, state, policy="partial" if name == "SCAR" else "full").state
                    losses[-1] = float(task.loss(state))
                elif (k + 1) % every == 0:
                    began = time.perf_counter()
                    running.save(state, k + 1)
                    saves.append(time.perf_counter() - began)
            found[name] = {
                "losses": losses, "step_seconds": float(np.median(steps)), "save_seconds": float(np.median(saves)),
                "saved_every": every, "fraction": fraction, "bytes": int(sum(running.partition.sizes[:-1])),
            }  # fmt: skip
    return found


def _train(one: Any, state: Any, first: float) -> list[float]:
    losses = [first]
    for k in range(ITERATIONS):
        state, loss = one(state, k)
        losses.append(float(loss))
    return losses
