"""Replicas under noise: theory against simulation, schedules, bitwise synchronization, and what XLA may overlap."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from sdc.aggregation import Assignment, gradient_noise
from sdc.aggregation.synchronization import PaftState, overlapped, paft, paft_sync, replica_mean, synchronizes
from sdc.train.studies.theory import (
    divergence,
    divergence_bound,
    divergence_over_time,
    noisy_bound,
    paft_bound,
    schedule_offset,
)

from .placements import AXIS, PLACEMENTS, equal_replicas, place, stack

WORKERS, DIMENSION, SIGMA, RATE, STEPS = 4, 4096, 0.5, 0.1, 40


def drift_apart(optimizer: optax.GradientTransformationExtraArgs, steps: int = STEPS) -> tuple[Any, Any]:
    """Replicas of zeros whose gradients are nothing but noise: parameters and states of every step, under `vmap`."""
    noise = gradient_noise(AXIS, SIGMA, seed=1)

    def run(theta: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            theta, state, noisy = carry
            gradient, noisy = noise.update(jnp.zeros(DIMENSION), noisy)
            updates, state = optimizer.update(gradient, state, theta)
            theta = optax.apply_updates(theta, updates)
            return (theta, state, noisy), (theta, state)

        return lax.scan(step, (theta, optimizer.init(theta), noise.init(theta)), None, length=steps)[1]

    return jax.tree.map(np.asarray, place(run, "vmap", WORKERS)(jnp.zeros((WORKERS, DIMENSION))))


def squared_divergence(theta: Any) -> np.ndarray:
    """Mean over workers of ||mean - theta_m||^2, at every step."""
    return np.square(theta - theta.mean(axis=0)).sum(axis=-1).mean(axis=0)


def test_divergence_is_that_of_theory() -> None:
    """The sum has (M - 1) d degrees of freedom; five standard errors are a confidence of more than 99.9999 %."""
    theta, _ = drift_apart(optax.with_extra_args_support(optax.sgd(RATE)))
    found = squared_divergence(theta)
    exact = divergence_over_time(SIGMA, [RATE] * STEPS, workers=WORKERS, dimension=DIMENSION)
    # The variance of a chi-squared over its mean squared is 2 / freedom.
    error = math.sqrt(2 / ((WORKERS - 1) * DIMENSION))
    assert np.abs(found / exact - 1).max() < 5 * error
    assert exact[-1] == pytest.approx(divergence(SIGMA, [RATE] * STEPS, workers=WORKERS, dimension=DIMENSION))


def test_synchronization_bounds_divergence() -> None:
    theta, state = drift_apart(paft_sync(optax.sgd(RATE), AXIS, 8))
    found = squared_divergence(theta)
    due = np.arange(1, STEPS + 1) % 8 == 0
    assert (found[due] == 0).all()
    for step in np.flatnonzero(due):
        assert equal_replicas(theta[:, step])
    exact = divergence_over_time(SIGMA, [RATE] * STEPS, workers=WORKERS, dimension=DIMENSION, period=8)
    error = math.sqrt(2 / ((WORKERS - 1) * DIMENSION))
    assert np.abs(found[~due] / exact[~due] - 1).max() < 5 * error
    assert (found <= divergence_bound(SIGMA, RATE, 8, workers=WORKERS, dimension=DIMENSION)).all()
    # What is reported is what was there just before the synchronization, and what lemma 4.1 expects in between.
    measured = np.square(state.divergence.measured).mean(axis=0)
    assert measured[-1] == pytest.approx(exact[7], rel=5 * error)
    expected = np.square(state.divergence.expected).mean(axis=0)
    assert expected[12] == pytest.approx(exact[12], rel=0.1)
    assert (state.divergence.age[0] == [*range(1, 8), *(number % 8 for number in range(STEPS - 7))]).all()


def algorithm_2(own: np.ndarray, errors: np.ndarray, first: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Algorithm 2 line by line, with its steps counted from 1: parameters of all steps, and (t, H) of each average."""
    theta = np.zeros(own.shape[1:])
    launched, every, found = {first}, [], []
    for t in range(1, len(own) + 1):
        noisy = own[t - 1].mean(axis=0) + errors[t - 1]  # line 4
        if t in launched:
            theta = theta - RATE * noisy  # line 6
            mean = theta.mean(axis=0)
        elif t - 1 in launched:
            sigma = np.linalg.norm(mean - theta, axis=1)  # line 10
            period = max(round(np.mean(np.linalg.norm(own[t - 1], axis=1) / sigma)), 1)  # line 11
            launched.add(t + period)  # line 12
            found.append((t, period))
            theta = mean - RATE * noisy  # line 13
        else:
            theta = theta - RATE * noisy  # line 15
        every.append(theta)
    return np.stack(every, axis=1), found


