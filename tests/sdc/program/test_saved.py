"""Values saved for the backward pass are sites for selectors that name them; faults there spare the forward pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.faults import BitFlip
from sdc.program import as_selector, direction, everything, matching, products

W = jax.random.normal(jax.random.key(0), (3, 8, 8)) / 3
X = jax.random.normal(jax.random.key(1), (4, 8))
NOW = sdc.Moment(jax.random.key(2), jnp.int32(0))


def layer(x: Any, w: Any) -> tuple[Any, None]:
    with jax.named_scope("ffn"):
        return jnp.sin(x @ w), None


def loss(layer: Any, w: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(layer, x, w)[0] ** 2)


def over_devices(w: Any, x: Any) -> Any:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    body = jax.value_and_grad(functools.partial(loss, layer))
    return jax.shard_map(
        lambda w, x: jax.tree.map(lambda one: lax.pmean(one, "data"), body(w, x)),
        mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False,
    )(w, x)  # fmt: skip


FORMS: dict[str, tuple[Any, set[str]]] = {
    # The slope of the sine is a cosine; the gradient of a product needs its factors.
    "everything is saved": (layer, {"saved/jvp()/scan", "saved/jvp()/ffn/cos", "saved/jvp()/mul"}),
    "a checkpoint": (jax.checkpoint(layer), {"saved/jvp()/scan", "saved/jvp()/mul"}),
    "products are saved": (
        jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable),
        {"saved/jvp()/scan", "saved/jvp()/ffn/dot_general", "saved/jvp()/mul"},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_saved_values_are_listed_by_their_origin(name: str) -> None:
    form, expected = FORMS[name]
    step = jax.value_and_grad(functools.partial(loss, form))
    listed = sdc.sites(step, W, X, where=direction("saved"))
    assert expected <= {site.name for site in listed}
    assert all(site.primitive == "saved" and not site.flops for site in listed)
    assert all(site.outputs[0].shape[0] == 3 for site in listed if "ffn" in site.name)  # one for each layer
    assert not any(site.direction == "saved" for site in sdc.sites(step, W, X))


@pytest.mark.parametrize("name", FORMS)
def test_a_fault_in_a_saved_value_spares_the_forward_pass(name: str) -> None:
    step = jax.value_and_grad(functools.partial(loss, FORMS[name][0]))
    clean = jax.jit(step)(W, X)
    for site in sorted(FORMS[name][1]):
        faulty = sdc.inject(step, [sdc.Fault(BitFlip(bits=(22,)), 0.2, f'matching("{site}")')])
        (value, gradient), events = jax.jit(faulty)(NOW, W, X)
        assert {one for one, event in events.items() if int(np.sum(event.changed))} == {site}
        assert value == clean[0], site
        assert not np.array_equal(gradient, clean[1]), site


def test_other_sites_keep_their_names_and_bits() -> None:
    step = jax.value_and_grad(functools.partial(loss, layer))
    plain = {site.name for site in sdc.sites(step, W, X)}
    both = sdc.sites(step, W, X, where=everything | direction("saved"))
    assert {site.name for site in both if site.direction != "saved"} == plain
    digests = [jax.jit(sdc.fingerprint(step, where))(W, X)[1] for where in (products, products | direction("saved"))]
    for name, digest in digests[0].items():
        np.testing.assert_array_equal(digest, digests[1][name])
    (value, gradient), _ = jax.jit(sdc.inject(step, [sdc.Fault(BitFlip(), 0.0, 'direction("saved")')]))(NOW, W, X)
    clean = jax.jit(step)(W, X)
    assert value == clean[0]
    np.testing.assert_array_equal(gradient, clean[1])


def test_on_devices_and_in_text() -> None:
    where = as_selector('matching("saved/*ffn*") & ~direction("fwd")')
    listed = sdc.sites(over_devices, W, X, where=where)
    assert {(site.dims, site.source.partition("(")[2]) for site in listed} == {(("data",), "loss)")}
    assert where.names_saved
    assert not as_selector('scope("*saved*")').names_saved
    assert matching("saved/jvp()/scan").names_saved


def test_a_step_without_a_backward_pass_saves_nothing() -> None:
    with pytest.raises(ValueError, match="saved"):
        sdc.sites(functools.partial(loss, layer), W, X, where=direction("saved"))


def test_gradients_of_examples_and_products_with_a_hessian_save_values_too() -> None:
    own = functools.partial(loss, layer)
    rows = jnp.stack([X, X + 1])
    per_example = jax.vmap(jax.grad(own), (None, 0))
    assert sdc.sites(per_example, W, rows, where=direction("saved"))

    def product(w: Any, x: Any) -> Any:
        return jax.jvp(lambda w: jax.grad(own)(w, x), (w,), (w,))[1]

    assert sdc.sites(product, W, X, where=direction("saved"))
    inner = jax.value_and_grad(lambda w, x: jnp.sum(jax.jit(lambda y: jnp.tanh(y @ w[0]) * y)(x) ** 2))
    names = {site.name for site in sdc.sites(inner, W, X, where=direction("saved"))}
    assert not any(name.endswith("/jit") for name in names), names
