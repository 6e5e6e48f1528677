"""The kernel for TPUs, interpreted: the digest of every shape and type that it takes, bit for bit."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from sdc.program import compiled_for, compiling_for
from sdc.twins import GOLDEN, MIX, digest
from sdc.twins.digest_kernel import LEAST, fits, kernel_digest


def values(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    bits = np.random.default_rng(math.prod(shape)).integers(0, 2**32, shape, np.uint32)
    return jax.lax.bitcast_convert_type(jnp.asarray(bits.astype(f"uint{8 * jnp.dtype(dtype).itemsize}")), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int16", "float32", "uint32"])
@pytest.mark.parametrize("shape", [(512, 128), (48, 1408), (2, 3, 32, 384)], ids=str)
def test_the_same_digest(shape: tuple[int, ...], dtype: str) -> None:
    x = values(shape, dtype)
    found = jax.jit(lambda x: (kernel_digest(x, GOLDEN, MIX, interpret=True), digest(x)))(x)
    assert found[0].tolist() == found[1].tolist()


def test_with_numbers_of_64_bits() -> None:
    x = values((128, 128), "float32")
    with jax.enable_x64(True):
        assert kernel_digest(x, GOLDEN, MIX, interpret=True).tolist() == digest(x).tolist()


def test_under_vmap() -> None:
    x = values((3, 64, 128), "bfloat16")
    found = jax.vmap(lambda x: kernel_digest(x, GOLDEN, MIX, interpret=True))(x)
    np.testing.assert_array_equal(found, jax.vmap(digest)(x))


@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((1024, 128), "bfloat16", True),
        ((4, 512, 128), "float32", True),
        ((LEAST * 2,), "bfloat16", False),  # one axis
        ((256, 128), "bfloat16", False),  # small
        ((1024, 192), "bfloat16", False),  # columns do not fill registers
        ((1000, 128), "bfloat16", False),  # rows do not
        ((128, 8, 128), "bfloat16", False),  # nor do those that leading axes are joined to
        ((1024, 128), "int8", False),
        ((1024, 128), "float64", False),
        ((1024, 128), "bool", False),
    ],
)
def test_what_it_takes(shape: tuple[int, ...], dtype: str, taken: bool) -> None:
    with compiling_for("tpu", whole=True), jax.enable_x64(True):
        assert fits(jax.ShapeDtypeStruct(shape, dtype)) is taken


def test_what_a_program_is_compiled_for() -> None:
    assert compiled_for()[::2] == ("cpu", False)  # of several devices: XLA may share arrays out
    with compiling_for("tpu", whole=True):
        assert compiled_for()[::2] == ("tpu", True)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    found: list[Any] = []

    def look(x: Any) -> Any:
        found.append(compiled_for()[::2])
        return x

    with compiling_for("tpu", whole=True):  # the mesh knows better
        for axes in ({"a", "b"}, {"a"}):
            mapped = jax.shard_map(look, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names=axes)
            jax.eval_shape(jax.jit(mapped), jnp.ones(4))
        one = jax.make_mesh((2, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
        mapped = jax.shard_map(look, mesh=one, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
        jax.eval_shape(jax.jit(mapped), jnp.ones(4))
    assert found == [("cpu", True), ("cpu", False), ("cpu", False)]
    assert compiled_for().platform == "cpu"
