"""Latencies of micro-batches: random distributions whose mean and variance are known exactly.

The theory of DropCompute (`speedup`) requires only the mean and the variance of a latency, whereas simulations draw
samples. Times are in seconds. Samples are drawn with a random key and are reproducible.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import TYPE_CHECKING, TypeAlias, get_args

from sdc._lazy import jax, jnp
from sdc.text import Form, form, read_term, write_term

from .workers import check_probability

if TYPE_CHECKING:
    from jaxtyping import Array, Float32, PRNGKeyArray

_NORMAL = NormalDist()


class _Written:
    """The distribution of the compute time of a micro-batch, with its mean and variance; draws are independent.

    Parameters are above 0 unless stated otherwise. The `repr` of a latency is its text form (see `parse_latency`).
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ValueError(
                    f"{name}={value}: expected a finite number above 0; for a time without variance use 'constant'"
                )

    def __repr__(self) -> str:
        return write_term(self, LATENCIES)


def _check_times(**times: float) -> None:
    for name, value in times.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: expected a finite time in seconds, at least 0")


@dataclasses.dataclass(frozen=True, repr=False)
class Constant(_Written):
    """A constant time."""

    seconds: float  # the time, at least 0

    def __post_init__(self) -> None:
        _check_times(seconds=self.seconds)

    @property
    def mean(self) -> float:
        return self.seconds

    @property
    def variance(self) -> float:
        return 0.0

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
        return jnp.full(shape, self.seconds, jnp.float32)


@dataclasses.dataclass(frozen=True, repr=False)
class Normal(_Written):
    """max(0, X) with X ~ N(mu, sigma²): negative draws become 0.

    The mean and the variance are those of the clipped distribution. Let a = mu/sigma, let phi and Phi be the density
    and the distribution function of N(0, 1), and let W = max(Z, -a) for Z ~ N(0, 1). Then:

        E[W] = phi(a) - a Phi(-a);  E[W²] = Phi(a) - a E[W];  mean = mu + sigma E[W];  variance = sigma² Var[W].
    """

    mu: float  # mean before clipping, above 0
    sigma: float  # standard deviation before clipping, above 0

    @property
    def _clipped(self) -> float:
        """E[W]: the amount by which clipping increases the mean, in units of sigma."""
        ratio = self.mu / self.sigma
        return _NORMAL.pdf(ratio) - ratio * _NORMAL.cdf(-ratio)

    @property
    def mean(self) -> float:
        return self.mu + self.sigma * self._clipped

    @property
    def variance(self) -> float:
        ratio, clipped = self.mu / self.sigma, self._clipped
        return self.sigma**2 * (_NORMAL.cdf(ratio) - ratio * clipped - clipped**2)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
        return jnp.maximum(self.mu + self.sigma * jax.random.normal(key, shape, jnp.float32), 0)


@dataclasses.dataclass(frozen=True, repr=False)
class LogNormal(_Written):
    """exp(X) with X ~ N(m, s²), s² = log(1 + (std/mean)²) and m = log(mean) - s²/2."""

    mean: float  # mean of the time itself, not of its logarithm; above 0
    std: float  # standard deviation of the time itself, above 0

    @property
    def variance(self) -> float:
        return self.std**2

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
        variance = math.log1p((self.std / self.mean) ** 2)
        mean = math.log(self.mean) - variance / 2
        return jnp.exp(mean + math.sqrt(variance) * jax.random.normal(key, shape, jnp.float32))


@dataclasses.dataclass(frozen=True, repr=False)
class Exponential(_Written):
    """Exponential distribution with density exp(-t/mean)/mean."""

    mean: float  # mean of the distribution, above 0

    @property
    def variance(self) -> float:
        return self.mean**2

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
        return self.mean * jax.random.exponential(key, shape, jnp.float32)


