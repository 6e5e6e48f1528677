"""One contract over types, shapes and schemes: margins are the formulas', wrong rows are found, named and mended."""

import dataclasses
import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdc.checksums._check import check, merge_flags, rounded_off
from sdc.checksums.products import Dot
from sdc.checksums.roundoff import Rounding, SchemeName, Settings
from sdc.checksums.schemes import BLOCK, Operands, signed_weights

SCHEMES: tuple[SchemeName, ...] = get_args(SchemeName)
# Shapes of both factors, contracted axes, batch axes.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "square": ((16, 16), (16, 16), (((1,), (0,)), ((), ()))),
    "one row": ((24,), (24, 9), (((0,), (0,)), ((), ()))),
    "one column": ((9, 24), (24,), (((1,), (0,)), ((), ()))),
    "one term": ((7, 1), (1, 5), (((1,), (0,)), ((), ()))),
    "odd, transposed": ((13, 7), (11, 13), (((0,), (1,)), ((), ()))),
    "wider than a block": ((3, 5), (5, BLOCK + 9), (((1,), (0,)), ((), ()))),
    "batches in another order": ((2, 5, 3, 4), (4, 3, 6, 2), (((3,), (0,)), ((0, 2), (3, 1)))),
    "several contracted axes": ((3, 4, 5, 2), (5, 6, 3), (((0, 2), (2, 0)), ((), ()))),
}


def product_of(shape: str, dtype: str, rng: np.random.Generator) -> tuple[Dot, Any, Any]:
    a_shape, b_shape, dimensions = SHAPES[shape]
    a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32).astype(dtype) for s in (a_shape, b_shape))
    return Dot(dimensions, (a.ndim, b.ndim), dtype=jnp.dtype(jnp.float32)), a, b


class Stuck(Dot):
    """A device that makes the same mistake each time."""

    def __call__(self, a: Any, b: Any) -> Any:
        return super().__call__(a, b).at[1, 2].add(5.0)


def small(seed: int = 0) -> tuple[Dot, Any, Any]:
    return product_of("square", "float32", np.random.default_rng(seed))


def test_a_fault_that_repeats_itself_is_flagged_and_not_confirmed() -> None:
    dot, a, b = small()
    product = Stuck(dot.dimensions, dot.axes)
    bad = product(a, b)
    c, flags = check(product, Settings("correct"), Operands(a, b, bad))
    assert (int(flags.flagged), int(flags.confirmed), int(flags.corrected)) == (1, 0, 0)
    np.testing.assert_array_equal(c, bad)
    assert flags.wrong is not None
    assert int(flags.wrong.element[0]) == 1 * 16 + 2
    assert float(flags.wrong.error[0]) == 0.0


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("side", ["a", "b"])
def test_inputs_that_are_not_finite_are_told_from_corruption(value: float, side: str) -> None:
    """One row of A concerns one row, an element of B all of them; both at once with a corrupted row."""
    product, a, b = small()
    if side == "a":
        a = a.at[3, 4].set(value)
    else:
        b = b.at[3, 4].set(value)
    c = product(a, b)
    c = c.at[7, 7].add(1.0)
    _, flags = check(product, Settings("locate"), Operands(a, b, c))
    concerned = 1 if side == "a" else 16
    assert int(flags.nonfinite) == concerned
    assert int(flags.checked) == 16 - concerned
    assert int(flags.flagged) == int(flags.confirmed) == (1 if side == "a" else 0)


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e19, 3e38, -3e38])
def test_outputs_that_are_not_finite_or_overflow_the_norm_are_corruption(value: float) -> None:
    product, a, b = small()
    clean = product(a, b)
    c, flags = check(product, Settings("correct"), Operands(a, b, clean.at[2, 5].set(value)))
    assert (int(flags.flagged), int(flags.confirmed), int(flags.corrected), int(flags.nonfinite)) == (1, 1, 1, 0)
    np.testing.assert_array_equal(c, clean)


