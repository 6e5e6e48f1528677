"""How many packets channels lose, in bursts of which length, on which links."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdc.aggregation import BadLink, Channel, GilbertElliott, Independent, Recorded, Sent

WORKERS, PACKETS, STEPS = 4, 400, 25


def sent(channel: Channel, *, scale: float = 1.0, steps: int = STEPS, packets: int = PACKETS) -> np.ndarray:
    """Packets that arrive: bool [steps, senders, receivers, packets]."""

    def one(sender: Any) -> Any:
        def step(state: Any, number: Any) -> Any:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), number), sender)
            arrived, state = channel.draw(key, state, Sent(sender, number, WORKERS, packets, jnp.float32(scale)))
            return state, arrived

        return jax.lax.scan(step, channel.init(WORKERS), jnp.arange(steps))[1]

    return np.asarray(jax.jit(jax.vmap(one, out_axes=1))(jnp.arange(WORKERS)))


def within(share: float, rate: float, count: int, *, correlated: float = 1.0) -> bool:
    """Whether a share lies within five standard errors of a rate."""
    return abs(share - rate) < 5 * math.sqrt(max(rate * (1 - rate), 1e-12) * correlated / count)


@pytest.mark.parametrize(("rate", "scale"), [(0.0, 1.0), (0.1, 1.0), (0.4, 0.5), (1.0, 1.0)])
def test_independent_losses(rate: float, scale: float) -> None:
    arrived = sent(Independent(rate), scale=scale)
    assert within(1 - arrived.mean(), rate * scale, arrived.size)
    lost = ~arrived
    assert within((lost[..., 1:] & lost[..., :-1]).mean(), (rate * scale) ** 2, arrived.size, correlated=2)


@pytest.mark.parametrize(("rate", "burst", "bad", "good"), [(0.1, 8.0, 1.0, 0.0), (0.2, 3.0, 0.5, 0.1)])
def test_bursts(rate: float, burst: float, bad: float, good: float) -> None:
    channel = GilbertElliott(rate, burst, bad, good)
    arrived = sent(channel)
    # Losses within a burst count as one: the variance of the share is larger by up to twice the burst.
    assert within(1 - arrived.mean(), rate, arrived.size, correlated=2 * burst)
    if bad == 1:
        stream = ~np.moveaxis(arrived, 0, 2).reshape(WORKERS * WORKERS, -1)
        starts = (stream[:, 1:] & ~stream[:, :-1]).sum() + stream[:, 0].sum()
        length = stream.sum() / starts
        # Stays are geometric, of a standard deviation of about their mean; they go on from step to step.
        assert abs(length - burst) < 5 * burst / math.sqrt(starts)


def test_a_bad_link_and_a_bad_worker() -> None:
    lost = 1 - sent(BadLink(0.5, sender=1, receiver=2)).mean(axis=(0, 3))
    assert (np.delete(lost.ravel(), WORKERS * 1 + 2) == 0).all()
    assert within(lost[1, 2], 0.5, STEPS * PACKETS)
    lost = 1 - sent(BadLink(1.0, sender=3, other=0.1)).mean(axis=(0, 3))
    assert (lost[3] == 1).all()
    assert all(within(share, 0.1, STEPS * PACKETS) for share in lost[:3].ravel())


def test_a_recorded_trace_begins_anew_at_its_end() -> None:
    trace = np.random.default_rng(0).random((3, WORKERS, WORKERS, 5)) < 0.5
    for given in (trace, trace.tolist()):
        np.testing.assert_array_equal(sent(Recorded(given), steps=7, packets=5), trace[[0, 1, 2, 0, 1, 2, 0]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Independent(1.1), "rate=1.1"),
        (lambda: GilbertElliott(0.1, 0.5), "burst=0.5"),
        (lambda: GilbertElliott(0.1, 4.0, bad=0.05), "rate=0.1"),
        (lambda: GilbertElliott(0.9, 1.0), "give a longer burst"),
        (lambda: BadLink(0.1), "needs a sender, a receiver or both"),
        (lambda: sent(BadLink(0.1, sender=4)), "sender=4: expected a worker from 0 to 3"),
        (lambda: Independent("0.1"), "rate='0.1'"),  # type: ignore[arg-type]
        (lambda: Recorded([[[True]]]), r"shape \(1, 1, 1\)"),  # type: ignore[arg-type]
        (lambda: Recorded(np.ones((2, 2, 2), bool)), r"shape \(2, 2, 2\)"),
        (lambda: sent(Recorded(np.ones((1, 3, 3, 5), bool)), packets=5), r"does not fit a run of \(4, 4, 5\)"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
