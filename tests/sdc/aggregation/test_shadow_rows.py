"""What a shadow replica gets of the rank that it repeats."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from sdc.aggregation.spares import init_shadow, judge, shadow
from sdc.bits import as_bits
from sdc.tools.bench.collectives import collectives
from tests.sdc.aggregation.test_spares import (
    BATCH,
    INPUTS,
    OUTPUTS,
    RANKS,
    ROWS,
    W,
    gradient,
    group,
    on_mesh,
    on_one_device,
    params,
)


def test_gradients_move_only_where_they_differ() -> None:
    run = on_mesh(shadow(gradient, "data"))
    text = run.lower(init_shadow(RANKS), params(), BATCH).compile().as_text()
    found = collectives(text)
    always = sorted(size for c in found if not c.conditional for size in c.sizes)
    x, y, grad, loss = 4 * ROWS * INPUTS, 4 * ROWS * OUTPUTS, W.nbytes, 4
    digests = RANKS * 2 * 4
    assert always == sorted([digests, x, y, x, y, grad, loss])
    gated = sorted(size for c in found if c.conditional for size in c.sizes)
    assert gated == sorted([grad, loss] * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "uint8", "int16", "bool", "key"])
def test_rows_travel_bit_for_bit(dtype: str) -> None:
    """The owner computes on its own rows and the others on copies: a changed bit would be a difference."""
    words = np.random.default_rng(1).integers(0, 2**32, (RANKS, 8), dtype=np.uint32)
    words[:, :4] = 0x80000000, 0x7FC01234, 0xFF812345, 1  # -0.0, two NaNs with a payload, a denormal number
    if dtype == "key":
        batch: Any = jax.random.wrap_key_data(jnp.asarray(words.reshape(RANKS, 4, 2)))
    elif dtype == "bool":
        batch = words % 2 == 0
    else:
        batch = lax.bitcast_convert_type(jnp.asarray(words), jnp.dtype(dtype))

    def bits(_: Any, x: Any) -> Any:
        words = as_bits(x).astype(jnp.uint32)
        return (words >> 16).astype(jnp.float32), (words % 2**16).astype(jnp.float32)

    run = on_one_device(shadow(bits, "data"))
    state = init_shadow(RANKS)
    for _ in range(RANKS * (RANKS - 1)):
        _, state, report = run(state, None, batch)
        assert not report.differed


def test_a_difference_on_one_device_of_a_rank() -> None:
    """Parameters are sharded over `model`; device (1, 1) is wrong."""
    mesh = jax.make_mesh((3, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def grad(w: Any, x: Any) -> Any:
        here = (lax.axis_index("data") == 1) & (lax.axis_index("model") == 1)
        grads = jax.grad(lambda w: jnp.sum(lax.psum(jnp.sum(w * x), "model") ** 2) / 2)(w)
        return jnp.where(here, grads.at[:2].multiply(2.0), grads)

    def body(state: Any, w: Any, x: Any) -> Any:
        mean, state, report = shadow(grad, "data")(state, w, x[0])
        return mean[None], jax.tree.map(lambda x: x[None, None], (state, report))

    run = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(), P("model"), P("data")),
            out_specs=(P("data", "model"), P("data", "model")),
            check_vma=False,
        )
    )
    state = jax.tree.map(np.asarray, init_shadow(3))
    w, x = jnp.arange(1.0, 9.0), jnp.asarray([1.0, 2.0, 3.0])
    for _ in range(5):
        mean, out = run(state, w, x)
        for leaf in jax.tree.leaves(out):
            assert (np.asarray(leaf) == np.asarray(leaf)[:1, :1]).all()
        assert (np.asarray(mean) == np.asarray(mean)[:1]).all()
        state, report = jax.tree.map(lambda x: np.asarray(x)[0, 0], out)
        assert int(report.difference.checked[0]) == 8
        assert int(report.difference.mismatched[0]) == (2 if 1 in group(report) else 0)
        assert float(report.difference.relative_max[0]) in (0.0, 0.5, 1.0)
    assert judge(state).suspects == (1,)
    assert run._cache_size() == 1
