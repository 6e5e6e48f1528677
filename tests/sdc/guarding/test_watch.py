"""A watched step is the step; each layer finds what it says it sees, and says why it cannot run."""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sdc
from sdc.faults import BitFlip
from sdc.guarding import Checksums, Detection, NotRepeatable, Recomputation, Ring, Spikes, State
from sdc.guarding.evidence import call_of
from sdc.guarding.spikes import RankValues
from sdc.guarding.state import odd_ones
from sdc.program import direction, products
from sdc.verdict import Verdict

pytestmark = pytest.mark.usefixtures("free_checks")
MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
WHOLE, SPLIT = NamedSharding(MESH, P()), NamedSharding(MESH, P("data"))
SIMULATED = sdc.Moment(jax.random.key(0), jnp.int32(0))


def loss(w: Any, x: Any) -> Any:
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
    return jnp.mean(lax.scan(lambda x, w: (layer(w, x), None), x, w)[0] ** 2)


def step(w: Any, x: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, {"loss": value}


W = jax.random.normal(jax.random.key(0), (2, 8, 8)) / 3


def batch(number: int) -> Any:
    return jax.device_put(jax.random.normal(jax.random.key(number), (8, 8)), SPLIT)


def state() -> Any:
    return jax.device_put(jnp.copy(W), WHOLE)


class Spoiled:
    """A compiled step whose results something changes."""

    def __init__(self, step: Any, change: Callable[[Any, Any], Any]) -> None:
        self.step, self.lower, self.change = step, step.lower, change

    def __call__(self, w: Any, x: Any) -> Any:
        return self.change(*self.step(w, x))


def watched(step: Callable[..., Any], layers: Any, steps: int = 30, **settings: Any) -> tuple[Any, list[Detection]]:
    found: list[Detection] = []
    watch = sdc.guard(step, MESH, budget=0.9, layers=layers, on_finding=found.append, **settings)
    w = state()
    for number in range(steps):
        w, _ = watch(w, batch(number))
    return watch.report(), found


def test_a_healthy_step_is_clean_and_unchanged() -> None:
    run, w, plain = jax.jit(step, donate_argnums=0), state(), state()
    watch = sdc.guard(run, MESH, budget=0.5)
    for number in range(40):
        w, _ = watch(w, batch(number))
        plain, _ = run(plain, batch(number))
    np.testing.assert_array_equal(w, plain)
    report = watch.report()
    assert report.verdict() == watch.verdict()
    assert report.verdict().verdict is Verdict.CLEAN
    assert not report.findings
    assert all(layer.runs or not layer.cost for layer in report.layers)
    text = str(report)
    assert "with 95 % confidence" in text
    assert "witness: " in text


def faulty(where: Any, **moment: Any) -> Callable[..., Any]:
    """A step on simulated faulty hardware."""
    fault = sdc.Fault(BitFlip(bits=(22,)), 0.3, where)

    def injected(w: Any, x: Any) -> Any:
        return sdc.inject(step, [fault])(SIMULATED, w, x)[0]

    return injected


def test_the_witness_finds_a_wrong_forward_product() -> None:
    layer = Recomputation()
    healthy = Recomputation()
    report, found = watched(step, [healthy])
    assert not found
    # Calibrated on healthy hardware, which fails later.
    run = jax.jit(lambda *arrays: (None, sdc.witness(faulty(products & direction("fwd")))(*arrays)[1]))

    class Fails(Recomputation):
        def before(self, call: Any) -> Any:
            return [run(*call.arrays)[1], super().before(call)[0]]  # an intermittent fault

    report, found = watched(step, [Fails()])
    assert report.verdict().verdict is Verdict.CORRUPT
    assert {finding.layer for finding in found} == {"witness"}
    assert "fwd/jvp()/dot_general" in found[0].what
    assert "test_watch.py" in found[0].what
    assert layer.name in str(report)


@pytest.mark.parametrize("device", range(4))
def test_the_witness_names_the_device_under_automatic_sharding(device: int) -> None:
    """A fault of one device, whose rows of the batch are wrong in one of two runs."""

    class Fails(Recomputation):
        def before(self, call: Any) -> Any:
            assert self.calibration is not None
            *rest, x = call.arrays
            rows = x.shape[0] // MESH.size
            wrong = x.at[device * rows].add(1e-3)
            both = x, jax.device_put(wrong, x.sharding)
            return [jax.device_get(self.calibration.run(*rest, each)[1]) for each in both]

    report, found = watched(step, [Fails(mesh=MESH)], steps=8)
    assert report.verdict().verdict is Verdict.CORRUPT
    name = MESH.devices.flat[device]
    assert {finding.devices for finding in found} == {(f"{name.platform}:{name.id}",)}


def test_checksums_find_a_wrong_product() -> None:
    report, found = watched(faulty(products & direction("bwd")), [Checksums()], steps=12)
    assert report.verdict().verdict is Verdict.CORRUPT
    assert "disagree with their checksums" in found[0].what


def test_without_recomputations_the_witness_says_so_and_nothing_is_clean() -> None:
    report, found = watched(lambda w, x: (w * 0.9, {"loss": jnp.sum(x)}), [Recomputation(), Checksums()])
    assert report.verdict().verdict is Verdict.INCONCLUSIVE
    assert not found
    assert [layer.runs for layer in report.layers] == [0, 0]
    assert "computes nothing twice" in report.layers[0].why_not
    assert "not run: " in str(report)


@pytest.mark.parametrize("device", range(4))
def test_neighbours_find_a_device_whose_fault_repeats(device: int) -> None:
    def with_fault(at: int) -> Callable[..., Any]:
        def body(w: Any, x: Any) -> Any:
            value, gradient = jax.value_and_grad(loss)(w, x)
            wrong = jnp.where(lax.axis_index("data") == at, gradient * 1.001, gradient)
            return w - 0.1 * lax.pmean(wrong, "data"), {"loss": lax.pmean(value, "data")}

        return jax.shard_map(body, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)

    class Fails(Ring):
        """A device that becomes faulty after calibration; on the rotated mesh, it has the next place."""

        def prepare(self, call: Any) -> None:
            super().prepare(call)
            healthy, faults = (self.run, self.run_rotated), (with_fault(device), with_fault((device + 1) % 4))
            self.run, self.run_rotated = (functools.partial(self.fails, jax.jit(fault)) for fault in faults)
            self.checks = 100  # after those that belong to the calibration
            assert all(healthy)

        def fails(self, run: Any, *arrays: Any) -> Any:
            return jax.tree.leaves(run(*(jax.device_put(x, NamedSharding(MESH, x.sharding.spec)) for x in arrays)))

    ring = Ring(MESH, "data")
    report, found = watched(with_fault(-1), [ring], steps=12)
    assert ring.rotated.devices.tolist() == [MESH.devices[number - 1] for number in range(4)]
    assert report.layers[0].about == "2 of 2 results"
    assert not found
    report, found = watched(with_fault(-1), [Fails(MESH, "data")], steps=12)
    assert report.verdict().verdict is Verdict.CORRUPT
    assert found[0].devices == ()  # the mean carries the error to all devices


def test_replicas_that_differ_are_found_on_their_device() -> None:
    def change(w: Any, metrics: Any) -> Any:
        shards = [jnp.asarray(shard.data) for shard in w.addressable_shards]
        shards[2] = shards[2].at[0, 0, 0].add(1e-3)
        parts = [jax.device_put(part, device) for part, device in zip(shards, MESH.devices, strict=True)]
        return jax.make_array_from_single_device_arrays(w.shape, WHOLE, parts), metrics

    report, found = watched(Spoiled(jax.jit(step), change), [State()], steps=40)
    assert report.verdict().verdict is Verdict.CORRUPT
    assert found[0].devices == ("cpu:2",)
    assert found[0].layer == "replicas"


def test_memory_that_changes_between_steps_is_found() -> None:
    found: list[Detection] = []
    watch = sdc.guard(jax.jit(step), MESH, budget=0.9, layers=[State()], on_finding=found.append)
    w = state()
    for number in range(60):
        w, _ = watch(w, batch(number))
        if watch.steps > 10 and not found:
            jax.block_until_ready(w)
            address = w.addressable_shards[1].data.unsafe_buffer_pointer()
            ctypes.cast(address, ctypes.POINTER(ctypes.c_uint32))[5] ^= 1 << 3
    watch.report()
    kinds = {finding.layer for finding in found}
    assert "at rest" in kinds
    assert all(finding.devices == ("cpu:1",) for finding in found if finding.layer == "at rest")


def test_odd_ones_are_the_minority() -> None:
    digests = np.zeros((4, 2, 2), np.uint32)
    digests[3, 1] = 7
    np.testing.assert_array_equal(np.argwhere(odd_ones(digests, (0,))), [[3, 1]])
    np.testing.assert_array_equal(np.argwhere(odd_ones(digests, (0, 1))), [[3, 1]])
    assert odd_ones(digests[:, :1], (0,)).sum() == 0
    assert odd_ones(digests[2:], (0,)).sum() == 2  # one of each: no majority


def test_spikes_are_a_suspicion_and_no_verdict() -> None:
    def change(w: Any, metrics: Any) -> Any:
        return w, {"loss": metrics["loss"] * (1000 if next(count) == 60 else 1)}

    count = iter(range(1000))
    report, found = watched(Spoiled(jax.jit(step), change), [Spikes(limit=100), State()], steps=80)
    assert [finding.step for finding in found] == [60]
    assert not found[0].proof
    assert report.verdict().verdict is Verdict.INCONCLUSIVE


def test_a_value_that_is_not_finite_is_a_suspicion() -> None:
    layer = Spikes()
    assert layer.judge({"loss": jnp.float32(jnp.nan)}, 3)[0].step == 3


def test_flax_objects_among_the_arguments_are_left_alone() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.int32(0))

        def __call__(self, x: Any) -> Any:
            self.calls[...] += 1
            return jnp.tanh(self.linear(x))

    @nnx.jit
    def train(model: Model, x: Any) -> Any:
        value, gradient = nnx.value_and_grad(lambda model: jnp.mean(nnx.remat(Model.__call__)(model, x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradient))
        return value

    model, plain = Model(), Model()
    watch = sdc.guard(train, MESH, budget=0.5)
    for number in range(30):
        x = jax.random.normal(jax.random.key(number), (4, 8))
        assert watch(model, x) == train(plain, x)
    assert int(model.calls[...]) == int(plain.calls[...]) == 30
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(plain))
    report = watch.report()
    assert report.verdict().verdict is Verdict.CLEAN, str(report)
    assert next(layer.about for layer in report.layers if layer.name == "abft").startswith(
        "3 products"
    )  # of both passes


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget=1\.5"):
        sdc.guard(step, MESH, budget=1.5)
    with pytest.raises(ValueError, match="different names"):
        sdc.guard(step, MESH, layers=[State(), State()])
    wrong: dict[str, Any] = {"mesh": "data", "on_finding": "print", "layers": ["abft"]}
    for name, value in wrong.items():
        with pytest.raises(TypeError, match=rf"^{name}.*{value if isinstance(value, str) else value[0]}"):
            sdc.guard(step, **{name: value})
    for mesh, axis, problem in (
        (None, "data", "no mesh"),
        (MESH, "model", "axis 'model'"),
        (jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]), "data", "one device"),
    ):
        layer = Ring(mesh, axis)
        watch = sdc.guard(jax.jit(step), mesh, axis=axis, layers=[layer], budget=0.5)
        watch(W, jnp.ones((8, 8)))
        assert problem in watch.report().layers[0].why_not


