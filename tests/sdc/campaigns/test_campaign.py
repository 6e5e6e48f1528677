"""Campaigns: outcomes and detections against runs done by hand, evenly spread, the same when resumed."""

import collections
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sdc
from sdc.campaigns import Campaign, NotDeterministic
from sdc.campaigns.outcomes import DETECTORS, Observed, Thresholds, classify
from sdc.faults import BitFlip, Rotate, When
from sdc.program import argument, arithmetic, named, operations, primitive, products

BATCHES = [np.random.default_rng(n).normal(size=(4, 3)).astype(np.float32) for n in range(9)]
W = np.zeros(3, np.float32)


def step(w: Any, x: Any) -> Any:
    """Linear regression on x's sum, with momentum; nothing of this project."""
    w, momentum = w
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x.sum(1)) ** 2))(w)
    momentum = 0.5 * momentum + gradient
    return (w - 0.1 * momentum, momentum), {"loss": value, "norm": jnp.sqrt(jnp.sum(gradient**2))}


def make(**arguments: Any) -> Campaign:
    return Campaign(
        step, (W, W), BATCHES,
        observe=lambda state, metrics: {
            "loss": metrics["loss"], "gradient_norm": metrics["norm"], "history": jnp.max(jnp.abs(state[1])) / 100.0,
        },
        **{"follow": 3, **arguments},
    )  # fmt: skip


RUNNER = make(faults=("bitflip", "nan", "zero"))
ROWS = list(RUNNER.run(range(120)))


def test_outcomes_are_those_of_runs_by_hand() -> None:
    """Each struck run once more, step by step in NumPy of its losses, from the first step on."""
    plain, struck = jax.jit(step), jax.jit(sdc.strike(step, RUNNER.where))
    for row in ROWS[:60]:
        injection = RUNNER.plan(row["injection"])
        state: Any = (W, W)
        losses, norms, clean_losses = [], [], []
        clean: Any = (W, W)
        for number, batch in enumerate(BATCHES[: injection.step + 4]):
            strike = injection.strike if number == injection.step else sdc.no_strike()
            (state, metrics), events = struck(strike, state, batch)
            clean, clean_metrics = plain(clean, batch)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["norm"]))
            clean_losses.append(float(clean_metrics["loss"]))
            if number == injection.step:
                assert sum(int(event.changed) for event in events.values()) == row["changed"]
        excess = [(a - b) / b for a, b in zip(losses[injection.step :], clean_losses[injection.step :], strict=True)]
        finite = all(np.isfinite([*losses, *norms])) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
        if row["outcome"] == "nonfinite":
            assert not finite
        elif row["outcome"] == "divergence":
            assert excess[-1] > 0.1
        elif row["outcome"] == "spike":
            assert max(excess) > 0.1 >= excess[-1]
        else:
            assert finite
            assert max(excess) <= 0.1 + 1e-6
    assert {row["outcome"] for row in ROWS} >= {"masked", "benign", "nonfinite"}


def test_masked_means_bit_for_bit() -> None:
    for row in ROWS:
        assert (row["outcome"] == "masked") == (row["detected"]["fingerprint"] is None)
        if row["outcome"] == "masked":
            assert row["followed"] == 0
        if row["fault"] == "nan" and row["outcome"] == "nonfinite":
            assert row["detected"]["nonfinite"] is not None


def test_injections_are_spread_evenly() -> None:
    """Every stretch of a campaign: each site, step, bit and kind as often as any other, nearly."""
    plans = [RUNNER.plan(number).row for number in range(1200)]
    for name, values in {
        "site": len(RUNNER.sites), "step": len(BATCHES) - 3, "fault": 3,
    }.items():  # fmt: skip
        for part in (plans[:600], plans[600:]):
            found = collections.Counter(row[name] for row in part)
            assert len(found) == values
            assert max(found.values()) <= 1.5 * 600 / values + 3
            assert min(found.values()) >= 0.5 * 600 / values - 3
    bits = collections.Counter(row["bits"][0] for row in plans if row["bits"])
    assert set(bits) == set(range(32))
    pairs = {(row["site"], row["fault"]) for row in plans}
    assert len(pairs) == 3 * len(RUNNER.sites)


def test_one_site_one_bit() -> None:
    site = next(site for site in RUNNER.sites if site.primitive == "dot_general")
    runner = make(where=named(site.name), faults=("bitflip,bits=30",))
    rows = list(runner.run(range(5)))
    assert {row["site"] for row in rows} == {site.name}
    for row in rows:
        assert (row["bits"], row["field"], row["dtype"]) == ([30], "exponent", "float32")
        assert int(row["old"][0], 16) ^ int(row["new"][0], 16) == 1 << 30


