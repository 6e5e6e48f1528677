"""Matrix products as linear maps of their first factor, with the row sums that a check compares.

Let `C = A B`, where A is m×k and B is k×n, and let w be a vector of n weights. Then `C w = A (B w)`, so the weighted
sum of a *row* of C also follows from A and the *checksum* `B w`, at the cost of two matrix-vector products. Batches,
several contracted axes and convolutions work the same way; a row is then the set of elements that enter one sum over
all columns. Columns may be split into blocks with separate sums, which form the last axis of the results in this
module.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import sparse
from jaxtyping import Array, Bool, Float, Float32, Shaped

from sdc.bits import as_bits, from_bits

from ..program import compiled_for

Dimensions: TypeAlias = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
Weights: TypeAlias = Float[Array, "n"]
Folded: TypeAlias = Float[Array, "*folded blocks"]
Sums: TypeAlias = Float[Array, "*rows blocks"]


class Powers(NamedTuple):
    """Powers of two by which factors are scaled: for each factor, with its axes, and for each row of the product."""

    a: Float[Array, "*#a"]  # powers for the first factor
    b: Float[Array, "*#b"]  # powers for the second factor
    # Powers of both factors, in the axes of the rows; scalars if they are the same for all rows.
    rows: tuple[Float[Array, "*#rows"], Float[Array, "*#rows"]]


def _power(x: Float[Array, "*shape"], axes: Sequence[int]) -> Float[Array, "*#shape"]:
    """Returns powers of two that scale the largest finite numbers over `axes` to below 1; in the result, these axes
    have size one."""
    info = jnp.finfo(x.dtype)
    largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axis=tuple(axes), keepdims=True)
    bits, most = as_bits(largest), 2 * int(info.maxexp) - 3
    exponent = bits >> info.nmant
    # Both the power and its inverse are normal numbers.
    power = from_bits(jnp.clip(most - exponent.astype(jnp.int32), 1, most - 1).astype(bits.dtype) << info.nmant, x)
    return jnp.where(exponent == 0, jnp.ones((), x.dtype), power)


def _marked(x: Shaped[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns 1 for each finite number, and NaN for every other number."""
    return jnp.where(jnp.isfinite(x), jnp.float32(1), jnp.float32(jnp.nan))


def _sum(x: Float[Array, "*shape"], axes: Sequence[int], careful: bool) -> Float[Array, "*rest"]:
    """Sums over axes; if `careful`, sums in two stages with about equal numbers of terms, so errors grow only with the
    square root of the number of terms.

    A sequential sum loses terms that are each too small to change the sum, up to thousands of times and always in the
    same direction, for example if one probability is near 1 and all others are near 0.
    """
    if not careful:
        return jnp.sum(x, axis=tuple(axes))
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    x = x.transpose(*kept, *axes).reshape(*(x.shape[axis] for axis in kept), -1)
    parts = _blocked(x, max(1, math.isqrt(x.shape[-1])))
    # Without the barrier, XLA merges the two sums.
    return jnp.sum(lax.optimization_barrier(jnp.sum(parts, axis=-1)), axis=-1)


def _blocked(x: Shaped[Array, "*rest n"], blocks: int) -> Shaped[Array, "*rest blocks block"]:
    """Splits the last axis into blocks, and pads the last block with zeros."""
    length = -(-x.shape[-1] // blocks) if blocks else 0
    if missing := blocks * length - x.shape[-1]:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], blocks, length)


def _sum_blocks(x: Shaped[Array, "*rest n"], weights: Weights, blocks: int, careful: bool) -> Sums:
    cut = _blocked(x * weights, blocks)
    return _sum(cut, [cut.ndim - 1], careful)


