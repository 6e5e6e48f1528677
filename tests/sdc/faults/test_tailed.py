"""Severities with a heavy tail: elements are hit, and by how much, as a plain NumPy version of the law has it.

Samples are compared by two-sample Kolmogorov-Smirnov tests at 99.9 %, counts to five standard deviations. Draws are the
same each time, so that this does not fail by chance.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sdc
from sdc.faults import SMALLEST, Add, Relative, Tailed, When, as_fault, parse_fault

KEY = jax.random.key(0)
DTYPES = ["float32", "bfloat16"]
LAYERS, SIZE, STEPS = 3, 1024, 500
KIND = Tailed(severity=(0.5, 1.0, 2.0), tail=0.8, few=1.5)
RATES = (0.02, 0.01, 0.02)
MORE = 20  # numPy draws so many times more, so that it hardly scatters itself


def probed(x: Any) -> Any:
    return sdc.probe(x, "p")


def layered(x: Any) -> Any:
    return lax.scan(lambda carry, y: (carry, sdc.probe(y, "p")), jnp.float32(0), x)[1]


def apart(seen: np.ndarray, drawn: np.ndarray) -> float:
    """Distance of two distributions, over that which 99.9 % of samples of one distribution do not exceed."""
    every = np.sort(np.concatenate([seen, drawn]))
    below = (np.searchsorted(np.sort(sample), every, side="right") / sample.size for sample in (seen, drawn))
    first, second = below
    return float(np.abs(first - second).max() / (1.95 * math.sqrt(1 / seen.size + 1 / drawn.size)))


@functools.cache
def measured(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Changed elements and their mean relative change in each step and layer."""
    numbers = np.random.default_rng(0).uniform(1, 2, (LAYERS, SIZE))
    x = jnp.asarray(numbers, dtype)
    run = jax.jit(jax.vmap(sdc.inject(layered, [sdc.Fault(KIND, RATES)], record=8), (sdc.Moment(None, 0), None)))
    out, events = run(sdc.Moment(KEY, jnp.arange(STEPS)), x)
    before, after = np.asarray(x, np.float64), np.asarray(out, np.float64)
    hit = after != before
    counts = hit.sum(2)
    with np.errstate(invalid="ignore"):
        means = np.abs(after / before - 1).sum(2) / counts
    event = events["fwd/p"]
    np.testing.assert_array_equal(event.changed, counts)
    np.testing.assert_array_equal(event.drawn, counts)  # no change was lost to rounding
    for step, layer in np.argwhere(counts > 0)[:100]:  # the record is of the first ones
        places = np.flatnonzero(hit[step, layer])[:8]
        np.testing.assert_array_equal(event.hits.element[step, layer, : places.size], places)
    return counts, means


def by_numpy() -> tuple[np.ndarray, np.ndarray]:
    """The same of the law: V = severity u^-tail, hits with the probability rate (1 + few) u^few, each in (0, 2 V]."""
    rng = np.random.default_rng(1)
    u = rng.random((STEPS * MORE, LAYERS))
    counts = rng.binomial(SIZE, np.asarray(RATES) * (1 + KIND.few) * u**KIND.few)
    # The mean of n numbers uniform in (0, 2], by adding up so many.
    most = int(counts.max())
    sums = np.concatenate([np.zeros((1, *u.shape)), np.cumsum(2 * rng.random((most, *u.shape), np.float32), axis=0)])
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.take_along_axis(sums, counts[None], 0)[0] / counts
    return counts, np.asarray(KIND.severity) * u**-KIND.tail * means


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_counts_and_severities_are_those_of_the_law(dtype: str, layer: int) -> None:
    counts, means = (x[:, layer] for x in measured(dtype))
    drawn, severities = (x[:, layer] for x in by_numpy())
    assert apart(counts, drawn) < 1
    assert apart(means[counts > 0], severities[drawn > 0]) < 1
    # Jointly: in the steps with few hits, and in those with many.
    middle = int(np.median(drawn))
    assert apart(means[(counts > 0) & (counts < middle)], severities[(drawn > 0) & (drawn < middle)]) < 1
    assert apart(means[counts >= middle], severities[drawn >= middle]) < 1
    # What this would not be, if steps were all alike, or counts independent of severities.
    assert apart(means[(counts > 0) & (counts < middle)], severities[drawn >= middle]) > 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tail_is_that_of_pareto(dtype: str) -> None:
    """With every element hit, the mean over 1,024 of them is the step's severity to 2 %: log u is exponential."""
    steps, kind = 400, Tailed(severity=2.0, tail=0.5)
    x = jnp.ones(1024, dtype)
    step = sdc.inject(probed, [sdc.Fault(kind, 1.0)])

    def mean(moment: Any) -> Any:
        return jnp.mean(jnp.abs(step(moment, x)[0].astype(jnp.float32) - 1))

    severity = np.asarray(jax.jit(jax.vmap(mean, (sdc.Moment(None, 0),)))(sdc.Moment(KEY, jnp.arange(steps))))
    u = np.sort((severity / 2.0) ** -2.0)
    distance = max(np.abs(u - np.arange(steps) / steps).max(), np.abs(u - np.arange(1, steps + 1) / steps).max())
    assert distance < 1.95 / math.sqrt(steps)  # of Kolmogorov's distribution at 99.9 %
    assert severity.max() > 2 * 50**0.5  # one step in 50 is so severe; of 400, one in 3,000 runs has none


