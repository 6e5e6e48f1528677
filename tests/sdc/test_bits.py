"""The bit views are lossless for every type that a training step holds."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

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
    back = jax.jit(lambda x: bits.from_bits(bits.as_bits(x), x))(jnp.asarray(x))
    assert back.dtype == x.dtype
    assert np.asarray(back).tobytes() == x.tobytes()


def test_keys_round_trip() -> None:
    key = jax.random.split(jax.random.key(7), 3)
    assert (jax.random.key_data(bits.from_bits(bits.as_bits(key), key)) == jax.random.key_data(key)).all()


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "int64", "complex128"])
def test_words_of_elements(dtype: str) -> None:
    """In memory they lie one beside the other, narrow ones widened with zeros."""
    with jax.enable_x64():
        x = random_array(dtype, (3, 4))
        words = np.stack(bits.element_words(jnp.asarray(x)), axis=-1)
    expected = x.reshape(3, 4, 1).view(f"u{min(x.itemsize, 4)}")
    np.testing.assert_array_equal(words, expected)
    assert words.dtype == np.uint32


def test_narrow_types_are_refused() -> None:
    with pytest.raises(ValueError, match="int4 is narrower than 8 bits"):
        bits.as_bits(jnp.zeros(2, jnp.int4))
