"""The bit views are lossless for every type that a training step holds."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdc import bits

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "uint16", "bool", "complex64"]
SHAPES = [(), (1,), (3,), (4,), (2, 3), (3, 4), (0, 2), (2, 0)]


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any bit pattern, NaN and infinities included."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    return raw.view(kind)[..., 0] if dtype != "bool" else (raw[..., 0] % 2).astype(bool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trips(dtype: str, shape: tuple[int, ...]) -> None:
    x = random_array(dtype, shape)
    back = bits.from_words(bits.to_words(jnp.asarray(x)), jnp.asarray(x))
    assert back.dtype == x.dtype
    assert np.asarray(back).tobytes() == x.tobytes()
    assert np.asarray(bits.from_bits(bits.as_bits(jnp.asarray(x)), jnp.asarray(x))).tobytes() == x.tobytes()


def test_keys_round_trip() -> None:
    key = jax.random.split(jax.random.key(7), 3)
    assert (jax.random.key_data(bits.from_words(bits.to_words(key), key)) == jax.random.key_data(key)).all()


@settings(max_examples=20)
@given(st.integers(1, 5).map(lambda n: 2 * n), st.integers(0, 100))
def test_packing_joins_neighbours(length: int, seed: int) -> None:
    x = random_array("bfloat16", (length,), seed)
    np.testing.assert_array_equal(bits.to_words(jnp.asarray(x)), x.view(np.uint32))


def test_narrow_types_are_refused() -> None:
    with pytest.raises(ValueError, match="int4 is narrower than 8 bits"):
        bits.as_bits(jnp.zeros(2, jnp.int4))
