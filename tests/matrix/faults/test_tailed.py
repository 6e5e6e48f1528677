"""Severities with a heavy tail: elements are hit, and by how much, as a plain NumPy version of the law has it.

Samples are compared by two-sample Kolmogorov-Smirnov tests at 99.9 %, counts to five standard deviations. Draws are the
same each time, so that this does not fail by chance.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdc
from sdc.faults import Relative, Tailed, When
from tests.sdc.faults.test_tailed import DTYPES, KEY, KIND, LAYERS, RATES, SIZE, STEPS, measured


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_frequency_is_the_rate(dtype: str) -> None:
    counts, _ = measured(dtype)
    assert counts.shape == (STEPS, LAYERS)
    means = SIZE * np.asarray(RATES)
    variances = means + means**2 * KIND.few**2 / (2 * KIND.few + 1)  # at most, of a binomial and of the share
    assert (np.abs(counts.mean(0) - means) < 5 * np.sqrt(variances / STEPS)).all()
    # No more are hit than in the mildest steps.
    most = means * (1 + KIND.few)
    assert (counts.max(0) < most + 5 * np.sqrt(most)).all()


def test_faults_of_one_device_and_time_have_their_spikes_together() -> None:
    spike, steps = 0.3, 400
    when, other = When(spike=spike), When(spike=spike, burst=1e-6)
    faults = [
        sdc.Fault(Tailed(0.5, 1.0), 0.3, "fwd/p", at={"twin": 0}, when=when),
        sdc.Fault(Relative(0.5), 0.3, "fwd/q", at={"twin": 0}, when=when),
        sdc.Fault(Tailed(0.5, 1.0), 0.3, "fwd/p", at={"twin": 1}, when=when),
        sdc.Fault(Tailed(0.5, 1.0), 0.3, "fwd/q", at={"twin": 1}, when=other),
    ]

    def run(x: Any) -> Any:
        step = sdc.inject(lambda x: (sdc.probe(x, "p"), sdc.probe(x, "q")), faults)
        _, events = jax.vmap(step, (sdc.Moment(None, 0), None))(sdc.Moment(KEY, jnp.arange(steps)), x)
        return jnp.stack([events[name].changed > 0 for name in ("fwd/p", "fwd/q")])

    # With 64 elements at a rate of 0.3 / 0.3, all are hit in a spike.
    (p, q), (twin_p, twin_q) = np.asarray(jax.jit(jax.vmap(run, axis_name="twin"))(jnp.ones((2, 64))))
    np.testing.assert_array_equal(p, q)
    for hit in (p, twin_p, twin_q):
        assert abs(hit.sum() - spike * steps) < 5 * math.sqrt(steps * spike * (1 - spike))
    for first, second in ((p, twin_p), (twin_p, twin_q)):  # another device, and another course in time
        assert abs((first & second).sum() - spike**2 * steps) < 5 * math.sqrt(steps * spike**2 * (1 - spike**2))