def test_simulated_faults_are_marked_if_the_step_returns_their_events() -> None:
    fault = sdc.Fault(BitFlip(bits=(22,)), 0.3, products)
    report, found = watched(lambda w, x: sdc.inject(step, [fault])(SIMULATED, w, x)[0], [Checksums()], steps=12)
    assert found
    assert not report.simulated
    watch = sdc.guard(lambda w, x: sdc.inject(step, [fault])(SIMULATED, w, x), budget=0.9, layers=[Checksums()])
    for number in range(12):
        watch(state(), batch(number))
    report = watch.report()
    assert report.findings
    assert report.verdict() == watch.verdict()
    assert report.verdict().reason.startswith("with simulated faults, step ")
    assert ", with simulated faults" in str(report)
    assert "without a finding" not in str(report)  # of the only layer, which has findings
    assert "paid in advance" in str(dataclasses.replace(report, overhead=2.0))


def test_a_guard_that_never_ran_is_inconclusive() -> None:
    report = sdc.guard(step, MESH).report()
    assert report.verdict().verdict is Verdict.INCONCLUSIVE
    assert report.steps == 0


def test_steps_with_other_shapes_are_not_checked_until_they_last() -> None:
    run, layer = jax.jit(step), Recomputation()
    watch = sdc.guard(run, MESH, budget=0.9, layers=[layer])
    w = state()
    for number in range(40):
        x = jax.random.normal(jax.random.key(number), (8 if number % 2 else 4, 8))
        w, _ = watch(w, jax.device_put(x, SPLIT))
    [report] = watch.report().layers
    assert report.steps[0] >= 18  # half of them, after the warm-up
    assert report.runs + report.steps[0] == sum(report.steps.values())
    for number in range(120):
        w, _ = watch(w, jax.device_put(jax.random.normal(jax.random.key(number), (16, 8)), SPLIT))
    assert watch.report().layers[0].runs > report.runs + 10
    assert not watch.report().findings