@dataclasses.dataclass(frozen=True)
class Shown(Tailed):
    """Adds the draw to each element that is hit, rather than a relative change: on zeros, it can be read off."""

    def on(self, u: Any, layer: Any) -> Any:
        return Add(u)


@functools.cache
def draws() -> np.ndarray:
    """Draws by device, step, fault, microstep, layer and element."""
    faults = [sdc.Fault(Shown(1.0, 1.0, 0.0), 1.0, site) for site in ("fwd/p", "fwd/q")]

    def both(x: Any) -> Any:
        return sdc.probe(x, "p"), sdc.probe(x, "q")

    def over_layers(x: Any) -> Any:
        return lax.scan(lambda carry, y: (carry, both(y)), jnp.float32(0), x)[1]

    def step(x: Any) -> Any:
        return lax.scan(lambda carry, y: (carry, over_layers(y)), jnp.float32(0), x)[1]

    def run(x: Any) -> Any:
        steps = jax.vmap(sdc.inject(step, faults), (sdc.Moment(None, 0), None))
        first, second = steps(sdc.Moment(KEY, jnp.arange(40)), x)[0]
        return jnp.stack([first, second], 1)

    return np.asarray(jax.jit(jax.vmap(run, axis_name="twin"))(jnp.zeros((2, 3, LAYERS, 5))))


def test_a_step_and_layer_have_one_draw() -> None:
    """The same for all devices, microsteps and elements; another for each step, layer and fault."""
    found = draws()
    assert found.shape == (2, 40, 2, 3, LAYERS, 5)
    one = found[:1, :, :, :1, :, :1]
    np.testing.assert_array_equal(found, np.broadcast_to(one, found.shape))
    assert len(np.unique(one)) == one.size
    assert ((one >= SMALLEST) & (one < 1)).all()
    # Neither do they hang together: correlations of 40 independent pairs scatter by 0.16.
    by_step = one.reshape(40, -1)
    assert np.abs(np.corrcoef(by_step.T) - np.eye(2 * LAYERS)).max() < 3.5 * 0.16