def test_a_branch_that_is_not_taken_is_not_reached() -> None:
    def branched(w: Any, x: Any) -> Any:
        return jax.lax.cond(x[0] > 100.0, lambda w: jnp.sin(w), lambda w: w + 1.0, w), jnp.sum(w)

    rows = sdc.campaign(
        branched, W, [b[0] for b in BATCHES], loss=lambda state, value: value + 1.0, injections=3, follow=1,
        where=primitive("sin"),
    )  # fmt: skip
    assert {row["outcome"] for row in rows} == {"not_reached"}


def observed(loss: float, norm: float = 1.0, history: float = 0.1, digest: int = 0) -> Observed:
    return Observed(loss, norm, history, bool(np.isfinite(loss)), (digest, digest))


@pytest.mark.parametrize(
    ("losses", "outcome", "detected"),
    [
        ([2.0, 2.0, 2.0], "benign", {"fingerprint": 0}),
        ([2.0, 2.5, 2.0], "spike", {"fingerprint": 0, "loss_spike": 1}),
        ([2.0, 2.1, 2.4], "divergence", {"fingerprint": 0, "loss_spike": 2}),
        ([2.0, float("nan")], "nonfinite", {"fingerprint": 0, "nonfinite": 1}),
    ],
)
def test_classes_by_hand(losses: list[float], outcome: str, detected: dict[str, int]) -> None:
    clean = [observed(2.0)] * 5
    result = classify(clean, [observed(loss, digest=1) for loss in losses], 1, Thresholds(0.25, 3.0))
    assert result["outcome"] == outcome
    assert {name: at for name, at in result["detected"].items() if at is not None} == detected
    assert set(result["detected"]) == set(DETECTORS)


def test_detectors_by_hand() -> None:
    clean = [observed(2.0)] * 5
    struck = [observed(2.0, norm=1.5, digest=1), observed(2.0, norm=5.0, history=1.2, digest=1)]
    found = classify(clean, struck, 0, Thresholds(0.25, 3.0))["detected"]
    assert found == {
        "fingerprint": 0, "nonfinite": None, "loss_spike": None, "gradient_norm_spike": 1, "history_bound": 1,
    }  # fmt: skip
    assert (
        classify(clean, [observed(2.0, digest=1), observed(2.01, digest=1)], 0, Thresholds(1, 3))["visible_after"] == 1
    )


def test_no_false_alarm_on_the_clean_run() -> None:
    for start in range(len(BATCHES)):
        result = classify(RUNNER.clean, RUNNER.clean[start:], start, RUNNER.limits)
        assert not any(at is not None for at in result["detected"].values())
        assert result["outcome"] == "masked"


def test_a_step_that_does_not_repeat_itself_is_refused() -> None:
    calls = iter(range(10**6))

    def restless(w: Any, x: Any) -> Any:
        noise = jax.pure_callback(lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), np.float32))
        return w + noise, jnp.sum(w)

    with pytest.raises(NotDeterministic, match="gave different bits when repeated"):
        sdc.campaign(restless, W, BATCHES, loss=lambda state, value: value, where=operations & arithmetic)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"follow": 9}, "too few for follow=9"),
        ({"faults": ()}, "expected at least one kind of fault"),
        ({"faults": "bitflip"}, "faults=bitflip: expected a sequence of faults; wrap a single one in a list"),
        ({"faults": 3}, "faults=3: expected a sequence of faults"),
        ({"faults": ("meteor",)}, "unknown kind 'meteor'"),
        ({"faults": [sdc.Fault(BitFlip(), 0.1)]}, r"faults=bitflip\(rate=0.1\): a campaign chooses the site"),
        ({"faults": [sdc.Fault(BitFlip(), when=When(onset=3))]}, "a campaign chooses the site"),
        ({"faults": [Rotate()]}, "leaves 1 element in place"),
        ({"where": named("fwd/nothing")}, "matches none of the step's"),
        ({"faults": ("bitflip,bits=40",)}, "cannot strike the selected site '.*': bit 40 of a 32-bit float32"),
    ],
)
def test_campaigns_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_states_of_objects_and_of_what_is_no_array() -> None:
    """A model of NNX that the step changes, and one of Equinox that holds functions, as they are as arrays."""
    x = [jnp.linspace(-1.0, 1.0, 8).reshape(2, 4) * number for number in range(1, 8)]

    def loss_of(apply: Any, batch: Any) -> Any:
        return jnp.mean((apply(batch) - 1.0) ** 2)

    def nnx_step(state: Any, batch: Any) -> Any:
        model, optimizer = state
        loss, gradients = nnx.value_and_grad(lambda model: loss_of(model, batch))(model)
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(model, gradients)
        return state, loss

    def eqx_step(model: Any, batch: Any) -> Any:
        loss, gradients = eqx.filter_value_and_grad(lambda model: loss_of(jax.vmap(model), batch))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), loss

    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])
    states: list[tuple[Any, Any]] = [
        (nnx_step, (model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))),
        (eqx_step, eqx.nn.MLP(4, 2, 4, 1, key=jax.random.key(0))),
    ]
    for step, state in states:
        rows = sdc.campaign(step, state, x, loss=lambda state, value: value, injections=6, where=products, follow=2)
        assert sum(row["changed"] for row in rows) == 6
        assert {row["outcome"] for row in rows} != {"masked"}
    np.testing.assert_array_equal(model.kernel[...], kernel)
    state, where = states[0][1], argument("0/0/*")
    names = {site.name for site in sdc.sites(nnx_step, state, x[0], where=where)}
    runner = Campaign(nnx_step, state, x, observe=lambda _, value: {"loss": value}, where=where)
    assert {site.name for site in runner.sites} == names == {"arg/0/0/bias", "arg/0/0/kernel"}


