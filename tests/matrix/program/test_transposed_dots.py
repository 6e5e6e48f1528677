"""Products that are transposed after they were computed are computed the other way round, except for a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sdc
from sdc.program import compiling_for, primitive

W = np.asarray(jax.random.normal(jax.random.key(0), (3, 4, 4)), np.float32)
X = np.asarray(jax.random.normal(jax.random.key(1), (8, 4)), np.float32)
PRODUCTS = primitive("dot_general")


def gradient(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w[0, :, :3]) ** 2))(w)


def scanned(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        layer = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None))
        return jnp.sum(lax.scan(layer, x, w)[0] ** 2)

    return jax.jit(jax.grad(loss))(w)


def batched(w: Any, x: Any) -> Any:
    y = jnp.broadcast_to(x, (3, *x.shape))
    return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.einsum("bmk,bkn->bmn", y, w[:, :, :3])) ** 2))(w)


def transpositions(step: Any) -> int:
    return sum(site.primitive == "transpose" for site in sdc.sites(step, W, X))


def used_twice(w: Any, x: Any) -> Any:
    product = x[:3] @ w[0]
    return product.T @ product


@pytest.mark.parametrize("step", [gradient, scanned, batched, used_twice])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_the_same_numbers(step: Any, platform: str) -> None:
    plain = step(W, X)
    there, many = sdc.sites(step, W, X, where=PRODUCTS), transpositions(step)
    with compiling_for(platform, whole=False):
        sites = sdc.sites(step, W, X, where=PRODUCTS)
        few = transpositions(step)
        out, digests = jax.jit(sdc.fingerprint(step, PRODUCTS))(W, X)
    np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-6)
    assert [site.name for site in sites] == [site.name for site in there] == list(digests)
    shapes, before = ([site.outputs[0].shape for site in each] for each in (sites, there))
    assert (shapes == before) is (step in (used_twice, scanned))  # of squares nobody can tell
    assert [site.flops for site in sites] == [site.flops for site in there]
    assert few == many - (step is not used_twice)
    if step is gradient:
        assert (before[-1], shapes[-1]) == ((3, 4), (4, 3))


def test_what_was_injected_is_found() -> None:
    fault = sdc.Fault(sdc.faults.BitFlip(bits=(30,)), 0.3, PRODUCTS, at={"twin": 1})
    moment = sdc.Moment(jax.random.key(0), jnp.int32(0))
    with compiling_for("tpu", whole=False):
        twins = sdc.lockstep(sdc.inject(batched, [fault]), "twin", where=PRODUCTS)
        run = jax.vmap(twins, in_axes=None, axis_name="twin", axis_size=2)
        (_, events), mismatches = jax.jit(run)(moment, W, X)
        _, flags = jax.jit(sdc.abft(batched))(W, X)
    assert sum(int(event.changed.sum()) for event in events.values()) > 0
    for name, event in events.items():
        assert int(mismatches[name].difference.mismatched[0, 1]) == int(event.changed[1])
    assert all(int(flag.checked) > 0 and int(flag.flagged) == 0 for flag in flags.values())
