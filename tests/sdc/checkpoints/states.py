"""States that move, running checkpoints of them, and a simple model in memory of what a store must hold."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sdc.checkpoints import RunningCheckpoint
from tests.storms.bits import bits_of

OPTIMIZER = optax.trace(0.9)


def start() -> dict[str, Any]:
    params = {"w": jnp.zeros((16, 8)), "b": jnp.zeros(6), "scalar": jnp.float32(0.0)}
    return {"params": params, "opt": OPTIMIZER.init(params), "key": jax.random.key(0), "count": jnp.int32(0)}


def moved(state: Any, rows: Sequence[int], step: int) -> dict[str, Any]:
    """A state in which some rows of `w` moved, the further the later they stand, and all else a little."""
    w = state["params"]["w"]
    for place, row in enumerate(rows):
        w = w.at[row].add(1.0 + place + step)
    params = {"w": w, "b": state["params"]["b"] + 0.01, "scalar": state["params"]["scalar"] + 0.01}
    trace = jax.tree.map(lambda leaf: leaf * 2.0 + step, params)
    key = jax.random.fold_in(state["key"], step)
    return {"params": params, "opt": state["opt"]._replace(trace=trace), "key": key, "count": jnp.int32(step)}


def nothing(state: Any) -> Any:
    """The same with other numbers everywhere: all was lost."""

    def lost(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(99)
        return jnp.full_like(leaf, 77)

    return jax.tree.map(lost, state)


def opened(folder: Path, **options: Any) -> RunningCheckpoint:
    return RunningCheckpoint(folder, start(), moving="params", rows=4, **{"fraction": 0.3, **options})


class Model:
    """What a store must hold: of each block its pieces as they were saved last."""

    def __init__(self, running: RunningCheckpoint) -> None:
        self.cut = running.partition
        self.state = start()
        self.steps = dict.fromkeys(range(len(self.cut.blocks)), -1)

    def save(self, blocks: Sequence[int], state: Any, step: int) -> None:
        for block in [*blocks, self.cut.choices]:
            self.steps[block] = step
            for piece in self.cut.blocks[block]:
                self.state = jax.tree_util.tree_map_with_path(
                    lambda path, old, new, piece=piece: (
                        self._rows(old, new, piece)
                        if jax.tree_util.keystr(path, simple=True, separator="/") == piece.name
                        else old
                    ),
                    self.state,
                    state,
                )

    @staticmethod
    def _rows(old: Any, new: Any, piece: Any) -> Any:
        return new if old.ndim == 0 else old.at[piece.start : piece.stop].set(new[piece.start : piece.stop])

    def agrees(self, running: RunningCheckpoint) -> None:
        found = running.recover(list(range(len(self.cut.blocks))), nothing(start()))
        assert bits_of(found.state) == bits_of(self.state)
        saved = {block: step for block, step in self.steps.items() if step >= 0}
        assert found.steps == saved
        assert found.initial == [block for block in self.steps if block not in saved]
