"""Random programs: constructs of JAX, and modules of other libraries, inside one another."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

Body = Callable[[Any, Any], Any]
"""`(x, w) -> x`, float32[4, 4] each; numbers stay small."""
W = np.asarray(jax.random.normal(jax.random.key(0), (4, 4)), np.float32) / 4
X = np.asarray(jax.random.normal(jax.random.key(1), (4, 4)), np.float32)


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


LAYER = eqx.nn.Linear(4, 4, key=jax.random.key(2))
GRAPH, STATE = nnx.split(nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(0))))


def module(x: Any, w: Any) -> Any:
    return jnp.tanh(nnx.merge(GRAPH, STATE)(x))


LEAVES: dict[str, Body] = {
    "product": lambda x, w: jnp.tanh(x @ w),
    "products": lambda x, w: jnp.einsum("ij,jk,kl->il", x, w, w),
    "arithmetic": lambda x, w: jnp.sin(x) * 0.5 + w,
    "convolution": lambda x, w: jax.vmap(lambda row: jnp.convolve(row, w[0], mode="same"))(x),
    "reduction": lambda x, w: x / (1.0 + jnp.sum(x * x, axis=-1, keepdims=True)),
    "reference": lambda x, w: _referenced(x, w),
    "nnx": module,
    "eqx": lambda x, w: jax.vmap(LAYER)(x),
}


def _referenced(x: Any, w: Any) -> Any:
    reference = jax.new_ref(x)
    reference[...] = reference[...] @ w
    return jax.freeze(reference)


def scanned(body: Body) -> Body:
    return lambda x, w: lax.scan(lambda x, _: (body(x, w), None), x, None, length=3)[0]


def reversed_scan(body: Body) -> Body:
    return lambda x, w: lax.scan(lambda x, row: (body(x, w) + row, x[0]), x, w[:2], reverse=True)[0]


def looped(body: Body) -> Body:
    """A `while` whose condition computes."""

    def run(x: Any, w: Any) -> Any:
        def go_on(carry: Any) -> Any:
            return (carry[0] < 3) & (jnp.sum(jnp.abs(carry[1])) < 1e6)

        return lax.while_loop(go_on, lambda carry: (carry[0] + 1, body(carry[1], w)), (jnp.int32(0), x))[1]

    return run


def chosen(body: Body) -> Body:
    return lambda x, w: lax.cond(jnp.sum(x) > 0.0, body, lambda x, w: body(-x, w) * 0.5, x, w)


def mapped(body: Body) -> Body:
    shard = jax.shard_map(
        lambda x, w: body(jnp.concatenate([x, x]), w)[:2],
        mesh=mesh(), in_specs=(P("rows"), P()), out_specs=P("rows"), check_vma=False,
    )  # fmt: skip
    return lambda x, w: shard(x, w)


def with_own_derivative(body: Body) -> Body:
    run = jax.custom_vjp(body)
    run.defvjp(lambda x, w: (body(x, w), (x, w)), lambda kept, g: jax.tree.map(jnp.tanh, jax.vjp(body, *kept)[1](g)))
    return run


def with_own_tangent(body: Body) -> Body:
    run = jax.custom_jvp(body)
    run.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
    return run


def named(body: Body) -> Body:
    return jax.named_scope("block")(body)


WRAPPERS: dict[str, Callable[[Body], Body]] = {
    "scan": scanned, "reversed scan": reversed_scan, "while": looped, "cond": chosen, "shard_map": mapped,
    "remat": lambda body: jax.checkpoint(body), "jit": lambda body: jax.jit(lambda x, w: body(x, w)),
    "custom_vjp": with_own_derivative, "custom_jvp": with_own_tangent, "scope": named,
    "vmap": lambda body: lambda x, w: jax.vmap(body, in_axes=(0, None))(jnp.stack([x, x * 0.5]), w)[1],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Program:
    """A step.

    Attributes:
        text: what it is made of.
        step: `(w, x) -> out`.
        differentiated: whether it is a gradient.
    """

    text: str
    step: Callable[[Any, Any], Any] = dataclasses.field(repr=False)
    differentiated: bool


def bodies() -> st.SearchStrategy[tuple[str, Body]]:
    leaves = st.sampled_from(sorted(LEAVES)).map(lambda name: (name, LEAVES[name]))

    def wrap(inner: st.SearchStrategy[tuple[str, Body]]) -> st.SearchStrategy[tuple[str, Body]]:
        wrapped = st.tuples(st.sampled_from(sorted(WRAPPERS)), inner).map(
            lambda found: (f"{found[0]}({found[1][0]})", WRAPPERS[found[0]](found[1][1]))
        )
        chained = st.tuples(inner, inner).map(
            lambda two: (f"{two[0][0]}, {two[1][0]}", lambda x, w: two[1][1](two[0][1](x, w), w))
        )
        return wrapped | wrapped | chained

    return st.recursive(leaves, wrap, max_leaves=3)


@st.composite
def programs(draw: Any) -> Program:
    """Steps: values, or gradients where the program has a derivative, which a `while` has not."""
    text, body = draw(bodies())
    allowed = "while" not in text and "reference" not in text
    # JAX has no shard_map inside of another one over the same axis, and no custom derivative that changes arrays.
    if text.count("shard_map") > 1 or ("reference" in text and "custom" in text):
        text, body = "product", LEAVES["product"]
    differentiated = allowed and draw(st.booleans())
    if differentiated:
        return Program(
            f"gradient of {text}", lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean(body(x, w) ** 2))(w), True
        )
    return Program(text, lambda w, x: body(x, w), False)