class Net(eqx.Module):
    """What people keep in a module besides arrays."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    temperature: float
    times: int
    act: Any = jnp.tanh

    def __call__(self, x: Any, key: Any) -> Any:
        for _ in range(self.times):
            x = self.act(self.linear(self.dropout(x, key=key))) * self.temperature
        return x


def test_numbers_of_python_stay_what_they_are_unless_the_step_changes_them() -> None:
    def step(state: Any, batch: Any) -> Any:
        net, count = state
        x, key = batch
        loss, gradient = eqx.filter_value_and_grad(
            lambda net: jnp.mean((jax.vmap(net)(x, jax.random.split(key, 6)) - 1.0) ** 2)
        )(net)
        return (eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, gradient)), count + 1), loss

    keys = jax.random.split(jax.random.key(1), 4)
    batches = [(jnp.linspace(-1.0, 1.0, 24).reshape(6, 4), key) for key in keys]
    net = Net(eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.Dropout(0.1), 0.3, 2)
    runner = Campaign(step, (net, 0), batches, observe=lambda state, loss: {"loss": loss}, where=products, follow=1)
    own, state, plain = [], (net, jnp.int32(0)), eqx.filter_jit(step)
    for batch in batches:
        state, loss = plain(state, batch)
        own.append(float(loss))
    np.testing.assert_allclose([seen.loss for seen in runner.clean], own, rtol=1e-6)
    rows = list(runner.run(range(2)))
    assert all(row["changed"] == 1 for row in rows)


def test_arguments_are_named_as_elsewhere() -> None:
    def step(state: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] - 1.0) ** 2))(state["params"])
        return {**state, "params": {"w": state["params"]["w"] - 0.1 * gradient["w"]}}, value

    state, x = {"params": {"w": jnp.ones(8) / 8}, "name": "a"}, jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
    where = argument("0/params/*")
    names = {site.name for site in sdc.sites(step, state, x, where=where)}
    rows = sdc.campaign(step, state, [x] * 4, loss=lambda _, value: value, where=where, injections=3, follow=1)
    assert {row["site"] for row in rows} == names == {"arg/0/params/w"}


def test_a_state_that_is_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the state holds a reference .* create the reference inside the step"):
        sdc.campaign(lambda w, x: (w, jnp.sum(x)), jax.new_ref(W), BATCHES, loss=lambda state, value: value)


@pytest.mark.parametrize(
    ("step", "loss", "message"),
    [
        (lambda w, x: (w, x), None, r"loss=None: expected a function of \(state, metrics\)"),
        (lambda w, x: (w, jnp.sum(x)), lambda state: 1.0, r"expected a function of \(state, metrics\)"),
        (lambda w, x: jnp.sum(w), lambda state, value: value, r"expected a tuple \(state, metrics\)"),
        (lambda w, x: (w * 2, x), lambda state, value: value, r"loss=an array of shape \(4, 3\): expected one number"),
        (lambda w, x: (w * 2, x), lambda state, value: {"a": value}, "loss=dict of shape"),
        (lambda w, x: (w * 2, x), lambda state, value: "low", "loss=str: expected one number"),
        (lambda w, x: (w * 2, jnp.log(-jnp.sum(w**2) - 1)), lambda state, value: value, "a loss of nan at step 0"),
    ],
)
def test_a_campaign_needs_a_state_and_a_loss(step: Any, loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sdc.campaign(step, W, BATCHES, loss=loss)


def test_checked_products_are_one_more_detector() -> None:
    """It finds what strikes a product at once, unless the change is too small, and nothing that strikes elsewhere."""
    inside = list(make(where=products, faults=("scale,factor=-3",), abft=True).run(range(12)))
    found = [row["detected"]["abft"] for row in inside if row["changed"] and row["outcome"] != "masked"]
    assert found
    assert set(found) == {0}
    outside = list(make(where=primitive("sqrt"), faults=("scale,factor=-3",), abft=True).run(range(6)))
    assert [row["detected"]["abft"] for row in outside] == [None] * 6
    assert "abft" not in next(make(where=products).run([0]))["detected"]