@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_and_extreme_scales_are_clean(name: SchemeName) -> None:
    """Sums that vanish, or whose squares vanish or overflow, are no corruption; a doubled element still is."""
    product, a, b = small()
    run = jax.jit(lambda a, b, c: check(product, Settings(scheme=name), Operands(a, b, c))[1])
    for scale in (0.0, 1e-38, 1e-30, 1e-26, 1e-24, 1e-22, 1e-20, 1e-18, 1e15, 1e18, 1e20, 1e30):
        for left, right in ((scale, 1.0), (scale, 1e-5), (1.0, scale)):
            scaled, other = a * np.float32(left), b * np.float32(right)
            c = product(scaled, other)
            flags = run(scaled, other, c)
            assert int(flags.flagged) == 0, (left, right)
            assert int(flags.checked) == 16
            if scale > 1e-25 and name not in ("paper", "deterministic"):
                assert int(run(scaled, other, c.at[3, 5].multiply(3.0)).confirmed) == 1, (left, right)


def test_rows_that_are_tiny_beside_others_are_clean() -> None:
    """As in the gradient of a sharp softmax: rows of 1e-25 beside rows of 1; errors of 1 % are found in those too."""
    product, a, b = small()
    a = a * jnp.logspace(0, -37, 16, dtype=jnp.float32)[:, None]
    for factors in ((a, b), (a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))):
        clean = product(*factors)
        _, flags = check(product, Settings(), Operands(*factors, clean))
        assert int(flags.flagged) == 0
        for row in (3, 8, 11):
            wrong = clean.at[row, 2].add(0.01 * jnp.sqrt(jnp.mean(jnp.square(1e10 * clean[row]))) / 1e10)
            _, flags = check(product, Settings("locate"), Operands(*factors, wrong))
            assert int(flags.flagged) == int(flags.confirmed) == 1
            assert flags.wrong is not None
            assert (int(flags.wrong.found), int(flags.wrong.element[0])) == (1, row * clean.shape[1] + 2)


@pytest.mark.parametrize("name", ["two-tier", "blocks", "residual"])
@pytest.mark.parametrize(("left", "right"), [(1e2, 1e-38), (1e5, 1e-37), (1e-38, 1e2), (1e10, 1e-36), (1e35, 1e-38)])
def test_what_is_flushed_to_zero_is_no_corruption(name: SchemeName, left: float, right: float) -> None:
    """Subnormal numbers vanish, now in the product, now in its check, and the other factor makes them large."""
    product, a, b = small()
    a, b = a * np.float32(left), b * np.float32(right)
    run = jax.jit(lambda a, b: check(product, Settings(scheme=name), Operands(a, b, product(a, b)))[1])
    assert int(run(a, b).flagged) == 0


def test_terms_that_are_each_too_small_to_count_are_clean() -> None:
    """As in the gradient of a softmax that is sure of the wrong token: -1, and hundreds of terms below its spacing."""
    product = Dot((((1,), (0,)), ((), ())), (2, 2))
    run = jax.jit(lambda *given: check(product, Settings("correct"), Operands(*given)))
    a = jnp.full((16, 320), 2.9e-8).at[:, 0].set(-1)
    b = jnp.broadcast_to(jnp.sign(signed_weights(64)), (320, 64))
    # Whether the small terms are lost depends on the order in which a processor adds them: of a product that lost them
    # and one that kept them, one departs from the sums of the check on any processor, and neither is wrong.
    lost, kept = -b[:16], (np.float64(a) @ np.float64(b)).astype(np.float32)
    both = [run(a, b, c)[1] for c in (lost, kept)]
    assert [int(flags.flagged) for flags in both] == [0, 0]
    assert max(int(flags.examined) for flags in both) == 16
    second = jax.jit(lambda *given: check(product, Settings("correct", tier=2), Operands(*given))[1])(a, b, lost)
    assert int(second.flagged) == 0
    assert 0.1 < float(second.margin) < 1
    clean = product(a, b)
    mended, flags = run(a, b, clean.at[3, 5].add(0.01))
    np.testing.assert_array_equal(mended, clean)
    assert int(flags.flagged) == int(flags.confirmed) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_sums_of_one_sign_are_clean_in_products_with_vectors(dtype: str) -> None:
    """XLA adds one term after the other there, and each may be too small to count in full."""
    product, depth = Dot((((1,), (0,)), ((), ())), (2, 2), dtype=jnp.dtype(jnp.float32)), 40_000
    run = jax.jit(lambda a, b: check(product, Settings(), Operands(a, b, product(a, b)))[1])
    little = jnp.full((1, depth), 1e-8).at[0, 0].set(1)
    for a, b in ((jnp.full((1, depth), 1 / 3), jnp.full((depth, 200), 1e-3)), (little, jnp.ones((depth, 200)))):
        for left, right in ((a, b), (b.T, a.T)):
            assert int(run(left.astype(dtype), right.astype(dtype)).flagged) == 0


