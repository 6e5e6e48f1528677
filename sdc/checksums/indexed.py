"""Products in which integers say which rows meet which columns: ragged ones, and those of sparse arrays."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import sparse
from jaxtyping import Array, Bool, Float, Shaped

from .products import Dimensions, Dot, Powers, powers_as_a_whole, sum_blocks


@dataclasses.dataclass(frozen=True)
class Indexed:
    """`lax.ragged_dot_general`, or a sparse first factor (its stored numbers) times a dense second one.

    Each is linear in its second factor, whose free axes are the columns; rows are all other axes of the result. The
    methods are those of `Dot`.
    """

    kind: str  # `ragged_dot_general`, `bcoo_dot_general` or `bcsr_dot_general`
    dimensions: Dimensions  # as `lax.dot_general` has them
    axes: tuple[int, int]  # numbers of axes of the factors, the first one as if it were dense
    params: tuple[tuple[str, Any], ...]  # further parameters of the equation
    groups: tuple[int, ...] = ()  # axes of the second factor that are groups of rows
    precision: Any = None
    dtype: Any = None  # type of the result, or None
    indices: tuple[Any, ...] = ()  # sizes of the groups, or places of the numbers; None where only shapes matter

    @property
    def exact(self) -> bool:
        return self._folding.exact

    def returning(self, dtype: Any) -> "Indexed":
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    @property
    def _folding(self) -> Dot:
        """A dense product whose second factor has the same columns."""
        contracted, (lhs_batch, rhs_batch) = self.dimensions
        return Dot((contracted, (lhs_batch, (*rhs_batch, *self.groups))), self.axes, self.precision)

    def __call__(self, a: Shaped[Array, "*a"], b: Shaped[Array, "*b"]) -> Shaped[Array, "*c"]:
        return self._multiply(a, b, self.dimensions, self.groups, self.precision, self.dtype)

    def _multiply(self, a: Any, b: Any, dimensions: Any, groups: Any, precision: Any, dtype: Any) -> Any:
        if self.kind == "ragged_dot_general":
            ragged = dict(self.params)["lhs_ragged_dimensions"]
            numbers = lax.RaggedDotDimensionNumbers(dimensions, ragged, groups)
            (sizes,) = self.indices
            return lax.ragged_dot_general(a, b, sizes, numbers, precision=precision, preferred_element_type=dtype)
        primitive = sparse.bcoo_dot_general_p if self.kind == "bcoo_dot_general" else sparse.bcsr_dot_general_p
        return primitive.bind(
            a, *self.indices, b,
            dimension_numbers=dimensions, preferred_element_type=jnp.dtype(dtype or jnp.result_type(a, b)),
            **dict(self.params),
        )  # fmt: skip

    def depth(self, a: Any, b: Any) -> int:
        """Number of terms of each sum at most."""
        return math.prod(b.shape[axis] for axis in self.dimensions[0][1])

    def width(self, a: Any, b: Any) -> int:
        return self._folding.width(a, b)

    def rows(self, a: Any, b: Any) -> int:
        return math.prod(jax.eval_shape(self, a, b).shape) // max(self.width(a, b), 1)

    def fold(
        self, b: Float[Array, "*b"], weights: Float[Array, "n"], blocks: int, *, careful: bool = False
    ) -> Float[Array, "*folded blocks"]:
        return self._folding.fold(b, weights, blocks, careful=careful)

    def apply(
        self, a: Float[Array, "*a"], folded: Float[Array, "*folded blocks"], *, careful: bool = False
    ) -> Float[Array, "*rows blocks"]:
        (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = self.dimensions
        kept = sorted((*rhs_contracted, *rhs_batch, *self.groups))  # the axes of the second factor that are left
        contracted, batch, groups = (
            tuple(kept.index(axis) for axis in axes) for axes in (rhs_contracted, rhs_batch, self.groups)
        )
        dimensions = ((lhs_contracted, contracted), (lhs_batch, batch))
        return self._multiply(a, folded, dimensions, groups, lax.Precision.HIGHEST, None)

    def total(
        self, c: Float[Array, "*c"], weights: Float[Array, "n"], blocks: int, *, careful: bool = False
    ) -> Float[Array, "*rows blocks"]:
        (_, contracted), (_, batch) = self.dimensions
        columns = self.axes[1] - len(contracted) - len(batch) - len(self.groups)
        return sum_blocks(c.reshape(*c.shape[: c.ndim - columns], weights.size), weights, blocks, careful)

    def spread(self, rows: Shaped[Array, "*rows"], c: Any) -> Shaped[Array, "*#c"]:
        return self._folding.spread(rows, c)

    def powers(self, a: Float[Array, "*a"], b: Float[Array, "*b"]) -> Powers:
        return powers_as_a_whole(a, b)

    def finite(self, a: Shaped[Array, "*a"], b: Shaped[Array, "*b"]) -> Bool[Array, "*#rows"]:
        # What is left out may be computed with zeros in its place, and zero times infinity is everywhere.
        every = jnp.all(jnp.isfinite(a)) & jnp.all(jnp.isfinite(b))
        return every.reshape([1] * self._rank(a, b))

    def norms(self, a: Float[Array, "*a"], b: Float[Array, "*b"]) -> Float[Array, "*#rows"]:
        ones = jnp.ones(self.width(a, b), b.dtype)
        of_b = jnp.max(self.fold(jnp.abs(b), ones, 1), initial=0.0)
        of_a = jnp.max(self.apply(jnp.abs(a), self.fold(jnp.ones_like(b), ones, 1)), initial=0.0)
        return (of_a / max(self.width(a, b), 1) * of_b).reshape([1] * self._rank(a, b))

    def _rank(self, a: Any, b: Any) -> int:
        """Number of axes of the rows."""
        (_, contracted), (_, batch) = self.dimensions
        columns = self.axes[1] - len(contracted) - len(batch) - len(self.groups)
        return jax.eval_shape(self, a, b).ndim - columns