class Product(abc.ABC):
    """A product of two arrays that is linear in each of them, with the sums that a check needs.

    Methods take both factors, or arrays of the same shapes, and the result as `c`.
    """

    @property
    @abc.abstractmethod
    def precision(self) -> Any:
        """Precision of the jaxpr equation."""

    @abc.abstractmethod
    def __call__(self, a: Shaped[Array, "*a"], b: Shaped[Array, "*b"]) -> Shaped[Array, "*c"]:
        """Returns the product."""

    @abc.abstractmethod
    def depth(self, a: Any, b: Any) -> int:
        """Returns the largest number of terms in a sum (k)."""

    @abc.abstractmethod
    def width(self, a: Any, b: Any) -> int:
        """Returns the number of columns (n)."""

    def rows(self, a: Any, b: Any) -> int:
        """Returns the number of rows (m) of each batch or group."""
        return math.prod(jax.eval_shape(self, a, b).shape) // max(self.width(a, b), 1)

    @abc.abstractmethod
    def fold(self, b: Float[Array, "*b"], weights: Weights, blocks: int, *, careful: bool = False) -> Folded:
        """Computes the checksum of the second factor: the weighted sum of its columns; for `careful`, see `_sum`."""

    @abc.abstractmethod
    def apply(self, a: Float[Array, "*a"], folded: Folded, *, careful: bool = False) -> Sums:
        """Computes the expected row sums from the first factor and the checksum of the second factor."""

    @abc.abstractmethod
    def total(self, c: Float[Array, "*c"], weights: Weights, blocks: int, *, careful: bool = False) -> Sums:
        """Computes the weighted sums of the rows of the product."""

    @abc.abstractmethod
    def rank(self, a: Any, b: Any) -> int:
        """Returns the number of axes that index the rows."""

    def spread(self, rows: Shaped[Array, "*rows"], c: Any) -> Shaped[Array, "*#c"]:
        """Reshapes one value per row so that it broadcasts to the product."""
        return rows.reshape(*rows.shape, *[1] * (c.ndim - rows.ndim))

    def powers(self, a: Float[Array, "*a"], b: Float[Array, "*b"]) -> Powers:
        """Returns powers of two that scale both factors to below 1, separately for each row if the product allows it;
        this base class returns one power per factor."""
        by_a, by_b = (_power(x, range(x.ndim)) for x in (a, b))
        return Powers(by_a, by_b, (by_a.reshape(()), by_b.reshape(())))

    def finite(self, a: Shaped[Array, "*a"], b: Shaped[Array, "*b"]) -> Bool[Array, "*#rows"]:
        """Returns whether the inputs of each row are all finite; this base class tests all rows together.

        Products may be computed with zeros in place of absent terms; the NaN of zero times infinity then spreads to
        other rows.
        """
        return (jnp.all(jnp.isfinite(a)) & jnp.all(jnp.isfinite(b))).reshape([1] * self.rank(a, b))

    def _finite_rows(self, a: Shaped[Array, "*a"], b: Shaped[Array, "*b"]) -> Bool[Array, "*rows"]:
        ones = jnp.ones(self.width(a, b), jnp.float32)
        return ~jnp.isnan(self.apply(_marked(a), self.fold(_marked(b), ones, 1))[..., 0])

    def norms(self, a: Float[Array, "*a"], b: Float[Array, "*b"]) -> Float[Array, "*#rows"]:
        """Returns `||A||_inf ||B||_inf`, from the largest absolute row sums; this base class returns one bound for all
        rows."""
        ones = jnp.ones(self.width(a, b), b.dtype)
        of_b = jnp.max(self.fold(jnp.abs(b), ones, 1), initial=0.0)
        of_a = jnp.max(self.apply(jnp.abs(a), self.fold(jnp.ones_like(b), ones, 1)), initial=0.0)
        return (of_a / max(self.width(a, b), 1) * of_b).reshape([1] * self.rank(a, b))

    @property
    def exact(self) -> bool:
        """Whether the factors are multiplied without rounding them first, regardless of the device's default."""
        both = self.precision if isinstance(self.precision, tuple) else (self.precision,)
        return all(str(each).upper() == "HIGHEST" for each in both)


