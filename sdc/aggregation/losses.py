"""What a step of `lossy_zero2` lost: its report, and its log, from which a run is replayed."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, UInt8, UInt32

from .assignment import Tree
from .channels import Recorded
from .lossy import Layout, own_packets

SAMPLE = 256
"""Most elements of a shard from which the drift between copies is estimated."""


class LossyLog(NamedTuple):
    """Which packets of this worker arrived at the last step, eight to a byte (`numpy.packbits` along the last axis).

    Attributes:
        gradient: packets of the reduce-scatter, uint8 [receivers, packets / 8].
        parameter: packets of the all-gather, of the same shape and type.
    """

    gradient: UInt8[Array, "workers bytes"]
    parameter: UInt8[Array, "workers bytes"]


class LossyReport(NamedTuple):
    """What the last step lost, and how far the copies are off; the same on every worker.

    Attributes:
        gradient_loss: share of the packets of gradients between different workers that did not arrive.
        parameter_loss: the same share of the packets of parameters.
        unreduced: packets of shards of which nothing arrived, so that their gradient is that of the step before.
        move: s^2, mean square of what owners moved their parameters by.
        owner_drift: mean square of the difference between a copy and its owner's shard, estimated like `pair_drift`.
        pair_drift: the same between two copies, neither of them the owner's, from a sample of up to `SAMPLE` elements
            of each shard; NaN with two workers, where there is but one copy. In theory `drift.pair_drift`.
        norm: Euclidean norm of the aggregated gradient; 0 where rates do not tighten.
    """

    gradient_loss: Float32[Array, ""]
    parameter_loss: Float32[Array, ""]
    unreduced: UInt32[Array, ""]
    move: Float32[Array, ""]
    owner_drift: Float32[Array, ""]
    pair_drift: Float32[Array, ""]
    norm: Float32[Array, ""]


def recorded(logs: Sequence[LossyLog], params: Tree, *, packet: int | None = None) -> tuple[Recorded, Recorded]:
    """The channels that replay a run, from the logs of its steps.

    Args:
        logs: the log of each step, from all workers: leaves uint8 [senders, receivers, bytes].
        params: the parameters of one worker.
        packet: what the run gave `lossy_zero2`.

    Returns:
        For `p_grad` and `p_param`. The replay must not ask for `tighten`; `parity` and `reliable` have no effect.

    Raises:
        ValueError: there is no step, or the logs are of another model, number of workers or packet size.
    """
    if not logs:
        raise ValueError("the log holds no step; replay a run of one step or more")
    found = []
    for name in LossyLog._fields:
        packed = np.stack([np.asarray(getattr(log, name)) for log in logs])
        if packed.ndim != 4 or packed.shape[1] != packed.shape[2]:
            raise ValueError(
                f"a log of shape {packed.shape}: expected uint8 [steps, senders, receivers, bytes] of all workers"
            )
        packets = Layout.of(params, packed.shape[1], packet).packets
        arrived = np.unpackbits(packed, axis=-1).astype(np.bool_)
        # What a worker sends itself always arrives: it tells how many packets there were.
        own = np.einsum("swwp->swp", arrived)
        if packed.shape[3] != -(-packets // 8) or not (own == (np.arange(arrived.shape[-1]) < packets)).all():
            raise ValueError(
                f"a log of {packed.shape[3]} bytes a link does not fit {packets} packets; "
                "replay a run with its own model and packet size"
            )
        found.append(Recorded(arrived[..., :packets]))
    return found[0], found[1]


def measured_losses(
    layout: Layout,
    axis_name: str,
    sent_gradient: Bool[Array, "workers packets"],
    sent_parameter: Bool[Array, "workers packets"],
    received: Float32[Array, "packets"],
    moved: Sequence[Float[Array, "1 _"]],
    copies: Sequence[Float[Array, "workers _"]],
    owners: Sequence[Float[Array, "workers _"]],
) -> LossyReport:
    """What a step lost, and how far the copies are off; its norm is 0."""
    others = ~own_packets(layout, axis_name)
    # All elements would take another pass over all parameters.
    pairs = [(copy, owner, -(-copy.shape[1] // SAMPLE)) for copy, owner in zip(copies, owners, strict=True)]
    sampled = jnp.concatenate(
        [(copy[:, ::apart] - owner[:, ::apart]).astype(jnp.float32) for copy, owner, apart in pairs], axis=1
    )
    sums = lax.psum(
        (
            jnp.sum(~sent_gradient & others, dtype=jnp.float32),
            jnp.sum(~sent_parameter & others, dtype=jnp.float32),
            jnp.sum(received == 0, dtype=jnp.uint32),
            sum_of_squares(moved),
            sampled,
            jnp.square(sampled),
        ),
        axis_name,
    )
    gradient, parameter, unreduced, move, first, second = sums
    copies_of_one = layout.workers - 1
    sent = layout.workers * copies_of_one * layout.packets
    size = max(1, sum(layout.sizes))
    drift = jnp.float32(jnp.nan)
    if copies_of_one > 1:
        # The mean of (a - b)^2 over pairs; the owner's own error is 0 and adds to neither sum.
        spread = copies_of_one * second - jnp.square(first)
        # Where copies differ by less than rounding, the difference of the sums can be negative.
        drift = 2 * jnp.maximum(jnp.mean(spread), 0) / (copies_of_one * (copies_of_one - 1))
    return LossyReport(
        gradient / sent,
        parameter / sent,
        unreduced,
        move / size,
        jnp.mean(second) / copies_of_one,
        drift,
        jnp.float32(0),
    )


def sum_of_squares(leaves: Sequence[Float[Array, "..."]]) -> Float32[Array, ""]:
    """Over all leaves, in float32."""
    return sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves), jnp.float32(0))