@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
def test_algorithm_2(sigma: float) -> None:
    generator = np.random.default_rng(0)
    own, errors = generator.normal(size=(2, STEPS, WORKERS, 64)).astype(np.float32)
    own, errors = own + 1, sigma * errors
    optimizer = paft(optax.sgd(RATE), AXIS, 5, rule="gradient")

    def run(own: Any, errors: Any) -> Any:
        def step(carry: Any, given: Any) -> Any:
            theta, state = carry
            mine, error = given
            mean = lax.pmean(mine, AXIS) + error
            updates, state = optimizer.update(mean, state, theta, own_gradient=mine)
            theta = optax.apply_updates(theta, updates)
            return (theta, state), (theta, state.period, state.synchronizations)

        return lax.scan(step, (jnp.zeros(64), optimizer.init(jnp.zeros(64))), (own, errors))[1]

    theta, period, done = place(run, "vmap", WORKERS)(own.swapaxes(0, 1), errors.swapaxes(0, 1))
    expected, averages = algorithm_2(own, errors, 5)
    used = np.flatnonzero(np.diff(done[0], prepend=0))
    assert [(int(step) + 1, int(period[0, step])) for step in used] == averages
    np.testing.assert_allclose(theta, expected, atol=1e-5)
    assert len(averages) >= 2


class Course(NamedTuple):
    """A training run, step by step: the distance of replicas from their mean at each average, in updates of the next
    step (NaN in other steps), the period, and the number of averages."""

    distance: np.ndarray
    period: np.ndarray
    done: np.ndarray


def train_under_noise(
    inner: optax.GradientTransformation, sigmas: Any, *, steps: int = 600, sync_state: bool = False
) -> Course:
    """Trains two matrices and a vector on a quadratic with noisy batches, for several degrees of noise at once."""
    optimizer = paft(inner, AXIS, sync_state=sync_state)
    shapes = {"a": (16, 24), "b": (24, 8), "c": (8,)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), 3), strict=True))
    best = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}

    def own_gradient(theta: Any, key: Any) -> Any:
        noise = jax.tree.map(lambda leaf, k: 0.1 * jax.random.normal(jax.random.fold_in(key, k[0]), leaf.shape), theta,
                             jax.tree.map(jax.random.key_data, keys))  # fmt: skip
        return jax.tree.map(
            lambda x, y, e: jnp.linspace(0.1, 1, x.size).reshape(x.shape) * (x - y) + e, theta, best, noise
        )

    def run(sigma: Any, worker: Any) -> Any:
        noise = gradient_noise(AXIS, sigma, seed=3)

        def step(carry: Any, key: Any) -> Any:
            theta, state, noisy = carry
            mean = lax.pmean(own_gradient(theta, jax.random.fold_in(key, worker)), AXIS)
            gradient, noisy = noise.update(mean, noisy)
            updates, state = optimizer.update(gradient, state, theta)
            new = optax.apply_updates(theta, updates)
            moved = optax.tree.norm(jax.tree.map(jnp.subtract, new, theta))
            squares = lax.pmean((jnp.square(state.divergence.measured), jnp.square(moved)), AXIS)
            return (new, state, noisy), (*squares, state.period, state.synchronizations)

        theta = jax.tree.map(jnp.zeros_like, best)
        start = theta, optimizer.init(theta), noise.init(theta)
        return lax.scan(step, start, jax.random.split(jax.random.key(5), steps))[1]

    everyone = jax.vmap(jax.vmap(run, (None, 0), axis_name=AXIS), (0, None))
    with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
        found = jax.jit(everyone)(jnp.asarray(sigmas, jnp.float32), jnp.arange(WORKERS))
    apart, moved, period, done = (np.asarray(x)[:, 0] for x in found)
    distance = np.full_like(apart, np.nan)
    used = np.diff(done, prepend=0, axis=1) > 0
    # In the step of an average, replicas move by the average too.
    distance[used] = np.sqrt(apart / np.roll(moved, -1, axis=1))[used]
    distance[:, -1] = np.nan
    return Course(distance, period, done)


