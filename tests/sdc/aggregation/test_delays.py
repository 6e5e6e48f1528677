"""Latencies: what is drawn against closed forms of mean and variance, and lines of text against classes."""

import math

import jax
import numpy as np
import pytest

from sdc.aggregation.delays import (
    Bernoulli,
    BoundedLogNormal,
    Constant,
    Exponential,
    Gamma,
    Latency,
    LogNormal,
    Normal,
    parse_latency,
)

KEY = jax.random.key(5)
DRAWS = 200_000
# The mean 0.225 and the variance 0.05 are those of the published comparison of noise types.
MODELS: list[Latency] = [
    Constant(0.45),
    Constant(0.0),
    Normal(0.45, 0.05),
    Normal(0.225, 0.2236),
    Normal(0.1, 1.0),
    LogNormal(0.225, 0.2236),
    LogNormal(100.0, 5.0),
    Exponential(0.225),
    Gamma(0.225, 1.0),
    Gamma(3.0, 20.0),
    Gamma(1.0, 0.3),
    Bernoulli(0.45, 0.45, 0.5),
    Bernoulli(0.0, 1.0, 0.02),
    BoundedLogNormal(1.0),
    BoundedLogNormal(0.45),
]


def draw(latency: Latency) -> np.ndarray:
    return np.asarray(latency.sample(KEY, (DRAWS // 100, 100)))


@pytest.mark.parametrize("latency", MODELS, ids=str)
def test_mean_and_variance_are_those_of_what_is_drawn(latency: Latency) -> None:
    """Within five standard errors; that of the variance comes from the fourth moment of the draws."""
    times = draw(latency)
    assert times.dtype == np.float32
    assert times.shape == (DRAWS // 100, 100)
    assert (times >= 0).all()
    times = times.astype(np.float64).ravel()
    deviations = (times - times.mean()) ** 2
    rounding = 1e-6 * latency.mean
    assert abs(times.mean() - latency.mean) <= 5 * times.std() / math.sqrt(DRAWS) + rounding
    assert abs(deviations.mean() - latency.variance) <= 5 * deviations.std() / math.sqrt(DRAWS) + rounding**2


@pytest.mark.parametrize(
    ("latency", "quantiles"),
    [
        (LogNormal(0.225, 0.2236), [0.0553, 0.1596, 0.4607]),
        (Exponential(2.0), [-2 * math.log(0.9), 2 * math.log(2), 2 * math.log(10)]),
        (Gamma(2.0, 1.0), [-2 * math.log(0.9), 2 * math.log(2), 2 * math.log(10)]),
        (Normal(1.0, 1.0), [0.0, 1.0, 1 + 1.28155]),
        (BoundedLogNormal(2.0), [2 + math.exp(-0.5 - z) for z in (1.28155, 0, -1.28155)]),
    ],
    ids=str,
)
def test_quantiles(latency: Latency, quantiles: list[float]) -> None:
    """10, 50 and 90 %, computed apart from the code: the shape of a distribution, not its moments only."""
    np.testing.assert_allclose(np.quantile(draw(latency), [0.1, 0.5, 0.9]), quantiles, rtol=0.02)


def test_bounded_lognormal_is_bounded() -> None:
    """An unbounded delay of 5.5 times the base has a probability of 0.18 %."""
    times = draw(BoundedLogNormal(2.0))
    assert times.max() == 2 * 6.5
    assert np.mean(times == times.max()) == pytest.approx(0.0019, abs=5e-4)


def test_clipping_of_a_narrow_normal_costs_no_digits() -> None:
    narrow = Normal(1.0, 1e-9)
    assert narrow.mean == 1.0
    assert narrow.variance == pytest.approx(1e-18, rel=1e-12)


@pytest.mark.parametrize("latency", MODELS, ids=str)
def test_draws_come_from_the_key_alone(latency: Latency) -> None:
    def draw(key: jax.Array) -> np.ndarray:
        return np.asarray(latency.sample(key, (3, 50)))

    np.testing.assert_array_equal(draw(KEY), draw(KEY))
    if latency.variance:
        assert (draw(KEY) != draw(jax.random.key(6))).any()
    compiled = jax.jit(lambda key: latency.sample(key, (3, 50)))(KEY)
    np.testing.assert_allclose(compiled, draw(KEY), rtol=1e-5)


@pytest.mark.parametrize(
    ("spec", "latency"),
    [
        ("constant,seconds=0.1", Constant(0.1)),
        ("normal,mu=0.1,sigma=0.05", Normal(0.1, 0.05)),
        ("lognormal, std=5e-2, mean=0.1", LogNormal(0.1, 0.05)),
        ("exponential,mean=2", Exponential(2.0)),
        ("gamma,mean=2,shape=3", Gamma(2.0, 3.0)),
        ("bernoulli,base=0.45,extra=1,probability=0.1", Bernoulli(0.45, 1.0, 0.1)),
        ("boundedlognormal,base=0.45", BoundedLogNormal(0.45)),
    ],
)
def test_lines(spec: str, latency: Latency) -> None:
    assert parse_latency(spec) == latency


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("weibull,mean=1", "unknown kind 'weibull'; expected one of constant, normal, .*boundedlognormal"),
        ("", "unknown kind ''"),
        ("gamma,mean=1,scale=2", "unknown key 'scale'; kind gamma takes mean, shape"),
        ("gamma,mean=1", "'shape' is missing; write 'gamma\\(mean=..., shape=...\\)'"),
        ("exponential,mean=1,mean=2", "'mean' is given twice"),
        ("exponential,1", "'1' is not of the form key=value; write 'exponential\\(mean=...\\)'"),
        ("exponential,mean=", "'mean=' is not of the form key=value; write 'exponential\\(mean=...\\)'"),
        ("exponential,mean=-1", "mean=-1.0: expected a finite number above 0"),
        ("lognormal,mean=1,std=0", "std=0.0: expected a finite number above 0"),
        ("lognormal,mean=nan,std=1", "mean=nan"),
        ("normal,mu=0,sigma=1", "mu=0.0"),
        ("normal,mu=1,sigma=inf", "sigma=inf"),
        ("gamma,mean=1,shape=0", "shape=0.0"),
        ("constant,seconds=-0.1", "seconds=-0.1: expected a finite time in seconds, at least 0"),
        ("bernoulli,base=1,extra=-1,probability=0.1", "extra=-1.0: expected a finite time"),
        ("bernoulli,base=inf,extra=1,probability=0.1", "base=inf: expected a finite time"),
        ("bernoulli,base=1,extra=1,probability=1.5", "probability=1.5: expected a probability"),
        ("boundedlognormal,base=0", "base=0.0: expected a finite number above 0"),
    ],
)
def test_bad_lines_say_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_latency(spec)
    assert repr(spec) in str(caught.value)
