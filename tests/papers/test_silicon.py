"""Profiles of faulty silicon carry the published shares, and the kind that they are made of does what it says.

Shares are of elements that a simulated step really changed, as its ground truth tells. They are compared by exact
binomial intervals of 99.9 % confidence: of the share that the profile states, which the interval must hold, and of the
published one, whose own interval must meet it. Draws are the same each time, so that this does not fail by chance.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdc
from sdc.analysis.statistics import proportion_interval
from sdc.faults.kinds import field_bits
from sdc.nodes import silicon
from tests.sdc.nodes.test_silicon import CONFIDENCE, DTYPES, KEY, SHAPE, finite, flipped, outcomes, raw, simulated


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_has_the_published_shares(dtype: str) -> None:
    places, old, new, drawn = simulated("silicon:gpu", dtype)
    found = outcomes(old, new)
    single = flipped(old, new)[found["flips"]] == 1
    stated = {"zero": 0.5068, "special": 0.0101, "flips": 0.4831, "one bit of flips": 0.39}
    for name, hits in [*found.items(), ("one bit of flips", single)]:
        low, high = proportion_interval(int(hits.sum()), hits.size, confidence=CONFIDENCE)
        published = silicon.SHARES[name]
        assert low <= stated[name] <= high, name
        assert published.low <= stated[name] <= published.high, name
        assert low <= published.high, name
        assert high >= published.low, name
    assert len(places) == drawn  # no two hits met, and no number here was what the fault made of it


def test_signatures_of_permanent_faults() -> None:
    """Their forms as in figure 3: patches with one bit, single elements with low bits, rows with high bits."""
    dtype = "bfloat16"
    places, old, new, _ = simulated("silicon:tensor-core", dtype)
    assert set((raw(old) ^ raw(new)).tolist()) == {1 << 6}
    rows, columns = places // SHAPE[1], places % SHAPE[1]
    hit = np.zeros(SHAPE, bool)
    hit[rows, columns] = True
    whole = [hit[r : r + 3, c : c + 3].all() for r, c in zip(rows, columns, strict=True)]
    covered = np.zeros(SHAPE, bool)
    for r, c in zip(rows[whole], columns[whole], strict=True):
        covered[r : r + 3, c : c + 3] = True
    inside = (rows < SHAPE[0] - 2) & (columns >= 2) & (columns < SHAPE[1] - 2)
    assert covered[rows[inside], columns[inside]].all()  # those at an edge were cut

    places, old, new, _ = simulated("silicon:fma", dtype)
    counts = flipped(old, new)
    low, high = proportion_interval(int((counts == 1).sum()), counts.size, confidence=CONFIDENCE)
    assert low <= silicon.FMA_FLIPS[0] <= high
    assert (counts == 1).mean() > 0.5  # single bits have more weight
    assert finite(new).all()

    [fault, *_] = silicon.silicon_faults("silicon:cache-line", layers=1)
    run = jax.jit(sdc.inject(lambda x: sdc.probe(x, "attn"), [dataclasses.replace(fault, rate=1e-3)]))
    x = jnp.ones((64, 50), dtype)
    out, _ = run(sdc.Moment(KEY, jnp.int32(0)), x)
    flips = raw(out) ^ raw(x)
    assert 0 < (flips != 0).any(1).sum() < 64
    assert ((flips != 0).all(1) == (flips != 0).any(1)).all()
    high_bits = {1 << bit for bit in field_bits(dtype, "exponent")}
    assert set(flips[flips != 0].tolist()) == high_bits
