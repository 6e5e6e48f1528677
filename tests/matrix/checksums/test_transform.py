"""`abft` on whole steps and in single layers: every nesting, both directions, with the transformations around it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.checksums._check import check
from sdc.checksums.fused_products import multiply, triton_product
from sdc.checksums.products import Dot
from sdc.checksums.roundoff import Profile, Rounding
from sdc.checksums.schemes import signed_weights
from sdc.faults import Moment
from sdc.faults.fault import When
from sdc.faults.kinds import Scale
from sdc.program import varying
from sdc.program.selectors import products
from tests.sdc.checksums.test_transform import FORWARD, RNG, W, X, assert_same_bits, step_of


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in FORWARD), ("scan", "bfloat16")])
def test_every_nesting_is_checked_and_mended(name: str, dtype: str) -> None:
    """Clean: the plain result to rounding, no flag. With faults: each is flagged where it was injected, and undone."""
    step = sdc.checksums.accumulators(step_of(name))
    args = jnp.asarray(W, dtype), jnp.asarray(X, dtype)
    faulty = sdc.inject(step, [sdc.Fault(Scale(-2.0), 0.05, products, when=When(onset=1))])
    checked = jax.jit(sdc.abft(faulty, mode="correct"))
    (expected, _), none = checked(Moment(jax.random.key(1), jnp.int32(0)), *args)
    (out, events), flags = checked(Moment(jax.random.key(1), jnp.int32(1)), *args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(step_of(name)(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=3e-2, atol=3e-2)
    assert set(flags) == set(none) == {site.name for site in sdc.sites(step, *args, where=products)}
    assert all(int(np.sum(flag.flagged)) == 0 and int(np.sum(flag.checked)) > 0 for flag in none.values())
    changed = {site: np.asarray(event.changed) for site, event in events.items()}
    assert sum(int(count.sum()) for count in changed.values()) > 0
    for site, flag in flags.items():
        np.testing.assert_array_equal(np.asarray(flag.flagged) > 0, changed[site] > 0)
        np.testing.assert_array_equal(flag.flagged, flag.confirmed)
        np.testing.assert_array_equal(flag.flagged, flag.corrected)
        if name != "while":
            assert flag.wrong is not None
            np.testing.assert_array_equal(flag.wrong.found, changed[site])
    if name != "convolution":  # which XLA may compute in another order in the branch
        assert_same_bits(out, expected)


@pytest.mark.parametrize("placement", ["vmap", "shard_map, checked"])
def test_twins(placement: str) -> None:
    """Flags are of the twin and layer that was hit; a corrected twin is like the healthy one to lock-step."""
    fault = sdc.Fault(Scale(3.0), (0.05, 0.0, 0.1), products, at={"twin": 1})
    step = sdc.inject(sdc.checksums.accumulators(step_of("scan")), [fault])

    def twins(mode: Any) -> Callable[..., Any]:
        return sdc.lockstep(sdc.abft(step, mode=mode), "twin", where=products)

    def place(run: Callable[..., Any]) -> Callable[..., Any]:
        if placement == "vmap":
            return jax.vmap(run, (None, 0, 0), axis_name="twin")
        mesh = jax.make_mesh((2,), ("twin",), axis_types=(AxisType.Auto,))
        return jax.shard_map(
            lambda moment, w, x: jax.tree.map(lambda a: a[None], varying(run(moment, w[0], x[0]))),
            mesh=mesh,
            in_specs=(P(), P("twin"), P("twin")),
            out_specs=P("twin"),
            check_vma=True,
        )

    w, x = (jnp.broadcast_to(jnp.asarray(a, jnp.bfloat16), (2, *a.shape)) for a in (W, X))
    moment = Moment(jax.random.key(3), jnp.int32(0))
    for mode in ("detect", "correct"):
        ((_, events), flags), mismatches = jax.jit(place(twins(mode)))(moment, w, x)
        changed = sum(np.asarray(event.changed) for event in events.values())
        flagged = sum(np.asarray(flag.flagged) for flag in flags.values())
        different = sum(np.asarray(m.difference.mismatched)[0, ..., 1] for m in mismatches.values())
        assert changed.shape == flagged.shape == (2, 3)
        assert not changed[0].any()
        assert not changed[1, 1]
        assert changed[1, 0]
        assert changed[1, 2]
        np.testing.assert_array_equal(flagged > 0, changed > 0)
        np.testing.assert_array_equal(different, changed[1] if mode == "detect" else 0)


def flax_models() -> dict[str, Callable[..., Any]]:
    """Losses of models whose layers check themselves; the settings of their products are given."""
    rngs = nnx.Rngs(0)

    def linear(product: Any) -> Any:
        graph, params = nnx.split(nnx.Linear(8, 4, dot_general=product, rngs=rngs))
        return params, lambda params, x: nnx.merge(graph, params)(x)

    def general(product: Any) -> Any:
        graph, params = nnx.split(nnx.LinearGeneral((8,), (2, 3), dot_general=product, rngs=rngs))
        return params, lambda params, x: nnx.merge(graph, params)(x)

    def heads(product: Any) -> Any:
        module = nnx.MultiHeadAttention(
            2, 8, qkv_features=8, decode=False, qkv_dot_general=product, out_dot_general=product, rngs=rngs
        )
        graph, params = nnx.split(module)
        return params, lambda params, x: nnx.merge(graph, params)(x[None])

    def old(product: Any) -> Any:
        module = linen.Dense(4, dot_general=product)
        return module.init(jax.random.key(0), X), module.apply

    def einsum(product: Any) -> Any:
        settings = product.keywords
        return jnp.asarray(W[0]), lambda w, x: sdc.checksums.einsum("td,de->te", x, w, **settings)

    return {
        "nnx.Linear": linear,
        "nnx.LinearGeneral": general,
        "nnx attention": heads,
        "linen.Dense": old,
        "einsum": einsum,
    }


@pytest.mark.parametrize("model", flax_models())
def test_layers_check_themselves_forward_and_backward(model: str) -> None:
    product = functools.partial(sdc.checksums.dot_general, mode="correct")
    params, apply = flax_models()[model](product)
    _plain, bare = flax_models()[model](lax.dot_general if model != "einsum" else functools.partial(lax.dot_general))

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(apply(params, x) ** 2)

    out, flags = jax.jit(sdc.checksums.collect(jax.value_and_grad(loss, (0, 1))))(params, X)
    directions = [name.split("/")[0] for name in flags]
    products = 4 if model == "nnx attention" else 1
    assert directions.count("fwd") == products
    assert directions.count("bwd") == 2 * products
    assert all(int(flag.checked) > 0 and int(flag.flagged) == 0 for flag in flags.values())
    expected = jax.value_and_grad(lambda params, x: jnp.sum(bare(params, x) ** 2), (0, 1))(params, X)
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_fused_kernel_is_the_product_and_its_sums(dtype: str) -> None:
    """Interpreted: against NumPy in float64, and under `abft` with and without a fault."""
    a = jnp.asarray(RNG.normal(size=(2, 128, 192)), dtype)
    b = jnp.asarray(RNG.normal(size=(192, 256)), dtype)
    c, (weighted, squares) = triton_product(a, b, interpret=True)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(c, exact, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(weighted, exact @ np.asarray(signed_weights(256), np.float64), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(squares, (exact**2).sum(-1), rtol=1e-4)

    profile = Profile(Rounding(), fused=True)
    step = sdc.abft(lambda a, b: a @ b, mode="correct", profile=profile)
    assert "pallas_call" in str(jax.make_jaxpr(step)(a, b))
    out, flags = jax.jit(step)(a, b)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=1e-2, atol=1e-2)
    [flag] = flags.values()
    assert int(flag.checked) == 256
    assert int(flag.flagged) == 0

    product = Dot((((2,), (0,)), ((), ())), (3, 2), dtype=jnp.dtype(jnp.float32))
    wrong = multiply(product, profile.settings(sdc.checksums.Settings("correct"), ""), a, b)
    assert wrong.totals is not None
    wrong = wrong._replace(c=wrong.c.at[1, 5, 7].add(1.0), totals=(wrong.totals[0].at[1, 5].add(0.9), wrong.totals[1]))
    mended, flag = check(product, sdc.checksums.Settings("correct"), wrong)
    assert int(flag.flagged) == int(flag.corrected) == 1
    np.testing.assert_allclose(mended, exact, rtol=1e-4, atol=1e-4)
