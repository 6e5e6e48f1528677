"""The README's table of forms of a step and transformations: every cell is correct."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl, sparse
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import sdc
from sdc.program import argument, primitive, products

README = Path(__file__).parents[2] / "README.md"
W = np.asarray(jax.random.normal(jax.random.key(0), (4, 4)), np.float32) / 2
X = np.asarray(jax.random.normal(jax.random.key(1), (8, 4)), np.float32)
MOMENT = sdc.Moment(jax.random.key(2), jnp.int32(0))
AUTO, EXPLICIT = (jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
                  for kind in (AxisType.Auto, AxisType.Explicit))  # fmt: skip


class Form(NamedTuple):
    """A form of a step: `(state, x) -> (state, loss)`."""

    step: Callable[[Any, Any], Any]
    state: Callable[[], Any] = lambda: W
    x: Any = X
    where: Any = products  # sites that the tools observe
    struck: Any = None  # sites where faults strike twins; None for the same
    mesh: bool = False  # whether twins run on two devices instead of under vmap
    jit: Callable[..., Any] = jax.jit
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def trained(model: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Gradient descent on a pytree of arrays."""

    def step(w: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.square(model(w, x))))(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient), value

    return step


def nnx_state() -> Any:
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def nnx_step(state: Any, x: Any) -> Any:
    model, optimizer = state
    value, gradient = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradient)
    return state, value


def eqx_step(model: Any, x: Any) -> Any:
    value, gradient = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient)), value


LINEN = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)])


def referenced(w: Any, x: Any) -> Any:
    total = jax.new_ref(jnp.zeros_like(w))
    total[...] += x.T @ (x @ w)
    return w - 0.01 * total[...], jnp.sum(total[...])


def static(w: Any, x: Any) -> Any:
    powered = jax.jit(lambda w, x, power: jnp.mean((x @ w) ** power), static_argnames="power")
    return trained(lambda w, x: powered(w, x, power=3))(w, x)


def constrained(w: Any, x: Any) -> Any:
    x = lax.with_sharding_constraint(x, NamedSharding(AUTO, P("data")))
    return trained(lambda w, x: jnp.tanh(x @ w))(w, x)


def mapped(w: Any, x: Any) -> Any:
    def local(w: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * lax.pmean(gradient, "data"), lax.pmean(value, "data")

    return jax.shard_map(
        local, mesh=AUTO, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data", "model"}, check_vma=False
    )(w, x)


def nested(w: Any, x: Any) -> Any:
    def layer(x: Any, _: Any) -> Any:
        return lax.cond(jnp.sum(x) > 0, lambda x: jnp.tanh(x @ w), lambda x: x @ w, x), None

    x = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, lax.scan(layer, c[1], None, length=2)[0]), (0, x))[1]
    return w + 0.01 * jnp.mean(x), jnp.mean(x**2)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def rematerialized(w: Any, x: Any) -> Any:
    return jax.checkpoint(lambda x: jax.nn.relu(clipped(x @ w)))(jax.nn.relu(x @ w))


def offloaded(w: Any, x: Any) -> Any:
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    new, value = trained(jax.checkpoint(lambda w, x: jnp.sin(jnp.tanh(x @ w) @ w), policy=policy))(w, x)
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.device_put(jax.device_put(new, host), jax.memory.Space.Device), value


def experts(w: Any, x: Any) -> Any:
    return lax.ragged_dot(x, jnp.stack([w, -w]), jnp.asarray([3, 5], jnp.int32))


def complex_step(w: Any, x: Any) -> Any:
    z = lax.complex(x, x[::-1]) @ lax.complex(w, w.T)
    return w + 0.01 * jnp.mean(jnp.real(z)), jnp.mean(jnp.abs(z))


def kernel_step(w: Any, x: Any) -> Any:
    def body(x: Any, w: Any, out: Any) -> None:
        out[...] = x[...] @ w[...]

    y = pl.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, w)
    return w + 0.01 * (x.T @ y), jnp.mean(y**2)