def test_more_noise_is_averaged_more_often() -> None:
    """With the norm of the aggregated gradient, the period did not depend on the noise, and under Adam it grew with
    it."""
    for inner in (optax.sgd(0.05), optax.adam(0.01)):
        quiet, some, loud = train_under_noise(inner, (0.01, 0.1, 1.0), steps=200).done[:, -1]
        assert quiet < some < loud


def test_equal_replicas_are_averaged_less_and_less_often() -> None:
    """H doubles up to its limit. Skipped steps leave replicas equal too, and H must not jump to the limit then."""
    optimizer = paft(optax.sgd(RATE), AXIS, 2, 1, 7)

    def run(theta: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            theta, state = carry
            updates, state = optimizer.update(jnp.ones(3), state, theta)
            return (optax.apply_updates(theta, updates), state), state.next

        return lax.scan(step, (theta, optimizer.init(theta)), None, length=12)[1]

    planned = place(run, "vmap", WORKERS)(jnp.zeros((WORKERS, 3)))[0]
    assert planned.tolist() == [1, 1, *[6] * 5, *[14] * 5]


def launched(theta: Any, gradient: Any, optimizer: Any = None, steps: int = 2) -> Any:
    """Parameters and state of each worker after the first synchronization, from replicas that begin apart."""
    optimizer = optimizer or paft(optax.sgd(0.0), AXIS, 1, 1, 50, rule="gradient")

    def run(theta: Any) -> Any:
        state = optimizer.init(theta)
        for _ in range(steps):
            updates, state = optimizer.update(gradient, state, theta, own_gradient=gradient)
            theta = optax.apply_updates(theta, updates)
        return theta, state

    return place(run, "vmap", WORKERS)(theta)


def test_a_replica_on_the_mean_does_not_stretch_the_period() -> None:
    _, state = launched(jnp.asarray([[1.0], [0.0], [1.0], [2.0]]), jnp.full(1, 7.0))
    assert state.divergence.measured.tolist() == [0, 1, 0, 1]
    assert state.period.tolist() == [7] * WORKERS


@pytest.mark.parametrize("synchronization", [None, paft_sync(optax.sgd(0.0), AXIS, 1)])
def test_divergence_is_from_the_mean_before_it_is_rounded(synchronization: Any) -> None:
    """In bfloat16, whose neighbours of 1 are 1/128 above and 1/256 below it."""
    theta = jnp.asarray([[1.0], [1.0], [1.0], [1 + 1 / 128]], jnp.bfloat16)
    mean, state = launched(theta, jnp.ones(1, jnp.bfloat16), synchronization, steps=2 if synchronization is None else 1)
    assert (mean == 1).all()
    np.testing.assert_array_equal(state.divergence.measured, [1 / 512] * 3 + [3 / 512])


@pytest.mark.parametrize("make", [lambda inner: paft_sync(inner, AXIS, 1), lambda inner: paft(inner, AXIS, 1, 1, 9)])
def test_leaves_without_a_mean_stay_and_complex_ones_are_averaged(make: Any) -> None:
    start = {
        "real": jnp.asarray([1.0, 3.0]), "complex": jnp.asarray([1j, 3.0]), "whole": jnp.asarray([1, 2]),
        "true": jnp.asarray([True, False]), "key": jax.random.split(jax.random.key(0), 2),
    }  # fmt: skip
    moved = {name: name in ("real", "complex") for name in start}
    optimizer = make(optax.chain(optax.masked(optax.sgd(0.0), moved)))

    def run(theta: Any) -> Any:
        state = optimizer.init(theta)
        nothing = {name: theta[name] if moved[name] else np.zeros((), jax.dtypes.float0) for name in theta}
        for _ in range(2):
            updates, state = optimizer.update(nothing, state, theta)
            theta = {name: theta[name] + updates[name] for name in theta}
        return theta, state.divergence.measured, replica_mean({"scalar": 2.0, "count": 3}, AXIS)

    theta, measured, scalars = place(run, "vmap", 2)(start)
    assert theta["real"].tolist() == [2.0, 2.0]
    assert theta["complex"].tolist() == [1.5 + 0.5j] * 2
    for name in ("whole", "true", "key"):
        assert (theta[name] == start[name]).all()
    if isinstance(optimizer.init(start), PaftState):
        np.testing.assert_allclose(measured, math.sqrt(1 + 2.5))
    assert scalars["scalar"].tolist() == [2.0] * 2
    assert scalars["count"].tolist() == [3] * 2


def test_period_of_one_averages_at_every_second_step() -> None:
    """By line 12 of algorithm 2: the step that waits for an average does not start the next one."""
    _, state = drift_apart(paft(optax.sgd(RATE), AXIS, 1, 1, 1), steps=6)
    assert state.synchronizations[0].tolist() == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("sync_state", [False, True])
def test_synchronized_replicas_are_bitwise_equal(placement: str, sync_state: bool) -> None:
    """From replicas far apart: an added difference would leave last bits."""
    optimizer = paft_sync(optax.sgd(0.1, momentum=0.9), AXIS, 1, sync_state)

    def step(theta: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, optimizer.init(theta), theta)
        return optax.apply_updates(theta, updates), state.inner

    start = {"w": 10.0 ** jax.random.uniform(jax.random.key(0), (WORKERS, 1000), minval=-6, maxval=6)}
    gradient = {"w": jax.random.normal(jax.random.key(1), (WORKERS, 1000))}
    theta, inner = place(step, placement, WORKERS)(start, gradient)
    assert equal_replicas(theta)
    assert equal_replicas(inner) == sync_state
    np.testing.assert_allclose(theta["w"][0], np.mean(start["w"] - 0.1 * gradient["w"], axis=0), rtol=1e-4)


def two_layers(theta: Any, batch: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(batch @ theta["a"]) @ theta["b"] - 1.0))


