"""How often equation 6 would flag a node: the probabilities against simulated products."""

import numpy as np
import pytest

from sdc.train.studies.flags import WIDTH, flagged_share, probability, threshold


def test_the_threshold_is_that_of_a_product() -> None:
    """In a product of normal factors, as printed, and no rounding error comes near it."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((size, WIDTH), np.float32) for size in (64, WIDTH))
    c = a @ b
    right = WIDTH * 2.0**-24 * np.abs(a).sum(1).max() * np.abs(b).sum(1).max()
    assert right / c.std() == pytest.approx(threshold(), rel=0.03)
    left = np.abs(c.sum(1) - a @ b.sum(1)).max()
    assert left < right / 100


@pytest.mark.parametrize(
    ("struck", "mean", "limit"), [(3, 4.0, 12.0), (20, 9.0, 45.0), (6400, 1.0, 40.0), (3, 0.1, 12.0)]
)
def test_probabilities_are_those_of_simulated_rows(struck: int, mean: float, limit: float) -> None:
    rng, rows, trials = np.random.default_rng(0), 64, 4000
    found = 0
    for _ in range(trials):
        count = rng.poisson(struck)
        changes = rng.standard_normal(count) * rng.uniform(0, 2 * mean, count)
        sums = np.bincount(rng.integers(0, rows, count), changes, rows)
        found += np.abs(sums).max() > limit
    expected = float(probability(np.asarray([struck]), np.asarray([mean]), limit, rows)[0])
    assert abs(found / trials - expected) < 4 * np.sqrt(expected * (1 - expected) / trials) + 0.02 * expected + 1e-3


def test_nodes() -> None:
    assert flagged_share("node2") is None
    shares = [flagged_share(node) for node in ("node10", "node14")]
    assert all(share is not None and 1e-8 < share < 1e-3 for share in shares)
