"""Digests by block: they add up to that of the array under any sharding, and a change is in its block and no other."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from sdc.checkpoints.blocks import bits_of, box_text, cut_shape, parse_box, take, total, whole
from sdc.twins.digests import digest


def mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))


def blocks(array: Any) -> Any:
    shares, apart = take({"x": array})()
    assert not apart
    assert whole(shares["x"], bits_of(array).shape)
    return total(shares["x"])


def test_keys_and_arrays_of_one_device() -> None:
    keys = jax.random.split(jax.random.key(3), 16)
    np.testing.assert_array_equal(blocks(keys).sum(axis=0, dtype=np.uint32), np.asarray(digest(keys)))
    alone = jax.device_put(jnp.arange(12.0), jax.devices()[5])
    np.testing.assert_array_equal(blocks(alone), blocks(jnp.arange(12.0)))


@settings(max_examples=30)
@given(rows=st.integers(1, 300), columns=st.integers(1, 600), where=st.integers(0), bit=st.integers(0, 31))
def test_a_flipped_bit_is_in_its_block(rows: int, columns: int, where: int, bit: int) -> None:
    array = np.zeros((rows, columns), np.uint32)
    cut = cut_shape(array.shape, 4)
    before = blocks(jnp.asarray(array))
    assert before.shape == (cut.blocks, 2)
    place = where % array.size
    array.reshape(-1)[place] ^= np.uint32(1 << bit)
    differs = (blocks(jnp.asarray(array)) != before).any(axis=1)
    start, stop = cut.block(int(np.flatnonzero(differs).item()))
    assert start <= place // columns < stop


@given(shape=st.lists(st.integers(0, 1 << 20), max_size=3), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_a_cut_covers_the_rows_once(shape: list[int], itemsize: int) -> None:
    cut = cut_shape(shape, itemsize)
    ends = [cut.block(number) for number in range(cut.blocks)]
    assert ends[0][0] == 0
    assert ends[-1][1] == cut.shape[0]
    assert all(first[1] == second[0] for first, second in itertools.pairwise(ends))
    assert cut.blocks <= 64
    if cut.blocks > 1:
        assert cut.rows * max(1, math.prod(cut.shape[1:])) * itemsize >= 1 << 16


def test_devices_that_should_hold_the_same() -> None:
    sharding = NamedSharding(mesh(), P("a"))
    parts = [np.zeros((4, 2), np.float32) for _ in range(8)]
    parts[6][1, 1] = 1.0
    placed = [jax.device_put(part, device) for part, device in zip(parts, mesh().devices.flat, strict=True)]
    _, apart = take({"w": jax.make_array_from_single_device_arrays((8, 2), sharding, placed)})()
    assert apart == ["w at 4:8,0:2"]


def test_digests_are_taken_before_an_array_is_donated() -> None:
    array = jnp.arange(1024.0)
    expected = blocks(jnp.arange(1024.0))
    finish = take({"x": array})
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    np.testing.assert_array_equal(total(finish()[0]["x"]), expected)


def test_boxes_as_text() -> None:
    for box in [(), ((0, 4),), ((0, 4), (8, 16))]:
        assert parse_box(box_text(box)) == box
    with pytest.raises(ValueError, match="is not an index range"):
        parse_box("0:1:2")