@dataclasses.dataclass(frozen=True)
class Dot(Product):
    """`lax.dot_general`: the sum over the contracted axes, for each index of the batch axes."""

    dimensions: Dimensions  # contracted axes and batch axes of both factors, as in `lax.dot_general`
    axes: tuple[int, int]  # numbers of axes of the factors
    precision: Any = None
    dtype: Any = None  # dtype of the result, or None
    sharding: Any = None  # sharding of the result, or None

    def __call__(self, a: Shaped[Array, "*a"], b: Shaped[Array, "*b"]) -> Shaped[Array, "*c"]:
        return lax.dot_general(a, b, self.dimensions, self.precision, self.dtype, out_sharding=self.sharding)

    def depth(self, a: Any, b: Any) -> int:
        return math.prod(a.shape[axis] for axis in self.dimensions[0][0])

    def width(self, a: Any, b: Any) -> int:
        return math.prod(b.shape[axis] for axis in self._free(1))

    def rows(self, a: Any, b: Any) -> int:
        return math.prod(a.shape[axis] for axis in self._free(0))

    def rank(self, a: Any = None, b: Any = None) -> int:
        return self.axes[0] - len(self.dimensions[0][0])

    def _free(self, side: int) -> tuple[int, ...]:
        contracted, batch = (axes[side] for axes in self.dimensions)
        return tuple(axis for axis in range(self.axes[side]) if axis not in contracted and axis not in batch)

    def fold(self, b: Float[Array, "*b"], weights: Weights, blocks: int, *, careful: bool = False) -> Folded:
        free = self._free(1)
        if blocks == 1:
            wide = weights.reshape([b.shape[axis] if axis in free else 1 for axis in range(b.ndim)])
            # Both signs are flipped, which changes no bit. Otherwise, XLA would share the weights between this sum and
            # that of the product, and its CPU backend would materialize them as a matrix (5 ms at 2,048 squared).
            return -_sum(b * -wide, free, careful)[..., None]
        kept = [axis for axis in range(b.ndim) if axis not in free]
        flat = b.transpose(*kept, *free).reshape(*(b.shape[axis] for axis in kept), weights.size)
        return _sum_blocks(flat, weights, blocks, careful)

    def apply(self, a: Float[Array, "*a"], folded: Folded, *, careful: bool = False) -> Sums:
        if folded.shape[-1] == 1:
            (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = self.dimensions
            kept = sorted([*rhs_contracted, *rhs_batch])  # the remaining axes of the second factor
            partner = dict(zip([*lhs_contracted, *lhs_batch], [*rhs_contracted, *rhs_batch], strict=True))
            order = [kept.index(partner[axis]) for axis in range(a.ndim) if axis in partner]
            shape = [a.shape[axis] if axis in partner else 1 for axis in range(a.ndim)]
            rows = _sum(a * folded[..., 0].transpose(order).reshape(shape), lhs_contracted, careful)
            return self._rows(rows, 0)[..., None]
        return lax.dot_general(a, folded, self.with_folded, precision=lax.Precision.HIGHEST)

    @property
    def with_folded(self) -> Dimensions:
        """Contracted and batch axes of the product of the first factor and the checksum of the second one."""
        (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = self.dimensions
        kept = sorted([*rhs_contracted, *rhs_batch])  # the remaining axes of the second factor
        contracted, batch = ([kept.index(axis) for axis in axes] for axes in (rhs_contracted, rhs_batch))
        return (lhs_contracted, contracted), (lhs_batch, batch)

    def total(self, c: Float[Array, "*c"], weights: Weights, blocks: int, *, careful: bool = False) -> Sums:
        rows = self.rank()
        if blocks == 1:
            return _sum(c * weights.reshape(c.shape[rows:]), range(rows, c.ndim), careful)[..., None]
        return _sum_blocks(c.reshape(*c.shape[:rows], weights.size), weights, blocks, careful)

    def _rows(self, x: Shaped[Array, "*left"], side: int) -> Shaped[Array, "*rows"]:
        """Transposes a factor, from which the contracted axes were removed, so that the batch axes come first."""
        contracted, batch = (axes[side] for axes in self.dimensions)
        left = [axis for axis in range(self.axes[side]) if axis not in contracted]
        return x.transpose([left.index(axis) for axis in (*batch, *self._free(side))])

    def powers(self, a: Float[Array, "*a"], b: Float[Array, "*b"]) -> Powers:
        # Powers are separate for each row, and for each batch of the second factor, so that large numbers do not hide
        # small ones.
        contracted, batch = self.dimensions
        by_a = _power(a, contracted[0])
        by_b = _power(b, [axis for axis in range(b.ndim) if axis not in batch[1]])
        rows_a = self._rows(by_a.squeeze(tuple(contracted[0])), 0)
        rows_b = self._rows(by_b.squeeze(tuple(contracted[1])), 1)
        rows_b = rows_b.reshape(*rows_b.shape[: len(batch[1])], *[1] * (rows_a.ndim - len(batch[1])))
        return Powers(by_a, by_b, (rows_a, rows_b))

    def finite(self, a: Shaped[Array, "*a"], b: Shaped[Array, "*b"]) -> Bool[Array, "*rows"]:
        return self._finite_rows(a, b)

    def norms(self, a: Float[Array, "*a"], b: Float[Array, "*b"]) -> Float[Array, "*#rows"]:
        (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = self.dimensions
        norms = []
        for x, summed, others, batch in (
            (a, lhs_contracted, self._free(0), lhs_batch),
            (b, self._free(1), rhs_contracted, rhs_batch),
        ):
            sums = jnp.sum(jnp.abs(x), axis=tuple(summed), keepdims=True)
            most = jnp.max(sums, axis=tuple(others), keepdims=True, initial=0.0)
            order = [*batch, *(axis for axis in range(x.ndim) if axis not in batch)]
            norms.append(most.transpose(order).reshape([x.shape[axis] for axis in batch]))
        both = norms[0] * norms[1]
        return both.reshape(*both.shape, *[1] * len(self._free(0)))

    def columns(self) -> "Dot":
        """Returns the product whose rows are the columns of this product, `C' = B' A'`."""
        contracted, batch = self.dimensions
        return Dot((contracted[::-1], batch[::-1]), self.axes[::-1], self.precision, self.dtype)

    def matrix(self, c: Shaped[Array, "*c"]) -> Shaped[Array, "rows n"]:
        """Reshapes the result to a matrix with all rows on one axis, and all columns on the other."""
        return c.reshape(math.prod(c.shape[: self.rank()]), -1)

    def matrices(
        self, a: Shaped[Array, "*a"], b: Shaped[Array, "*b"], c: Shaped[Array, "*c"]
    ) -> tuple[Shaped[Array, "batch m k"], Shaped[Array, "batch k n"], Shaped[Array, "batch m n"]]:
        """Transposes and reshapes factors and product to batches of matrices."""
        contracted, batch = self.dimensions
        m, k, n = self.rows(a, b), self.depth(a, b), self.width(a, b)
        a = a.transpose(*batch[0], *self._free(0), *contracted[0]).reshape(-1, m, k)
        b = b.transpose(*batch[1], *contracted[1], *self._free(1)).reshape(-1, k, n)
        return a, b, c.reshape(-1, m, n)

    def mapped(self) -> "Dot":
        """Returns the same product, mapped over a new first axis of both factors and of the result."""
        contracted, batch = (tuple(tuple(axis + 1 for axis in axes) for axes in pair) for pair in self.dimensions)
        dimensions = (contracted[0], contracted[1]), ((0, *batch[0]), (0, *batch[1]))
        axes = self.axes[0] + 1, self.axes[1] + 1
        return dataclasses.replace(self, dimensions=dimensions, axes=axes, sharding=None)


@dataclasses.dataclass(frozen=True)
class Conv(Product):
    """`lax.conv_general_dilated`: columns are the output features, and rows are all other axes; each group has its own
    rows."""

    params: tuple[tuple[str, Any], ...]  # parameters of the equation
    dtype: Any = None  # dtype of the result, or None

    @property
    def precision(self) -> Any:
        return dict(self.params)["precision"]

    @property
    def _groups(self) -> int:
        params = dict(self.params)
        return int(max(params["feature_group_count"], params["batch_group_count"]))

    @property
    def _numbers(self) -> Any:
        return dict(self.params)["dimension_numbers"]

    def __call__(self, a: Shaped[Array, "*a"], b: Shaped[Array, "*b"]) -> Shaped[Array, "*c"]:
        return lax.conv_general_dilated(a, b, **dict(self.params), preferred_element_type=self.dtype)

    def depth(self, a: Any, b: Any) -> int:
        return math.prod(b.shape) // max(b.shape[self._numbers.rhs_spec[0]], 1)

    def width(self, a: Any, b: Any) -> int:
        return int(b.shape[self._numbers.rhs_spec[0]]) // self._groups

    def rows(self, a: Any, b: Any) -> int:
        return super().rows(a, b) // self._groups

    def rank(self, a: Any, b: Any) -> int:
        return len(self._numbers.out_spec)

    def fold(self, b: Float[Array, "*b"], weights: Weights, blocks: int, *, careful: bool = False) -> Folded:
        axis = self._numbers.rhs_spec[0]
        grouped = jnp.moveaxis(b, axis, -1)
        grouped = grouped.reshape(*grouped.shape[:-1], self._groups, weights.size)
        return jnp.moveaxis(_sum_blocks(grouped, weights, blocks, careful), -2, axis)

    def apply(self, a: Float[Array, "*a"], folded: Folded, *, careful: bool = False) -> Sums:
        axis, blocks = self._numbers.rhs_spec[0], folded.shape[-1]
        # Blocks become further output features of their group.
        kernel = jnp.moveaxis(folded, axis, -2)
        kernel = jnp.moveaxis(kernel.reshape(*kernel.shape[:-2], -1), -1, axis)
        found = lax.conv_general_dilated(a, kernel, **dict(self.params) | {"precision": lax.Precision.HIGHEST})
        rows = jnp.moveaxis(found, self._numbers.out_spec[1], -1)
        return rows.reshape(*rows.shape[:-1], self._groups, blocks)

    def total(self, c: Float[Array, "*c"], weights: Weights, blocks: int, *, careful: bool = False) -> Sums:
        c = jnp.moveaxis(c, self._numbers.out_spec[1], -1)
        return _sum_blocks(c.reshape(*c.shape[:-1], self._groups, weights.size), weights, blocks, careful)

    def spread(self, rows: Shaped[Array, "*rows"], c: Any) -> Shaped[Array, "*#c"]:
        axis = self._numbers.out_spec[1]
        features = jnp.repeat(rows, c.shape[axis] // self._groups, axis=-1, total_repeat_length=c.shape[axis])
        return jnp.moveaxis(features, -1, axis)

    def finite(self, a: Shaped[Array, "*a"], b: Shaped[Array, "*b"]) -> Bool[Array, "*#rows"]:
        # XLA may compute all groups together, padded with zeros.
        return super().finite(a, b) if self._groups > 1 else self._finite_rows(a, b)


@dataclasses.dataclass(frozen=True)
class Indexed(Product):
    """`lax.ragged_dot_general`, or the product of a sparse first factor (its stored numbers) and a dense second factor.

    These products are linear in the second factor, whose free axes are the columns; rows are all other axes of the
    result.
    """

    kind: str  # `ragged_dot_general`, `bcoo_dot_general` or `bcsr_dot_general`
    dimensions: Dimensions  # as in `lax.dot_general`
    axes: tuple[int, int]  # numbers of axes of the factors, those of the dense shape for a sparse one
    params: tuple[tuple[str, Any], ...]  # further parameters of the equation
    groups: tuple[int, ...] = ()  # axes of the second factor that are groups of rows
    precision: Any = None
    dtype: Any = None  # dtype of the result, or None
    indices: tuple[Any, ...] = ()  # sizes of the groups, or indices of the numbers; None if only shapes matter

    @property
    def _folding(self) -> Dot:
        """Dense product whose second factor has the same columns."""
        contracted, (lhs_batch, rhs_batch) = self.dimensions
        return Dot((contracted, (lhs_batch, (*rhs_batch, *self.groups))), self.axes, self.precision)

    @property
    def _columns(self) -> int:
        """Number of axes that form the columns."""
        (_, contracted), (_, batch) = self.dimensions
        return self.axes[1] - len(contracted) - len(batch) - len(self.groups)

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
        return math.prod(b.shape[axis] for axis in self.dimensions[0][1])

    def width(self, a: Any, b: Any) -> int:
        return self._folding.width(a, b)

    def rank(self, a: Any, b: Any) -> int:
        return jax.eval_shape(self, a, b).ndim - self._columns

    def fold(self, b: Float[Array, "*b"], weights: Weights, blocks: int, *, careful: bool = False) -> Folded:
        return self._folding.fold(b, weights, blocks, careful=careful)

    def apply(self, a: Float[Array, "*a"], folded: Folded, *, careful: bool = False) -> Sums:
        (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = self.dimensions
        kept = sorted((*rhs_contracted, *rhs_batch, *self.groups))  # the remaining axes of the second factor
        contracted, batch, groups = (
            tuple(kept.index(axis) for axis in axes) for axes in (rhs_contracted, rhs_batch, self.groups)
        )
        dimensions = ((lhs_contracted, contracted), (lhs_batch, batch))
        return self._multiply(a, folded, dimensions, groups, lax.Precision.HIGHEST, None)

    def total(self, c: Float[Array, "*c"], weights: Weights, blocks: int, *, careful: bool = False) -> Sums:
        flat = c.reshape(*c.shape[: c.ndim - self._columns], weights.size)
        return _sum_blocks(flat, weights, blocks, careful)


def _multiplies(dimensions: Dimensions, a: Any, b: Any) -> bool:
    """Returns whether the backend can compute the product of these factors in float32 without transposing them.

    XLA's CPU backend multiplies bfloat16 natively if it has a kernel, and has no other path to a float32 result, so
    products with other orders of axes fail at run time ("Unsupported element type for DotThunk::Execute: BF16 x BF16 =
    F32"). None of 967 products with random dimensions that pass this test failed, nor did any of 300 products that are
    transposed first (jax 0.10.2, a CPU with avx512_bf16). Most of the 300 do not need the transposition, but
    transposing takes less time than widening the factors.
    """
    if compiled_for().platform != "cpu" or not a.dtype == b.dtype == jnp.bfloat16:
        return True
    contracted, batch = dimensions
    depths = [len(axes) for axes in contracted]
    leading = all(tuple(axes) == tuple(range(len(axes))) for axes in batch)
    at_an_end = [
        tuple(axes) in (tuple(range(len(outer), len(outer) + len(axes))), tuple(range(x.ndim - len(axes), x.ndim)))
        for axes, outer, x in zip(contracted, batch, (a, b), strict=True)
    ]
    rows_last = tuple(contracted[0]) != tuple(range(a.ndim - depths[0], a.ndim))
    columns = b.ndim - depths[1] - len(batch[1])
    return leading and all(at_an_end) and not (rows_last and columns > 1)


def arranged(dimensions: Dimensions, a: Any, b: Any) -> tuple[Dimensions, Any, Any]:
    """Transposes the factors of a product, if necessary, so that the backend can return float32 sums.

    Batch axes then come first; contracted axes follow the rows in `a` and precede the columns in `b`.
    """
    if _multiplies(dimensions, a, b):
        return dimensions, a, b
    (left, right), (of_a, of_b) = dimensions
    rows, columns = (
        [axis for axis in range(x.ndim) if axis not in (*contracted, *batch)]
        for x, contracted, batch in ((a, left, of_a), (b, right, of_b))
    )
    # Without the barrier, XLA undoes the transposition.
    a, b = lax.optimization_barrier((a.transpose(*of_a, *rows, *left), b.transpose(*of_b, *right, *columns)))
    outer, depth = len(of_a), len(left)
    batch, last = tuple(range(outer)), tuple(range(a.ndim - depth, a.ndim))
    return ((last, tuple(range(outer, outer + depth))), (batch, batch)), a, b