def training(optimizer: optax.GradientTransformationExtraArgs, *, around: bool) -> Any:
    """One step of training; with `around`, the choice of PAFT is put around it."""

    def step(theta: Any, state: Any, batch: Any, *, synchronize: bool | None = None) -> Any:
        gradient = lax.pmean(jax.grad(two_layers)(theta, batch), AXIS)
        gradient = jax.tree.map(lambda leaf: leaf * (1 + 0.1 * lax.axis_index(AXIS).astype(jnp.float32)), gradient)
        updates, state = optimizer.update(gradient, state, theta, synchronize=synchronize)
        return optax.apply_updates(theta, updates), state

    return overlapped(step) if around else step


@pytest.mark.parametrize("placement", ["vmap", "shard_map", "shard_map, checked"])
def test_overlapped_is_the_same_method(placement: str) -> None:
    optimizer = paft(optax.sgd(0.1), AXIS, 2, 1, 3)
    theta = {"a": jnp.ones((3, 4)) * 0.1, "b": jnp.linspace(-1.0, 1.0, 4)[:, None]}
    batch = np.asarray(jax.random.normal(jax.random.key(0), (WORKERS, 8, 3)))
    ends = []
    for around in (False, True):
        one = training(optimizer, around=around)
        step = place(lambda theta, state, batch, one=one: one(theta, batch=batch, state=state), placement, WORKERS)
        state = place(lambda theta: (theta, optimizer.init(theta)), placement, WORKERS)(stack(theta, WORKERS))
        for _ in range(8):
            state = step(*state, batch)
        assert state[1].synchronizations[0] >= 2
        ends.append(state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *ends)


