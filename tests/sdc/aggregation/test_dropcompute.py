"""Accumulation that stops: against plain NumPy, on a real clock, replayed bit for bit, and with nothing completed."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, PartitionSpec as P

from sdc.aggregation import (
    Resampling,
    Stopwatch,
    Sum,
    accumulate,
    combine,
    completed_before,
    dropcompute,
    gradient_sum,
    masked,
    skip_empty,
)
from sdc.aggregation.delays import BoundedLogNormal
from sdc.aggregation.speedup import completed
from sdc.aggregation.synchronization import paft_sync, replica_mean

from .placements import AXIS, PLACEMENTS, bits, equal_replicas, place

WORKERS, MICRO_BATCHES = 4, 5


def loss(theta: Any, batch: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(batch @ theta["a"]) @ theta["b"] - 1.0))


def theta() -> Any:
    return {"a": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.linspace(0.1, 0.4, 4)[:, None]}


def micro_batches(workers: int = WORKERS) -> np.ndarray:
    return np.asarray(jax.random.normal(jax.random.key(0), (workers, MICRO_BATCHES, 6, 3)))


def one_worker(batch: Any, count: Any, correction: Any = "none") -> Any:
    total = masked(accumulate(loss), gradient_sum(theta()), batch, count, theta())
    return combine(total, AXIS, count, MICRO_BATCHES, correction=correction, drop_rate=0.25)


@functools.cache
def gradients() -> Any:
    """Loss and gradient of every worker's every micro-batch."""
    return jax.jit(jax.vmap(jax.vmap(lambda batch: jax.value_and_grad(loss)(theta(), batch))))(micro_batches())


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("correction", ["none", "rate", "count"])
def test_combined_is_the_sum_of_what_was_completed(correction: str, placement: str) -> None:
    counts = np.array([5, 0, 3, 1], np.int32)
    found = place(functools.partial(one_worker, correction=correction), placement, WORKERS)(micro_batches(), counts)
    values, each = gradients()
    mask = np.arange(MICRO_BATCHES) < counts[:, None]
    divisor = {"none": 20, "rate": 20 / 0.75, "count": 9}[correction]
    for name, leaf in each.items():
        expected = (np.asarray(leaf) * mask[..., None, None]).sum(axis=(0, 1)) / divisor
        np.testing.assert_allclose(found.gradient[name][0], expected, rtol=1e-5, atol=1e-7)
    assert found.completed.tolist() == [9] * 4
    assert not found.empty.any()
    np.testing.assert_allclose(found.loss, (np.asarray(values) * mask).sum() / 9, rtol=1e-5)
    assert equal_replicas(found)


@pytest.mark.parametrize("count", [2, jnp.int32(2)])
def test_a_constant_count_adds_gradients_up_once(count: Any) -> None:
    """The type checker takes parameters and count to be equal on all workers; the derivative is still one worker's."""

    def step(params: Any, batch: Any) -> Any:
        return combine(masked(accumulate(loss), gradient_sum(params), batch[0], count, params), AXIS, count, 5).gradient

    mesh = Mesh(np.asarray(jax.devices()[:WORKERS]), (AXIS,))
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P()))
    found = run(theta(), micro_batches())
    for name, leaf in gradients()[1].items():
        np.testing.assert_allclose(found[name], np.asarray(leaf)[:, :2].sum(axis=(0, 1)) / 20, rtol=1e-5, atol=1e-7)


def test_nothing_completed_leaves_the_step_out() -> None:
    optimizer = skip_empty(optax.sgd(0.1, momentum=0.9))

    def step(params: Any, state: Any, batch: Any, count: Any) -> Any:
        total = masked(accumulate(loss), gradient_sum(params), batch, count, params)
        found = combine(total, AXIS, count, MICRO_BATCHES, correction="count")
        updates, state = optimizer.update(found.gradient, state, params, empty=found.empty)
        return optax.apply_updates(params, updates), state, found

    run = place(step, "vmap", WORKERS)
    state = place(lambda _: (theta(), optimizer.init(theta())), "vmap", WORKERS)(jnp.arange(WORKERS))
    *before, _ = run(*state, micro_batches(), jnp.full(WORKERS, 2, jnp.int32))
    *after, found = run(*before, micro_batches(), jnp.zeros(WORKERS, jnp.int32))
    assert found.empty.all()
    assert np.isnan(found.loss).all()
    assert after[1].skipped.tolist() == [1] * 4
    jax.tree.map(np.testing.assert_array_equal, (after[0], after[1].inner), (before[0], before[1].inner))


