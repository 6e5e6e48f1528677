"""Digests against a NumPy reference, over types, shapes, shardings and transformations."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sdc
from sdc.twins import digest, tree_digest
from tests.sdc.test_bits import DTYPES, SHAPES, random_array

MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def reference(x: np.ndarray) -> np.ndarray:
    """The definition, word by word."""
    narrow = x.dtype.itemsize <= 2
    words = np.ascontiguousarray(x).reshape(-1).view(f"u{min(x.dtype.itemsize, 4)}").tolist()
    sums = [0, 0]
    for i, word in enumerate(words):
        v = (word + i * 0x9E3779B1) % 2**32
        p = (v if narrow else v ^ v >> 16) * 0x85EBCA6B % 2**32
        h = p ^ p >> 15
        sums = [(sums[0] + h) % 2**32, (sums[1] + h * h) % 2**32]
    return np.asarray(sums, np.uint32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 4)], ids=str)
def test_the_definition(dtype: str, shape: tuple[int, ...]) -> None:
    x = random_array(dtype, shape)
    np.testing.assert_array_equal(jax.jit(digest)(jnp.asarray(x)), reference(x))


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_64_bit_elements(dtype: str) -> None:
    with jax.enable_x64():
        x = random_array(dtype, (3, 2))
        np.testing.assert_array_equal(digest(jnp.asarray(x)), reference(x))
        last = digest(jnp.asarray(x)[2:], shape=(3, 2), offset=(2, 0))
        np.testing.assert_array_equal(digest(jnp.asarray(x)[:2], shape=(3, 2)) + last, reference(x))


def test_keys() -> None:
    keys = jax.random.split(jax.random.key(3), 5)
    np.testing.assert_array_equal(digest(keys), reference(np.asarray(jax.random.key_data(keys))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_independent_of_sharding(dtype: str) -> None:
    x = random_array(dtype, (8, 8))
    expected = reference(x)
    sharded = jax.device_put(x, NamedSharding(MESH, P("a", "b")))
    np.testing.assert_array_equal(jax.jit(digest)(sharded), expected)

    def shard(x: Any) -> Any:
        offset = (lax.axis_index("a") * 2, lax.axis_index("b") * 4)
        return lax.psum(digest(x, shape=(8, 8), offset=offset), ("a", "b"))

    by_hand = jax.shard_map(shard, mesh=MESH, in_specs=P("a", "b"), out_specs=P())
    np.testing.assert_array_equal(jax.jit(by_hand)(x), expected)
    rows = jax.vmap(digest)(jnp.asarray(x).reshape(8, 1, 8))
    np.testing.assert_array_equal(rows[3], reference(x[3:4]))


def test_independent_of_the_memory() -> None:
    x = random_array("bfloat16", (3, 5))
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    np.testing.assert_array_equal(digest(jax.device_put(x, host)), reference(x))

    def step(x: Any) -> Any:
        return jax.device_put(jax.device_put(x, host), jax.memory.Space.Device)

    out, digests = jax.jit(sdc.fingerprint(step, "everything"))(x)
    np.testing.assert_array_equal(out, x)
    assert len(digests) == 4  # the argument, both copies and the result
    for found in digests.values():
        np.testing.assert_array_equal(found, reference(x)[None])


def test_a_shard_may_cut_anywhere() -> None:
    x = random_array("bfloat16", (2, 6))
    parts = [digest(jnp.asarray(x[:, a:b]), shape=(2, 6), offset=(0, a)) for a, b in ((0, 3), (3, 4), (4, 6))]
    np.testing.assert_array_equal(sum(parts), reference(x))


def hashes(words: np.ndarray, index: np.ndarray, width: int) -> np.ndarray:
    """The definition's h, of many words."""
    v = words + index * np.uint32(0x9E3779B1)
    p = (v if width == 16 else v ^ (v >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    return p ^ (p >> np.uint32(15))


@pytest.mark.parametrize("apart", [None, 1, 1024, 2**20, 2**25])
@pytest.mark.parametrize("width", [16, 32])
def test_pairs_of_changes_are_seen(width: int, apart: int | None) -> None:
    """Of 2**20 pairs of random places each: their elements swapped, both signs flipped, both lowest bits flipped.

    That none is missed says at 95 % that fewer than 3 in a million are (each); the first sum alone misses up to one
    in 16.
    """
    draw, count = np.random.default_rng(0), 2**20
    at = draw.integers(0, 2**26, (2, count), dtype=np.uint32)
    if apart is not None:
        at[1] = at[0] + np.uint32(apart)
    words = draw.standard_normal((2, count)).astype(np.float32).view(np.uint32) >> np.uint32(32 - width)
    top = np.uint32(1 << (width - 1))
    h = hashes(words, at, width)
    for changed in (words[::-1], words ^ top, words ^ np.uint32(1)):
        other, there = hashes(changed, at, width), (changed != words).any(axis=0) & (at[0] != at[1])
        alike = (h.sum(0, dtype=np.uint32) == other.sum(0, dtype=np.uint32)) & there
        missed = alike & ((h * h).sum(0, dtype=np.uint32) == (other * other).sum(0, dtype=np.uint32))
        assert there.mean() > 0.99
        assert not missed.any()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: np.concatenate([x[1::-1], x[2:]]),  # two elements swapped
        lambda x: x * np.where(np.arange(64) < 2, -1, 1).astype(np.float32),  # two signs flipped
        lambda x: np.roll(x, 1),
    ],
)
def test_changes_that_simpler_digests_miss(change: Any) -> None:
    x = np.random.default_rng(1).normal(size=64).astype(np.float32)
    assert (np.asarray(digest(jnp.asarray(x))) != np.asarray(digest(jnp.asarray(change(x))))).any()