def test_the_average_depends_on_nothing_but_the_parameters_of_the_step() -> None:
    """In the program of a synchronizing step no path leads from the forward and backward pass to the average, or back.

    The average is the all-reduce of the parameters as they came in; every matrix product reads the parameters as they
    came in, too.
    """
    optimizer = paft(optax.sgd(0.1), AXIS)

    def step(theta: Any, state: Any, batch: Any) -> Any:
        return training(optimizer, around=False)(theta, state, batch, synchronize=True)

    theta = {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 1))}
    mesh = Mesh(np.asarray(jax.devices()[:WORKERS]), (AXIS,))
    state = jax.eval_shape(optimizer.init, theta)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P(AXIS)), out_specs=P(), check_vma=False)
    jaxpr = jax.make_jaxpr(mapped)(theta, state, jnp.ones((4, 3))).eqns[0].params["jaxpr"]
    parents = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}

    def reaches(eqn: Any, primitive: str) -> bool:
        """Whether the equation reads, at any remove, what an equation of this primitive made."""
        above = [parents[var] for var in eqn.invars if not hasattr(var, "val") and var in parents]
        return any(other.primitive.name == primitive or reaches(other, primitive) for other in above)

    shapes = {tuple(var.aval.shape) for var in jaxpr.invars[:2]}
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name.startswith("psum")]
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    averages = [eqn for eqn in sums if not reaches(eqn, "dot_general")]
    numbers: set[tuple[int, ...]] = {()}  # of the schedule
    assert {tuple(var.aval.shape) for eqn in averages for var in eqn.outvars} - numbers == shapes
    assert products
    assert not any(reaches(eqn, sums[0].primitive.name) for eqn in products)


def test_parameters_sharded_within_a_replica() -> None:
    """Two workers of two ranks each find the divergence and the period of two workers that hold everything."""
    settings = {"rule": "gradient", "initial_period": 1, "max_period": 50}
    optimizer = {axes: paft(optax.sgd(0.1), AXIS, **settings, replica_axes=axes) for axes in ((), ("model",))}
    start = jnp.stack([jnp.linspace(0.0, 1.0, 8), jnp.linspace(0.0, 2.0, 8)])
    gradient = jnp.ones((2, 8))

    def run(optimizer: Any, theta: Any, gradient: Any) -> Any:
        state = optimizer.init(theta)
        for _ in range(2):
            updates, state = optimizer.update(gradient, state, theta, own_gradient=gradient)
            theta = optax.apply_updates(theta, updates)
        return theta, state.divergence.measured, state.period

    whole = jax.vmap(functools.partial(run, optimizer[()]), axis_name=AXIS)(start, gradient)
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), (AXIS, "model"))

    def one(theta: Any, gradient: Any) -> Any:
        return jax.tree.map(lambda x: x[None], run(optimizer[("model",)], theta[0], gradient[0]))

    spec = P(AXIS, "model")
    sharded = jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, P(AXIS), P(AXIS)), check_vma=False)
    )(start, gradient)
    for a, b in zip(whole, sharded, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert int(whole[2][0]) == round(math.sqrt(8) / float(whole[1][0]))


def test_bounds_hold_in_simulation() -> None:
    """Theorems 3.2 and 4.2 on f(x) = |x|^2 (mu = 1, L = 4 along two groups of axes), M = 4 workers, exact gradients."""
    curvature = np.where(np.arange(64) < 32, 1.0, 4.0)
    mu, smooth, sigma, start = 1.0, 4.0, 0.05, np.ones(64)
    generator = np.random.default_rng(0)
    whole = sigma * math.sqrt(64)
    for period in (None, 10):
        steps = 400
        offset = schedule_offset(period or 1, smoothness=smooth, convexity=mu)
        theta, losses, weighted = np.tile(start, (4, 1)), [], 0.0
        rates = 4 / (mu * (offset + np.arange(steps)))
        weights = np.square(offset + np.arange(steps))
        for step in range(steps):
            losses.append(0.5 * np.sum(curvature * np.square(theta.mean(axis=0))))
            weighted = weighted + weights[step] * theta.mean(axis=0)
            mean = (curvature * theta).mean(axis=0)
            theta = theta - rates[step] * (mean + sigma * generator.normal(size=theta.shape))
            if period and (step + 1) % period == 0:
                theta[:] = theta.mean(axis=0)
        if period is None:
            bound = noisy_bound(whole, rates, workers=4, distance=8.0, gradient_noise=0.0, smoothness=smooth)
            assert np.mean(rates * losses) <= bound
        else:
            found = 0.5 * np.sum(curvature * np.square(weighted / weights.sum()))
            bound = paft_bound(
                whole, period, steps, workers=4, distance=8.0, gradient_noise=0.0, smoothness=smooth, convexity=mu
            )
            assert found <= bound


@pytest.mark.parametrize(
    "wrong",
    [
        lambda inner: optax.chain(inner, optax.scale(0.5)),
        lambda inner: optax.chain(inner, optax.clip(1.0)),
        lambda inner: optax.chain(inner, optax.clip_by_global_norm(1.0)),
        lambda inner: optax.chain(inner, optax.scale_by_schedule(lambda step: 0.5)),
        lambda inner: optax.MultiSteps(inner, 2),
    ],
)
def test_what_calculates_with_an_assignment_is_refused(wrong: Any) -> None:
    optimizer = wrong(paft_sync(optax.sgd(0.1), AXIS, 1))
    step = jax.vmap(lambda theta: optimizer.update(theta, optimizer.init(theta), theta)[0], axis_name=AXIS)
    # optax multiplies with truth values
    with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match="Assignment"):
        jax.jit(step)({"w": jnp.ones((2, 3))})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int16", "int4", "bool", "complex64", "key"])
