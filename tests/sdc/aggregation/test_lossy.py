"""Lossy collectives against plain NumPy and theory; a run replays from its log; what helps against losses helps."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from sdc.aggregation import (
    BadLink,
    GilbertElliott,
    Recorded,
    lossy_all_gather,
    lossy_psum_scatter,
    lossy_zero2,
    recorded,
)
from sdc.aggregation.lossy import Layout, measured_losses
from sdc.train.studies.theory import own_weight, owner_drift, pair_drift, steady_drift

from .placements import AXIS, PLACEMENTS, equal_replicas, place, stack

WORKERS = 4


def naive_scatter(x: Any, arrived: Any, weight: Any, previous: Any) -> np.ndarray:
    """The mean over what arrived, element by element: x [senders, receivers, shard]."""
    workers, _, shard = x.shape
    packets = arrived.shape[2]
    length = -(-shard // packets)
    out = np.array(previous)
    for receiver in range(workers):
        for element in range(shard):
            there = [s for s in range(workers) if s == receiver or arrived[s, receiver, element // length]]
            total = sum(weight[s] for s in there)
            if total > 0:
                out[receiver, element] = sum(weight[s] * x[s, receiver, element] for s in there) / total
    return out


@functools.cache
def scatter(placement: str) -> Any:
    def run(x: Any, arrived: Any, weight: Any, previous: Any) -> Any:
        return lossy_psum_scatter(x, AXIS, arrived, previous=previous, weight=weight)

    return place(run, placement, WORKERS)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_reduce_scatter_is_the_mean_over_what_arrived(placement: str) -> None:
    generator = np.random.default_rng(0)
    for weight in (np.ones(4), np.array([2.0, 0.0, 0.0, 1.0]), np.array([0.0, 0.0, 0.0, 5.0])):
        x = generator.normal(size=(4, 4, 7)).astype(np.float32)
        previous = generator.normal(size=(4, 7)).astype(np.float32)
        arrived = generator.random((4, 4, 3)) < 0.5
        mean, received = scatter(placement)(x, arrived, weight.astype(np.float32), previous)
        np.testing.assert_allclose(mean, naive_scatter(x, arrived, weight, previous), rtol=1e-5, atol=1e-6)
        own = arrived | np.eye(4, dtype=bool)[..., None]
        np.testing.assert_allclose(received, np.einsum("srp,s->rp", own, weight))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_all_gather_keeps_what_did_not_arrive(placement: str) -> None:
    generator = np.random.default_rng(1)
    shard, stale = generator.normal(size=(4, 5)), generator.normal(size=(4, 4, 5))
    arrived = generator.random((4, 4, 2)) < 0.5

    def run(shard: Any, arrived: Any, stale: Any) -> Any:
        return lossy_all_gather(shard, AXIS, arrived, stale=stale)

    copies, received = place(run, placement, 4)(shard.astype(np.float32), arrived, stale.astype(np.float32))
    there = np.swapaxes(arrived | np.eye(4, dtype=bool)[..., None], 0, 1)
    np.testing.assert_array_equal(received, there)
    expected = np.where(np.repeat(there, 3, axis=-1)[..., :5], shard[None], stale)
    np.testing.assert_array_equal(copies, expected.astype(np.float32))


def test_lost_infinities_stay_lost() -> None:
    x = np.ones((4, 4, 2), np.float32)
    x[1, 0] = np.inf
    arrived = np.ones((4, 4, 1), bool)
    arrived[1, 0] = False
    mean, _ = scatter("vmap")(x, arrived, np.ones(4, np.float32), np.zeros((4, 2), np.float32))
    assert (np.asarray(mean) == 1).all()


def test_unbiased_over_workers_and_leaning_to_the_owner_given_them() -> None:
    """Over 20,000 draws at p = 0.3 with N = 4; five standard errors."""
    p, draws = 0.3, 20_000
    arrived = jax.random.uniform(jax.random.key(0), (draws, 4, 4, 1)) >= p
    x = jnp.broadcast_to(jnp.eye(4)[:, None, :], (4, 4, 4))  # worker i's gradient is the i-th unit vector
    run = jax.jit(jax.vmap(lambda arrived: scatter("vmap")(x, arrived, jnp.ones(4), jnp.zeros((4, 4)))[0]))
    weights = np.asarray(run(arrived))  # [draws, receiver, sender]
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    own = weights[:, np.arange(4), np.arange(4)]
    assert abs(own.mean() - own_weight(p, 4)) < 5 * own.std() / math.sqrt(own.size)
    others = weights[:, 0, 1:]
    even = (1 - own_weight(p, 4)) / 3
    assert (np.abs(others.mean(axis=0) - even) < 5 * others.std(axis=0) / math.sqrt(draws)).all()


def random_walk(optimizer: Any, steps: int, size: int = 4000, steady: float | None = None) -> Any:
    """States of a run whose owners move by independent steps of variance 1, or by a steady one."""

    def run(theta: Any) -> Any:
        def step(carry: Any, number: Any) -> Any:
            theta, state = carry
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), number), lax.axis_index(AXIS))
            gradient = jax.random.normal(key, (size,)) * 2.0 if steady is None else jnp.full(size, steady)
            updates, state = optimizer.update(gradient, state, theta)
            theta = optax.apply_updates(theta, updates)
            return (theta, state), (theta, state)

        return lax.scan(step, (theta, optimizer.init(theta)), jnp.arange(steps))[1]

    return jax.tree.map(np.asarray, place(run, "vmap", WORKERS)(jnp.zeros((WORKERS, size))))


def test_xor_parity_gives_back_the_bits() -> None:
    """What is modelled: the one packet that a group has lost is the XOR of its others and the parity."""
    words = np.random.default_rng(0).integers(0, 2**32, (4, 5), dtype=np.uint32)
    parity = np.bitwise_xor.reduce(words)
    for lost in range(4):
        np.testing.assert_array_equal(np.bitwise_xor.reduce(np.delete(words, lost, axis=0)) ^ parity, words[lost])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stale_packets_stand_in_for_lost_ones(placement: str) -> None:
    """Algorithm 1 of the paper, for packets; a packet that never arrived is left out of the mean."""
    generator, steps = np.random.default_rng(2), 5
    gradients = generator.normal(size=(steps, WORKERS, WORKERS, 3)).astype(
        np.float32
    )  # [step, sender, receiver, shard]
    arrived = generator.random((steps, WORKERS, WORKERS, 2)) < 0.4
    optimizer = lossy_zero2(optax.sgd(0.1), AXIS, Recorded(arrived), 0.0, packet=2, stale=True)
    theta = jnp.zeros((WORKERS, 3 * WORKERS))
    state, update = place(optimizer.init, placement, WORKERS)(theta), place(optimizer.update, placement, WORKERS)
    last: dict[tuple[int, int, int], float] = {}
    for step in range(steps):
        _, state = update(gradients[step].reshape(WORKERS, -1), state, theta)
        for sender, receiver, element in np.ndindex(WORKERS, WORKERS, 3):
            if sender == receiver or arrived[step, sender, receiver, element // 2]:
                last[sender, receiver, element] = gradients[step, sender, receiver, element]
        expected = [
            [np.mean([last[s, r, e] for s in range(WORKERS) if (s, r, e) in last]) for e in range(3)]
            for r in range(WORKERS)
        ]
        np.testing.assert_allclose(state.previous, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="create the state with init"):
        place(lossy_zero2(optax.sgd(0.1), AXIS).update, "vmap", WORKERS)(theta, state, theta)
    with pytest.raises(ValueError, match="weight has no meaning with stale"):
        place(lambda *given: optimizer.update(*given, weight=1.0), "vmap", WORKERS)(theta, state, theta)


REPLAYED = {
    "independent": {"p_grad": 0.3, "p_param": 0.2, "packet": 3},
    "per shard": {"p_grad": 0.3, "p_param": 0.2},
    "stale": {"p_grad": 0.3, "p_param": 0.2, "packet": 3, "stale": True},
    "everything": {
        "p_grad": GilbertElliott(0.2, 4.0), "p_param": BadLink(0.7, receiver=2), "packet": 2, "parity": 3,
        "reliable": 0.1, "tighten": 0.5,
    },
}  # fmt: skip


def train(optimizer: Any, placement: str, steps: int = 5) -> Any:
    """Parameters of all workers and the log of each step, of a small regression."""

    def step(theta: Any, state: Any, batch: Any) -> Any:
        gradient = jax.grad(lambda theta: jnp.mean(jnp.square(batch @ theta["w"] + theta["b"])))(theta)
        updates, state = optimizer.update(gradient, state, theta)
        return optax.apply_updates(theta, updates), state

    theta = stack({"w": jnp.linspace(-1.0, 1.0, 30).reshape(10, 3), "b": jnp.ones(3)}, WORKERS)
    run = place(step, placement, WORKERS)
    state = place(optimizer.init, placement, WORKERS)(theta)
    batch = np.asarray(jax.random.normal(jax.random.key(3), (steps, WORKERS, 6, 10)))
    logs = []
    for number in range(steps):
        theta, state = run(theta, state, batch[number])
        logs.append(jax.tree.map(np.asarray, state.log))
    return theta, logs


@pytest.mark.parametrize("name", REPLAYED)
def test_a_run_replays_from_its_log_bit_for_bit(name: str) -> None:
    chosen: dict[str, Any] = dict(REPLAYED[name])
    packet = chosen.get("packet")
    theta, logs = train(lossy_zero2(optax.sgd(0.1, momentum=0.9), AXIS, **chosen), "shard_map")
    assert not equal_replicas(theta)
    one = jax.tree.map(lambda leaf: leaf[0], theta)
    gradients, parameters = recorded(logs, one, packet=packet)
    more = {"packet": packet, "seed": 99, "stale": name == "stale"}
    replay = lossy_zero2(optax.sgd(0.1, momentum=0.9), AXIS, gradients, parameters, **more)
    again, same = train(replay, "shard_map")
    jax.tree.map(np.testing.assert_array_equal, again, theta)
    jax.tree.map(np.testing.assert_array_equal, same, logs)
    with pytest.raises(ValueError, match="does not fit"):
        recorded(logs, {"w": jnp.ones(1000)}, packet=2)
    if packet == 3:  # one packet more is as many bytes
        with pytest.raises(ValueError, match="does not fit"):
            recorded(logs, {**one, "more": jnp.ones(1)}, packet=packet)


def test_weights_of_finished_work() -> None:
    """Together with DropCompute: workers that finished nothing weigh nothing, also in their own shard."""
    optimizer = lossy_zero2(optax.sgd(1.0), AXIS, 0.0, 0.0)

    def step(theta: Any, gradient: Any, weight: Any) -> Any:
        updates, state = optimizer.update(gradient, optimizer.init(theta), theta, weight=weight)
        return optax.apply_updates(theta, updates), state.report.unreduced

    run = place(step, "vmap", WORKERS)
    gradient = jnp.broadcast_to(jnp.arange(4.0)[:, None], (4, 8))
    theta, unreduced = run(jnp.zeros((4, 8)), gradient, jnp.asarray([1.0, 0.0, 0.0, 3.0]))
    np.testing.assert_allclose(theta, -2.25)
    assert (unreduced == 0).all()
    theta, unreduced = run(jnp.zeros((4, 8)), gradient, jnp.zeros(4))
    assert (np.asarray(theta) == 0).all()
    assert (unreduced == 4).all()


def test_weights_are_taken_as_python_numbers() -> None:
    def step(theta: Any) -> Any:
        optimizer = lossy_zero2(optax.sgd(1.0), AXIS)
        updates, _ = optimizer.update(theta, optimizer.init(theta), theta, weight=2.0)
        return optax.apply_updates(theta, updates), lossy_psum_scatter(
            theta[:, None], AXIS, jnp.ones((2, 1), bool), previous=jnp.zeros(1), weight=3
        )

    theta, (mean, received) = place(step, "vmap", 2)(jnp.asarray([[1.0, 1.0], [3.0, 3.0]]))
    assert theta.tolist() == [[-1.0, 1.0], [-1.0, 1.0]]
    assert mean.tolist() == [[2.0], [2.0]]
    assert received.tolist() == [[6.0], [6.0]]


def added_up(spec: Any, mean: bool) -> Any:
    """An update under the type checker, of a gradient that it has added up or that the user has averaged."""
    optimizer = lossy_zero2(optax.sgd(1.0), AXIS)

    def step(theta: Any, batch: Any) -> Any:
        gradient = jax.grad(lambda theta: jnp.sum(theta * batch))(theta)
        gradient = lax.pmean(gradient, AXIS) if mean else gradient
        return optimizer.update(gradient, optimizer.init(theta), theta)[1].step[None]

    mesh = Mesh(np.asarray(jax.devices()[:2]), (AXIS,))
    return jax.shard_map(step, mesh=mesh, in_specs=(spec, P(AXIS)), out_specs=P(AXIS))(jnp.ones(2), jnp.ones(2))


def updated(theta: Any, gradient: Any) -> Any:
    optimizer = lossy_zero2(optax.sgd(1.0), AXIS)
    return bound(lambda: optimizer.update(gradient, optimizer.init(theta), theta)[1].step)


def bound(fn: Any, workers: int = 2) -> Any:
    return jax.vmap(lambda _: fn(), axis_name=AXIS)(jnp.arange(workers))


def other_state(**changes: Any) -> Any:
    """An update with the state of another setting."""
    setting = {"size": 80, "packet": 2, **changes}
    optimizer = lossy_zero2(optax.sgd(1.0), AXIS, packet=2)
    other = lossy_zero2(optax.sgd(1.0), AXIS, packet=setting["packet"])

    def run() -> Any:
        state = other.init(jnp.ones(setting["size"]))
        return optimizer.update(jnp.ones(80), state, jnp.ones(80))[1].step

    return bound(run)


def scattered(data: tuple[int, int], packets: tuple[int, int]) -> Any:
    """A reduce-scatter of data and packets of these shapes."""
    x, arrived = jnp.ones(data), jnp.ones(packets, bool)
    return bound(lambda: lossy_psum_scatter(x, AXIS, arrived, previous=jnp.ones(data[1])))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lossy_zero2(optax.sgd(1.0), AXIS, -0.1), "p_grad=-0.1"),
        (lambda: lossy_zero2(optax.sgd(1.0), AXIS, 0.0, 2.0), "p_param=2.0"),
        (lambda: lossy_zero2(optax.sgd(1.0), AXIS, reliable=1.5), "reliable=1.5"),
        (lambda: lossy_zero2(optax.sgd(1.0), AXIS, parity=0), "parity=0"),
        (lambda: lossy_zero2(optax.sgd(1.0), AXIS, packet=0), "packet=0"),
        (lambda: lossy_zero2(optax.sgd(1.0), AXIS, tighten=-1.0), "tighten=-1.0"),
        (lambda: lossy_zero2(optax.sgd(1.0), AXIS, stale=0.5), "stale=0.5: expected True or False"),
        (lambda: lossy_zero2(optax.sgd(1.0), AXIS).init(jnp.ones(2)), "not bound"),
        (lambda: bound(lambda: lossy_zero2(optax.sgd(1.0), AXIS).init(jnp.ones(2)), 1), "has size 1"),
        (lambda: other_state(size=6), "the state has shards"),
        (lambda: other_state(packet=1), "create the state with init"),
        (lambda: bound(lambda: lossy_zero2(optax.sgd(1.0), AXIS).update(jnp.ones(2), (), jnp.ones(2))), "type tuple"),
        (lambda: bound(lambda: lossy_zero2(optax.sgd(1.0), AXIS).update(jnp.ones(2), ())), "no parameters were given"),
        (lambda: lossy_zero2(optax.sgd(1.0), AXIS, None), "p_grad=None: expected a probability.*or a Channel"),
        (lambda: lossy_zero2(optax.sgd(1.0), AXIS, 0.0, "0.1"), "p_param='0.1': expected a probability"),
        (lambda: lossy_zero2(optax.sgd(1.0), ("a", "b")), "expected the name of one"),
        (lambda: added_up(P(), False), "has already summed it over 'data'"),
        (lambda: added_up(P(AXIS), True), "has already summed it over 'data'"),
        (lambda: updated({"a": jnp.ones(2)}, [jnp.ones(2)]), "expected that of the parameters"),
        (lambda: updated({"a": jnp.ones(2)}, {"a": jnp.ones(3)}), r"gradient\['a'\] has shape \(3,\); expected that"),
        (lambda: updated({"a": jnp.ones(2)}, {"a": jnp.ones(2, jnp.int32)}), r"\['a'\] is int32\[2\]"),
        (lambda: updated({}, {}), "no parameters to train"),
        (lambda: updated({"a": jnp.ones((0, 2))}, {"a": jnp.ones((0, 2))}), r"\['a'\] is float32\[0, 2\]"),
        (lambda: updated({"a": jnp.ones(2, bool)}, {"a": jnp.ones(2)}), r"\['a'\] is bool\[2\]; expected only arrays"),
        (lambda: updated(jax.random.key(0), jnp.ones(())), "expected only arrays of floats"),
        (lambda: scattered((3, 2), (2, 1)), r"the data have shape \(3, 2\)"),
        (lambda: scattered((2, 7), (2, 5)), "needs only 4 packets of 2"),
        (lambda: recorded([], jnp.ones(2)), "the log has no steps"),
        (lambda: lossy_zero2(optax.sgd(1.0), AXIS, 0.1, reliable=0.1), "give packet too"),
        (lambda: pair_drift(1.0), "no packet arrives"),
        (lambda: owner_drift(-0.1), "p=-0.1"),
    ],
)  # fmt: skip
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_recorded_channel_takes_no_parity_twice() -> None:
    trace = Recorded(np.ones((1, WORKERS, WORKERS, 2), bool))
    optimizer = lossy_zero2(optax.sgd(0.1), AXIS, trace, trace, packet=1000, parity=4, reliable=0.5)
    theta, _ = train(optimizer, "vmap", steps=2)
    assert equal_replicas(theta)


def test_the_reliable_packets_are_those_of_largest_norm() -> None:
    """All links lose everything; a quarter of the packets, those with the large gradients, still come through."""
    optimizer = lossy_zero2(optax.sgd(1.0), AXIS, 1.0, 0.0, packet=5, reliable=0.25)

    def step(theta: Any) -> Any:
        size = jnp.where(jnp.arange(80) % 20 < 5, 8.0, 1.0)  # the first packet of each shard of 20
        gradient = size * (1.0 + lax.axis_index(AXIS).astype(jnp.float32))
        updates, state = optimizer.update(gradient, optimizer.init(theta), theta)
        return optax.apply_updates(theta, updates), state.log

    theta, log = place(step, "vmap", WORKERS)(jnp.zeros((WORKERS, 80)))
    arrived = np.unpackbits(log.gradient, axis=-1, count=4)
    off = ~np.eye(WORKERS, dtype=bool)
    assert (arrived[off] == [1, 0, 0, 0]).all()
    first = -np.asarray(theta[0]).reshape(4, 4, 5)
    np.testing.assert_allclose(first[:, 0], 8 * 2.5)  # the mean over all workers
    np.testing.assert_allclose(first[:, 1:], np.arange(1.0, 5.0)[:, None, None] * np.ones((4, 3, 5)))  # the owner's own


def test_rates_tighten_with_the_gradient() -> None:
    """Gradients shrink tenfold over the run; with an exponent of 1 so does the loss."""

    def run(theta: Any) -> Any:
        optimizer = lossy_zero2(optax.sgd(0.0), AXIS, 0.5, 0.5, packet=1, tighten=1.0)

        def step(state: Any, number: Any) -> Any:
            gradient = jnp.ones(4000) * jnp.where(number < 5, 1.0, 0.1)
            _, state = optimizer.update(gradient, state, theta)
            return state, state.report

        return lax.scan(step, optimizer.init(theta), jnp.arange(10))[1]

    report = place(run, "vmap", WORKERS)(jnp.zeros((WORKERS, 4000)))
    loss = np.asarray(report.gradient_loss)[0]
    assert loss[:6] == pytest.approx(0.5, abs=0.03)
    assert loss[6:] == pytest.approx(0.05, abs=0.01)


def test_one_bad_step_does_not_tighten_for_good() -> None:
    """After a gradient that is not finite, rates follow the finite ones again."""

    def run(theta: Any) -> Any:
        optimizer = lossy_zero2(optax.sgd(0.0), AXIS, 0.5, 0.5, packet=1, tighten=1.0)

        def step(state: Any, number: Any) -> Any:
            bad = jnp.where(number == 2, jnp.nan, jnp.where(number == 4, jnp.inf, 1.0))
            _, state = optimizer.update(jnp.ones(4000) * bad, state, theta)
            return state, state.report.gradient_loss

        return lax.scan(step, optimizer.init(theta), jnp.arange(8))[1]

    loss = np.asarray(place(run, "vmap", WORKERS)(jnp.zeros((WORKERS, 4000))))[0]
    assert loss == pytest.approx(0.5, abs=0.03)


def test_exactly_the_share_asked_for_is_reliable() -> None:
    """Where most packets have no norm at all, and some are not numbers."""
    optimizer = lossy_zero2(optax.sgd(0.0), AXIS, 1.0, 1.0, packet=1, reliable=0.25)

    def step(theta: Any) -> Any:
        gradient = jnp.zeros(80).at[jnp.arange(4) * 20 + 3].set(jnp.nan)
        return optimizer.update(gradient, optimizer.init(theta), theta)[1].log

    log = place(step, "vmap", WORKERS)(jnp.zeros((WORKERS, 80)))
    arrived = np.unpackbits(log.gradient, axis=-1, count=20)[~np.eye(WORKERS, dtype=bool)]
    assert (arrived.sum(axis=-1) == 5).all()
    assert (arrived[:, 3] == 1).all()


@pytest.mark.parametrize("p", [0.1, 0.4])
def test_drift_of_a_random_walk(p: float) -> None:
    """Gradients are lossless: with N = 4 the mean of draws of variance 4 has variance 1."""
    _, state = random_walk(lossy_zero2(optax.sgd(1.0), AXIS, 0.0, p, packet=4), 300)
    settled = slice(40, None)
    report = jax.tree.map(lambda leaf: leaf[0, settled].mean(), state.report)
    assert report.move == pytest.approx(1.0, rel=0.01)
    # 1,000 packets, 260 steps, correlated over 1 / (1 - p) steps: a relative standard error below 0.01.
    assert report.pair_drift == pytest.approx(pair_drift(p), rel=0.05)
    assert report.owner_drift == pytest.approx(owner_drift(p), rel=0.05)
    assert report.parameter_loss == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / (12 * 250 * 260)))
    assert (state.report.gradient_loss == 0).all()


def test_drift_of_a_steady_owner() -> None:
    p = 0.3
    _, state = random_walk(lossy_zero2(optax.sgd(1.0), AXIS, 0.0, p, packet=4), 300, steady=0.5)
    assert state.report.pair_drift[0, 40:].mean() == pytest.approx(steady_drift(p, 0.5), rel=0.05)


def test_drift_over_pairs_is_that_of_the_copies() -> None:
    """The report's sums against the parameters themselves, where every element is in the sample."""
    theta, state = random_walk(lossy_zero2(optax.sgd(1.0), AXIS, 0.2, 0.4, packet=3), 10, size=40)
    for step in range(10):
        copies = theta[:, step].reshape(WORKERS, WORKERS, 10)  # [holder, owner, element]
        pairs, owners = [], []
        for owner in range(WORKERS):
            others = [holder for holder in range(WORKERS) if holder != owner]
            owners += [np.square(copies[a, owner] - copies[owner, owner]).mean() for a in others]
            pairs += [np.square(copies[a, owner] - copies[b, owner]).mean() for a in others for b in others if a < b]
        assert state.report.pair_drift[0, step] == pytest.approx(np.mean(pairs), rel=1e-4, abs=1e-7)
        assert state.report.owner_drift[0, step] == pytest.approx(np.mean(owners), rel=1e-4, abs=1e-7)


def test_pair_drift_is_not_negative() -> None:
    """Three copies that are off by the same: (a + a + a)^2 and 3 (a^2 + a^2 + a^2) differ in their last bits."""
    for seed in range(5):
        off = jnp.broadcast_to(jax.random.normal(jax.random.key(seed), (4, 256)), (4, 4, 256))

        def report(off: Any) -> Any:
            layout = Layout(4, (1024,), None)
            owned = (jnp.arange(4) == lax.axis_index(AXIS))[:, None]
            arrived, copies = jnp.ones((4, 1), bool), jnp.where(owned, 0, off)
            nothing = [jnp.zeros_like(off)]
            return measured_losses(layout, AXIS, arrived, arrived, jnp.ones(1), [off[:1]], [copies], nothing)

        assert place(report, "vmap", 4)(off).pair_drift[0] >= 0