def test_tree_digest_tells_leaves_apart() -> None:
    a, b = jnp.arange(3.0), jnp.ones(3)
    assert (tree_digest((a, b)) != tree_digest((b, a))).any()
    assert (tree_digest((a, b)) == tree_digest([a, b])).all()


def test_fingerprint_of_a_step() -> None:
    def step(x: Any) -> Any:
        return lax.scan(lambda c, y: (sdc.probe(c + y, "p"), c), jnp.zeros(2), x)[0]

    x = jnp.arange(6.0).reshape(3, 2)
    out, digests = jax.jit(sdc.fingerprint(step))(x)
    np.testing.assert_array_equal(out, step(x))
    assert digests["fwd/p"].shape == (3, 1, 2)
    for row, value in enumerate(np.cumsum(np.asarray(x), 0)):
        np.testing.assert_array_equal(digests["fwd/p"][row, 0], reference(value))


@pytest.mark.parametrize("excess", [True, False])
def test_bfloat16_with_and_without_excess_precision(excess: bool) -> None:
    """docs/your-own-step.md says that gradients move by about 2 %, or not at all."""

    def loss(w: Any, x: Any) -> Any:
        for weights in w:
            hidden = jax.nn.gelu(x @ weights)
            x = x + jnp.tanh(hidden / (1 + jnp.mean(hidden * hidden, axis=-1, keepdims=True)) @ weights)
        return jnp.mean(x * x)

    draw = np.random.default_rng(0)
    w, x = ((0.3 * draw.normal(size=size)).astype("bfloat16") for size in ((2, 32, 32), (16, 32)))
    options = {"xla_allow_excess_precision": excess}
    plain = jax.jit(jax.grad(loss), compiler_options=options)(w, x).astype("float32")
    step = sdc.fingerprint(jax.grad(loss), "operations")
    observed = jax.jit(step, compiler_options=options)(w, x)[0].astype("float32")
    moved = jnp.sqrt(jnp.mean((observed - plain) ** 2) / jnp.mean(plain**2))
    assert (0 < moved < 0.02) if excess else (observed == plain).all()


def test_fingerprint_of_a_while_depends_on_the_order() -> None:
    def step(values: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, sdc.probe(values[c[0]], "p")), (0, 0.0))

    a = sdc.fingerprint(step)(jnp.asarray([1.0, 2.0]))[1]["fwd/p"]
    b = sdc.fingerprint(step)(jnp.asarray([2.0, 1.0]))[1]["fwd/p"]
    assert (a != b).any()


def test_size_of_the_index_is_no_limit() -> None:
    """Indices beyond 2**32 wrap as the definition says."""
    far = digest(jnp.ones((1, 1)), shape=(2**20, 2**20), offset=(2**19, 5))
    index = (2**19 * 2**20 + 5) % 2**32
    word = (int(np.float32(1).view(np.uint32)) + index * 0x9E3779B1) % 2**32
    near = digest(lax.bitcast_convert_type(jnp.asarray([word], jnp.uint32), jnp.float32))
    np.testing.assert_array_equal(far, near)
    assert math.prod((2**20, 2**20)) > 2**32


def test_digests_of_other_shapes_are_of_another_program() -> None:
    """A smaller last batch, say, would pass for a fault."""
    run = sdc.fingerprint(lambda w, x: jnp.sum(x @ w), "products")
    w = jnp.ones((4, 4))
    whole, part, narrow = (
        run(w.astype(x.dtype), x)[1] for x in (jnp.ones((6, 4)), jnp.ones((3, 4)), jnp.ones((6, 4), "bfloat16"))
    )
    for other, said in ((part, r"float32\[6, 4\] in one and float32\[3, 4\]"), (narrow, r"and bfloat16\[6, 4\]")):
        with pytest.raises(ValueError, match=f"different programs: the outputs of 'fwd/dot_general' are .*{said}"):
            sdc.first_difference(whole, other)