def test_assignments_pass_through_transformations_bit_for_bit(dtype: str) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (4, 3, 2), dtype=np.uint32)
    words[0, :, 0] = 0x80000000, 0x7FC01234, 0xFF812345  # -0.0 and two NaNs with a payload
    if dtype == "key":
        value: Any = jax.random.wrap_key_data(jnp.asarray(words))
    elif dtype in ("bool", "int4", "complex64"):
        value = jnp.asarray(words.astype(np.int32) % 2).astype(dtype)
    else:
        value = lax.bitcast_convert_type(jnp.asarray(words), jnp.dtype(dtype))
    updates = jax.jit(jax.vmap(lambda x: {"w": Assignment(x)}))(value)
    found = jnp.zeros_like(value) + updates["w"]
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    if dtype == "key":
        found, value = jax.random.key_data(found), jax.random.key_data(value)
    assert np.asarray(found).tobytes() == np.asarray(value).tobytes()


def test_an_assignment_is_added_to_a_parameter_and_no_more() -> None:
    with pytest.raises(TypeError):
        Assignment(jnp.ones(2)) * 2.0  # type: ignore[operator]
    assert optax.apply_updates(np.ones(2, np.float32), Assignment(jnp.zeros(2))).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"shape \(2,\) cannot set a parameter of shape \(3,\)"):
        optax.apply_updates(jnp.ones(3), Assignment(jnp.zeros(2)))


