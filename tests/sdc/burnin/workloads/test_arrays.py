"""Data that provoke are what they say, bit by bit, and the same on every host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdc.burnin.programs import bits_of, host_digest
from sdc.burnin.workloads.arrays import (
    FLOATS,
    HIDDEN,
    TOKENS,
    WIDTH,
    activations,
    alternating,
    keeps_subnormals,
    make_floats,
    normal,
    ones,
    random_words,
    subnormal,
)
from sdc.burnin.workloads.movement import PATTERNS
from sdc.settings import SettingError

TYPES = {"float32": (23, 8), "bfloat16": (7, 8), "float16": (10, 5)}
"""Bits of mantissa and exponent."""
PINNED = {
    "normal": "3377432f63b37730",
    "ones": "1e04a1b2e7d90995",
    "subnormal": "69d0e19b9389c3ea",
    "alternating": "f6da8be43559a4db",
    "activations": "4a8402224dc02e0a",
}
PINNED_WORDS = "5284e09a88560e2a"


@pytest.mark.parametrize("dtype", TYPES)
def test_mantissas_are_all_ones(dtype: str) -> None:
    mantissa, exponent = TYPES[dtype]
    bits = bits_of(ones((5, 7), dtype, 0)).astype(np.uint32)
    assert (bits & (2**mantissa - 1) == 2**mantissa - 1).all()
    exponents = (bits >> mantissa) & (2**exponent - 1)
    assert set((exponents.astype(int) - 2 ** (exponent - 1) + 1).tolist()) == {-1, 0, 1}
    assert set((bits >> (mantissa + exponent)).tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", TYPES)
def test_subnormal_numbers_have_no_exponent_and_are_not_zero(dtype: str) -> None:
    mantissa, exponent = TYPES[dtype]
    bits = bits_of(subnormal((5, 70), dtype, 0)).astype(np.uint32)
    assert (((bits >> mantissa) & (2**exponent - 1)) == 0).all()
    assert (bits & (2**mantissa - 1) != 0).all()
    assert set((bits >> (mantissa + exponent)).tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", TYPES)
def test_signs_alternate(dtype: str) -> None:
    signs = bits_of(alternating((4, 9), dtype, 0)) >> np.uint32(sum(TYPES[dtype]))
    assert signs.tolist() == [0, 1] * 18


def test_normal_numbers_have_mean_0_and_variance_1_and_use_all_mantissa_bits() -> None:
    x = normal((50_000,), "float32", 0)
    assert abs(x.mean()) < 5 / np.sqrt(x.size)  # five standard errors
    assert abs(x.astype(np.float64).var() - 1) < 5 * np.sqrt(2 / x.size)
    assert 2.7 < (x.astype(np.float64) ** 4).mean() < 3.1  # a uniform variable has 1.8
    assert np.bitwise_or.reduce(bits_of(x)) & 0x7FFFFF == 0x7FFFFF
    assert np.bitwise_and.reduce(bits_of(x)) & 0x7FFFFF == 0


def test_activations_are_those_of_the_network() -> None:
    h = normal((TOKENS, WIDTH), "float64", 3)
    up, gate, keys = normal((3, WIDTH, HIDDEN), "float64", 4)
    gates, scores = h @ gate, h @ keys
    gated = gates / (1 + np.exp(-gates)) * (h @ up)
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    got = activations((2 * TOKENS, HIDDEN), "float32", 3)
    # Rounded to float32 once; the sums of the reference are taken in another order, 1e-16 apart.
    np.testing.assert_allclose(got[0::2], gated, rtol=2e-7, atol=1e-12)
    np.testing.assert_allclose(got[1::2], weights, rtol=2e-7)
    np.testing.assert_array_equal(activations((3 * TOKENS, HIDDEN), "float32", 3)[: 2 * TOKENS], got)


def test_words() -> None:
    walking = PATTERNS["walking-ones"](np.arange(64, dtype=np.uint32), np.uint32)
    assert [word.bit_count() for word in walking.tolist()] == [1] * 64
    assert sorted(walking[:32].tolist()) == [1 << bit for bit in range(32)]
    assert walking[0] != walking[32]
    assert len(set(random_words((1000,), 0).tolist())) == 1000


def test_bits_are_the_same_on_every_host() -> None:
    """Digests as they were on the first host; a host with other ones would look faulty to golden digests."""
    found = {kind: host_digest(make_floats(kind, (33, 5), "float32", 7)) for kind in FLOATS}
    assert found == PINNED
    assert host_digest(random_words((33, 5), 7)) == PINNED_WORDS


@pytest.mark.parametrize("kind", FLOATS)
def test_each_seed_has_its_own_data(kind: str) -> None:
    a, again, b = (make_floats(kind, (16, 8), "bfloat16", seed) for seed in (0, 0, 1))
    assert (bits_of(a) == bits_of(again)).all()
    assert (bits_of(a) != bits_of(b)).mean() > 0.25


def test_large_arrays_are_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = normal((100,), "float32", 0)
    monkeypatch.setattr("sdc.burnin.workloads.arrays.BLOCK", 7)
    np.testing.assert_array_equal(normal((100,), "float32", 0), whole)


def test_a_cpu_flushes_subnormal_numbers() -> None:
    device = jax.devices()[0]
    assert not keeps_subnormals("float32", device)
    flushed = jax.jit(lambda x: x * jnp.float32(2))(jax.device_put(subnormal((8,), "float32", 0), device))
    assert not np.asarray(flushed).any()


def test_unknown_data_are_refused() -> None:
    with pytest.raises(SettingError, match="kind=zeros: expected one of normal"):
        make_floats("zeros", (1,), "float32", 0)
    with pytest.raises(SettingError, match="dtype=int32"):
        make_floats("normal", (1,), "int32", 0)