def test_the_share_goes_with_the_draw() -> None:
    """How many elements are hit is the binomial law of the very draw that decides the severity."""
    size, rate, few = 4096, 0.02, 2.0
    step = sdc.inject(probed, [sdc.Fault(Shown(1.0, 1.0, few), rate)])
    run = jax.jit(jax.vmap(step, (sdc.Moment(None, 0), None)))
    out, events = run(sdc.Moment(KEY, jnp.arange(200)), jnp.zeros(size))
    out, counts = np.asarray(out), np.asarray(events["fwd/p"].changed, np.float64)
    u = out.max(1)
    assert (((out == 0) | (out == u[:, None])).all(1)).all()
    seen = counts > 0
    expected = size * rate * (1 + few) * u[seen] ** few
    assert (counts[seen] < expected + 5 * np.sqrt(expected) + 5).all()
    scaled = (counts[seen] - expected)[expected > 10] / np.sqrt(expected[expected > 10])
    assert abs(scaled.mean()) < 5 / math.sqrt(scaled.size)
    assert abs(scaled.std() - 1) < 5 / math.sqrt(2 * scaled.size)
    # Steps without a hit: as many as have none by chance.
    uniform = (np.arange(100_000) + 0.5) / 100_000
    none = np.mean((1 - np.minimum(rate * (1 + few) * uniform**few, 1)) ** size)
    assert abs((~seen).sum() - 200 * none) < 5 * math.sqrt(200 * none * (1 - none))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_strike_has_a_draw_of_its_own(dtype: str) -> None:
    kind = Tailed(severity=0.5, tail=1.0, few=1.0)
    x = jnp.ones(8, dtype)
    where = "fwd/p"
    selector = sdc.Fault(kind, site=where).selector
    [site] = sdc.sites(probed, x, where=selector)
    run = jax.jit(sdc.strike(probed, selector))
    out, events = run(sdc.strike_on(site, kind, 3), x)
    assert np.flatnonzero(np.asarray(out) != np.asarray(x)).tolist() == [3]
    assert int(events[where].changed) == 1

    def change(key: Any) -> Any:
        return jnp.abs(kind.change(key, (), jnp.float32, jnp.int32(0)).factor - 1)

    keys = jax.random.split(KEY, 2000)
    found = np.asarray(jax.jit(jax.vmap(change))(keys))
    rng = np.random.default_rng(2)
    assert apart(found, 2 * rng.random(100_000) * 0.5 / rng.random(100_000)) < 1
    struck = [np.asarray(run(sdc.strike_on(site, kind, 3, key=key), x)[0], np.float64)[3] for key in keys[:20]]
    # To the last bit of the type, and that of 1 where the change is smaller.
    epsilon = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.abs(np.asarray(struck) - 1), found[:20], rtol=epsilon, atol=epsilon)


def test_levels_and_shares() -> None:
    u = np.asarray([0.01, 0.5, 1.0])
    kind = Tailed((0.5, 2.0), tail=1.5, few=2.0)
    for layer in (0, 1):
        level = [float(kind.level(each, layer)) for each in u]
        np.testing.assert_allclose(level, np.asarray(kind.severity)[layer] * u**-1.5, rtol=1e-6)
    np.testing.assert_allclose(kind.share(u), 3 * u**2)
    assert kind.largest_share() == 3
    assert sdc.Fault(kind, 0.1, when=When(spike=0.5)).largest_rate() == pytest.approx(0.6)
    steady = Tailed(0.5)  # as `Relative` of twice the size, with another draw
    assert float(steady.level(0.01)) == 0.5
    assert steady.share(0.01) == 1


@pytest.mark.parametrize(
    "fault",
    [sdc.Fault(KIND, RATES, "fwd/ffn", when=When(spike=0.02)), sdc.Fault(Tailed(1e-6, 1.17, 1.7), 1e-9, at={"twin": 1}),
     sdc.Fault(Tailed(0.5), 0.1)],
)  # fmt: skip
def test_the_text_is_read_as_it_is_written(fault: sdc.Fault) -> None:
    assert parse_fault(str(fault)) == fault
    assert as_fault(str(fault.what)).what == fault.what


def test_one_text() -> None:
    text = 'tailed(severity=0.5, tail=1.17, few=1.7, rate=0.001, site="fwd/attn")'
    fault = parse_fault(text)
    assert str(fault) == text
    assert fault.what == Tailed(0.5, 1.17, 1.7)
    assert [fault.describe()] == ["tailed severity 0.5 tail 1.17 few 1.7, rate 0.001, site fwd/attn"]


@pytest.mark.parametrize("name", ["tail", "few"])
@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
def test_what_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*: expected a finite number of at least 0"):
        Tailed(0.5, **{name: value})
    with pytest.raises(ValueError, match=f"fault 'tailed,.*: {name}=.*: expected a finite number of at least 0"):
        as_fault(f"tailed,severity=0.5,{name}={value}")


@pytest.mark.parametrize("kind", [Tailed, Relative])
@pytest.mark.parametrize("severity", [-1.0, math.nan, math.inf, (0.5, -1.0)])
def test_what_no_severity_is(kind: type[Relative], severity: Any) -> None:
    with pytest.raises(ValueError, match=r"severity=.*: expected a relative change of at least 0"):
        kind(severity)
