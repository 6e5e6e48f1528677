"""A kept step is replayed in idle time, by the executable of the step; the vendor's checker speaks by errors."""

import contextlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sdc
from sdc.guarding import Detection, Replay, VendorChecker, layers_for
from sdc.guarding.evidence import call_of
from sdc.verdict import Verdict

from .test_watch import MESH, SPLIT, WHOLE, Spoiled, W, batch, state, step

pytestmark = pytest.mark.usefixtures("free_checks")


def replayed(run: Any, steps: int = 40, idle: Any = lambda number: True) -> tuple[Any, list[Detection], Any]:
    found: list[Detection] = []
    watch = sdc.guard(run, MESH, budget=0.9, layers=[Replay()], on_finding=found.append)
    w = state()
    for number in range(steps):
        w, _ = watch(w, batch(number))
        if idle(number):
            watch.idle()
    return watch.report(), found, w


@pytest.mark.parametrize("donate", [(), (0,), (0, 1)])
def test_replays_of_healthy_steps_agree_and_change_nothing(donate: tuple[int, ...]) -> None:
    run, plain = jax.jit(step, donate_argnums=donate), state()
    report, found, w = replayed(run)
    for number in range(40):
        plain, _ = jax.jit(step)(plain, batch(number))
    np.testing.assert_array_equal(w, plain)
    assert not found
    assert report.verdict().verdict is Verdict.CLEAN
    assert report.layers[0].runs > 20
    assert report.layers[0].most_wrong_share() < 0.2


def test_a_step_that_was_wrong_once_is_found_with_its_number_and_device() -> None:
    def change(w: Any, metrics: Any) -> Any:
        if next(calls) != 30:
            return w, metrics
        shards = [jnp.asarray(shard.data) for shard in w.addressable_shards]
        shards[2] = shards[2].at[0, 0, 0].add(1e-3)
        parts = [jax.device_put(part, device) for part, device in zip(shards, MESH.devices, strict=True)]
        return jax.make_array_from_single_device_arrays(w.shape, WHOLE, parts), metrics

    calls = itertools.count()
    report, found, _ = replayed(Spoiled(jax.jit(step), change))
    assert report.verdict().verdict is Verdict.CORRUPT
    assert len(found) == 1
    assert found[0].devices == ("cpu:2",)
    assert found[0].what == "result/0 differs from the replay of the step"
    assert 14 <= found[0].step <= 30  # two calls for each step that is kept


def test_a_result_that_is_wrong_on_all_devices_names_none() -> None:
    def change(w: Any, metrics: Any) -> Any:
        return w, {"loss": metrics["loss"] * (2 if next(calls) == 30 else 1)}

    calls = itertools.count()
    found = replayed(Spoiled(jax.jit(step), change))[1]
    assert [one.devices for one in found] == [()]
    assert "result/1/loss differs" in found[0].what


def test_without_idle_time_one_step_is_kept_and_nothing_is_claimed() -> None:
    report, found, _ = replayed(jax.jit(step), idle=lambda number: False)
    assert report.layers[0].runs == 0
    assert report.layers[0].most_wrong_share() == 1
    assert report.verdict().verdict is Verdict.INCONCLUSIVE
    report, found, _ = replayed(jax.jit(step), idle=lambda number: number % 8 == 0)
    assert 2 <= report.layers[0].runs <= 5
    assert not found


def test_idle_without_anything_to_do() -> None:
    watch = sdc.guard(jax.jit(step), MESH, budget=0.9)
    assert not watch.idle()
    watch(state(), batch(0))
    assert not watch.idle()


def test_a_failing_replay_stops_and_training_goes_on() -> None:
    def change(w: Any, metrics: Any) -> Any:
        if idling:
            raise RuntimeError("out of memory")
        return w, metrics

    idling: list[int] = []
    watch, w = sdc.guard(Spoiled(jax.jit(step), change), MESH, budget=0.9, layers=[Replay()]), state()
    for number in range(20):
        w, _ = watch(w, batch(number))
        idling.append(number)
        assert not watch.idle()
        idling.clear()
    assert watch.report().layers[0].why_not == "it failed (RuntimeError: out of memory)"
    assert watch.report().layers[0].runs == 0
    assert watch.report().verdict().verdict is Verdict.INCONCLUSIVE