SPARSE = sparse.BCOO.fromdense(np.where(X > 0, X, 0))
FORMS: dict[str, Form] = {
    "functions of pytrees": Form(trained(lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"]), lambda: {"a": W, "b": W.T}),
    "Flax NNX models and optimizers, changed in place": Form(nnx_step, nnx_state, jit=nnx.jit),
    "Flax Linen, Haiku": Form(trained(LINEN.apply), lambda: LINEN.init(jax.random.key(0), X)),
    "Equinox modules": Form(
        eqx_step, lambda: eqx.nn.MLP(4, 2, 4, 1, key=jax.random.key(0)), jit=eqx.filter_jit
    ),
    "references (`jax.new_ref`)": Form(referenced),
    "static arguments": Form(static),
    "`jit` with `NamedSharding`s": Form(constrained, lambda: jax.device_put(W, NamedSharding(AUTO, P("model")))),
    "explicit sharding": Form(
        trained(lambda w, x: jnp.tanh(x @ w)), lambda: jax.device_put(W, NamedSharding(EXPLICIT, P(None, None))),
        x=jax.device_put(X, NamedSharding(EXPLICIT, P("data", None))), context=lambda: jax.set_mesh(EXPLICIT),
    ),
    "`shard_map`": Form(mapped),
    "`scan`, `while`, `cond` in one another": Form(nested),
    "`remat`, custom derivatives": Form(trained(rematerialized)),
    "offloading (values in the memory of the host)": Form(offloaded, where=products | primitive("device_put")),
    "experts (`ragged_dot`)": Form(trained(experts), mesh=True),  # JAX supports ragged_dot under vmap for few axes only
    "sparse arrays (BCOO, BCSR)": Form(trained(lambda w, x: SPARSE @ w + x @ w)),
    "complex products": Form(complex_step, struck=argument("1")),
    "kernels (`pallas_call`, foreign calls)": Form(kernel_step, where=primitive("pallas_call", "dot_general")),
}  # fmt: skip


def own_bytes(tree: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(nnx.state(tree) if isinstance(tree, nnx.Module) else tree)
    return [
        np.asarray(leaf)
        for leaf in leaves
        if eqx.is_array(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]


def inject(form: Form) -> str:
    """Asserts that a fault that never hits changes nothing, and that one that hits is reported with its effect."""
    hits, quiet = ([sdc.Fault(sdc.faults.BitFlip(bits=(30,)), rate, form.where)] for rate in (1.0, 0.0))
    state = form.state()
    clean = form.jit(form.step)(form.state(), form.x)
    (new, value), events = form.jit(sdc.inject(form.step, quiet))(MOMENT, state, form.x)
    for ours, theirs in zip(own_bytes((new, value)), own_bytes(clean), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    (_, struck), events = form.jit(sdc.inject(form.step, hits))(MOMENT, form.state(), form.x)
    assert sum(int(np.sum(event.changed)) for event in events.values()) > 0
    assert np.asarray(struck).tobytes() != np.asarray(clean[1]).tobytes()
    return "yes" if not any(site.primitive == "pallas_call" for site in events.sites) else "one site"


def fingerprint(form: Form) -> str:
    (_, digests), (_, again) = (
        form.jit(sdc.fingerprint(form.step, form.where))(form.state(), form.x) for _ in range(2)
    )
    assert len(digests) > 0
    assert sdc.first_difference(digests, again) is None
    return "one site" if any(site.primitive == "pallas_call" for site in digests.sites) else "yes"


def lockstep(form: Form) -> str:
    struck = form.where if form.struck is None else form.struck
    fault = sdc.Fault(sdc.faults.BitFlip(bits=(20,)), 0.3, struck, at={"twin": 1})
    # If anything differs, the step is repeated with an exchange at every site, so this covers both ways.
    twins = sdc.lockstep(sdc.inject(form.step, [fault]), "twin", where=form.where, exchange="step")
    if form.jit is nnx.jit:
        states = nnx.vmap(lambda _: form.state(), out_axes=0)(jnp.arange(2))
        run = nnx.jit(nnx.vmap(twins, in_axes=(None, 0, None), out_axes=0, axis_name="twin"))
        (_, events), mismatches = run(MOMENT, states, form.x)
    elif form.mesh:
        two = jax.make_mesh((2,), ("twin",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

        def one(state: Any, x: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf[None], _reports(twins(MOMENT, state, x)))

        pair = jax.shard_map(one, mesh=two, in_specs=P(), out_specs=P("twin"), check_vma=False)
        events, mismatches = form.jit(pair)(form.state(), form.x)
    else:
        pair = jax.vmap(lambda state, x: _reports(twins(MOMENT, state, x)), in_axes=None, axis_name="twin", axis_size=2)
        events, mismatches = form.jit(pair)(form.state(), form.x)
    injected = {name: int(np.sum(event.changed[1])) for name, event in events.items()}
    found = {name: int(np.sum(report.difference.mismatched[0][..., 1])) for name, report in mismatches.items()}
    assert found == injected or (form.struck is not None and sum(found.values()) > 0)
    assert sum(injected.values()) > 0
    return "one site" if any(site.primitive == "pallas_call" for site in events.sites) else "yes"


def _reports(out: Any) -> Any:
    """Drops the step's own output, which may hold objects that are not arrays."""
    (_, events), mismatches = out
    return events, mismatches


def abft(form: Form) -> str:
    _, flags = form.jit(sdc.abft(form.step))(form.state(), form.x)
    assert sum(int(np.sum(flag.checked)) for flag in flags.values()) > 0
    assert not any(np.any(flag.flagged) for flag in flags.values())
    return "listed" if flags.skipped else "yes"


def witness(form: Form) -> str:
    """Asserts that the witness changes nothing, and that what XLA computes twice is the same."""
    clean = form.jit(form.step)(form.state(), form.x)
    out, witnessed = form.jit(sdc.witness(form.step))(form.state(), form.x)
    for ours, theirs in zip(own_bytes(out), own_bytes(clean), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert not any(np.any(one.differs) for one in witnessed.values())
    return "yes"


def campaign(form: Form) -> str:
    rows = sdc.campaign(
        form.step, form.state(), [form.x] * 3, loss=lambda state, value: value, injections=2, where=form.where, follow=1
    )
    # The number of iterations of a `while` is unknown: a fault may be planned for one that never runs.
    assert sum(row["changed"] for row in rows) == 2 or form.step is nested
    assert len(rows) == 2
    return "yes"


TOOLS = {tool.__name__: tool for tool in (inject, fingerprint, lockstep, abft, witness, campaign)}


def cells() -> Iterator[tuple[str, str, str]]:
    """Yields each form, each transformation, and the README's cell for them."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in README.read_text().splitlines()
        if line.startswith("|")
    ]
    head = next(number for number, row in enumerate(rows) if row[0] == "form of a step")
    names = [re.sub(r"\W", "", name) for name in rows[head][1:]]
    for row in rows[head + 2 :][: len(FORMS)]:
        for name, said in zip(names, row[1:], strict=True):
            yield row[0], name, said


CELLS = list(cells())


def test_the_table_is_complete() -> None:
    assert {(form, tool) for form, tool, _ in CELLS} == {(form, tool) for form in FORMS for tool in TOOLS}


@pytest.mark.parametrize(("name", "tool", "said"), CELLS, ids=[f"{form}-{tool}" for form, tool, _ in CELLS])
def test_every_cell(name: str, tool: str, said: str) -> None:
    form = FORMS[name]
    with form.context(), jax.numpy_dtype_promotion("standard"):
        if said == "no":
            with pytest.raises(ValueError, match=r"hit|complex"):
                TOOLS[tool](form)
        else:
            assert TOOLS[tool](form) == said
