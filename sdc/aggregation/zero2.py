"""ZeRO-2 over links that lose packets: every worker owns a shard of the optimizer and holds a copy of all parameters.

Weintraub, Banner, Orda, *Distributed Training under Packet Loss* (2025), algorithm 1:

    forward, backward -> lossy reduce-scatter of gradients -> the owner updates its shard -> lossy all-gather

Beyond the paper, from its list of open questions: loss per packet, bursts, bad links, recorded traces (`channels`),
reliable transport for the packets of largest norm, parity packets, rates that tighten as training converges, and a log
of everything that was lost, from which a run is replayed bit for bit.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from .assignment import Tree, assign, check_update, stepped
from .channels import Channel, Independent, Recorded, Sent
from .losses import LossyLog, LossyReport, measured_losses, sum_of_squares
from .lossy import Layout, all_gather, check_floats, check_gradient, own_packets, reduce_scatter
from .workers import check_axis, check_probability, check_some, count_workers


class LossyState(NamedTuple):
    """State of `lossy_zero2`; shards are flat and padded.

    Attributes:
        inner: state of the optimizer, on this worker's shards.
        step: steps done.
        previous: this worker's shards of the last aggregated gradient.
        channels: states of this worker's links, for gradients and for parameters.
        strongest: the largest norm of an aggregated gradient so far.
        report, log: what the last step lost.
    """

    inner: optax.OptState
    step: Int32[Array, ""]
    previous: Tree
    channels: tuple[Any, Any]
    strongest: Float32[Array, ""]
    report: LossyReport
    log: LossyLog


@dataclasses.dataclass(frozen=True)
class _Transport:
    """What stands between a sender and the packets that arrive."""

    channel: Channel
    reliable: float
    parity: int | None

    def deliver(
        self,
        key: Array,
        state: Any,
        sent: Sent,
        squares: Float32[Array, "workers packets"] | None,
    ) -> tuple[Bool[Array, "workers packets"], Any]:
        """Packets that arrive, and the channel's state. `squares` are the packets' norms, for those sent reliably."""
        workers, packets = sent.workers, sent.packets
        if self.parity is None or isinstance(self.channel, Recorded):
            arrived, state = self.channel.draw(key, state, sent)
        else:
            groups = -(-packets // self.parity)
            drawn, state = self.channel.draw(key, state, sent._replace(packets=groups * (self.parity + 1)))
            group = drawn.reshape(workers, groups, self.parity + 1)
            real = (jnp.arange(groups * self.parity) < packets).reshape(groups, self.parity)
            data, spare = group[..., :-1] | ~real, group[..., -1:]
            mended = data | ((jnp.sum(~data, axis=-1, keepdims=True) == 1) & spare)
            arrived = mended.reshape(workers, -1)[:, :packets]
        if squares is not None and not isinstance(self.channel, Recorded):  # what a log holds has been mended already
            # What is not a number is as important as can be; of equal norms the first are taken.
            largest = lax.top_k(jnp.nan_to_num(squares, nan=jnp.inf), math.ceil(self.reliable * packets))[1]
            arrived |= jnp.zeros_like(arrived).at[jnp.arange(workers)[:, None], largest].set(True)
        return arrived, state


def lossy_zero2(
    optimizer: optax.GradientTransformation,
    axis_name: str,
    p_grad: float | Channel = 0.0,
    p_param: float | Channel = 0.0,
    *,
    packet: int | None = None,
    seed: int = 0,
    reliable: float = 0.0,
    parity: int | None = None,
    tighten: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """ZeRO-2 with lossy collectives.

    `update` takes this worker's own gradient, before any all-reduce, and its own copy of the parameters; `init` and
    `update` run under the worker axis. Each leaf is flattened, padded with zeros to a multiple of the workers, and cut
    into shards; the optimizer sees flat shards in the structure of the parameters. It must therefore work element by
    element, as SGD, momentum and Adam do; one that looks at the shape of a leaf (Adafactor's factored moments) or at
    all of it (a norm over a leaf) sees those of a shard.

    Args:
        optimizer: any optax optimizer; its state lives on shards.
        axis_name: the axis of the workers, bound.
        p_grad: probability that a packet of gradients is lost, or a channel.
        p_param: the same for packets of parameters.
        packet: elements of a packet, counted for each leaf; None to lose all that one worker sends another in a step,
            or nothing, as the paper does.
        seed: decides all draws.
        reliable: share of the packets to each receiver that are sent reliably: those of largest norm, of the gradient,
            or of what the parameters have moved.
        parity: one XOR parity packet for so many packets: a group that lost one packet, and not the parity, has it
            back, bit for bit, for 1/parity more traffic. None for none.
        tighten: loss rates are multiplied by (||ghat|| / the largest ||ghat|| so far)^tighten, ghat being the
            aggregated gradient of the step before where it is finite, so that links get better as training converges. 0
            for constant rates.

    Returns:
        An optimizer with `LossyState`, whose `update` takes `weight`, that of this worker's gradient in the mean (for
        instance its finished micro-batches; 1 by default). Its updates are assignments: nothing may be chained behind.

    Raises:
        ValueError: a probability, the packet size or `parity` is out of range; in `init` and `update`: the axis is not
            bound or has fewer than two workers, or a parameter has no elements or is no float; in `update`: the state
            is of another optimizer, model or number of workers, the gradient does not fit the parameters, or
            `shard_map`, which checks types, has added it up already.
    """
    check_axis("axis_name", axis_name)
    check_probability("reliable", reliable)
    if reliable and packet is None:
        raise ValueError(f"reliable={reliable}: with one packet from worker to worker, all would be; give packet too")
    check_some("parity", parity, "packets")
    if not 0 <= tighten < math.inf:
        raise ValueError(f"tighten={tighten}: expected an exponent of at least 0")
    check_some("packet", packet, "elements")
    for name, rate in (("p_grad", p_grad), ("p_param", p_param)):
        if not isinstance(rate, Channel):
            check_probability(name, rate, ", or a Channel")
    inner = optax.with_extra_args_support(optimizer)
    transports = [
        _Transport(rate if isinstance(rate, Channel) else Independent(rate), reliable, parity)
        for rate in (p_grad, p_param)
    ]

    def own(leaves: Sequence[Array]) -> list[Array]:
        me = lax.axis_index(axis_name)
        return [lax.dynamic_index_in_dim(leaf, me, keepdims=False) for leaf in leaves]

    def init(params: Tree) -> LossyState:
        workers = count_workers(axis_name)
        check_floats(params)
        layout = Layout.of(params, workers, packet)
        structure = jax.tree.structure(params)
        shards = own(layout.cut(params))
        size = -(-layout.packets // 8)
        zero = jnp.zeros((), jnp.float32)
        return LossyState(
            inner.init(jax.tree.unflatten(structure, shards)),
            jnp.zeros((), jnp.int32),
            jax.tree.unflatten(structure, [jnp.zeros_like(shard) for shard in shards]),
            (transports[0].channel.init(workers), transports[1].channel.init(workers)),
            zero,
            LossyReport(zero, zero, jnp.zeros((), jnp.uint32), zero, zero, zero, zero),
            LossyLog(jnp.zeros((workers, size), jnp.uint8), jnp.zeros((workers, size), jnp.uint8)),
        )

    def update(
        gradient: Tree,
        state: LossyState,
        params: Tree = None,
        *,
        weight: Float32[Array, ""] | float | None = None,
        **extra: Any,
    ) -> tuple[Tree, LossyState]:
        workers = count_workers(axis_name)
        layout = Layout.of(params, workers, packet)
        _check(state, params, layout)
        check_gradient(gradient, params, axis_name)
        structure = jax.tree.structure(params)
        sender = lax.axis_index(axis_name)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), state.step), sender)
        keys = jax.random.split(key)
        scale = jnp.float32(1)
        if tighten:
            share = state.report.norm / jnp.where(state.strongest > 0, state.strongest, 1)
            known = (state.strongest > 0) & jnp.isfinite(share)
            scale = jnp.where(known, jnp.minimum(share, 1) ** jnp.float32(tighten), 1)

        itself = own_packets(layout, axis_name)
        sent = Sent(sender, state.step, workers, layout.packets, scale)

        def deliver(which: int, moved: Sequence[Array]) -> tuple[Array, Any]:
            squares = layout.squares(moved) if reliable else None
            arrived, channel = transports[which].deliver(keys[which], state.channels[which], sent, squares)
            return arrived | itself, channel

        gradients = layout.cut(gradient)
        sent_gradient, gradient_channel = deliver(0, gradients)
        previous = jax.tree.leaves(state.previous)
        means, received = reduce_scatter(gradients, layout, axis_name, sent_gradient, previous, weight)

        stale = layout.cut(params)
        shards = own(stale)
        new, inner_state = stepped(
            inner,
            jax.tree.unflatten(structure, means),
            state.inner,
            jax.tree.unflatten(structure, shards),
            **extra,
        )
        new = jax.tree.leaves(new)
        moved = [(b - a)[None] for a, b in zip(shards, new, strict=True)]
        sent_parameter, parameter_channel = deliver(1, moved)
        copies, owners, _ = all_gather(new, layout, axis_name, sent_parameter, stale)

        norm = jnp.zeros((), jnp.float32)
        if tighten:
            norm = jnp.sqrt(lax.psum(sum_of_squares(means), axis_name))
        report = measured_losses(layout, axis_name, sent_gradient, sent_parameter, received, moved, copies, owners)
        log = LossyLog(jnp.packbits(sent_gradient, axis=-1), jnp.packbits(sent_parameter, axis=-1))
        return assign(layout.join(copies, params)), LossyState(
            inner_state,
            state.step + 1,
            jax.tree.unflatten(structure, means),
            (gradient_channel, parameter_channel),
            jnp.where(jnp.isfinite(norm), jnp.maximum(state.strongest, norm), state.strongest),
            report._replace(norm=norm),
            log,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check(state: Any, params: Tree, layout: Layout) -> None:
    check_update(state, LossyState, params)
    shards = tuple(leaf.size for leaf in jax.tree.leaves(state.previous))
    if shards != layout.shards or state.log.gradient.shape != (layout.workers, -(-layout.packets // 8)):
        raise ValueError(
            f"the state is of shards of {shards} elements and a log of shape {state.log.gradient.shape}; expected "
            f"{layout.shards} for {layout.workers} workers with {layout.packets} packets; "
            "make it with init, for this model, number of workers and packet size"
        )
    check_floats(params)
