"""Checks the rows of one matrix product, recomputes the product if rows look wrong, and returns flags."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Float32, Shaped, UInt32

from sdc.bits import as_bits, select
from sdc.results import total
from sdc.verdict import Judgement, Verdict, limit

from ..program import Reports, Site, Values, agreed, rarely, traced_once, varying
from .judgement import LEAST_COVERAGE, judge_rows, lacking_coverage
from .products import Dot, Indexed, Product
from .roundoff import Settings, work_type
from .schemes import Expected, Operands, Probabilistic, kind_of, make_scheme, signed_weights, turned

LISTED = 8  # maximum number of wrong elements that are listed
LARGEST_TOGETHER = 2**16  # maximum number of elements of a product, with its factors, that shares a check
# Padding at most doubles the number of elements of a shared check, or brings it to the second number.
PADDED, LARGEST_PADDED = 2, 2**18
LARGEST = 2**31 - 1  # maximum number of elements, which 32-bit integers count


class WrongElements(NamedTuple):
    """The first wrong elements of a product; rows beyond `found` are zero.

    Attributes:
        found: number of wrong elements: those in a flagged row and a flagged column, except elements that recomputation
            reproduced; for complex products, real and imaginary parts count separately.
        element: flat index in the product, row-major.
        error: difference from the recomputed element; 0 if recomputation gave the same value.
    """

    found: UInt32[Array, "*site"]
    element: UInt32[Array, "*site places"]
    error: Float32[Array, "*site places"]


class Flags(NamedTuple):
    """The results of checking a product. All zeros mean that nothing was checked.

    Attributes:
        checked: number of rows that were checked.
        examined: number of rows that the first tier passed on to the second tier or to recomputation.
        flagged: number of rows that the scheme flags as wrong, except rows whose recomputation is identical and whose
            error is no larger than what long sums can lose.
        confirmed: number of flagged rows whose recomputation is correct, so the error is in the hardware, not in the
            bound. Rows that are flagged but not confirmed are wrong in the recomputation too; only another device can
            show whether the cause is a permanent fault or a false alarm.
        corrected: number of rows replaced by recomputed rows.
        nonfinite: number of rows with infinite or undefined *inputs*, which cannot be checked; `checked` excludes them.
        margin: largest `|r| / bound` in the last tier, which determines whether a row is flagged; infinite if a sum
            overflowed, 0 if no row reached this tier.
        first_margin: largest `|r| / bound` in the first of two tiers, which passes on rows with a margin above 1.
        wrong: the first wrong elements, in the modes `locate` and `correct`; None in other modes.
    """

    checked: UInt32[Array, "*site"]
    examined: UInt32[Array, "*site"]
    flagged: UInt32[Array, "*site"]
    confirmed: UInt32[Array, "*site"]
    corrected: UInt32[Array, "*site"]
    nonfinite: UInt32[Array, "*site"]
    margin: Float32[Array, "*site"]
    first_margin: Float32[Array, "*site"]
    wrong: WrongElements | None = None

    def summary(self, site: Site | None = None) -> dict[str, Any]:
        """Returns the totals over all iterations and devices; waits for them."""
        return {
            "rows checked": total(self.checked),
            "flagged": total(self.flagged),
            "largest margin": float(np.max(np.asarray(self.margin), initial=0.0)),
        }

    def verdict(self) -> Judgement:
        """Returns the verdict on this product; waits for the counts."""
        return judge_rows(self._counts(), "this product", "")

    @staticmethod
    def judge(reports: Reports["Flags"]) -> Judgement:
        """Returns the verdict on the products of a step; waits for the counts."""
        every = {name: flags._counts() for name, flags in reports.items()}
        hit = [name for name, counts in every.items() if counts["flagged"]]
        whole = {key: sum(counts[key] for counts in every.values()) for key in COUNTED}
        found = judge_rows(whole, f"{len(hit)} of {len(every)} products, first {hit[0]}" if hit else "", "")
        if found.verdict is not Verdict.CLEAN:
            return found
        share, left = coverage(reports), [(one.site.name, one.site.source, one.reason) for one in reports.skipped]
        partly = f"{found.reason}, which are {limit(100 * share, 4, up=False)} % of the work in matrix products"
        return lacking_coverage(whole["checked"], share, LEAST_COVERAGE, left) or found._replace(reason=partly)

    def _counts(self) -> dict[str, int]:
        return {name: total(getattr(self, name)) for name in COUNTED}


COUNTED = ("checked", "flagged", "confirmed", "corrected", "nonfinite")


def coverage(flags: Reports[Any]) -> float:
    """Returns the checked share of the operations in a step's products.

    Args:
        flags: the reports of `sdc.abft`.

    Returns:
        A number from 0 to 1. Products that `where` excludes do not count; rows with non-finite factors count as
        unchecked. The result is 0 if the number of operations of a skipped product is unknown, as in a call to foreign
        code.

    Raises:
        ValueError: the argument does not consist of reports of `sdc.abft`, or the function is called inside `jax.jit`.
    """
    if not isinstance(flags, Reports):
        raise ValueError(
            f"expected flags, not {type(flags).__name__}; give the second value that a function transformed by "
            "sdc.abft returns"
        )
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(flags)):
        raise ValueError(
            "the number of checked rows is unknown inside jax.jit; return the flags, and call coverage outside"
        )
    if any(one.share is None for one in flags.skipped):
        return 0.0
    work = {site.name: site.runs * (site.products or 0) for site in flags.sites}
    left = sum(one.site.runs * (one.site.products or 0) for one in flags.skipped)
    whole = sum(work.values()) + left

    def judged(flag: Any) -> float:
        """Returns the share of a product's rows whose factors are finite, or 1 for a product that did not run."""
        if isinstance(flag.checked, jax.ShapeDtypeStruct):  # from `jax.eval_shape`
            return 1.0
        checked, nonfinite = (float(np.sum(np.asarray(x), dtype=np.float64)) for x in (flag.checked, flag.nonfinite))
        return checked / (checked + nonfinite) if nonfinite else 1.0

    return sum(work[name] * judged(flag) for name, flag in flags.items()) / whole if whole else 0.0