def test_a_layer_that_fails_stops_and_training_goes_on() -> None:
    class Broken(Checksums):
        name = "broken"

        def before(self, call: Any) -> Any:
            if next(count) > 5:
                raise RuntimeError("out of memory\nand more")
            return super().before(call)

    count = iter(range(1000))
    report, found = watched(step, [Broken(), State()], steps=30)
    assert report.layers[0].why_not == "it failed (RuntimeError: out of memory)"
    assert report.layers[0].runs <= 6  # the one that failed, and all later ones, do not count
    assert report.layers[0].steps[0] >= 20
    assert report.layers[1].runs > 10
    assert not found
    assert report.steps == 30


def test_results_may_change_their_structure() -> None:
    def change(w: Any, metrics: Any) -> Any:
        return w, {**metrics, **({"other": jnp.float32(1)} if next(count) % 3 else {"more": {"a": jnp.ones(3)}})}

    count = iter(range(1000))
    report, found = watched(Spoiled(jax.jit(step), change), [Spikes(), State()], steps=80)
    assert not found
    assert not any(layer.why_not for layer in report.layers)


def test_what_differs_in_the_same_way_twice_is_no_proof() -> None:
    run = jax.jit(lambda *arrays: (None, sdc.witness(faulty(products & direction("fwd")))(*arrays)[1]))

    class Recurs(Recomputation):
        def before(self, call: Any) -> Any:
            return [run(*call.arrays)[1] for _ in range(2)]

    layer = Recurs()
    report, found = watched(step, [layer], steps=15)
    assert not found  # XLA may compute the two passes differently: it belongs to the calibration
    assert layer.recurring == {"fwd/jvp()/dot_general"}
    layer = Recurs()
    layer.checks = 100
    report, found = watched(step, [layer], steps=15)
    assert [finding.proof for finding in found] == [False]
    assert "compared no more" in found[0].what
    assert report.verdict().verdict is Verdict.INCONCLUSIVE


