"""Lossy collectives against plain NumPy and theory; a run replays from its log; what helps against losses helps."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings, strategies as st

from sdc.aggregation import (
    lossy_zero2,
)
from sdc.aggregation.lossy import Layout, LossyState
from tests.sdc.aggregation.placements import AXIS
from tests.sdc.aggregation.test_lossy import WORKERS, random_walk


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    packet=st.one_of(st.none(), st.integers(1, 12)),
    workers=st.integers(2, 5),
)
def test_layout_cuts_and_joins(sizes: list[int], packet: int | None, workers: int) -> None:
    tree = [np.arange(1, size + 1, dtype=np.float32) for size in sizes]
    layout = Layout.of(tree, workers, packet)
    shards = layout.cut(tree)
    assert [shard.shape for shard in shards] == [(workers, -(-size // workers)) for size in sizes]
    for joined, leaf in zip(layout.join(shards, tree), tree, strict=True):
        np.testing.assert_array_equal(joined, leaf)
    numbers = np.arange(layout.packets)
    spread = layout.spread(jnp.asarray(numbers))
    squares = np.zeros((workers, layout.packets))
    first = 0
    for shard, number, count in zip(shards, spread, layout.counts, strict=True):
        length = shard.shape[1] if packet is None else min(packet, shard.shape[1])
        expected = [0 if packet is None else first + place // length for place in range(shard.shape[1])]
        assert np.asarray(number).tolist() == expected
        for row in range(workers):
            np.add.at(squares[row], expected, np.square(np.asarray(shard)[row]))
        first += count
    np.testing.assert_allclose(layout.squares(shards), squares, rtol=1e-5)


def last_loss(state: LossyState) -> tuple[float, float]:
    return float(state.report.gradient_loss[0].mean()), float(state.report.parameter_loss[0].mean())


def test_parity_and_reliable_packets_lower_the_loss() -> None:
    """With p = 0.2 and one parity packet for 4, a packet stays lost unless the 4 others of its 5 arrive."""
    run = functools.partial(random_walk, steps=40)
    plain = run(lossy_zero2(optax.sgd(1.0), AXIS, 0.2, 0.2, packet=5))[1]
    parity = run(lossy_zero2(optax.sgd(1.0), AXIS, 0.2, 0.2, packet=5, parity=4))[1]
    reliable = run(lossy_zero2(optax.sgd(1.0), AXIS, 0.2, 0.2, packet=5, reliable=0.25))[1]
    count = 40 * WORKERS * (WORKERS - 1) * 200
    for found, rate in ((plain, 0.2), (parity, 0.2 * (1 - 0.8**4)), (reliable, 0.2 * 0.75)):
        for share in last_loss(found):
            assert abs(share - rate) < 5 * math.sqrt(4 * rate * (1 - rate) / count)