@functools.partial(jax.tree_util.register_dataclass, data_fields=["checked", "margin"], meta_fields=["last"])
@dataclasses.dataclass(frozen=True)
class Screened:
    """The result of the tier with which a check begins.

    Attributes:
        checked: number of rows.
        margin: largest `|r| / bound`; NaN or infinite if a sum is undefined or overflowed. The product is suspicious
            unless it is at most 1.
        last: whether this tier is the last one.
    """

    checked: UInt32[Array, "*site"]
    margin: Float32[Array, "*site"]
    last: bool


def screen(product: Product, settings: Settings, operands: Operands) -> tuple[Shaped[Array, "*c"], Screened]:
    """Checks a product with the tier with which a check begins, and examines nothing.

    Arguments and errors are those of `check`. Returns the product unchanged.
    """
    (c,), screened = _screened([operands.c], operands, _unsharded(product, operands), settings)
    return c, screened


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["runs", "operands"],
    meta_fields=["product", "settings", "relative"],
)
@dataclasses.dataclass(frozen=True)
class Deferred:
    """A small product whose first tier runs together with that of others.

    Attributes:
        runs: 1; or 0 if the product is in a branch that was not taken.
        operands: factors and product, as batches of matrices.
        product: the product of such operands.
        settings: settings of the check.
        relative: lambda, divided by the lenience of `settings`; None if it follows from the shape.
    """

    runs: UInt32[Array, ""]
    operands: Operands
    product: Dot
    settings: Settings
    relative: float | None

    @classmethod
    def of(cls, product: Dot, settings: Settings, given: Operands) -> "Deferred":
        scheme, relative = make_scheme(product, settings, given), None
        if settings.scheme == "two-tier" and isinstance(scheme, Probabilistic):
            relative = scheme.relative / (scheme.lenience(given) if settings.lenient else 1.0)
            # So that all share a check, it takes the norm of the terms of each, as the second tier would.
            settings = dataclasses.replace(settings, lenient=False, cancels=True)
        operands = Operands(*product.matrices(given.a, given.b, given.c))
        matrices = Dot((((2,), (1,)), ((0,), (0,))), (3, 3), lax.Precision.HIGHEST if product.exact else None)
        return cls(jnp.uint32(1), operands, matrices, settings, relative)

    @property
    def kind(self) -> Any:
        """What products that share a check have in common; the shape too, if bounds follow from it."""
        shape = self.shape if self.relative is None else ()
        return shape, self.product, self.settings, *(x.dtype for x in self.operands[:3])

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of matrices, and m, k and n."""
        return *self.operands.a.shape, self.operands.b.shape[-1]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["screened"], meta_fields=["names"])
@dataclasses.dataclass(frozen=True)
class Stack:
    """Results of the first tier of several products, on a leading axis."""

    names: tuple[str, ...]  # of the sites
    screened: Screened


def screen_together(found: Mapping[str, Screened | Deferred]) -> list[Stack]:
    """Completes the results of the first tier: deferred products are padded with zeros, and share a few checks, so that
    XLA does not compile one for each."""
    stacks, deferred = [], dict[str, Deferred]()
    for name, one in found.items():
        if isinstance(one, Deferred):
            deferred[name] = one
        else:
            stacks.append(Stack((name,), jax.tree.map(lambda x: x[None], one)))
    groups: list[_Group] = []
    for name, one in sorted(deferred.items(), key=lambda item: -_Group().joined(item[1]).padded):  # large ones first
        for place, group in enumerate(groups):
            joined = group.joined(one)
            if group.kind == one.kind and joined.padded <= max(PADDED * joined.least, LARGEST_PADDED):
                joined.names.append(name)
                groups[place] = joined
                break
        else:
            groups.append(_Group().joined(one))
            groups[-1].names.append(name)
    for group in groups:
        stacks.append(Stack(tuple(group.names), _screen_group([deferred[name] for name in group.names])))
    return stacks


@dataclasses.dataclass(frozen=True)
class _Group:
    """Deferred products that share a check: names, kind, number of matrices, largest sides, and number of elements."""

    names: list[str] = dataclasses.field(default_factory=list)
    kind: Any = None
    batch: int = 0
    sides: tuple[int, ...] = (0, 0, 0)
    least: int = 0

    @property
    def padded(self) -> int:
        """Number of elements after padding."""
        m, k, n = self.sides
        return self.batch * (m * k + k * n + m * n)

    def joined(self, one: Deferred) -> "_Group":
        batch, m, k, n = one.shape
        sides = tuple(max(pair) for pair in zip(self.sides, (m, k, n), strict=True))
        least = self.least + batch * (m * k + k * n + m * n)
        return _Group(self.names, one.kind, self.batch + batch, sides, least)


def _screen_group(several: Sequence[Deferred]) -> Screened:
    """Returns the results of the first tier of products of one kind, on a leading axis."""
    first, *_ = several
    batches = [one.shape[0] for one in several]

    def stacked(matrices: Sequence[Any]) -> Any:
        sides = [max(x.shape[axis] for x in matrices) for axis in (1, 2)]
        missing = [[(0, side - size) for side, size in zip(sides, x.shape[1:], strict=True)] for x in matrices]
        return jnp.concatenate([jnp.pad(x, [(0, 0), *more]) for x, more in zip(matrices, missing, strict=True)])

    a, b, c = (stacked([one.operands[which] for one in several]) for which in range(3))
    # Without the barrier, XLA's CPU backend fuses the concatenation into every reader of it.
    given = Operands(*lax.optimization_barrier((a, b, c)))
    if first.relative is not None:
        work = work_type(a.dtype, b.dtype, c.dtype)
        rows = [(one.relative or 0.0, one.shape[2] * one.shape[3]) for one in several]
        relative, size = jnp.asarray(np.repeat(np.asarray(rows), batches, axis=0), work).T[..., None, None]
        given = given._replace(own=(relative, size))
    margins = jnp.max(_first_margins(first.product, first.settings, given), axis=1)
    starts = np.cumsum([0, *batches[:-1]])[:, None]
    places = starts + np.minimum(np.arange(max(batches)), np.asarray(batches)[:, None] - 1)
    runs = [one.runs for one in several]
    known = not any(isinstance(x, jax.core.Tracer) for x in runs)  # XLA folds constants one by one
    times = jnp.asarray(np.asarray(runs)) if known else jnp.stack(runs)
    checked = np.asarray([one.shape[0] * one.shape[1] for one in several], np.uint32)
    return Screened(times * checked, jnp.max(margins[places], axis=1).astype(jnp.float32), is_last(first.settings))


def merge_screened(total: Screened, new: Screened) -> Screened:
    """Merges the results of two checks; zeros change nothing."""
    return Screened(total.checked + new.checked, jnp.maximum(total.margin, new.margin), new.last)


def check(product: Product, settings: Settings, operands: Operands) -> tuple[Shaped[Array, "*c"], Flags]:
    """Checks a product.

    Args:
        product: the function from `a` and `b` to `c`, which is evaluated again if rows are flagged.
        settings: settings of the check.
        operands: the factors, and the computed product.

    Returns:
        The product (with wrong rows replaced in mode `correct`), and its flags.

    Raises:
        ValueError: the roundoff of a type is unknown, or a setting is unknown.
    """
    product = _unsharded(product, operands)
    if _is_empty(operands):
        return operands.c, no_flags(settings)
    (c,), flags = _checked([operands.c], operands, product, settings)
    return c, flags


def _unsharded(product: Product, operands: Operands) -> Product:
    """Returns the product to recompute, whose sharding XLA may choose; raises ValueError if a roundoff is unknown."""
    work_type(operands.a.dtype, operands.b.dtype, operands.c.dtype)
    return dataclasses.replace(product, sharding=None) if isinstance(product, Dot) else product


def _is_empty(given: Operands) -> bool:
    return 0 in (given.a.size, given.b.size, given.c.size)


@functools.partial(traced_once, static_argnums=(2, 3))
def _screened(outs: Values, given: Operands, product: Product, settings: Settings) -> tuple[Values, Screened]:
    if _is_empty(given):
        return outs, Screened(jnp.uint32(0), jnp.float32(0), is_last(settings))
    given = given._replace(c=outs[0])
    margins = _first_margins(_at_indices(product, given), settings, given)
    # Elements of all rows are tested, whether by rows or by columns.
    rows = given.c.size // product.width(given.a, given.b) if settings.columns else margins.size
    return outs, Screened(jnp.uint32(rows), jnp.max(margins).astype(jnp.float32), is_last(settings))


def is_last(settings: Settings) -> bool:
    """Returns whether the tier with which checks begin decides."""
    return first_tier(settings) == kind_of(settings.scheme).tiers


def unexamined(settings: Settings, one: Screened, xp: Any = jnp) -> Flags:
    """Returns the flags of a product that the first tier passes, or whose examination is left to another program.

    Args:
        settings: settings of the site's check.
        one: result of the first tier.
        xp: `jax.numpy`, or `numpy` for arrays that are on the host.
    """
    margin = xp.where(xp.isnan(one.margin), xp.float32(xp.inf), one.margin)
    name = "margin" if one.last else "first_margin"
    return no_flags(settings, one.margin.shape, xp)._replace(checked=one.checked, **{name: margin})


def _first_margins(product: Product, settings: Settings, given: Operands) -> Float[Array, "*rows"]:
    """Returns the margins of the tier with which checks begin: of rows, or of columns."""
    if settings.columns and isinstance(product, Dot):
        product, given = turned(product, given)
    margins = row_margins(product, settings, given, expect(product, settings, given, first_tier(settings)))
    return margins * make_scheme(product, settings, given).lenience(given) if settings.lenient else margins


def first_tier(settings: Settings) -> int:
    """Returns the tier with which checks begin."""
    return min(settings.tier, kind_of(settings.scheme).tiers)


@functools.partial(traced_once, static_argnums=(2, 3))
def _checked(outs: Values, given: Operands, product: Product, settings: Settings) -> tuple[Values, Flags]:
    c, flags = _mapped(product, settings, 0)(given._replace(c=outs[0]))
    return [c], flags


def no_flags(settings: Settings, kept: tuple[int, ...] = (), xp: Any = jnp) -> Flags:
    """Returns the flags of an unchecked product, for each index of the axes `kept`, as arrays of `xp`."""
    none, wrong = xp.zeros(kept, xp.uint32), None
    if xp is np:
        none.setflags(write=False)  # several fields share it
    if settings.mode != "detect":
        wrong = WrongElements(none, *(xp.zeros((*kept, LISTED), dtype) for dtype in (xp.uint32, xp.float32)))
    zero = xp.zeros(kept, xp.float32)
    return Flags(none, none, none, none, none, none, zero, zero, wrong)


def merge_flags(total: Flags, new: Flags) -> Flags:
    """Merges the flags of two checks; zeros change nothing."""
    places = total.wrong
    if places is not None and new.wrong is not None:
        at = jnp.minimum(places.found, LISTED).astype(jnp.int32) + jnp.arange(LISTED, dtype=jnp.int32)
        places = WrongElements(
            places.found + new.wrong.found,
            places.element.at[at].add(new.wrong.element, mode="drop"),
            places.error.at[at].add(new.wrong.error, mode="drop"),
        )
    counts = [a + b for a, b in zip(total[:6], new[:6], strict=True)]
    margins = [jnp.maximum(a, b) for a, b in zip(total[6:8], new[6:8], strict=True)]
    return Flags._make([*counts, *margins, places])


def _mapped(product: Product, settings: Settings, axes: int) -> Any:
    """Returns the check, with separate flags for each index of the first `axes` axes of the product.

    Under `vmap`, a branch would become a select between two computed values, so the recomputation would always run.
    `vmap` therefore adds an axis to the product instead.
    """

    @custom_vmap
    def checked(operands: Operands) -> tuple[Any, Flags]:
        return _check(product, settings, axes, operands)

    @checked.def_vmap
    def _(size: int, batched: Any, operands: Operands) -> Any:
        operands = jax.tree.map(
            lambda own, x: x if own else jnp.broadcast_to(x, (size, *x.shape)), batched[0], operands
        )
        if isinstance(product, Dot):
            out = _mapped(product.mapped(), settings, axes + 1)(operands)
        else:
            out = lax.map(_mapped(product, settings, axes), operands)
        return out, jax.tree.map(lambda _: True, out)

    return checked


def _check(whole: Product, settings: Settings, axes: int, given: Operands) -> tuple[Any, Flags]:
    c, product = given.c, _at_indices(whole, given)
    tiers = kind_of(settings.scheme).tiers
    decided = is_last(settings)
    margins = _first_margins(product, settings, given)

    def largest(margins: Float[Array, "*rows"]) -> Float32[Array, "*kept"]:
        return jnp.max(margins, axis=tuple(range(axes, margins.ndim))).astype(jnp.float32)

    def any_above(largest: Float32[Array, "*kept"]) -> Bool[Array, ""]:
        return agreed(~(jnp.max(largest) <= 1))

    nothing = no_flags(settings, margins.shape[:axes])
    judged = jnp.full(margins.shape[:axes], math.prod(margins.shape[axes:]), jnp.uint32)
    most = largest(margins)

    clean = nothing._replace(checked=judged)
    clean = varying(clean._replace(margin=most) if decided else clean._replace(first_margin=most))

    def examine(given: Operands, margins: Float[Array, "*rows"]) -> tuple[Any, Flags]:
        product = _at_indices(whole, given)
        usable = jnp.broadcast_to(product.finite(given.a, given.b), margins.shape)
        suspicious = ~(margins <= 1)
        # Results of the first tier are not reused: the check itself may have been wrong.
        expected = expect(product, settings, given._replace(checksum=None), tiers)
        last = row_margins(product, settings, given._replace(totals=None), expected)
        last = jnp.where(usable, jnp.where(suspicious, last, margins if decided else 0.0), 0.0)
        most, (examined, nonfinite) = largest(last), _count(axes, suspicious & usable, ~usable)
        found = nothing._replace(checked=judged - nonfinite, examined=examined, nonfinite=nonfinite, margin=most)
        if not decided:
            found = found._replace(first_margin=largest(jnp.where(usable, margins, 0.0)))
        recompute = functools.partial(_recompute, product, settings, axes, expected, last, found)
        return lax.cond(any_above(most), recompute, lambda given: (given.c, varying(found)), given)

    if settings.mode != "correct":  # the product itself need not pass through a conditional
        return c, lax.cond(any_above(most), lambda *given: examine(*given)[1], lambda *_: clean, given, margins)

    def mend(state: tuple[Any, Flags], margins: Float[Array, "*rows"], a: Any, b: Any, *others: Any) -> Any:
        return examine(Operands(a, b, state[0], *others), margins)

    return rarely(any_above(most), mend, (c, clean), margins, given.a, given.b, *given[3:])


def _at_indices(product: Product, given: Operands) -> Product:
    return dataclasses.replace(product, indices=given.indices) if isinstance(product, Indexed) else product


def _recompute(
    product: Product,
    settings: Settings,
    axes: int,
    expected: Expected,
    margins: Float[Array, "*rows"],
    found: Flags,
    given: Operands,
) -> tuple[Any, Flags]:
    """Recomputes a product with margins above 1, to distinguish transient errors from persistent ones."""
    c = given.c
    full = product(given.a, given.b)
    # Without the barrier, XLA would omit the rounding between the product and the sums of its rows.
    recomputed = lax.optimization_barrier(full.astype(c.dtype))
    carried = None if given.carried is None else rounded_off(product, given.b, full, recomputed)
    again = row_margins(product, settings, Operands(given.a, given.b, recomputed, carried), expected)
    # Long sums can lose terms that are each too small, always in the same direction. A row whose recomputation is
    # identical therefore counts as correct if such losses explain its error.
    differ = as_bits(recomputed) != as_bits(c)
    ones = jnp.ones(product.width(given.a, given.b), jnp.float32)
    same = product.total(differ.astype(jnp.float32), ones, 1)[..., 0] == 0
    lenience = make_scheme(product, settings, given).lenience(given)
    confirmed = ~(margins <= 1) & ((again <= 1) | (~same & (again * lenience <= 1)))
    margins = jnp.where(same & (margins * lenience <= 1), margins * lenience, margins)
    flagged = ~(margins <= 1)
    counts = _count(axes, flagged, confirmed)
    most = jnp.max(margins, axis=tuple(range(axes, margins.ndim))).astype(jnp.float32)
    found = found._replace(flagged=counts[0], confirmed=counts[1], margin=most)
    if settings.mode == "detect":
        return c, varying(found)
    columns = _wrong_columns(product, settings, given)
    # The fused kernel rounds differently from the recomputed product.
    changed = differ & columns if settings.fused else differ
    wrong = product.spread(flagged, c) & jnp.where(product.spread(confirmed, c), changed, columns)
    found = found._replace(wrong=_wrong_elements(wrong, recomputed, c, axes))
    if settings.mode == "locate":
        return c, varying(found)
    mended = select(jnp.broadcast_to(product.spread(confirmed, c), c.shape), recomputed, c)
    return mended, varying(found._replace(corrected=found.confirmed))


def expect(product: Product, settings: Settings, given: Operands, tier: int) -> Expected:
    """Returns the expected sums of the rows for a tier of the scheme; one-tier schemes also accept tier 2."""
    return make_scheme(product, settings, given).expect(given.wide(), tier)


def row_margins(product: Product, settings: Settings, given: Operands, expected: Expected) -> Float[Array, "*rows"]:
    """Returns `|r| / bound` of every row."""
    return make_scheme(product, settings, given).margin(given.wide(), expected)


def rounded_off(product: Product, b: Any, full: Float[Array, "*c"], rounded: Shaped[Array, "*c"]) -> Any:
    """Returns the weighted sum of each row's rounding errors, which the scheme `residual` keeps with the product."""
    lost = full - rounded.astype(full.dtype)
    return product.total(lost, signed_weights(product.width(None, b), lost.dtype), 1)[..., 0]