def test_a_step_with_side_effects_is_not_run_again() -> None:
    def logging(w: Any, x: Any) -> Any:
        jax.debug.callback(lambda value: calls.append(value), jnp.sum(x))
        return step(w, x)

    calls: list[Any] = []
    report, _ = watched(jax.jit(logging), [Recomputation(), Checksums(), Ring(MESH, "data"), State()], steps=12)
    jax.effects_barrier()
    assert len(calls) == 12
    assert all("DebugEffect, which a check would repeat" in layer.why_not for layer in report.layers[:3])
    assert report.layers[3].runs > 3


def test_donated_scalars_and_local_metrics_do_no_harm() -> None:
    @functools.partial(jax.jit, donate_argnums=0)
    def scaled(state: Any, x: Any) -> Any:
        w, metrics = step(state["w"], x)
        local = jax.shard_map(
            lambda x: jnp.tile(x, (32, 1)), mesh=MESH, in_specs=P("data"), out_specs=P(), check_vma=False
        )(x)
        return {"w": w, "scale": state["scale"] * 0.999}, {**metrics, "local": local}

    found: list[Detection] = []
    watch = sdc.guard(scaled, MESH, budget=0.9, layers=[Spikes(), State()], on_finding=found.append)
    given = {"w": state(), "scale": jax.device_put(jnp.float32(1), WHOLE)}
    for number in range(60):
        given, _ = watch(given, batch(number))
    assert not found
    assert not any(layer.why_not for layer in watch.report().layers)
    assert [layer.runs > 30 for layer in watch.report().layers] == [True, True]


