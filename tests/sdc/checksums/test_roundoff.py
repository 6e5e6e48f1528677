"""Units of rounding, and the weights of sums."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st

from sdc.checksums.roundoff import EXACT, PLATFORMS, Units, spacing, unit, work_type
from sdc.checksums.schemes import signed_weights
from tests.matrix.checksums.test_check import TYPES


@given(st.sampled_from(TYPES), st.floats(-4, 4, width=32), st.integers(-6, 6))
def test_units_bound_the_rounding_of_every_number(dtype: str, mantissa: float, exponent: int) -> None:
    """|round(x) - x| <= unit |x| + spacing."""
    x = np.float32(mantissa * 2.0**exponent)
    rounded = float(jnp.asarray(x).astype(dtype))
    if np.isfinite(rounded):
        assert abs(rounded - float(x)) <= unit(dtype) * abs(float(x)) + spacing(dtype)


def test_units_of_devices_that_round_their_inputs() -> None:
    """TF32 counts for float32 factors, not for bfloat16 ones, which it holds, nor at the highest precision."""
    tensor_cores = PLATFORMS["gpu"]
    f32, bf16 = np.dtype("float32"), jnp.dtype("bfloat16")
    assert Units.of(f32, f32, f32, tensor_cores).inputs == 2.0**-11
    assert Units.of(f32, f32, f32, tensor_cores, exact=True).inputs == 0
    assert Units.of(bf16, bf16, f32, tensor_cores).inputs == 0
    assert Units.of(f32, f32, f32, EXACT).inputs == 0
    assert Units.of(bf16, bf16, bf16, EXACT).output == 2.0**-8
    assert work_type(bf16, f32) == jnp.float32


def test_weights_are_exact_in_bfloat16_and_tell_neighbours_apart() -> None:
    w = signed_weights(1000)
    np.testing.assert_array_equal(w.astype(jnp.bfloat16).astype(jnp.float32), w)
    assert float(jnp.abs(w).min()) >= 0.5
    assert float(jnp.abs(w).max()) < 1
    assert float(jnp.mean(w[1:] != w[:-1])) > 0.98
    assert abs(float(jnp.mean(jnp.sign(w)))) < 0.1


def test_entrywise_norms_explain_the_false_alarms_of_equation_6() -> None:
    """Of correct products of 1,024 terms (Ma et al., arXiv:2502.12340, appendix D.4), whose sums are rounded too."""
    rng, u = np.random.default_rng(0), 2.0**-23
    given = rng.standard_normal((256, 1024)), rng.standard_normal((1024, 1024))
    for dtype, flags in ((jnp.float32, False), (jnp.bfloat16, True)):

        def rounded(x: np.ndarray, dtype: Any = dtype) -> np.ndarray:
            return x.astype(dtype).astype(np.float32)

        a, b = (rounded(x) for x in given)
        ones = np.ones(1024, np.float32)
        left = np.abs(rounded(rounded(a @ b) @ ones) - rounded(a @ rounded(b @ ones))).max()
        entrywise = 1024 * u * np.abs(a).max() * np.abs(b).max()
        induced = 1024 * u * np.abs(a).sum(axis=1).max() * np.abs(b).sum(axis=1).max()
        assert (left > entrywise, left > induced) == (flags, False)
        assert abs(entrywise - 0.0029) < 1e-4