def _wrong_columns(product: Product, settings: Settings, given: Operands) -> Bool[Array, "*#c"]:
    """Returns the columns that the first tier flags, or all columns if it flags none; the result has the axes of the
    product.

    If terms cancel, the first tier flags too many columns.
    """
    if not isinstance(product, Dot):
        return jnp.ones([1] * given.c.ndim, jnp.bool_)
    batch, rows = len(product.dimensions[1][0]), product.rank()
    columns, operands = turned(product, Operands(given.a, given.b, given.c))
    flagged = ~(row_margins(columns, settings, operands, expect(columns, settings, operands, 1)) <= 1)
    flagged |= ~jnp.any(flagged, axis=tuple(range(batch, flagged.ndim)), keepdims=True)
    return flagged.reshape(*flagged.shape[:batch], *[1] * (rows - batch), *flagged.shape[batch:])


def _wrong_elements(
    wrong: Bool[Array, "*c"], recomputed: Shaped[Array, "*c"], c: Shaped[Array, "*c"], axes: int
) -> WrongElements:
    """Returns the first wrong elements, for each index of the first `axes` axes."""
    if c.size >= LARGEST:
        raise ValueError(
            f"a product of {c.size:,} elements on one device is too large for locating wrong elements (expected fewer "
            f"than {LARGEST:,}); choose mode='detect', or shard the product"
        )

    kept, number = c.shape[:axes], math.prod(c.shape[axes:])

    def flat(x: Any) -> Any:
        return jnp.broadcast_to(x, c.shape).reshape(*kept, number).astype(jnp.float32)

    work = work_type(c.dtype)
    off = flat(c.astype(work) - recomputed.astype(work))
    # `top_k` keeps the order of equal values.
    known, at = lax.top_k(flat(wrong), min(LISTED, number))
    error = jnp.where(known > 0, jnp.take_along_axis(off, at, axis=-1), 0.0)
    element = jnp.where(known > 0, at, 0).astype(jnp.uint32)
    missing = [(0, 0)] * axes + [(0, LISTED - at.shape[-1])]
    total = jnp.sum(jnp.broadcast_to(wrong, c.shape), axis=tuple(range(axes, c.ndim)), dtype=jnp.uint32)
    return WrongElements(total, jnp.pad(element, missing), jnp.pad(error, missing))


def _count(axes: int, *rows: Bool[Array, "*rows"]) -> UInt32[Array, "counts *kept"]:
    """Counts rows of several kinds, for each index of the first `axes` axes."""
    return jnp.sum(jnp.stack(rows), axis=tuple(range(axes + 1, rows[0].ndim + 1)), dtype=jnp.uint32)