def test_python_numbers_are_constants_and_nothing_is_kept() -> None:
    @functools.partial(jax.jit, static_argnums=2)
    def powered(w: Any, x: Any, power: int) -> Any:
        return step(w**power, x)

    watch = sdc.guard(powered, MESH, budget=0.9, layers=[Recomputation(), Checksums()])
    w = state()
    for number in range(12):
        w, _ = watch(w, batch(number), 1)
    assert all(layer.runs > 3 for layer in watch.report().layers)
    gc.collect()
    assert sum(x.shape == (8, 8) for x in jax.live_arrays()) <= 1  # not the first batch


def test_inside_jit_and_compiled_programs_are_refused() -> None:
    watch = sdc.guard(step, MESH)
    with pytest.raises(ValueError, match="inside jit"):
        jax.jit(watch)(W, jnp.ones((8, 8)))
    with pytest.raises(TypeError, match="pass the jitted function"):
        sdc.guard(jax.jit(step).lower(W, jnp.ones((8, 8))).compile())


def test_a_step_that_no_longer_repeats_itself_is_evidence() -> None:
    class Changed(Recomputation):
        def prepare(self, call: Any) -> None:
            if next(count):
                raise NotRepeatable("the step computed other bits from the same inputs")
            super().prepare(call)

    count, found = iter(range(10)), []
    watch = sdc.guard(jax.jit(step), MESH, budget=0.9, layers=[Changed()], on_finding=found.append)
    w = state()
    for number in range(140):
        x = jax.random.normal(jax.random.key(number), (8 if number < 30 else 16, 8))
        w, _ = watch(w, jax.device_put(x, SPLIT))
    assert watch.verdict().verdict is Verdict.CORRUPT
    assert [finding.layer for finding in found] == ["witness"]


def test_neighbours_exclude_early_what_depends_on_the_order_of_a_sum() -> None:
    layer = Ring(MESH, "data")
    zeros, ones = np.zeros((4, 2), np.uint32), np.ones((4, 2), np.uint32)
    layer.compared, layer.sizes = [True, True], [1, 3]
    assert not layer.judge(([zeros, zeros], [zeros, ones]), 0)
    assert (layer.compared, layer.coverage, layer.why_not) == ([True, False], 0.25, "")  # of the elements
    assert not layer.judge(([zeros, zeros], [ones, ones]), 1)
    assert "order of a reduction" in layer.why_not


