"""Convolutions are checked as the products that they are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sdc
from sdc.checksums._check import check
from sdc.checksums.products import Conv
from sdc.checksums.roundoff import Mode, SchemeName, Settings
from sdc.checksums.schemes import Operands, signed_weights
from tests.sdc.checksums.test_check import SCHEMES


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_groups_of_a_convolution_share_inputs_that_are_not_finite(value: float) -> None:
    """XLA may compute the groups together: nothing can be said of any row, and no hardware is accused."""
    numbers = lax.conv_dimension_numbers((2, 6, 6, 4), (3, 3, 2, 8), ("NHWC", "HWIO", "NHWC"))

    def gradients(x: Any, kernel: Any, cotangent: Any) -> Any:
        def convolve(x: Any, kernel: Any) -> Any:
            return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2)

        return jax.vjp(convolve, x, kernel)[1](cotangent)

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 6, 6, 4), (3, 3, 2, 8), (2, 6, 6, 8)
    x, kernel, cotangent = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    _, flags = jax.jit(sdc.abft(gradients, mode="correct"))(x, kernel, cotangent.at[0, 2, 2, 1].set(value))
    for flag in flags.values():
        assert int(flag.checked) == int(flag.flagged) == 0
        assert int(flag.nonfinite) > 0


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "strided": ((2, 7, 9, 4), (3, 3, 4, 6), {"window_strides": (2, 1)}),
    "dilated": ((1, 9, 9, 3), (2, 2, 3, 8), {"window_strides": (1, 1), "rhs_dilation": (2, 2)}),
    "transposed": ((2, 4, 4, 3), (3, 3, 3, 5), {"window_strides": (1, 1), "lhs_dilation": (2, 2)}),
    "in groups": ((2, 6, 6, 4), (3, 3, 2, 8), {"window_strides": (1, 1), "feature_group_count": 2}),
    "batch in groups": ((4, 6, 6, 2), (3, 3, 2, 6), {"window_strides": (1, 1), "batch_group_count": 2}),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "blocks") for kind in CONVOLUTIONS), *(("in groups", name) for name in SCHEMES[::2])]
)
def test_convolutions(kind: str, name: SchemeName) -> None:
    """Clean ones pass; a wrong element is found in its row, named and mended."""
    a_shape, b_shape, params = CONVOLUTIONS[kind]
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (a_shape, b_shape))
    numbers = lax.conv_dimension_numbers(a.shape, b.shape, ("NHWC", "HWIO", "NHWC"))
    settings = {
        "padding": ((1, 1), (1, 1)), "lhs_dilation": None, "rhs_dilation": None, "feature_group_count": 1,
        "batch_group_count": 1, "precision": None, "dimension_numbers": numbers,
    } | params  # fmt: skip
    product = Conv(tuple(settings.items()))
    clean = product(a, b)
    mode: Mode = "detect" if name == "paper" else "correct"
    run = jax.jit(lambda *operands: check(product, Settings(mode, name), Operands(*operands)))
    groups = max(settings["feature_group_count"], settings["batch_group_count"])
    flags = run(a, b, clean)[1]
    assert int(flags.checked) == clean.size // clean.shape[-1] * groups
    assert int(flags.flagged) == 0
    where = int(rng.integers(clean.size))
    mended, flags = run(a, b, clean.reshape(-1).at[where].add(3.0).reshape(clean.shape))
    assert int(flags.flagged) == int(flags.confirmed) == 1
    if mode == "correct":
        # XLA may compute a convolution in a branch in another order.
        np.testing.assert_allclose(mended, clean, rtol=1e-5)
        assert flags.wrong is not None
        # In that order others of the row come out anew as well, off by rounding.
        assert int(flags.wrong.element[np.argmax(np.abs(flags.wrong.error))]) == where


def test_the_kernel_of_a_convolution_as_a_product_against_numpy() -> None:
    """Checksums and sums of rows of a grouped convolution are those of its output, in float64."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 6, 6, 4)).astype("f"), rng.standard_normal((3, 3, 2, 8)).astype("f")
    numbers = lax.conv_dimension_numbers(a.shape, b.shape, ("NHWC", "HWIO", "NHWC"))
    params = {
        "window_strides": (1, 1), "padding": "SAME", "lhs_dilation": None, "rhs_dilation": None,
        "dimension_numbers": numbers, "feature_group_count": 2, "batch_group_count": 1, "precision": None,
    }  # fmt: skip
    product = Conv(tuple(params.items()))
    weights = signed_weights(4)
    c = np.asarray(product(jnp.asarray(a), jnp.asarray(b)), np.float64).reshape(2, 6, 6, 2, 4)
    expected = c @ np.asarray(weights, np.float64)
    folded = product.fold(jnp.asarray(b), weights, 1)
    np.testing.assert_allclose(product.apply(jnp.asarray(a), folded)[..., 0], expected, rtol=1e-4, atol=1e-4)
    total = product.total(jnp.asarray(c.reshape(2, 6, 6, 8), jnp.float32), weights, 1)
    np.testing.assert_allclose(total[..., 0], expected, rtol=1e-4, atol=1e-4)
