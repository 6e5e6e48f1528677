"""Differences and the metrics of the study against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdc.twins import mismatch

CASES = {
    "equal": ([1.0, -0.0, np.nan], [1.0, -0.0, np.nan], (3, 0, 0, 0, 0.0, 0.0)),
    "relative": ([2.0, -4.0, 1.0], [3.0, -2.0, 1.0], (3, 2, 0, 0, 1.0, 0.5)),
    "zero reference": ([0.0, 1.0], [1.0, 1.0], (2, 1, 1, 0, 0.0, 0.0)),
    "sign of zero": ([0.0], [-0.0], (1, 1, 1, 0, 0.0, 0.0)),
    "non-finite suspect": ([1.0, 1.0], [np.nan, np.inf], (2, 2, 0, 2, 0.0, 0.0)),
    "non-finite reference": ([np.inf, 1.0], [1.0, 2.0], (2, 2, 0, 1, 1.0, 1.0)),
    "zero against NaN counts once": ([0.0], [np.nan], (1, 1, 0, 1, 0.0, 0.0)),
    "saturates": ([1e-30, 1e-30], [3e38, 3e38], (2, 2, 0, 0, mismatch.LARGEST, mismatch.LARGEST)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_difference(case: tuple[list[float], list[float], tuple[float, ...]]) -> None:
    reference, suspect, expected = case
    got = mismatch.difference(jnp.asarray(reference, jnp.float32), jnp.asarray(suspect, jnp.float32))
    np.testing.assert_allclose([float(x) for x in got], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "bool", "complex64"])
def test_every_type_is_compared_by_its_bits(dtype: str) -> None:
    a = jnp.asarray([0, 1, 1, 1], dtype)
    b = a.at[2].set(jnp.asarray(0, dtype))
    got = mismatch.difference(a, b)
    assert (int(got.checked), int(got.mismatched), float(got.relative_sum)) == (4, 1, 1.0)


def test_keys_are_compared_by_their_data() -> None:
    got = mismatch.difference(jax.random.split(jax.random.key(0), 3), jax.random.split(jax.random.key(1), 3))
    assert (int(got.checked), int(got.mismatched)) == (3, 3)


floats = st.floats(-8, 8, width=32, allow_subnormal=False)  # XLA on CPU flushes denormal numbers


@settings(max_examples=50)
@given(st.lists(st.tuples(floats, floats), min_size=4, max_size=4))
def test_difference_against_numpy(pairs: list[tuple[float, float]]) -> None:
    a, b = np.asarray(pairs, np.float32).T.copy()
    differs = a.view(np.uint32) != b.view(np.uint32)
    counted = differs & (a != 0)
    terms = np.abs(b[counted] - a[counted]) / np.abs(a[counted])
    got = mismatch.difference(jnp.asarray(a), jnp.asarray(b))
    assert (int(got.mismatched), int(got.zero_reference)) == (differs.sum(), (differs & (a == 0)).sum())
    np.testing.assert_allclose(got.relative_sum, terms.sum(), rtol=1e-5)
    np.testing.assert_allclose(got.relative_max, terms.max(initial=0), rtol=1e-6)


def test_merging_parts_is_comparing_the_whole() -> None:
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.normal(size=20), jnp.float32)
    b = a * jnp.asarray(rng.choice([1.0, 1.5], 20), jnp.float32)
    parts = mismatch.merge(mismatch.difference(a[:7], b[:7]), mismatch.difference(a[7:], b[7:]))
    np.testing.assert_allclose(np.asarray(parts), np.asarray(mismatch.difference(a, b)), rtol=1e-6)


def test_equations_1_to_4_against_the_definitions() -> None:
    rng = np.random.default_rng(0)
    ranks, layers, size = 2, 3, 40
    f = rng.normal(size=(layers, ranks, size)).astype(np.float32)
    g = np.where(rng.random(f.shape) < 0.2, f * 2, f).astype(np.float32)
    freq = [sum(int((f[k, t] != g[k, t]).sum()) for t in range(ranks)) / (ranks * size) for k in range(layers)]
    sev = [
        max(
            np.mean(np.abs(g[k, t] - f[k, t])[f[k, t] != g[k, t]] / np.abs(f[k, t])[f[k, t] != g[k, t]])
            for t in range(ranks)
        )
        for k in range(layers)
    ]
    per_layer = [
        [mismatch.difference(jnp.asarray(f[k, t]), jnp.asarray(g[k, t])) for t in range(ranks)] for k in range(layers)
    ]
    got_freq = [mismatch.mismatch_frequency([d.mismatched for d in row], [d.checked for d in row]) for row in per_layer]
    got_sev = [
        mismatch.mismatch_severity([d.relative_sum for d in row], [d.mismatched for d in row]) for row in per_layer
    ]
    np.testing.assert_allclose(got_freq, freq)
    np.testing.assert_allclose(got_sev, sev, rtol=1e-5)
    np.testing.assert_allclose(mismatch.mean_frequency(got_freq), np.mean(freq))
    np.testing.assert_allclose(mismatch.largest_severity([*got_sev, float("nan")]), np.max(sev), rtol=1e-5)


def test_nothing_checked_is_not_zero() -> None:
    assert np.isnan(mismatch.mismatch_frequency([0], [0]))
    assert np.isnan(mismatch.mismatch_severity([0.0], [0]))
    assert np.isnan(mismatch.largest_severity([]))
    assert np.isnan(mismatch.noise_to_signal([], []))


def test_equation_5() -> None:
    assert mismatch.noise_to_signal([1.0, 3.0, 0.0], [10.0, 10.0, 0.0]) == pytest.approx(0.3)
    assert mismatch.noise_to_signal([1.0], [0.0]) == np.inf