def test_references_on_explicit_axes_are_left_alone() -> None:
    """As in JAX's own training cookbook: a state of references, which the step changes, on a mesh that is set."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    layer = jax.checkpoint(lambda h, w: jax.nn.relu(h @ w))  # a custom derivative, whose parameters are functions

    @jax.jit
    def descend(state: Any, x: Any) -> Any:
        w = state["w"][...]
        value, gradient = jax.value_and_grad(
            lambda w: jnp.mean(lax.scan(lambda h, w: (layer(h, w), None), x, w)[0] ** 2)
        )(w)
        state["w"][...] = w - 0.1 * gradient
        return {"loss": value}

    with jax.set_mesh(mesh):
        states = [{"w": jax.new_ref(jax.device_put(W, P()))} for _ in range(2)]
        layers = [Recomputation(), Checksums(), Ring(mesh, "data"), State()]
        watch = sdc.guard(descend, mesh, budget=0.9, layers=layers)
        for number in range(12):
            x = jax.device_put(jax.random.normal(jax.random.key(number), (8, 8)), P("data"))
            watch(states[0], x)
            descend(states[1], x)
        np.testing.assert_array_equal(states[0]["w"][...], states[1]["w"][...])
        report = watch.report()
    assert not report.findings
    assert [bool(layer.why_not) for layer in report.layers] == [False, False, False, True], str(report)
    assert all(layer.runs > 5 for layer in report.layers[:3])
    assert report.layers[1].about.startswith("4 products")  # of both passes


def test_values_of_ranks_far_from_the_others_are_a_suspicion() -> None:
    draw = np.random.default_rng(0)
    known = RankValues()
    for _ in range(2_000):
        assert not known.outliers(draw.normal(size=8) + 10 * draw.normal())  # of healthy ranks, which vary together
    assert list(known.outliers(np.array([0.0, 0.1, 30.0, -0.1, 0.2, 0.0, 0.1, 0.0]))) == [2]
    assert not known.outliers(np.array([0.0, 0.1, 31.0, -0.1, 0.2, 0.0, 0.1, 0.0]))  # reported already
    assert known.outliers(np.array([0.0, np.nan, 0.2, -0.1, 0.2, 0.0, 0.1, 0.0])) == {1: np.inf}
    assert not known.outliers(np.full(8, np.nan))
    for _ in range(200):
        assert not RankValues().outliers(draw.normal(size=8) * 1e6)  # nothing is known yet
    known = RankValues()
    assert not any(known.outliers(np.zeros(8)) for _ in range(100))


def test_growth_of_a_rank_is_watched_on_request() -> None:
    def with_growth(w: Any, x: Any, faulty: Any) -> Any:
        def growth(x: Any) -> Any:
            own = jnp.mean(jnp.abs(x)) * jnp.where((lax.axis_index("data") == 2) & faulty, 1000, 1)
            return own[None]

        mapped = jax.shard_map(growth, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        return *step(w, x), mapped(x)

    run = jax.jit(with_growth)
    for layer, names in ((Spikes(), ()), (Spikes(ranks=("result/2", "2")), ("rank 2",))):
        found: list[Detection] = []
        watch, w = sdc.guard(run, MESH, budget=0.9, layers=[layer], on_finding=found.append), state()
        for number in range(60):
            w, *_ = watch(w, batch(number), jnp.bool_(number == 50))
        watch.report()
        assert [one.devices for one in found] == [(name,) for name in names]
        assert [one.step for one in found] == [50] * len(names)
        assert watch.verdict().verdict is Verdict.INCONCLUSIVE


def test_residuals_of_a_device_far_from_those_of_others_are_a_suspicion() -> None:
    def of_device(w: Any, x: Any) -> Any:
        return x @ w

    mapped = jax.shard_map(of_device, mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    layer = Checksums()
    layer.prepare(call_of(mapped, (W[0], batch(0)), {}, objects=False))
    assert not layer.why_not
    for number in range(50):
        flags = layer.before(call_of(mapped, (W[0], batch(number)), {}, objects=False))
        assert not layer.judge(flags, number)
    [name] = flags
    small = flags[name]._replace(first_margin=jnp.array([0.3, 0.3, 0.3, 0.0]))
    assert not layer.judge(sdc.program.Reports(flags.sites, [small]), 50)
    odd = flags[name]._replace(first_margin=flags[name].first_margin.at[1].set(1e30))
    [suspicion] = layer.judge(sdc.program.Reports(flags.sites, [odd]), 50)
    assert suspicion.devices == ("data=1",)
    assert not suspicion.proof
    assert "residuals of checksums" in suspicion.what


def test_calls_that_raise_are_steps_and_never_count_twice() -> None:
    def change(w: Any, metrics: Any) -> Any:
        if not isinstance(w, jax.core.Tracer) and next(calls) % 3:
            raise RuntimeError("lost a link")
        return w, metrics

    calls, w = itertools.count(), state()
    watch = sdc.guard(Spoiled(jax.jit(step), change), MESH, budget=0.9, layers=[Checksums()])
    for number in range(60):
        with contextlib.suppress(RuntimeError):
            w, _ = watch(w, batch(number))
    [layer] = watch.report().layers
    assert watch.report().steps == sum(layer.steps.values()) == 60
    assert all(count >= 0 for count in layer.steps.values())
    assert 0 < layer.most_wrong_share() < 1


def test_checks_that_could_not_be_judged_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(State):
        name, bounds = "late", True

        def prepare(self, call: Any) -> None:
            self.coverage = 1.0

        def cost(self, call: Any) -> Any:
            return None

        def before(self, call: Any) -> Any:
            return [slow]

        def after(self, out: Any, given: Any) -> Any:
            return None

        def judge(self, found: Any, step: int) -> list[Detection]:
            raise RuntimeError("device lost")

    slow = jnp.ones(3)
    monkeypatch.setattr(type(slow), "is_ready", lambda self: self is not slow)
    layer = Late()
    watch, w = sdc.guard(jax.jit(step), MESH, budget=0.9, layers=[layer]), state()
    for number in range(15):
        w, _ = watch(w, batch(number))
    report = watch.report()
    assert report.layers[0].runs == 0
    assert report.layers[0].most_wrong_share() == 1
    assert report.verdict().verdict is Verdict.INCONCLUSIVE


def test_the_least_coverage_holds_for_all_forms_of_the_arguments() -> None:
    class Covers(Checksums):
        def prepare(self, call: Any) -> None:
            super().prepare(call)
            self.coverage = 0.2 if call.arrays[1].shape[0] == 8 else 0.9

    watch, w = sdc.guard(jax.jit(step), MESH, budget=0.9, layers=[Covers()]), state()
    for number in range(160):
        w, _ = watch(w, batch(number)[: 8 if number < 40 else 4])
    report = watch.report()
    assert report.layers[0].runs > 50
    assert report.layers[0].coverage == 0.2
    assert report.verdict().verdict is Verdict.INCONCLUSIVE


def test_findings_are_kept_if_the_callback_raises() -> None:
    def stop(finding: Detection) -> None:
        raise KeyboardInterrupt

    layer, watch = Spikes(), sdc.guard(step, MESH, layers=[], on_finding=stop)
    with pytest.raises(KeyboardInterrupt):
        watch._found(layer.judge({"a": jnp.float32(jnp.nan), "b": jnp.float32(jnp.nan)}, 3))
    assert len(watch.report().findings) == 2


@pytest.mark.parametrize(
    ("rekey", "arguments", "problem"),
    [
        (lambda w, x: (w, x, x), {}, "another structure, shape or type"),
        (lambda w, x: (x, w), {}, "another structure, shape or type"),
        (lambda w, x: (w.astype(jnp.bfloat16), x), {}, "another structure, shape or type"),
        (lambda w: (w,), {"x": jnp.ones((8, 8))}, "the arrays x by name"),
        (lambda w, x: (w,), {}, "another structure, shape or type"),
    ],
)
def test_another_key_must_leave_the_arguments_as_they_are(rekey: Any, arguments: Any, problem: str) -> None:
    watch = sdc.guard(step, budget=0.9, layers=[Checksums()], rekey=rekey)
    with pytest.raises(ValueError, match=problem):
        watch(W, *(() if arguments else (jnp.ones((8, 8)),)), **arguments)
    number: Any = 5
    with pytest.raises(TypeError, match="rekey=5"):
        sdc.guard(step, rekey=number)