def test_a_thousand_simulated_workers_in_one_program() -> None:
    """2,048 workers: the mask comes from sampled latencies, in the program, and counts as the theory does."""
    model = BoundedLogNormal(1.0)

    def one(key: Any) -> Any:
        latencies = model.sample(key, (12,))
        count = completed_before(latencies, 15.0)
        batch = jax.random.normal(key, (12, 2, 3))
        total = masked(accumulate(loss), gradient_sum(theta()), batch, count, theta())
        return combine(total, AXIS, count, 12).completed, count, latencies

    total, counts, latencies = jax.jit(jax.vmap(one, axis_name=AXIS))(jax.random.split(jax.random.key(0), 2048))
    assert np.asarray(counts).tolist() == completed(np.asarray(latencies), 15.0).tolist()
    assert int(total[0]) == int(counts.sum())
    assert 0 < int((counts < 12).sum()) < 2048


class Clock:
    """Stands for the module `time`: only sleeping takes time, and what devices are said to take."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(dropcompute, "time", clock)
    return clock


def clocked(threshold: float, delays: Any, **extra: Any) -> Any:
    """A real run of one worker, but for the clock."""
    params, batch = theta(), micro_batches()[0]
    return Stopwatch(accumulate(loss), threshold).run(gradient_sum(params), list(batch), params, delays=delays, **extra)


DELAYS = [0.0, 0.05, 0.05, 0.05, 0.05]


def test_stops_at_the_threshold() -> None:
    """Micro-batches begin after 0, 50, 100, ... ms and take no time; who stands still is called off."""
    stopped = clocked(0.13, DELAYS)
    assert stopped.completed == 3
    assert stopped.latencies == pytest.approx((0.0, 0.05, 0.05))
    assert stopped.seconds == pytest.approx(0.13)
    assert clocked(math.inf, None).completed == MICRO_BATCHES
    assert clocked(math.inf, DELAYS).seconds == pytest.approx(0.2)
    assert clocked(0.01, [0.02] * 5).completed == 0


@pytest.mark.parametrize(("count", "threshold"), [(0, 0.01), (3, 0.13), (5, math.inf)])
def test_a_real_run_replays_bit_for_bit(count: int, threshold: float) -> None:
    """What the clock decided is given to the program, which masks: the same bits, loss and gradients."""
    real = clocked(threshold, [0.02, *DELAYS[1:]])
    assert real.completed == count
    params, batch = theta(), micro_batches()[0]
    replayed = jax.jit(lambda count: masked(accumulate(loss), gradient_sum(params), batch, count, params))(
        jnp.int32(real.completed)
    )
    again = clocked(0.01, DELAYS, completed=count).carry
    for other in (replayed, again):
        for one, two in zip(jax.tree.leaves(real.carry), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(bits(one), bits(two))


@pytest.mark.parametrize(("threshold", "begun"), [(0.31, 16), (0.3001, 16), (0.2999, 15), (0.01, 1)])
def test_dispatch_runs_ahead_but_not_beyond_the_threshold(
    threshold: float, begun: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that takes 20 ms for each micro-batch is never idle, and gets none that would begin too late."""
    dispatched, ends = [], [clock.now]

    def run(go: bool, carry: Any, batch: Any, context: Any) -> float:
        dispatched.append(clock.now)
        ends.append(max(ends[-1], clock.now) + 0.02)
        return ends[-1]

    def wait(end: float) -> None:
        clock.now = max(clock.now, end)

    monkeypatch.setattr(Stopwatch, "_run", staticmethod(run))
    monkeypatch.setattr(jax, "block_until_ready", wait)
    stopped = Stopwatch(lambda carry, batch, context: carry, threshold).run(0.0, range(100))
    assert stopped.completed == begun
    assert stopped.seconds == pytest.approx(0.02 * begun)
    starts = np.asarray(ends[:-1])
    assert (starts - starts[0] < threshold).all(), "nothing began after the threshold"
    # The clock of the first micro-batch is not known; from the third on the next is there before the one before ends.
    assert (np.asarray(dispatched)[2:] < starts[2:]).all()


def test_local_steps_stop_too() -> None:
    """DropCompute on local SGD: each worker takes as many steps as it completes, then parameters are averaged."""

    def run(batch: Any, count: Any) -> Any:
        def step(params: Any, one: Any, _: None) -> Any:
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, one))

        return replica_mean(masked(step, theta(), batch, count), AXIS)

    counts = np.array([5, 0, 2, 1], np.int32)
    found = place(run, "vmap", WORKERS)(micro_batches(), counts)
    ends = []
    for worker, count in enumerate(counts):
        params = theta()
        for number in range(count):
            gradient = jax.grad(loss)(params, micro_batches()[worker, number])
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        ends.append(params)
    for name, leaf in found.items():
        np.testing.assert_allclose(leaf[0], np.mean([end[name] for end in ends], axis=0), rtol=1e-5)
    assert equal_replicas(found)


