"""c, the distance and the bound of an outlook, beside iterations that shrink every error by c, and noisy ones."""

import numpy as np
import pytest

from tests.sdc.checkpoints.test_outlook_bounds import saves_of


@pytest.mark.parametrize("noise", [(0.1, 0.0), (0.0, 0.1), (0.07, 0.07)])
@pytest.mark.parametrize("r", [1, 0.25, 0.125])
def test_intervals_of_c_cover(r: float, noise: tuple[float, float]) -> None:
    """300 noisy trainings, whether blocks are off each by itself or all together."""
    hits = 0
    for seed in range(300):
        lengths = np.exp((seed % 2) * np.random.default_rng(seed).normal(size=8))
        found = saves_of(0.9, r, 32, lengths, noise=noise, seed=seed)[-1][0]
        assert found is not None
        assert found.convergence is not None
        hits += found.convergence.interval[0] <= 0.9 <= found.convergence.interval[1]
    assert hits >= 0.9 * 300
