"""A failure of a training that really saves: figure 9 of Qiao et al., ICML 2019, and what saving costs."""

import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from sdc.checkpoints import RecoveryPolicy, RunningCheckpoint

from ..iterative import DoesNotConverge, State
from .scar_workloads import Subject

AFTER, ITERATIONS = 7, 24
"""Iterations after which half is lost, and of the whole training."""
WAYS = {"SCAR": (0.25, 1), "traditional": (1.0, 4)}
"""Fraction of the bytes that a save writes, and iterations from one to the next."""


def overhead(subject: Subject, seed: int) -> dict[str, Any]:
    """Trains three times: without a failure, with SCAR, and with full checkpoints that are restored as a whole.

    All arrays of the training have the same rows, which are its blocks: they are saved side by side.
    """
    task = subject.task

    @jax.jit
    def one(state: Any, k: Any) -> Any:
        new = task.step(state, k)
        return new, task.loss(new)

    first = task.init(jax.random.key(seed))
    jax.block_until_ready(one(first, 0))
    found: dict[str, Any] = {"after": AFTER, "undisturbed": _train(one, first, float(task.loss(first)))}
    (moving,) = task.moving
    lost = np.random.default_rng([seed, 9]).permutation(task.count)[: task.count // 2].tolist()
    for name, (fraction, every) in WAYS.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            RunningCheckpoint(
                folder, _joined(first), fraction=fraction, rows=1,
                distance=lambda new, old: task.distance(_split(new, first)[moving], _split(old, first)[moving]),
            ) as running,
        ):  # fmt: skip
            state, losses, steps, saves = first, [float(task.loss(first))], [], []
            for k in range(ITERATIONS):
                began = time.perf_counter()
                state, loss = one(state, k)
                losses.append(float(loss))
                steps.append(time.perf_counter() - began)
                if k + 1 == AFTER:
                    policy: RecoveryPolicy = "partial" if name == "SCAR" else "full"
                    state = _split(running.recover(lost, _joined(state), policy=policy).state["rows"], first)
                    losses[-1] = float(task.loss(state))
                elif (k + 1) % every == 0:
                    began = time.perf_counter()
                    running.save(_joined(state), k + 1)
                    saves.append(time.perf_counter() - began)
            found[name] = {
                "losses": losses, "step_seconds": float(np.median(steps)), "save_seconds": float(np.median(saves)),
                "saved_every": every, "fraction": fraction, "bytes": int(sum(running.partition.sizes[:-1])),
            }  # fmt: skip
    if not all(np.isfinite(found[name]["losses"]).all() for name in WAYS):
        raise DoesNotConverge(f"{subject.name}: a loss after the failure is no number")
    return found


def _joined(state: State) -> State:
    """All arrays side by side: what belongs to a row is lost and saved with it."""
    return {"rows": jnp.concatenate([leaf.astype(jnp.float32) for _, leaf in sorted(state.items())], axis=1)}


def _split(rows: Array, like: State) -> State:
    """The arrays again, of their own types."""
    ends = np.cumsum([leaf.shape[1] for _, leaf in sorted(like.items())])
    parts = jnp.split(rows, ends[:-1].tolist(), axis=1)
    return {name: part.astype(like[name].dtype) for name, part in zip(sorted(like), parts, strict=True)}


def _train(one: Any, state: Any, first: float) -> list[float]:
    losses = [first]
    for k in range(ITERATIONS):
        state, loss = one(state, k)
        losses.append(float(loss))
    return losses
