"""Data that provoke faults, generated from a seed and a shape, with the same bits on every host.

All data come from the counter-based generator Philox, whose stream NumPy guarantees, and from operations whose rounding
IEEE 754 specifies, in a fixed order. Neither math libraries nor matrix products are used, because their results differ
between processors.

The treatment of subnormal numbers depends on the platform: XLA makes CPUs and TPUs flush subnormal inputs and results
to zero; NVIDIA's GPUs keep subnormal numbers unless a flag enables flushing. `keeps_subnormals` determines the
treatment on a device. On devices that flush subnormal numbers, the arithmetic units read subnormal data as zeros, so
these data exercise only copies and memory.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64, Shaped, UInt32, UInt64

from sdc.settings import SettingError

BLOCK = 2**20  # elements that are drawn together
TOKENS = 2**10  # rows of the small network's outputs; larger arrays repeat them
WIDTH, HIDDEN = 8, 16


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> Float[np.ndarray, "*shape"]:
    """Returns numbers with mean 0 and variance 1: sums of 12 uniform numbers, scaled so that all mantissa bits
    occur."""
    total = math.prod(shape)
    stream = _stream("normal", seed)
    flat = np.zeros(total)
    for start in range(0, total, BLOCK):
        count = min(BLOCK, total - start)
        # Exact sums of 16-bit integers, centered and scaled by a power of two.
        lanes = np.asarray(stream.random_raw(3 * count), np.uint64).view(np.uint16).reshape(count, 12)
        flat[start : start + count] = (lanes.sum(axis=1, dtype=np.int64) - 6 * 65535) / 65536.0
    return _typed(flat * 0.9999694831743187, dtype).reshape(shape)


def ones(shape: tuple[int, ...], dtype: str, seed: int) -> Float[np.ndarray, "*shape"]:
    """Returns numbers of either sign whose mantissa bits are all ones, with magnitudes from 1/2 to 4."""
    raw = _raw("ones", seed, math.prod(shape))
    exponents = ((raw >> np.uint64(1)) % np.uint64(3)).astype(np.int32) - 1
    signs = 1.0 - 2.0 * (raw & np.uint64(1)).astype(np.float64)
    x = signs * np.ldexp(2.0 - 2.0 ** -_mantissa(dtype), exponents)
    return _typed(x, dtype).reshape(shape)


def subnormal(shape: tuple[int, ...], dtype: str, seed: int) -> Float[np.ndarray, "*shape"]:
    raw = _raw("subnormal", seed, math.prod(shape))
    kind, mantissa = jnp.dtype(dtype), _mantissa(dtype)
    bits = (raw >> np.uint64(1)) % np.uint64(2**mantissa - 1) + np.uint64(1)
    bits |= (raw & np.uint64(1)) << np.uint64(kind.itemsize * 8 - 1)
    return bits.astype(f"uint{kind.itemsize * 8}").view(kind).reshape(shape)


def alternating(shape: tuple[int, ...], dtype: str, seed: int) -> Float[np.ndarray, "*shape"]:
    """Returns numbers with alternating signs, whose sums cancel."""
    size = np.abs(normal(shape, "float64", seed).reshape(-1)) + 2.0**-8
    size[1::2] *= -1
    return _typed(size, dtype).reshape(shape)


def activations(shape: tuple[int, ...], dtype: str, seed: int) -> Float[np.ndarray, "*shape"]:
    """Returns outputs of a small fixed network: for each row, gated units (SwiGLU) and then attention weights
    (softmax)."""
    h = normal((TOKENS, WIDTH), "float64", seed)
    up, gate, keys = normal((3, WIDTH, HIDDEN), "float64", seed + 1)
    gates = _product(h, gate)
    gated = gates / (1 + _exp(-gates)) * _product(h, up)
    scores = _product(h, keys)
    weights = _exp(scores - scores.max(axis=1, keepdims=True))
    total = weights[:, 0].copy()
    for column in range(1, HIDDEN):
        total += weights[:, column]
    rows = np.stack([gated, weights / total[:, None]], axis=1)
    return _typed(np.resize(rows, shape), dtype)


def random_words(shape: tuple[int, ...], seed: int) -> UInt32[np.ndarray, "*shape"]:
    return (_raw("words", seed, math.prod(shape)) >> np.uint64(32)).astype(np.uint32).reshape(shape)


def murmur(at: Any, word: Callable[[int], Any]) -> Any:
    """Returns pseudorandom words from the finalizer of MurmurHash3; `word` creates a constant in JAX or NumPy."""
    at = (at ^ (at >> word(16))) * word(0x85EBCA6B)
    at = (at ^ (at >> word(13))) * word(0xC2B2AE35)
    return at ^ (at >> word(16))


# Kinds of floating-point data by name; each is a function of shape, dtype and seed.
FLOATS = {make.__name__: make for make in (normal, ones, subnormal, alternating, activations)}


def make_floats(kind: str, shape: tuple[int, ...], dtype: str, seed: int) -> Float[np.ndarray, "*shape"]:
    """Returns data of one of the kinds in `FLOATS`, generated from the seed."""
    if kind not in FLOATS:
        raise SettingError("kind", kind, f"expected one of {', '.join(FLOATS)}")
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise SettingError("dtype", dtype, "expected a floating-point type")
    return FLOATS[kind](shape, dtype, seed)


def keeps_subnormals(dtype: str, device: jax.Device) -> bool:
    """Returns whether a device that multiplies a subnormal number by one returns that number rather than zero."""
    smallest = subnormal((8,), dtype, 0)
    one = np.ones(8, jnp.dtype(dtype))
    got = jax.jit(lambda x, y: x * y)(*jax.device_put((smallest, one), device))
    return bool((np.asarray(got) != 0).all())


def _stream(kind: str, seed: int) -> np.random.Philox:
    return np.random.Philox(key=np.asarray([seed, zlib.crc32(kind.encode())], np.uint64))


def _raw(kind: str, seed: int, count: int) -> UInt64[np.ndarray, "count"]:
    return np.asarray(_stream(kind, seed).random_raw(count), np.uint64)


def _mantissa(dtype: str) -> int:
    return int(jnp.finfo(jnp.dtype(dtype)).nmant)


def _typed(x: Float64[np.ndarray, "*shape"], dtype: str) -> Float[np.ndarray, "*shape"]:
    """Rounds numbers to a dtype via float32, which every host supports."""
    return x if dtype == "float64" else x.astype(np.float32).astype(jnp.dtype(dtype))


def _product(a: Float64[np.ndarray, "m k"], b: Float64[np.ndarray, "k n"]) -> Float64[np.ndarray, "m n"]:
    """Computes a matrix product whose sums are accumulated and rounded one term at a time, in order."""
    out = a[:, :1] * b[:1]
    for k in range(1, a.shape[1]):
        out = out + a[:, k : k + 1] * b[k : k + 1]
    return out


def _exp(x: Shaped[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Computes the exponential function from its series with correctly rounded operations, accurate to about 1e-15."""
    doublings = np.rint(x * 1.4426950408889634)
    r = x - doublings * 0.6931471805599453
    out = np.ones_like(r)
    for k in range(14, 0, -1):
        out = out * r / k + 1.0
    return np.ldexp(out, doublings.astype(np.int32))
