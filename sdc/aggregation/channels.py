"""Channels that lose packets: models that determine which packets of a worker arrive.

Each worker sends a stream of packets to every other worker. A channel draws the losses at the sender's end of each
link, with a key derived from the step and the sender. The losses therefore depend only on the seed, the step and the
link.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from sdc._lazy import jax, jnp, lax, np

from .workers import check_probability

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float32, Int32, PRNGKeyArray


class Sent(NamedTuple):
    """The packets that a worker sends in a step."""

    sender: Int32[Array, ""]  # index of this worker
    step: Int32[Array, ""]  # number of the step
    workers: int  # number of receivers
    packets: int  # number of packets to each receiver
    scale: Float32[Array, ""]  # factor by which loss rates are multiplied, at most 1


class Channel(ABC):
    """A model of the links from one worker to all workers."""

    def init(self, workers: int) -> Any:
        """Returns the initial state of one sender's links."""
        return ()

    @abstractmethod
    def draw(self, key: PRNGKeyArray, state: Any, sent: Sent) -> tuple[Bool[Array, "workers packets"], Any]:
        """Draws the packets to each receiver that arrive in a step.

        Args:
            key: random key, different for each step and sender.
            state: the state of this sender's links.
            sent: the packets.

        Returns:
            A mask of the packets that arrive, and the state of the links after the last packet.
        """


@dataclasses.dataclass(frozen=True)
class Independent(Channel):
    """Every packet is lost with the same probability, independently of all others."""

    rate: float  # probability that a packet is lost

    def __post_init__(self) -> None:
        check_probability("rate", self.rate)

    def draw(self, key: PRNGKeyArray, state: Any, sent: Sent) -> tuple[Bool[Array, "workers packets"], Any]:
        return jax.random.uniform(key, (sent.workers, sent.packets)) >= self.rate * sent.scale, state


@dataclasses.dataclass(frozen=True)
class GilbertElliott(Channel):
    """Losses in bursts: each link is in a good or a bad state, and may switch to the other state at every packet.

    Gilbert, *Capacity of a Burst-Noise Channel* (1960); Elliott (1963). Links start in the good state and keep their
    state between steps.
    """

    rate: float  # long-run share of lost packets
    burst: float = 8.0  # mean duration of the bad state, in packets
    bad: float = 1.0  # probability that a packet is lost in the bad state
    good: float = 0.0  # probability that a packet is lost in the good state

    def __post_init__(self) -> None:
        for name in ("rate", "bad", "good"):
            check_probability(name, getattr(self, name))
        if not self.burst >= 1:
            raise ValueError(f"burst={self.burst}: expected a mean length of at least 1 packet")
        if not self.good <= self.rate <= self.bad or (self.rate and self.good == self.bad):
            raise ValueError(f"rate={self.rate}: expected a rate between good={self.good} and bad={self.bad}")
        if self.into_bad > 1:
            raise ValueError(
                f"rate={self.rate} with bursts of {self.burst} packets: the good state would last less than one packet "
                "on average; give a longer burst"
            )

    @property
    def _share(self) -> float:
        """Long-run share of packets that are sent in the bad state."""
        return (self.rate - self.good) / (self.bad - self.good) if self.bad > self.good else 0.0

    @property
    def into_bad(self) -> float:
        """Probability per packet of a change from the good to the bad state; it determines the share of time in the bad
        state."""
        return self._share / (1 - self._share) / self.burst if self._share < 1 else 1.0

    @property
    def out_of_bad(self) -> float:
        """Probability per packet of a change from the bad to the good state."""
        return 1 / self.burst if self._share < 1 else 0.0

    def init(self, workers: int) -> Bool[Array, "workers"]:
        return jnp.zeros(workers, jnp.bool_)

    def draw(self, key: PRNGKeyArray, state: Any, sent: Sent) -> tuple[Bool[Array, "workers packets"], Any]:
        change, loss = jax.random.uniform(key, (2, sent.workers, sent.packets))
        # Each packet maps {good, bad} to itself; such maps compose, so one associative scan handles a whole stream.
        from_good, from_bad = change < self.into_bad, change >= self.out_of_bad

        def after(first: Any, then: Any) -> Any:
            return tuple(jnp.where(one, then[1], then[0]) for one in first)

        from_good, from_bad = lax.associative_scan(after, (from_good, from_bad), axis=1)
        bad = jnp.where(state[:, None], from_bad, from_good)
        rate = jnp.where(bad, jnp.float32(self.bad), jnp.float32(self.good)) * sent.scale
        return loss >= rate, bad[:, -1]


@dataclasses.dataclass(frozen=True)
class BadLink(Channel):
    """Losses on one bad link, or on all links from or to one worker; all other links have a loss rate of their own."""

    rate: float  # probability that a packet is lost on the bad links
    sender: int | None = None  # only links from this worker are bad; None: from any worker
    receiver: int | None = None  # only links to this worker are bad; None: to any worker
    other: float = 0.0  # probability that a packet is lost on all other links

    def __post_init__(self) -> None:
        check_probability("rate", self.rate)
        check_probability("other", self.other)
        if self.sender is None and self.receiver is None:
            raise ValueError(
                "a bad link needs a sender, a receiver or both; for equal losses on all links use Independent"
            )

    def draw(self, key: PRNGKeyArray, state: Any, sent: Sent) -> tuple[Bool[Array, "workers packets"], Any]:
        for name, value in (("sender", self.sender), ("receiver", self.receiver)):
            if value is not None and not 0 <= value < sent.workers:
                raise ValueError(f"{name}={value}: expected a worker from 0 to {sent.workers - 1}")
        hit = jnp.ones(sent.workers, jnp.bool_)
        if self.sender is not None:
            hit &= sent.sender == self.sender
        if self.receiver is not None:
            hit &= jnp.arange(sent.workers) == self.receiver
        rate = jnp.where(hit, jnp.float32(self.rate), jnp.float32(self.other)) * sent.scale
        return jax.random.uniform(key, (sent.workers, sent.packets)) >= rate[:, None], state


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded(Channel):
    """A recorded trace: the losses of a real network, or of an earlier run. After its last step, the trace starts again
    from the beginning."""

    arrived: Bool[np.ndarray, "steps senders receivers packets"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrived", np.asarray(self.arrived))
        if self.arrived.ndim != 4 or self.arrived.dtype != np.bool_ or not self.arrived.size:
            raise ValueError(
                f"the recorded trace has shape {self.arrived.shape} and type {self.arrived.dtype}; "
                "expected bool [steps, senders, receivers, packets]"
            )

    def draw(self, key: PRNGKeyArray, state: Any, sent: Sent) -> tuple[Bool[Array, "workers packets"], Any]:
        if self.arrived.shape[1:] != (sent.workers, sent.workers, sent.packets):
            raise ValueError(
                f"a recorded trace of {self.arrived.shape[1:]} (senders, receivers, packets) does not fit a run of "
                f"{(sent.workers, sent.workers, sent.packets)}; use the workers, model and packets of the recorded run"
            )
        return jnp.asarray(self.arrived)[sent.step % len(self.arrived), sent.sender], state
