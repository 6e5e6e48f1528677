"""The first tier on TPUs, which tests columns with sums that the matrix units compute."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdc
from sdc.checksums import screened
from sdc.checksums._check import screen
from sdc.checksums.fused_products import LARGE, multiply
from sdc.checksums.products import Dot
from sdc.checksums.roundoff import PLATFORMS, Settings
from sdc.checksums.schemes import SKETCHED, random_signs, signed_weights, sketch
from sdc.program import compiling_for, products

RNG = np.random.default_rng(41)
COLUMNS = Settings(rounding=PLATFORMS["tpu"], cancels=True, columns=True)
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "rows by columns": ((96, 160), (160, 64), (((1,), (0,)), ((), ()))),
    "columns by columns": ((160, 96), (160, 64), (((0,), (0,)), ((), ()))),
    "rows by rows": ((96, 160), (64, 160), (((1,), (1,)), ((), ()))),
    "several axes": ((3, 32, 8, 20), (20, 8, 64), (((2, 3), (1, 0)), ((), ()))),
    "batches": ((2, 40, 3, 30), (3, 30, 50, 2), (((3,), (1,)), ((0, 2), (3, 0)))),
}


def product_of(form: str, kind: str = "normal") -> tuple[Dot, Any, Any]:
    *shapes, dimensions = FORMS[form]
    a, b = (RNG.normal(size=shape) for shape in shapes)
    if kind == "of one sign":
        a, b = np.abs(a), np.abs(b)
    if kind == "tiny and huge":
        a, b = a * 1e-20, b * 1e20
    if kind == "huge and tiny":
        a, b = a * 1e20, b * 1e-20
    if kind == "few":
        a, b = (x * (RNG.random(x.shape) < 0.03) for x in (a, b))
    if kind == "cancelling" and form == "rows by columns":
        a[:, 0], a[:, -1], b[-1] = 2.0**24, -(2.0**24), b[0]
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (a, b)]
    return Dot(dimensions, (a.ndim, b.ndim), dtype=jnp.dtype(jnp.float32)), narrow[0], narrow[1]


@pytest.mark.parametrize("form", FORMS)
def test_sums_and_estimated_norms_against_numpy(form: str) -> None:
    product, a, b = product_of(form)
    sums, squares = sketch(product, a.astype(jnp.float32), b.astype(jnp.float32))
    wide = [np.asarray(x, np.float64) for x in (a, b)]

    def product_with(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            c = product(jnp.asarray(x), jnp.asarray(y))
        return np.asarray(c).reshape(*c.shape[: product.rank()], -1)

    exact = product_with(*wide) @ np.asarray(signed_weights(product.width(a, b)), np.float64)
    norms = product_with(*(x**2 for x in wide)).sum(-1)
    np.testing.assert_allclose(sums[..., 0], exact, atol=2**-22 * float(np.sqrt(norms).max()))
    ratios = np.asarray(squares[..., 0]) / norms
    spread = np.sqrt(2 / (SKETCHED - 3))  # the standard error of one row; with those of the norms of the second factor
    assert np.abs(ratios - 1).max() < 6 * spread
    assert abs(ratios.mean() - 1) < spread


def test_signs_are_random() -> None:
    signs = np.asarray(random_signs(4096))
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert abs(signs.mean()) < 4 / np.sqrt(signs.size)
    alike = signs.T @ signs / len(signs) - np.eye(SKETCHED)
    assert np.abs(alike).max() < 5.5 / np.sqrt(len(signs))  # of 8,128 pairs of columns


@pytest.mark.parametrize("kind", ["normal", "of one sign", "tiny and huge", "huge and tiny", "few", "cancelling"])
@pytest.mark.parametrize("form", FORMS)
def test_clean_products_pass_and_struck_ones_do_not(form: str, kind: str) -> None:
    product, a, b = product_of(form, kind)
    given = multiply(product, COLUMNS, a, b)
    np.testing.assert_array_equal(given.c, multiply(product, Settings(), a, b).c)
    c, found = screen(product, COLUMNS, given)
    assert float(found.margin) < 1
    assert int(found.checked) == c.size // product.width(a, b)
    assert given.totals is not None
    flat = np.asarray(c).reshape(*c.shape[: product.rank()], -1)
    place = np.unravel_index(RNG.integers(flat.size), flat.shape)
    flat = flat.copy()
    size = float(np.sqrt(np.sum(np.square(flat, dtype=np.float64)))) + 1.0
    flat[place] += np.float32(size)
    _, found = screen(product, COLUMNS, given._replace(c=jnp.asarray(flat.reshape(c.shape)), totals=None))
    assert not float(found.margin) <= 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_suspicious(value: float) -> None:
    product, a, b = product_of("rows by columns")
    given = multiply(product, COLUMNS, a.at[3, 5].set(value), b)
    assert not float(screen(product, COLUMNS, given)[1].margin) <= 1


def test_where_columns_are_tested() -> None:
    def step(a: Any, b: Any) -> Any:
        return a @ b

    def sketched(shape: tuple[int, int], dtype: Any, platform: str) -> bool:
        a, b = (jax.ShapeDtypeStruct(one, dtype) for one in (shape, shape[::-1]))
        with compiling_for(platform, whole=True):
            found = jax.make_jaxpr(screened(step, products, Settings()))(a, b)
        return f"{SKETCHED}]" in str(found)

    assert sketched((LARGE, 64), jnp.bfloat16, "tpu")
    assert not sketched((LARGE - 1, 64), jnp.bfloat16, "tpu")
    assert not sketched((LARGE, 64), jnp.float32, "tpu")
    assert not sketched((LARGE, 64), jnp.bfloat16, "gpu")
    with compiling_for("tpu", whole=True):  # the whole check tests rows
        text = str(jax.make_jaxpr(sdc.abft(step))(*(jnp.zeros(s, jnp.bfloat16) for s in ((LARGE, 64), (64, LARGE)))))
    assert f"{SKETCHED}]" not in text