def test_every_wrong_element_is_named_whatever_else_is_wrong() -> None:
    """Small errors in rows, batches and mapped products of their own, beside large ones."""
    rng = np.random.default_rng(0)
    product = Dot((((2,), (1,)), ((0,), (0,))), (3, 3))
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 4, 16), (2, 16, 8)))
    a = a.at[:, 1].multiply(1e-7)
    clean = product(a, b)
    wrong = clean.at[0, 0, 3].add(5.0).at[0, 1, 6].add(1e-6).at[1, 1, 5].add(1e-6)
    expected = [3, 14, 45]
    mended, flags = check(product, Settings("correct"), Operands(a, b, wrong))
    np.testing.assert_array_equal(mended, clean)
    assert flags.wrong is not None
    assert int(flags.wrong.found) == 3
    assert flags.wrong.element[:3].tolist() == expected
    np.testing.assert_allclose(flags.wrong.error[:3], (wrong - clean).reshape(-1)[jnp.asarray(expected)])

    single = Dot((((1,), (0,)), ((), ())), (2, 2))
    _, mapped = jax.vmap(lambda *given: check(single, Settings("correct"), Operands(*given)))(a, b, wrong)
    assert mapped.wrong is not None
    assert mapped.wrong.found.tolist() == mapped.corrected.tolist() == [2, 1]
    assert mapped.wrong.element[:, :2].tolist() == [[3, 14], [13, 0]]


@pytest.mark.parametrize("name", ["two-tier", "blocks", "residual", "deterministic"])
def test_cancellation_is_no_false_alarm(name: SchemeName) -> None:
    """Rows whose terms cancel are examined by the second tier, and pass."""
    rng = np.random.default_rng(1)
    a = rng.standard_normal((64, 256)).astype(np.float32)
    b = rng.standard_normal((256, 32)).astype(np.float32)
    b -= b.mean(0)
    a = 1000 + 1e-3 * a
    product = Dot((((1,), (0,)), ((), ())), (2, 2))
    _, flags = check(product, Settings(scheme=name), Operands(jnp.asarray(a), jnp.asarray(b), product(a, b)))
    assert int(flags.flagged) == 0
    assert (int(flags.examined) > 0) == (name != "deterministic")


def test_tiers_can_be_chosen() -> None:
    """Beginning with the second tier passes nothing on that it clears."""
    rng = np.random.default_rng(1)
    a = jnp.asarray(1000 + 1e-3 * rng.standard_normal((64, 256)), jnp.float32)
    b = rng.standard_normal((256, 32)).astype(np.float32)
    b = jnp.asarray(b - b.mean(0))
    product = Dot((((1,), (0,)), ((), ())), (2, 2))
    flags = check(product, Settings(tier=2), Operands(a, b, product(a, b)))[1]
    assert int(flags.examined) == int(flags.flagged) == 0