def bound_update(optimizer: Any, state: Any, params: Any = None, workers: int = 2) -> Any:
    return jax.vmap(lambda _: optimizer.update(jnp.ones(2), state, params), axis_name=AXIS)(jnp.arange(workers))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: paft_sync(optax.sgd(0.1), AXIS, 0), "period=0"),
        (lambda: paft_sync(optax.sgd(0.1), 5, AXIS), "axis_name=5: expected the name of one"),  # type: ignore[arg-type]
        (lambda: paft_sync(optax.sgd(0.1), AXIS, AXIS), "period='data': expected a number"),  # type: ignore[arg-type]
        (lambda: paft(optax.sgd(0.1), 5, 5), "axis_name=5: expected the name of one"),  # type: ignore[arg-type]
        (lambda: paft(optax.sgd(0.1), (AXIS, "model")), "expected the name of one"),  # type: ignore[arg-type]
        (lambda: paft(optax.sgd(0.1), AXIS, AXIS), "initial_period='data': expected a number"),  # type: ignore[arg-type]
        (lambda: paft(optax.sgd(0.1), AXIS, replica_axes="model"), r"write replica_axes=\('model',\)"),
        (lambda: bound_update(paft_sync(optax.sgd(0.1), AXIS, 1, replica_axes=("model",)), None, jnp.ones(2)),
         r"'model' is not bound \(bound: \['data'\]\)"),
        (lambda: paft(optax.sgd(0.1), AXIS, 5, 6, 9), "min_period=6, initial_period=5"),
        (lambda: paft(optax.sgd(0.1), AXIS, 5, 0, 9), "min_period=0"),
        (lambda: paft(optax.sgd(0.1), AXIS, rule="other"), "rule='other': expected one of update, gradient"),
        (lambda: paft(optax.sgd(0.1), AXIS, target=0.0), "target=0: expected a positive number of updates"),
        (lambda: bound_update(own := paft(optax.sgd(0.1), AXIS, rule="gradient"), own.init(jnp.ones(2)), jnp.ones(2)),
         "rule='gradient' needs the norm of the worker's own gradient; pass"),
        (lambda: paft_sync(optax.sgd(0.1), AXIS, 1).update(jnp.ones(2), None, jnp.ones(2)), "not bound"),
        (lambda: bound_update(paft_sync(optax.sgd(0.1), AXIS, 1), None, jnp.ones(2), workers=1), "has size 1"),
        (lambda: bound_update(paft_sync(optax.sgd(0.1), AXIS, 1), None, jnp.ones(2)), "state of type NoneType"),
        (lambda: bound_update(paft(optax.sgd(0.1), AXIS), paft_sync(optax.sgd(0.1), AXIS, 1).init(jnp.ones(2)),
                              jnp.ones(2)), "state of type PaftSyncState"),
        (lambda: bound_update(paft(optax.sgd(0.1), AXIS), paft(optax.sgd(0.1), AXIS).init(jnp.ones(2))),
         "no parameters were given"),
        (lambda: synchronizes({"a": 1}), "the tree contains 0 states of paft"),
        (lambda: divergence(0.1, [0.1], workers=1), "workers=1"),
        (lambda: divergence_over_time(0.1, [0.1], workers=2, period=0), "period=0"),
        (lambda: divergence_bound(-0.1, 0.1, 1, workers=2), "sigma=-0.1"),
        (lambda: paft_bound(0.1, 1, 0, workers=2, distance=1, gradient_noise=0, smoothness=1, convexity=1), "steps=0"),
    ],
)  # fmt: skip
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def made(update: Any) -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (optax.sgd, "expected an optax optimizer"),
        (None, "expected an optax optimizer"),
        (optax.chain(optax.clip(1.0), optax.MultiSteps(optax.sgd(0.1), 4)), "may accumulate gradients over steps"),
        (optax.apply_every(4), "may accumulate gradients over steps"),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), "may accumulate gradients over steps"),
        (
            optax.conditionally_mask(optax.sgd(0.1), lambda step: step % 2 == 0),
            "accumulate gradients over steps or skip",
        ),
        (optax.conditionally_transform(optax.sgd(0.1), lambda step: step % 2 == 0), "steps or skip steps"),
        (made(lambda g, s, p: g), "returned dict"),
        (made(lambda g, s, p: (None, s)), "for other parameters"),
        (made(lambda g, s, p: ({"w": None}, s)), r"no update for params\['w'\]"),
        (made(lambda g, s, p: ({"w": jnp.ones(4)}, s)), r"shape \(4,\) for params\['w'\] of shape \(3,\)"),
    ],
)
def test_an_optimizer_without_measurable_updates_is_refused(optimizer: Any, said: str) -> None:
    def step(theta: Any) -> Any:
        chosen = paft(optimizer, AXIS)
        return chosen.update(theta, chosen.init(theta), theta)[0]

    with pytest.raises(ValueError, match=said):
        jax.vmap(step, axis_name=AXIS)({"w": jnp.ones((2, 3))})


@pytest.mark.parametrize("size", [0.0, math.nan])
def test_an_update_that_measures_nothing_keeps_the_period(size: float) -> None:
    theta = jnp.asarray([[1.0], [0.0], [1.0], [2.0]])
    _, state = launched(theta, jnp.full(1, size), paft(optax.sgd(1.0), AXIS, 7, 2, 9), steps=8)
    assert state.synchronizations.tolist() == [1] * WORKERS
    assert state.period.tolist() == [7] * WORKERS