def test_objects_are_replayed_and_references_are_not() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    @nnx.jit
    def train(model: Model, x: Any) -> Any:
        value, gradient = nnx.value_and_grad(lambda model: jnp.mean(jnp.tanh(model.linear(x)) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradient))
        return value

    model, plain = Model(), Model()
    watch = sdc.guard(train, budget=0.9, layers=[Replay()])
    for number in range(30):
        x = jax.random.normal(jax.random.key(number), (4, 8))
        assert watch(model, x) == train(plain, x)
        watch.idle()
    assert watch.report().layers[0].runs > 15
    assert watch.report().verdict().verdict is Verdict.CLEAN, str(watch.report())

    @jax.jit
    def descend(ref: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(ref[...])
        ref[...] -= 0.1 * gradient
        return {"loss": value}

    ref = jax.new_ref(W[0])
    watch = sdc.guard(descend, budget=0.9, layers=[Replay()])
    for number in range(30):
        watch(ref, jax.random.normal(jax.random.key(number), (4, 8)))
        watch.idle()
    assert watch.report().layers[0].why_not == "the step changes references, whose contents it does not compare"


@pytest.mark.parametrize("nothing", [None, ()])
def test_a_step_without_results_is_not_replayed(nothing: Any) -> None:
    watch = sdc.guard(jax.jit(lambda w: nothing), budget=0.9, layers=[Replay()])
    for _ in range(8):
        watch(W)
        assert not watch.idle()
    assert watch.report().layers[0].why_not == "the step has no result that could be compared"
    assert watch.report().verdict().verdict is Verdict.INCONCLUSIVE


def test_a_step_that_raises_is_kept_no_longer() -> None:
    def change(w: Any, metrics: Any) -> Any:
        if not idling and next(calls) % 4 == 1:
            raise RuntimeError("lost a link")
        return w, metrics

    class Judged(Replay):
        def judge(self, found: Any, step: int) -> list[Detection]:
            judged.append(step)
            return super().judge(found, step)

    calls, judged, idling = itertools.count(), list[int](), list[int]()
    watch, w = sdc.guard(Spoiled(jax.jit(step), change), MESH, budget=0.9, layers=[Judged()]), state()
    for number in range(60):
        with contextlib.suppress(RuntimeError):
            w, _ = watch(w, batch(number))
        idling.append(number)
        watch.idle()
        idling.clear()
    assert 10 < watch.report().layers[0].runs == len(judged)
    assert not watch.report().findings


def test_simulated_faults_strike_replays_anew() -> None:
    faults = [sdc.Fault(sdc.faults.BitFlip(bits=(22,)), 1e-3, sdc.program.products)]

    def faulty(w: Any, x: Any, key: Any) -> Any:
        return sdc.inject(step, faults)(sdc.Moment(key, jnp.int32(0)), w, x)[0]

    keys = itertools.count(1)
    found: list[Detection] = []
    watch = sdc.guard(
        jax.jit(faulty), MESH, budget=0.9, layers=[Replay()], on_finding=found.append,
        rekey=lambda w, x, key: (w, x, jax.random.fold_in(key, next(keys))),
    )  # fmt: skip
    w = state()
    for number in range(30):
        w, _ = watch(w, jax.device_put(batch(number), SPLIT), jax.random.key(number))
        watch.idle()
    assert len({one.step for one in found}) > 10
    assert watch.verdict().verdict is Verdict.CORRUPT


def test_the_checker_of_the_vendor_is_for_tpus_and_speaks_by_errors() -> None:
    layer, call = VendorChecker(), call_of(step, (state(), batch(0)), {}, objects=False)
    layer.prepare(call)
    assert layer.why_not == "XLA has no checker for cpu, only for TPUs"
    assert "vendor" not in [one.name for one in layers_for(MESH, "data")]

    def halted(arrays: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: SDC detected in fusion.3\nmore")

    layer.run = halted
    assert [str(one) for one in layer.judge(layer.before(call), 7)] == [
        "step 7, vendor: the checker of XLA raised: INTERNAL: SDC detected in fusion.3"
    ]
    layer.run = jax.jit(call.run)
    assert layer.before(call) is None


def test_a_step_that_was_kept_for_another_form_of_the_arguments_does_not_count() -> None:
    watch, w = sdc.guard(jax.jit(step), MESH, budget=0.9, layers=[Replay()]), state()
    for number in range(160):  # after 100 steps of the other form, the checks are prepared for it
        w, _ = watch(w, batch(number)[: 8 if number < 20 else 4])
    assert watch.report().layers[0].runs == 0
