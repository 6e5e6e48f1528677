"""`sdc bench checkpoint`: what certificates and running checkpoints cost, against Orbax alone and against a step."""

import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from sdc.checkpoints import RunningCheckpoint, bits_of, certify, take
from sdc.train import get_config
from sdc.twins import digest

from .command import BenchOptions
from .timing import compiled, ratio, reference_step, take_turns

BARS = {
    "certify_digests": 1.5,
    "certify_save": 1.05,
    "certify_restore": 1.05,
    "scar_held_up": 0.02,
    "scar_bytes": 1.05,
    "scar_save": 0.25,
    "scar_recover": 0.25,
    "scar_copies": 1.0,
    "scar_store_after_1000": 3.0,
}
FRACTION = 1 / 8
SAVES = 1000
"""After which the size of a store is measured, that of `tiny`."""


def measure(options: BenchOptions) -> dict[str, Any]:
    """Measures float32."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of each save
    folder = Path(tempfile.mkdtemp())
    try:
        step, (state, batch) = reference_step(get_config(options.config or "bench").of_type("float32"))
        run = compiled({"step": step}, state, batch)
        found = _certificates(state, folder, options.steps) | _running(state, run, folder, options.steps)
        _, (small, _) = reference_step(get_config("tiny").of_type("float32"))
        return {"float32": found | {"scar_store_after_1000": _store(small, folder / "thousand")}}
    finally:
        shutil.rmtree(folder)


def _certificates(state: Any, folder: Path, steps: int) -> dict[str, Any]:
    leaves = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(state))}
    one = jax.jit(lambda leaves: [digest(bits_of(leaf)) for leaf in leaves.values()])
    plain = ocp.training.Checkpointer(folder / "plain", preservation_policy=_newest())
    certified = certify(ocp.training.Checkpointer(folder / "certified", preservation_policy=_newest()))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    count = iter(range(1_000_000))
    digests = take_turns({"one": lambda: one(leaves), "blocks": lambda: take(leaves)()[0]}, steps)
    saves = take_turns(
        {
            "plain": lambda: plain.save(next(count), state, force=True),
            "certified": lambda: certified.save(next(count), state, force=True),
        },
        steps,
    )
    loads = take_turns(
        {"plain": lambda: plain.load(None, abstract), "certified": lambda: certified.load(None, abstract)}, steps
    )
    for each in (plain, certified):
        each.close()
    return {
        "state_mib": sum(leaf.nbytes for leaf in map(bits_of, leaves.values())) / 2**20,
        "orbax_save_seconds": statistics.median(saves["plain"]),
        "orbax_restore_seconds": statistics.median(loads["plain"]),
        "certify_digests": ratio(digests["one"], digests["blocks"]),
        "certify_save": ratio(saves["plain"], saves["certified"]),
        "certify_restore": ratio(loads["plain"], loads["certified"]),
    }


def _running(state: Any, run: Mapping[str, Callable[[], Any]], folder: Path, steps: int) -> dict[str, Any]:
    """A training step, and a save after each; then saves and recoveries against Orbax's."""
    plain = ocp.training.Checkpointer(folder / "full", preservation_policy=_newest())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    moved = jax.jit(lambda state, key: jax.tree.map(lambda x: _moved(x, key), state))
    held, stepped, saved, full = [], [], [], []
    with RunningCheckpoint(folder / "running", state, fraction=FRACTION, moving="params") as running:
        for number in range(steps + 2):
            started = time.perf_counter()
            jax.block_until_ready(run["step"]())
            stepped.append(time.perf_counter() - started)
            state = jax.block_until_ready(moved(state, jax.random.key(number)))
            started = time.perf_counter()
            running.save(state, number)
            held.append(time.perf_counter() - started)
            running.wait()
            saved.append(time.perf_counter() - started)
            started = time.perf_counter()
            plain.save(number, state, force=True)
            full.append(time.perf_counter() - started)
        blocks = list(range(int(running.partition.choices * FRACTION)))
        loads = take_turns(
            {
                "full": lambda: plain.load(None, abstract),
                "part": lambda: running.recover(blocks, state).state,
                "all": lambda: running.recover([], state, policy="full").state,
            },
            steps,
        )
        size = sum(running.partition.sizes)
        parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
        written = running.bytes / (steps + 2) / FRACTION
        copies = sum(leaf.nbytes for leaf in running.copy.values()) / parameters
    plain.close()
    return {
        "step_seconds": statistics.median(stepped[2:]),
        "scar_blocks": running.partition.choices,
        "scar_held_up_seconds": statistics.median(held[2:]),
        "scar_held_up": ratio(stepped[2:], held[2:]),
        "scar_bytes": written / size,
        "scar_save": ratio(full[2:], saved[2:]),
        "scar_recover": ratio(loads["full"], loads["part"]),
        "scar_recover_all": ratio(loads["full"], loads["all"]),
        "scar_copies": copies,
    }


def _store(state: Any, folder: Path) -> float:
    """Size of a store after many saves, in states."""
    moved = jax.jit(lambda state, key: jax.tree.map(lambda x: _moved(x, key), state))
    with RunningCheckpoint(folder, state, fraction=FRACTION, moving="params") as running:
        for number in range(SAVES):
            state = moved(state, jax.random.key(number))
            running.save(state, number)
        running.wait()
        size = sum(running.partition.sizes)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / size


def _moved(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rows that move unlike each other, as those of a training do."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or not x.ndim:
        return x
    scale = jax.random.uniform(key, (x.shape[0], *[1] * (x.ndim - 1)), x.dtype)
    return x + scale * jnp.asarray(1e-3, x.dtype)


def _newest() -> Any:
    return ocp.training.preservation_policies.LatestN(1)