@settings(max_examples=40)
@given(
    size=st.integers(1, 30), workers=st.integers(1, 3), micro=st.integers(1, 3), batch=st.integers(1, 3),
    data=st.data(),
)  # fmt: skip
def test_every_sample_is_completed_once_an_epoch(size: int, workers: int, micro: int, batch: int, data: Any) -> None:
    """Dropped samples come back before the next epoch: at no time is one completed twice more often than another."""
    if workers * micro * batch > size:
        with pytest.raises(ValueError, match="needs more than"):
            Resampling(size, workers=workers, micro_batches=micro, batch=batch, seed=0)
        return
    make = functools.partial(Resampling, size, workers=workers, micro_batches=micro, batch=batch)
    samples, count = make(seed=1), np.zeros(size, int)
    for _ in range(20):
        restored = make(seed=1)
        restored.set_state(samples.get_state())
        step = next(samples)
        np.testing.assert_array_equal(next(restored), step)
        done = data.draw(st.lists(st.integers(0, micro), min_size=workers, max_size=workers))
        samples.drop(done)
        for rows, number in zip(step, done, strict=True):
            np.add.at(count, rows[:number].ravel(), 1)
        waiting = samples.get_state()
        assert sorted(np.repeat(np.arange(size), count).tolist() + waiting["queue"] + waiting["dropped"]) == sorted(
            list(range(size)) * (waiting["epoch"] + 1)
        ), "completed, waiting and dropped samples are all there are, once an epoch"


def sampled(**numbers: int) -> Resampling:
    return Resampling(**{"size": 8, "workers": 2, "micro_batches": 2, "batch": 1, "seed": 0, **numbers})


def combined(**extra: Any) -> Any:
    total = Sum(jnp.float32(0), jnp.ones(2))
    given = {"completed": jnp.int32(1), "micro_batches": 2, "axis_name": AXIS, **extra}
    return jax.vmap(lambda _: combine(total, **given).loss, axis_name=AXIS)(jnp.arange(2))


def around_an_assignment() -> Any:
    optimizer = skip_empty(paft_sync(optax.sgd(0.1), AXIS, 1))

    def step(params: Any) -> Any:
        return optimizer.update(params, optimizer.init(params), params, empty=True)[1].skipped

    return jax.vmap(step, axis_name=AXIS)(jnp.ones(2))


def test_empty_is_taken_as_a_python_bool() -> None:
    optimizer = skip_empty(optax.sgd(0.1))
    state = optimizer.init(jnp.ones(1))
    for empty, expected in ((True, 0.0), (False, -0.1)):
        updates, state = optimizer.update(jnp.ones(1), state, jnp.ones(1), empty=empty)
        assert updates.tolist() == pytest.approx([expected])
    assert int(state.skipped) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: combined(correction="mean"), "correction='mean'"),
        (lambda: combined(correction="rate", drop_rate=2.0), "drop_rate=2.0"),
        (lambda: combined(micro_batches=0), "micro_batches=0"),
        (lambda: combined(axis_name="other"), "not bound"),
        (lambda: combined(axis_name=(AXIS,)), "expected the name of one"),
        (lambda: combined(completed=jnp.int32(3)), "completed=3: expected a number of micro-batches from 0 to 2"),
        (lambda: masked(lambda c, b, _: c, 0, jnp.ones(2), jnp.int32(3)), "completed=3"),
        (lambda: masked(lambda c, b, _: c, 0, jnp.ones(2), -1), "completed=-1"),
        (lambda: around_an_assignment(), "put skip_empty inside"),
        (lambda: Stopwatch(accumulate(loss), 0.0), "threshold=0.0"),
        (lambda: clocked(1.0, [0.0]), "only 1 of at least 2 delays were given"),
        (lambda: clocked(1.0, None, completed=-1), "completed=-1"),
        (lambda: clocked(1.0, [math.inf] * 5), r"delays=\[inf"),
        (lambda: clocked(1.0, None, completed=6), "the log has 6 completed ones"),
        (lambda: masked(lambda c, b, _: c, 0, {"a": jnp.ones(2), "b": jnp.ones(3)}, jnp.int32(1)), r"\[2, 3\]"),
        (lambda: sampled(seed=-1), "seed=-1"),
        (lambda: sampled().drop([1, 1]), "call next first"),
        (lambda: sampled(size=0), "size=0"),
        (lambda: sampled().set_state({"epoch": 0, "queue": [8], "dropped": []}), "sample 8 does not fit"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_drops_that_do_not_fit() -> None:
    samples = sampled()
    next(samples)
    with pytest.raises(ValueError, match=r"completed=\[3, 0\]"):
        samples.drop([3, 0])