@dataclasses.dataclass(frozen=True, repr=False)
class Gamma(_Written):
    """Gamma distribution with scale mean/shape."""

    mean: float  # mean of the distribution, above 0
    shape: float  # shape of the distribution, above 0; 1 gives the exponential distribution; larger values vary less

    @property
    def variance(self) -> float:
        return self.mean**2 / self.shape

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
        return self.mean / self.shape * jax.random.gamma(key, self.shape, shape, jnp.float32)


@dataclasses.dataclass(frozen=True, repr=False)
class Bernoulli(_Written):
    """Stragglers: a micro-batch takes `base` seconds, plus `extra` seconds with a given probability."""

    base: float  # time of every micro-batch, at least 0
    extra: float  # additional time of a straggler, at least 0
    probability: float  # probability of a straggler

    def __post_init__(self) -> None:
        _check_times(base=self.base, extra=self.extra)
        check_probability("probability", self.probability)

    @property
    def mean(self) -> float:
        return self.base + self.probability * self.extra

    @property
    def variance(self) -> float:
        return self.extra**2 * self.probability * (1 - self.probability)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
        straggles = jax.random.bernoulli(key, self.probability, shape)
        return jnp.where(straggles, jnp.float32(self.base + self.extra), jnp.float32(self.base))


# log(Z/alpha) ~ N(_LOG_MEAN, 1) for Z ~ LogNormal(4, 1) and alpha = 2 exp(4.5), so that E[Z/alpha] = 1/2.
_LOG_MEAN = 4 - math.log(2) - 4.5
_BOUND = 5.5


@dataclasses.dataclass(frozen=True, repr=False)
class BoundedLogNormal(_Written):
    """The delay environment of DropCompute (Giladi et al., NeurIPS 2023, appendix B.1).

        t = base + base min(Z/alpha, beta),  Z ~ LogNormal(4, 1),  alpha = 2 exp(4.5),  beta = 5.5

    With Y = Z/alpha = exp(X), X ~ N(m, 1), m = 4 - log(alpha), and d = log(beta) - m:

        E[min(Y, beta)^k] = exp(k m + k²/2) Phi(d - k) + beta^k Phi(-d).

    A micro-batch takes 1.496 times `base` on average (1.5 times without the bound), and at most 6.5 times.
    """

    base: float  # time without delay, above 0

    @property
    def mean(self) -> float:
        return self.base * (1 + _bounded_moment(1))

    @property
    def variance(self) -> float:
        return self.base**2 * (_bounded_moment(2) - _bounded_moment(1) ** 2)

    def sample(self, key: PRNGKeyArray, shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
        delay = jnp.exp(_LOG_MEAN + jax.random.normal(key, shape, jnp.float32))
        return self.base * (1 + jnp.minimum(delay, _BOUND))


def _bounded_moment(k: int) -> float:
    """Returns E[min(Y, beta)^k] of `BoundedLogNormal`."""
    distance = math.log(_BOUND) - _LOG_MEAN
    below = math.exp(k * _LOG_MEAN + k**2 / 2) * _NORMAL.cdf(distance - k)
    return float(below + _BOUND**k * _NORMAL.cdf(-distance))


Latency: TypeAlias = Constant | Normal | LogNormal | Exponential | Gamma | Bernoulli | BoundedLogNormal
# Text forms of all latencies.
LATENCIES: Mapping[str, Form] = {model.__name__.lower(): form(model) for model in get_args(Latency)}


def parse_latency(text: str) -> Latency:
    """Parses a latency of the form `KIND(key=value, ...)`; see `sdc.text` for the grammar.

    The kinds are the classes of this module, and the keys are their attributes: `constant(seconds=S)`, `normal(mu=M,
    sigma=S)`, `lognormal(mean=M, std=S)`, `exponential(mean=M)`, `gamma(mean=M, shape=K)`, `bernoulli(base=B, extra=E,
    probability=P)`, `boundedlognormal(base=B)`.
    """
    found: Latency = read_term("latency", text, LATENCIES, example="lognormal(mean=0.1, std=0.05)").value
    return found
