"""What every kind of fault has."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sdc.text import write_term

from .changes import Change, apply

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Array, Float32, Int, PRNGKeyArray, Shaped


class Kind(abc.ABC):
    """What every kind of fault can do: make changes, and carry them out. Its `str` is its text, see `parse_kind`.

    Attributes:
        draws: whether something is drawn for each step and layer.
    """

    draws: ClassVar[bool] = False

    def __str__(self) -> str:
        from .kinds import KINDS  # which names them all

        return write_term(self, KINDS)

    @abc.abstractmethod
    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        """Draws the changes of elements of a type.

        Args:
            key: decides what is drawn.
            shape: one change for each element, or `()` for one that all elements share.
            dtype: type of the elements.
            layer: index of the innermost loop.

        Raises:
            ValueError: elements of this type cannot be changed so.
        """

    def draw(self, key: PRNGKeyArray) -> Float32[ArrayLike, ""]:
        """What is drawn for a step and a layer, and is the same for all that the fault hits there."""
        return np.float32(1)

    def on(self, u: Float32[ArrayLike, ""], layer: Int[Array, ""]) -> Kind:
        """The kind of a step and layer for which u was drawn."""
        return self

    def share(self, u: Float32[ArrayLike, ""]) -> Float32[ArrayLike, ""]:
        """What the rate is multiplied by where u was drawn; 1 on average."""
        return np.float32(1)

    def largest_share(self) -> float:
        """The largest that `share` can be."""
        return 1.0

    def __call__(
        self,
        key: PRNGKeyArray,
        x: Shaped[Array, "*groups n"],
        layer: Int[Array, ""],
        count: Int[Array, "*#groups"] | None = None,
    ) -> Shaped[Array, "*groups n"]:
        """The elements after the fault; `count` as of `apply`."""
        return apply(x, self.change(key, x.shape, x.dtype, layer), count=count)
