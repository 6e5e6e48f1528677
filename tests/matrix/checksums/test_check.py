"""One contract over types, shapes and schemes: margins are the formulas', wrong rows are found, named and mended."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdc.checksums._check import Flags, check
from sdc.checksums.products import Dot
from sdc.checksums.roundoff import Mode, Settings, unit
from sdc.checksums.schemes import BLOCK, Operands, signed_weights
from tests.sdc.checksums.test_check import SCHEMES, SHAPES, product_of

TYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def matrices(product: Dot, a: Any, b: Any, c: Any) -> list[np.ndarray]:
    """The factors and the product as float64 matrices [batch, m, k], [batch, k, n] and [batch, m, n]."""
    (ac, bc), (ab, bb) = product.dimensions
    a, b, c = (np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in (a, b, c))
    batch = math.prod(a.shape[axis] for axis in ab)
    depth = math.prod(a.shape[axis] for axis in ac)
    free_a = [axis for axis in range(a.ndim) if axis not in (*ac, *ab)]
    free_b = [axis for axis in range(b.ndim) if axis not in (*bc, *bb)]
    a = a.transpose(*ab, *free_a, *ac).reshape(batch, -1, depth)
    b = b.transpose(*bb, *bc, *free_b).reshape(batch, depth, -1)
    return [a, b, c.reshape(batch, a.shape[1], b.shape[2])]


def bounds(scheme: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, types: Any) -> Any:
    """Residual and bound of each row by the printed formulas, in plain NumPy; blocks on a last axis."""
    k, n = b.shape[1:]
    u, rounding = 2.0**-24, unit(types[1]) if unit(types[1]) > 2.0**-24 else 0.0
    if scheme == "paper":
        r = c.sum(2) - (a @ b.sum(2)[..., None])[..., 0]
        norms = np.abs(a).sum(2).max(1) * np.abs(b).sum(2).max(1)
        return r[..., None], np.broadcast_to((k * 2 * unit(types[0]) * norms)[:, None, None], (*r.shape, 1))
    w = np.asarray(signed_weights(n), np.float64)
    size = math.ceil(n / max(1, math.ceil(n / BLOCK))) if scheme == "blocks" else n
    parts = [slice(i, i + size) for i in range(0, n, size)]
    r, bound = [], []
    for part in parts:
        should = (a @ (b[..., part] @ w[part])[..., None])[..., 0]
        r.append(c[..., part] @ w[part] - should)
        norm = np.sqrt((c[..., part] ** 2).sum(2))
        if scheme == "deterministic":
            terms = (a.__abs__() @ (np.abs(b) @ np.abs(w))[..., None])[..., 0]
            gamma = (k + n) * u / (1 - (k + n) * u)
            bound.append(2 * gamma * terms + rounding * (np.abs(c) @ np.abs(w)))
        else:
            q = np.sqrt((a**2 @ (b[..., part] ** 2).sum(2)[..., None])[..., 0])
            bound.append(u * 2.25 * np.sqrt(k + size) * (np.maximum(q, norm) + np.abs(should)) + 3.4 * rounding * norm)
    return np.stack(r, -1), np.stack(bound, -1)


CASES = [
    (dtype, shape, rounded)
    for dtype in TYPES
    for shape in (SHAPES if dtype in ("float32", "bfloat16") else ("square", "batches in another order"))
    for rounded in (
        (False,) if dtype == "float32" or shape not in ("square", "batches in another order") else (False, True)
    )
]


@pytest.mark.parametrize(("dtype", "shape", "rounded"), CASES)
def test_margins_verdicts_places_and_repairs(dtype: str, shape: str, rounded: bool) -> None:
    """A clean product passes; an error of 20 bounds is flagged in its row, named and mended; one of 1/20 is not."""
    rng = np.random.default_rng(0)
    product, a, b = product_of(shape, dtype, rng)
    out = dtype if rounded else "float32"
    if rounded:
        product = dataclasses.replace(product, dtype=jnp.dtype(dtype))
    clean = product(a, b)
    where = int(rng.integers(clean.size))

    @jax.jit
    def run(a: Any, b: Any, c: Any) -> dict[tuple[str, str], tuple[Any, Flags]]:
        modes: dict[str, tuple[Mode, ...]] = {
            name: ("detect",) if name == "paper" else ("detect", "correct") if name == "two-tier" else ("correct",)
            for name in SCHEMES
        }
        return {
            (name, mode): check(product, Settings(mode, name), Operands(a, b, c))
            for name in SCHEMES
            for mode in modes[name]
        }

    am, bm, cm = matrices(product, a, b, clean)
    row = np.unravel_index(where, cm.shape)[:2]
    rows = math.prod(cm.shape[:2])
    for (name, mode), (c, flags) in run(a, b, clean).items():
        counts = [int(count) for count in flags[:6]]
        assert counts[0] == rows
        assert counts[2:] == [0, 0, 0, 0], (name, mode)
        assert float(flags.margin) <= 1
        np.testing.assert_array_equal(np.asarray(c, np.float64), np.asarray(clean, np.float64))

    for name in SCHEMES:
        residual, bound = bounds(name, am, bm, cm, (dtype, out))
        for factor in (20.0, 0.05):
            error = factor * 2 * bound[row].max() * np.sign(cm.reshape(-1)[where])
            bad = clean.reshape(-1).at[where].add(jnp.asarray(error, clean.dtype)).reshape(clean.shape)
            found = {mode: result for (scheme, mode), result in run(a, b, bad).items() if scheme == name}
            residual, expected = bounds(name, *matrices(product, a, b, bad), (dtype, out))
            margin = np.abs(residual[row] / expected[row]).max()
            margin = np.inf if np.isnan(margin) else margin  # the type has no room for such an error
            for mode, (c, flags) in found.items():
                wrong = int(margin > 1)
                assert int(flags.flagged) == int(flags.confirmed) == wrong, (name, mode, margin)
                assert wrong == int(factor > 1) or np.isinf(margin)
                if factor > 1 and np.isfinite(margin):
                    # Residuals of this size are the error's; what is left is rounding, of a twentieth of it at most.
                    np.testing.assert_allclose(float(flags.margin), margin, rtol=0.06)
                if mode == "detect" or not wrong:
                    assert flags.wrong is None or int(flags.wrong.found) == 0
                    continue
                assert flags.wrong is not None
                assert int(flags.wrong.found) == 1
                assert int(flags.wrong.element[0]) == where
                off = float(bad.reshape(-1)[where]) - float(clean.reshape(-1)[where])
                np.testing.assert_allclose(float(flags.wrong.error[0]), off, rtol=1e-5, atol=1e-6)
                mended = np.asarray(c, np.float64)
                np.testing.assert_array_equal(mended, np.asarray(clean if mode == "correct" else bad, np.float64))
                assert int(flags.corrected) == int(mode == "correct")
