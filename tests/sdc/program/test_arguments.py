"""What steps are given and return as people write them: objects that are changed in place, and what is no array."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sdc
from sdc.faults import BitFlip
from sdc.program import argument, everything, primitive, products

Step = Callable[..., Any]
X = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(8, 4)
MOMENT = sdc.Moment(jax.random.key(0), jnp.int32(0))
NEVER = sdc.Fault(BitFlip(), 0.0, products)


def injected(step: Step) -> Step:
    """With a fault that never hits, and without the argument that only `inject` takes."""
    faulty = sdc.inject(step, [NEVER])
    return lambda *args: faulty(MOMENT, *args)


TOOLS: dict[str, Callable[[Step], Step]] = {
    "abft": sdc.abft,
    "fingerprint": lambda step: sdc.fingerprint(step, everything),
    "inject": injected,
    "strike": lambda step: functools.partial(sdc.strike(step, products), sdc.no_strike()),
}


class Model(nnx.Module):
    """A layer that is used twice, running statistics, dropout, remat, and a scan over stacked layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(4, 4, rngs=rngs)

        self.shared = nnx.Linear(4, 4, rngs=rngs)
        self.tied = self.shared
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.stack = stacked(rngs)
        self.activation = nnx.gelu
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        x = nnx.remat(lambda layer, x: layer(x))(self.shared, x)
        x = self.dropout(self.activation(self.norm(x)))
        x = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)
        return self.tied(x)


def train_step(model: Model, optimizer: Any, metrics: Any, x: Any) -> Any:
    def loss_fn(model: Model) -> Any:
        return jnp.mean((model(x) - 1.0) ** 2)

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(model, gradients)
    metrics.update(values=loss)
    return loss


def training() -> tuple[Any, Any, Any]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), nnx.metrics.Average()


