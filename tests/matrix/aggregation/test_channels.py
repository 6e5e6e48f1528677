"""How many packets channels lose, in bursts of which length, on which links."""

import jax
import jax.numpy as jnp
import numpy as np

from sdc.aggregation import GilbertElliott, Sent


def test_bursts_are_those_of_a_chain_walked_packet_by_packet() -> None:
    channel = GilbertElliott(0.3, 4.0)
    arrived, state = channel.draw(
        jax.random.key(5), jnp.asarray([False, True]), Sent(jnp.int32(0), jnp.int32(0), 2, 50, jnp.float32(1)),
    )  # fmt: skip
    change, loss = (np.asarray(part) for part in jax.random.uniform(jax.random.key(5), (2, 2, 50)))
    for link, bad in enumerate([False, True]):
        for packet in range(50):
            bad = change[link, packet] < channel.into_bad if not bad else change[link, packet] >= channel.out_of_bad
            assert arrived[link, packet] == (loss[link, packet] >= float(bad))
        assert state[link] == bad