def test_carried_residual_sees_what_rounding_hides() -> None:
    """An error of a few percent of a row's rms in a rounded product: found with the residual, hidden without."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((256, 256)), jnp.bfloat16) for _ in range(2))
    product = Dot((((1,), (0,)), ((), ())), (2, 2), dtype=jnp.dtype(jnp.float32))
    full = product(a, b)
    rounded = full.astype(jnp.bfloat16)
    lost = rounded_off(product, b, full, rounded)
    at = np.argmax(np.abs(np.asarray(rounded, np.float32)) > 8)
    bad = rounded.reshape(-1).at[at].multiply(jnp.bfloat16(1.0625)).reshape(rounded.shape)
    with_residual = check(product, Settings("correct", "residual"), Operands(a, b, bad, lost))
    assert int(with_residual[1].confirmed) == 1
    np.testing.assert_array_equal(np.asarray(with_residual[0], np.float32), np.asarray(rounded, np.float32))
    for c, count in ((rounded, 0), (bad, 1)):
        flags = check(product, Settings(scheme="residual"), Operands(a, b, c, lost))[1]
        assert int(flags.flagged) == count
    without = check(dataclasses.replace(product, dtype=jnp.dtype(jnp.bfloat16)), Settings(), Operands(a, b, bad))[1]
    assert int(without.flagged) == 0


@pytest.mark.parametrize(("a_shape", "b_shape"), [((0, 4), (4, 3)), ((3, 0), (0, 2)), ((3, 4), (4, 0))])
def test_products_of_nothing_are_not_checked(a_shape: tuple[int, int], b_shape: tuple[int, int]) -> None:
    product = Dot((((1,), (0,)), ((), ())), (2, 2))
    a, b = jnp.zeros(a_shape), jnp.zeros(b_shape)
    c, flags = check(product, Settings("locate"), Operands(a, b, product(a, b)))
    assert c.shape == (a_shape[0], b_shape[1])
    assert not any(int(count) for count in flags[:6])


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "float4_e2m1fn"])
def test_types_without_a_known_roundoff_are_refused(dtype: str) -> None:
    x = jnp.zeros((4, 4), dtype)
    with pytest.raises(ValueError, match=f"a product of {dtype} cannot be checked"):
        check(Dot((((1,), (0,)), ((), ())), (2, 2)), Settings(), Operands(x, x, x))


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="checks a product as a whole; choose mode=detect"):
        Settings("correct", "paper")
    with pytest.raises(ValueError, match="mode=mend: expected one of 'detect', 'locate', 'correct'"):
        Settings("mend")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scheme=huang: expected one of 'two-tier'"):
        Settings(scheme="huang")  # type: ignore[arg-type]
    for values in ((0.5, 0.0), (-1.0, 0.0), (math.nan, 0.0), (1.0, 0.5), (1.0, -0.1)):
        with pytest.raises(ValueError, match="kappa must be at least 1"):
            Rounding(*values)


def test_flags_merge_like_one_check_of_both() -> None:
    """Zeros are neutral; places follow one another, up to the room there is."""
    product, a, b = small()
    clean = product(a, b)
    flags = [
        check(product, Settings("locate"), Operands(a, b, clean.at[rows, 3].add(2.0)))[1]
        for rows in (jnp.asarray([1, 2]), jnp.asarray([4, 5, 6, 7, 8, 9, 10]))
    ]
    zeros = jax.tree.map(jnp.zeros_like, flags[0])
    for first, second in ((zeros, flags[0]), (flags[0], zeros)):
        for x, y in zip(jax.tree.leaves(merge_flags(first, second)), jax.tree.leaves(flags[0]), strict=True):
            np.testing.assert_array_equal(x, y)
    both = merge_flags(*flags)
    assert both.wrong is not None
    assert int(both.flagged) == int(both.wrong.found) == 9
    assert both.wrong.element.tolist() == [16 * row + 3 for row in (1, 2, 4, 5, 6, 7, 8, 9)]