def test_twins_of_modules() -> None:
    """Each twin has a model of its own, which the step changes; a corrupted product of one is found and repaired."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key: Any) -> nnx.Linear:
        return nnx.Linear(4, 4, rngs=nnx.Rngs(key))

    def step(model: nnx.Linear, twin: Any, x: Any) -> Any:
        gradients = nnx.grad(lambda model: jnp.mean((model(x) + 0.0 * twin) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), gradients))
        return jnp.sum(x)

    models = make(jnp.stack([jax.random.key(0)] * 2))
    fault = sdc.Fault(BitFlip(bits=(30,)), 1.0, primitive("dot_general"), at={"twin": 1})
    before = models.kernel[...]
    twins = sdc.lockstep(sdc.inject(step, [fault]), "twin", where=products)
    run = nnx.jit(nnx.vmap(twins, in_axes=(None, 0, 0, None), out_axes=0, axis_name="twin"))
    (_, events), mismatches = run(MOMENT, models, jnp.arange(2.0), X)
    after = models.kernel[...]
    assert not np.array_equal(after, before)
    np.testing.assert_array_equal(after[0], after[1])
    for name, mismatch in mismatches.items():
        assert int(mismatch.difference.mismatched[0, 1]) == int(events[name].changed[1]) > 0


def test_variables_that_a_step_adds_and_modules_that_it_returns() -> None:
    class Noted(nnx.Module):
        def __init__(self) -> None:
            self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            y = self.inner(x)
            self.activations = nnx.Intermediate(y)
            return y

    def step(model: Noted, x: Any) -> Any:
        return {"model": model, "same": [model.inner], "text": "done", "y": model(x)}

    model, inner = (made := Noted()), made.inner
    out, flags = sdc.abft(step)(model, X)
    assert out["model"] is model
    assert out["same"][0] is inner
    assert out["text"] == "done"
    np.testing.assert_array_equal(model.activations[...], out["y"])
    assert int(flags["fwd/dot_general"].checked) == 8


def test_a_state_is_a_value_and_a_module_that_is_read_can_be_of_an_outer_trace() -> None:
    """As `nnx.split` makes it, also beside a module: only the returned state is new."""
    model, other = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(1))
    definition, state = nnx.split(model)
    kernel = np.asarray(model.kernel[...])

    def step(state: Any, other: nnx.Linear, x: Any) -> Any:
        model = nnx.merge(definition, state)
        gradients = nnx.grad(lambda model: jnp.mean(model(other(x)) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), gradients))
        return nnx.state(model), jnp.sum(x)

    names = [site.name for site in sdc.sites(step, state, other, X, where=argument("*"))]
    assert "arg/0/kernel/value" in names
    assert "arg/1/kernel" in names
    expected = jax.jit(lambda state, x: step(state, other, x))(state, X)
    for run in (sdc.abft(step), jax.jit(lambda state, other, x: sdc.abft(step)(state, other, x))):
        (after, _), _ = run(state, other, X)
        chex.assert_trees_all_close(after, expected[0], rtol=1e-5)
    (after, _), _ = jax.jit(lambda x: sdc.abft(step)(state, other, x))(X)
    chex.assert_trees_all_close(after, expected[0], rtol=1e-5)
    np.testing.assert_array_equal(model.kernel[...], kernel)


def test_variables_of_references_are_refused() -> None:
    with nnx.var_defaults(ref=True):
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="argument 0/bias is a variable that holds a reference"):
        sdc.abft(lambda model, x: model(x))(model, X)


def test_what_a_step_changes_without_being_given_it_is_refused() -> None:
    model, optimizer, metrics = training()
    with pytest.raises(ValueError, match="changes an object that is not one of its arguments"):
        sdc.abft(lambda x: train_step(model, optimizer, metrics, x))(X)
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    _, flags = sdc.abft(lambda x: linear(x))(X)  # reading is no change
    assert int(flags["fwd/dot_general"].checked) == 8


def test_a_module_that_is_changed_as_an_argument_and_read_by_a_closure_is_refused() -> None:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def step(given: nnx.Linear, x: Any) -> Any:
        given.bias[...] += 1.0
        return jnp.sum(model(x))

    with pytest.raises(ValueError, match="the step changes argument 0/bias and also reads it"):
        sdc.abft(step)(model, X)
    np.testing.assert_array_equal(model.bias[...], np.zeros(4))


class Layer(eqx.Module):
    weight: Any
    activation: Callable[[Any], Any]
    name: str
    scale: float
    training: bool

    def __call__(self, x: Any) -> Any:
        y = self.scale * self.activation(x @ self.weight)
        return jnp.tanh(y) if self.training else y


def layer(name: str = "a layer") -> Layer:
    return Layer(jnp.eye(4) / 3, jax.nn.relu, name, 2.0, True)


def learn(model: Layer, x: Any) -> Any:
    loss, gradients = eqx.filter_value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    return eqx.apply_updates(model, gradients), loss


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("jit", [eqx.filter_jit, lambda step: step], ids=["filter_jit", "eager"])
def test_what_is_no_array_passes_through(tool: str, jit: Callable[[Step], Step]) -> None:
    expected, loss = eqx.filter_jit(learn)(layer(), X)
    (model, found), reports = jit(TOOLS[tool](learn))(layer(), X)
    chex.assert_trees_all_close((model.weight, found), (expected.weight, loss), rtol=1e-6)
    assert (model.name, model.activation, model.training) == ("a layer", jax.nn.relu, True)
    assert len(reports) > 0


def power(x: Any, n: int, *, side: str = "left") -> Any:
    for _ in range(n):  # only of a number that is known
        x = x @ x.T if side == "left" else x.T @ x
    return jnp.sum(x)


@pytest.mark.parametrize("tool", [sdc.abft, sdc.fingerprint], ids=["abft", "fingerprint"])
def test_static_arguments(tool: Callable[..., Step]) -> None:
    transformed = tool(power, products)
    for run in (
        jax.jit(transformed, static_argnums=1, static_argnames="side"),
        jax.jit(transformed, static_argnames=("n", "side")),
        tool(jax.jit(power, static_argnums=1, static_argnames="side"), products),
        transformed,
    ):
        out, reports = run(X, 1, side="right")
        np.testing.assert_allclose(out, power(X, 1, side="right"), rtol=1e-5)
        assert [site.outputs[0].shape for site in reports.sites] == [(4, 4)]
    faulty = jax.jit(sdc.inject(power, [NEVER]), static_argnames=("n", "side"))
    assert len(faulty(MOMENT, X, 2)[1]) == 2


def accumulate(total: Any, x: Any) -> Any:
    """With references of its own, given ones, and one inside of a loop."""

    def add(_: Any, row: Any) -> Any:
        total[...] += jnp.sum(row @ row)
        return None, jnp.sin(row)

    own = jax.new_ref(jnp.zeros(4))
    own[...] = jnp.cos(x[0])
    _, rows = jax.lax.scan(add, None, x)
    total[...] = jax.lax.cond(x[0, 0] < 0, lambda: total[...] * 2.0, lambda: total[...])
    return rows @ own[...]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("jit", [jax.jit, lambda step: step], ids=["jit", "eager"])
def test_references_are_changed_once(tool: str, jit: Callable[[Step], Step]) -> None:
    expected, total = jax.new_ref(jnp.float32(1.0)), jax.new_ref(jnp.float32(1.0))
    wanted = jax.jit(accumulate)(expected, X)
    out, reports = jit(TOOLS[tool](accumulate))(total, X)
    np.testing.assert_allclose(out, wanted, rtol=1e-6)
    np.testing.assert_allclose(total[...], expected[...], rtol=1e-6)
    assert len(reports) > 0
    closed = jax.new_ref(jnp.float32(1.0))
    jit(TOOLS[tool](lambda x: accumulate(closed, x)))(X)
    np.testing.assert_allclose(closed[...], expected[...], rtol=1e-6)


def test_keys_as_raw_arrays() -> None:
    def step(key: Any, x: Any) -> Any:
        return x @ x.T + jax.random.normal(key, (8, 8))

    key = jax.random.PRNGKey(0)
    for tool in TOOLS.values():
        np.testing.assert_allclose(tool(step)(key, X)[0], step(key, X), rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match=r"expected an sdc.Moment\(key, step\)"):
        sdc.inject(step, [NEVER])(key, key, X)


def test_sites_of_objects_and_of_shapes() -> None:
    model = nnx.eval_shape(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    found = sdc.sites(lambda model, x: model(x), model, jax.ShapeDtypeStruct((8, 4), jnp.float32), where=argument("*"))
    assert [(site.name, site.outputs[0].shape) for site in found] == [
        ("arg/0/bias", (2,)), ("arg/0/kernel", (4, 2)), ("arg/1", (8, 4)),
    ]  # fmt: skip


def test_wrong_turns_end_in_one_line() -> None:
    """What stands in the wrong place is told by its name, with what belongs there."""
    fault = sdc.Fault(sdc.faults.BitFlip(), 1.0, products)
    x = jnp.ones((2, 2))

    def step(x: Any) -> Any:
        return x @ x

    run: Any = sdc.fingerprint(step, products)
    turns: dict[str, Callable[[], Any]] = {
        "expected a step, not list; pass the function itself": lambda: sdc.inject([fault], step),  # type: ignore
        "expected a step, not Selector": lambda: sdc.strike(products, step),  # type: ignore[arg-type]
        "expected a step, not ArrayImpl": lambda: sdc.abft(step(x)),
        "expected digests, not tuple; give the second value": lambda: sdc.first_difference(run(x), run(x)),
        "expected flags, not tuple; give the second": lambda: sdc.checksums.coverage(run(x)),
        "expected a Strike, as sdc.strike_on returns it": lambda: sdc.strike(step, products)(x),
        "expected a whole number for the step": lambda: sdc.inject(step, [fault])(
            sdc.Moment(jax.random.key(0), 1.5),
            x,  # type: ignore
        ),
        "expected a key, such as jax.random.key": lambda: sdc.inject(step, [fault])(sdc.Moment(0, 0), x),  # type: ignore
    }
    for said, turn in turns.items():
        with pytest.raises((TypeError, ValueError), match=said):
            turn()
    _, events = sdc.inject(step, [fault])(sdc.Moment(jax.random.key(0), 3), x)  # type: ignore[arg-type]
    assert int(events["fwd/dot_general"].changed) == 4
