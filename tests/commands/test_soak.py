"""The quick part of `make storms STORMS=soak`: what a long run with checkpoints holds does not grow."""

import random

from tests.storms import soak

NAMES = ("orbax", "certify", "running", "train")


def test_short_runs_do_not_leak() -> None:
    """A hundred checkpoints."""
    tally = soak.run(2000, seed=0, names=NAMES)
    assert tally.wrong == []
    assert tally.trials == len(NAMES)
    assert tally.seen["flat"] > tally.seen["undecided"]


def test_a_leak_is_seen_in_noise() -> None:
    """A descriptor in twenty samples, or a thread in a thousand, among variations of some descriptors and threads."""
    draw = random.Random(0)
    samples = [(n // 20 + draw.randrange(9), n // 1000 + draw.randrange(9), 7, 0, 0) for n in range(1000)]
    found = soak.slopes(samples)
    assert found.memory == (0, 0)
    for slope, growth in ((found.descriptors, 1 / 20), (found.threads, 1 / 1000)):
        assert abs(slope.value - growth) < slope.reach
    assert found.descriptors.value - found.descriptors.reach > soak.BOUNDS.descriptors
    assert found.threads.value + found.threads.reach < soak.BOUNDS.threads
