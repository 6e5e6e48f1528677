"""Faults do what they say, where and when they say, and the events are the ground truth."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.faults import BitFlip, Gaussian, Moment, Relative, Scale, Stuck
from tests.sdc.faults.test_inject import SIZE, X, bits_changed, identity, layered, moment

KINDS = {
    "bitflip": BitFlip(),
    "chosen bits": BitFlip((0, 15)),
    "scale": Scale(3.0),
    "relative": Relative(1e-6),
    "gaussian": Gaussian(0.5),
    "nan": Stuck(math.nan),
    "stuck": Stuck(1.0),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rate", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_events_count_what_really_changed(kind: Any, rate: float, dtype: str) -> None:
    x = jnp.asarray(X).astype(dtype)
    out, events = jax.jit(sdc.inject(identity, [sdc.Fault(kind, rate), sdc.Fault(BitFlip((3,)), rate)]))(moment(), x)
    changed = bits_changed(out, x).sum()
    assert int(events["fwd/p"].changed) == changed
    drawn = int(events["fwd/p"].drawn)
    assert drawn >= changed
    expected = 2 * rate * SIZE
    assert abs(drawn - expected) <= 5 * math.sqrt(expected * (1 - rate)) + 1e-9  # five standard deviations


@pytest.mark.parametrize("rate", [1e-6, 3e-3, 0.2])
def test_hits_are_independent_and_of_the_rate(rate: float) -> None:
    """Mean and variance of the count over many steps are those of the binomial distribution, to five sigma."""
    steps, size = 400, 50_000
    run = jax.jit(jax.vmap(sdc.inject(identity, [sdc.Fault(BitFlip((0,)), rate)]), in_axes=(Moment(None, 0), None)))
    out, events = run(Moment(jax.random.key(1), jnp.arange(steps)), jnp.ones(size))
    counts = np.asarray(events["fwd/p"].changed, np.float64)
    mean, variance = size * rate, size * rate * (1 - rate)
    assert abs(counts.mean() - mean) < 5 * math.sqrt(variance / steps)
    if mean > 10:
        assert abs(counts.var() / variance - 1) < 5 * math.sqrt(2 / steps)
        places = bits_changed(out, jnp.ones((steps, size))).sum(0)
        halves = places[: size // 2].sum(), places[size // 2 :].sum()
        assert abs(halves[0] - halves[1]) < 5 * math.sqrt(steps * variance)


def test_kinds_against_numpy() -> None:
    def corrupt(kind: Any) -> np.ndarray:
        return np.asarray(sdc.inject(identity, [sdc.Fault(kind, 1.0)])(moment(), jnp.asarray(X))[0])

    np.testing.assert_array_equal(corrupt(Scale(3.0)), X * np.float32(3))
    assert np.isnan(corrupt(Stuck(math.nan))).all()
    flipped = corrupt(BitFlip((31, 2))).view(np.uint32) ^ X.view(np.uint32)
    assert set(flipped.tolist()) == {1 << 31, 1 << 2}
    assert abs((flipped == 4).mean() - 0.5) < 5 * 0.5 / math.sqrt(SIZE)
    every = corrupt(BitFlip()).view(np.uint32) ^ X.view(np.uint32)
    assert {int(b) for b in every} == {1 << bit for bit in range(32)}
    relative = np.abs(corrupt(Relative(0.25)) - X) / np.abs(X)
    assert relative.min() > 0
    assert relative.max() <= 0.25 * (1 + 1e-6)
    assert abs(relative.mean() - 0.125) < 5 * 0.25 / math.sqrt(12 * SIZE)
    noise = corrupt(Gaussian(0.5)) - X
    assert abs(noise.std() - 0.5) < 5 * 0.5 / math.sqrt(2 * SIZE)


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_draws_do_not_depend_on_the_placement(rate: float) -> None:
    step = sdc.inject(layered, [sdc.Fault(BitFlip(), rate, at={"twin": 1})])
    x = jnp.broadcast_to(jnp.asarray(X).reshape(4, -1), (2, 4, SIZE // 4))

    def run(x: Any) -> Any:
        return step(moment(3), x)

    mesh = jax.make_mesh((2, 1), ("twin", "model"), axis_types=(AxisType.Auto,) * 2)
    body = jax.shard_map(
        lambda x: jax.tree.map(lambda a: a[None], run(x[0])),
        mesh=mesh, in_specs=P("twin"), out_specs=P("twin"), check_vma=False,
    )  # fmt: skip
    results = [jax.jit(body)(x), jax.vmap(run, axis_name="twin")(x), jax.pmap(run, axis_name="twin")(x)]
    for out, events in results[1:]:
        assert not bits_changed(out, results[0][0]).any()
        assert (events["fwd/p"].changed == results[0][1]["fwd/p"].changed).all()
    assert int(results[0][1]["fwd/p"].changed[1].sum()) > 0
