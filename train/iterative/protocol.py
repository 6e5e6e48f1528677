"""What every iterative-convergent training is to those who perturb it: a start, a step, a loss, and blocks of rows."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int32

from sdc.checkpoints import Distance, squared_distance

State: TypeAlias = dict[str, Array]
"""Arrays by name. All that a training has: what follows from the number of the iteration is not in it."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Iterative:
    """A training as Qiao et al. (ICML 2019, section 2) have it: x_{k+1} = f(x_k).

    Attributes:
        name: name for the record.
        source: source of the data.
        init: the first state, from a key.
        step: `(state, k) -> state`: iteration k, from 0. Pure, and of one program whatever k is.
        loss: the loss by which convergence is told: of a state, over data that are always the same.
        blocks: by name of an array the block of each of its rows, from 0. Rows of several arrays may be of one block:
            they are lost and saved together.
        moving: names of the arrays whose movement counts, the parameters.
        distance: how far rows of them moved.
    """

    name: str
    source: str
    init: Callable[[Array], State]
    step: Callable[[State, Int32[Array, ""]], State]
    loss: Callable[[State], Float32[Array, ""]]
    blocks: Mapping[str, Int[np.ndarray, "rows"]]
    moving: tuple[str, ...]
    distance: Distance = squared_distance

    def check(self) -> None:
        """Looks at arrays and blocks, before anything is computed.

        Raises:
            ValueError: an array has no blocks or too many, numbers of blocks leave gaps, nothing moves, the step gives
                back another state, or the loss is no number.
        """
        state = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        if set(self.blocks) != set(state) or not self.moving or not set(self.moving) <= set(state):
            raise ValueError(
                f"{self.name}: the state has {sorted(state)}, blocks are of {sorted(self.blocks)}, moving are "
                f"{list(self.moving)}; expected blocks of each array, and one or several of them to move"
            )
        numbers = set[int]()
        for name, ids in self.blocks.items():
            rows = state[name].shape[:1]
            if ids.shape != rows or not rows or not np.issubdtype(ids.dtype, np.integer):
                raise ValueError(
                    f"{self.name}: {name} is of shape {state[name].shape}, and its blocks are {ids.dtype} of shape "
                    f"{ids.shape}; expected a whole number for each row"
                )
            numbers |= set(ids.tolist())
        if numbers != set(range(len(numbers))):
            raise ValueError(f"{self.name}: numbers of blocks are {sorted(numbers)[:8]}...; expected 0, 1, 2, ...")
        after = jax.eval_shape(self.step, state, jax.ShapeDtypeStruct((), np.int32))
        if jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) != jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), state
        ):
            raise ValueError(f"{self.name}: step gives back {after}; expected a state as {state}")
        loss = jax.eval_shape(self.loss, state)
        if getattr(loss, "shape", None) != ():
            raise ValueError(f"{self.name}: loss gives {loss}; expected a single number")

    @property
    def count(self) -> int:
        """Number of blocks."""
        return 1 + max(int(ids.max()) for ids in self.blocks.values())

    def sizes(self, state: State) -> Int[np.ndarray, "blocks"]:
        """Bytes of the parameters of each block, at most what a save writes of it."""
        found = np.zeros(self.count, np.int64)
        for name in self.moving:
            leaf = state[name]
            np.add.at(found, self.blocks[name], leaf.size // leaf.shape[0] * leaf.dtype.itemsize)
        return found

    def moved(self, new: State, old: State) -> Float32[Array, "blocks"]:
        """How far each block moved: the sum of its rows' distances."""
        total = jnp.zeros(self.count, jnp.float32)
        for name in self.moving:
            rows = self.distance(new[name], old[name])
            total += jax.ops.segment_sum(rows, jnp.asarray(self.blocks[name]), self.count)
        return total


def rows_of(*counts: int) -> list[Int[np.ndarray, "rows"]]:
    """Each row of several arrays a block of its own, those of the second behind those of the first.

    Example:
        >>> from sdc.train.iterative.protocol import rows_of
        >>> [ids.tolist() for ids in rows_of(2, 3)]
        [[0, 1], [2, 3, 4]]
    """
    starts = np.cumsum([0, *counts])
    return [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, counts, strict=False)]
