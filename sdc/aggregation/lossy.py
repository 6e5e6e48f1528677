"""Training over links that lose packets: lossy collectives, ZeRO-2 with lossy collectives, and a log of the losses.

Weintraub, Banner, Orda, *Distributed Training under Packet Loss* (2025), section 3:

    forward, backward -> lossy reduce-scatter of gradients -> the owner updates its shard -> lossy all-gather

Parameters are divided into N shards; worker j owns shard j of the optimizer, and every worker has a copy of all
parameters. Gradients are averaged over the pieces that arrived; parameters that did not arrive remain stale:

    ghat_j = sum_i s_ij g_i^(j) / sum_i s_ij,    s_ij = 1 if the piece from i to j arrived, s_jj = 1

The paper's algorithm 1 differs: line 9 replaces a lost piece of a gradient by that worker's previous one, and line 14
renormalizes what survived. Here, only an aggregate to which nothing contributed is replaced by the previous one.

Each shard is divided into packets in the same way for every receiver. A mask, drawn by `channels`, marks which of the
packets that a worker *sends* to each receiver arrive. Receivers obtain the mask from the collective that carries the
data, at the cost of one number per packet.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8, UInt32

from ..program import manual_in_part
from .assignment import Tree, assign, check_update, checked_optimizer, stepped
from .channels import Channel, Independent, Recorded, Sent
from .workers import at_least_float32, check_axis, check_probability, check_some, count_workers, sums_by_itself


@dataclasses.dataclass(frozen=True)
class Layout:
    """The division of arrays into shards and packets."""

    workers: int  # N, number of shards
    sizes: tuple[int, ...]  # number of elements of each array
    packet: int | None  # number of elements per packet; None: one packet contains a worker's shards of all arrays

    def __post_init__(self) -> None:
        check_some("packet", self.packet, "elements")

    @classmethod
    def of(cls, tree: Tree, workers: int, packet: int | None) -> "Layout":
        """Returns the layout of the leaves of a tree."""
        return cls(workers, tuple(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)), packet)

    @property
    def shards(self) -> tuple[int, ...]:
        """Number of elements per shard, for each array; arrays are padded with zeros at the end if needed."""
        return tuple(-(-size // self.workers) for size in self.sizes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of packets per shard, for each array; 1 if one packet contains the shards of all arrays."""
        return tuple(1 if self.packet is None else max(1, -(-shard // self.packet)) for shard in self.shards)

    @property
    def packets(self) -> int:
        """Number of packets from one worker to another."""
        return 1 if self.packet is None else sum(self.counts)

    def spread(self, packets: Array) -> list[Array]:
        """Repeats each packet's value for all elements of the packet, separately for each array: [..., packets] to
        [..., shard]."""

        def spread(part: Array, shard: int) -> Array:
            length = shard if self.packet is None else min(self.packet, shard)
            wide = jnp.broadcast_to(part[..., None], (*part.shape, length))
            return wide.reshape(*part.shape[:-1], -1)[..., :shard]

        ends = np.cumsum(self.counts)[:-1]
        parts = [packets for _ in self.sizes] if self.packet is None else jnp.split(packets, ends, axis=-1)
        return [spread(part, shard) for part, shard in zip(parts, self.shards, strict=True)]

    def squares(self, leaves: Sequence[Float[Array, "workers shard"]]) -> Float32[Array, "workers packets"]:
        """Returns the squared Euclidean norm of each packet."""
        sums = []
        for leaf, count in zip(leaves, self.counts, strict=True):
            square = jnp.square(leaf.astype(jnp.float32))
            length = leaf.shape[-1] if self.packet is None else min(self.packet, leaf.shape[-1])
            padded = jnp.pad(square, ((0, 0), (0, count * length - leaf.shape[-1])))
            sums.append(jnp.sum(padded.reshape(leaf.shape[0], count, length), axis=-1))
        return sum(sums[1:], sums[0]) if self.packet is None else jnp.concatenate(sums, axis=-1)

    def cut(self, tree: Tree) -> list[Array]:
        """Reshapes the leaves to [workers, shard]."""
        return [
            jnp.pad(jnp.ravel(leaf), (0, shard * self.workers - leaf.size)).reshape(self.workers, shard)
            for leaf, shard in zip(jax.tree.leaves(tree), self.shards, strict=True)
        ]

    def join(self, leaves: Sequence[Array], like: Tree) -> Tree:
        """Inverts `cut`."""
        given = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return jax.tree.map(lambda x, old: x.reshape(-1)[: old.size].reshape(old.shape).astype(old.dtype), given, like)


def lossy_psum_scatter(
    x: Float[Array, "workers shard"],
    axis_name: str,
    arrived: Bool[Array, "workers packets"],
    *,
    previous: Float[Array, "shard"],
    weight: Float32[Array, ""] | float | None = None,
) -> tuple[Float[Array, "shard"], Float32[Array, "packets"]]:
    """Reduce-scatters a mean over the packets that arrived.

        ghat_j = sum_i s_ij w_i x_i[j] / sum_i s_ij w_i

    Args:
        x: this worker's summand for every receiver.
        axis_name: the axis of the workers, bound.
        arrived: mask of the packets from this worker that arrive at each receiver; a worker's packets to itself always
            arrive. A shard is divided into as many packets as the mask has columns; all but the last have equal length.
        previous: values to use for packets for which no summand arrived, or only summands of weight 0.
        weight: w_i of this worker, such as its number of completed micro-batches (default: 1).

    Returns:
        This worker's shard of the mean, and the sum of the weights that arrived for each packet of the shard.

    Raises:
        ValueError: the axis is not bound or has fewer than two workers, or shapes do not fit.

    References:
        Weintraub, Banner, Orda (2025), section 3.
    """
    layout = _layout(x, axis_name, arrived)
    means, received = reduce_scatter([x], layout, axis_name, arrived, [previous], weight)
    return means[0], received


def lossy_all_gather(
    shard: Float[Array, "shard"],
    axis_name: str,
    arrived: Bool[Array, "workers packets"],
    *,
    stale: Float[Array, "workers shard"],
) -> tuple[Float[Array, "workers shard"], Bool[Array, "workers packets"]]:
    """All-gathers shards; parts of the copies whose packets were lost keep their stale values.

    Args:
        shard: this worker's shard.
        axis_name, arrived: see `lossy_psum_scatter`.
        stale: this worker's copies of all shards.

    Returns:
        The new copies, and a mask of the packets from each worker that arrived here.

    Raises:
        ValueError: as in `lossy_psum_scatter`.
    """
    layout = _layout(stale, axis_name, arrived)
    copies, _, received = all_gather([shard], layout, axis_name, arrived, [stale])
    return copies[0], received


def reduce_scatter(
    leaves: Sequence[Float[Array, "workers _"]],
    layout: Layout,
    axis_name: str,
    arrived: Bool[Array, "workers packets"],
    previous: Sequence[Float[Array, "_"]],
    weight: Float32[Array, ""] | float | None = None,
) -> tuple[list[Float[Array, "_"]], Float32[Array, "packets"]]:
    """Applies `lossy_psum_scatter` to several arrays, whose packets are numbered consecutively."""
    arrived |= own_packets(layout, axis_name)
    weight = None if weight is None else jnp.asarray(weight, jnp.float32)
    sent = arrived.astype(jnp.float32) if weight is None else jnp.where(arrived, weight, 0)
    received = lax.psum_scatter(sent, axis_name)
    means, masks, shares = [], layout.spread(arrived), layout.spread(received)
    for leaf, mask, share, before in zip(leaves, masks, shares, previous, strict=True):
        wide = leaf.astype(at_least_float32(leaf.dtype))
        summand = jnp.where(mask, wide if weight is None else wide * weight.astype(wide.dtype), 0)
        total = lax.psum_scatter(summand, axis_name)
        mean = total / jnp.where(share > 0, share, 1).astype(wide.dtype)
        means.append(jnp.where(share > 0, mean, before.astype(wide.dtype)).astype(leaf.dtype))
    return means, received


def all_gather(
    shards: Sequence[Float[Array, "_"]],
    layout: Layout,
    axis_name: str,
    arrived: Bool[Array, "workers packets"],
    stale: Sequence[Float[Array, "workers _"]],
) -> tuple[list[Float[Array, "workers _"]], list[Float[Array, "workers _"]], Bool[Array, "workers packets"]]:
    """Applies `lossy_all_gather` to several arrays; also returns the owners' shards, which a real network would not
    deliver."""
    arrived |= own_packets(layout, axis_name)
    received = lax.all_to_all(arrived.astype(jnp.uint8), axis_name, 0, 0, tiled=True) > 0
    owners = [lax.all_gather(shard, axis_name) for shard in shards]
    copies = [jnp.where(*given) for given in zip(layout.spread(received), owners, stale, strict=True)]
    return copies, owners, received


def check_floats(params: Tree) -> None:
    """Raises ValueError unless all leaves are nonempty arrays of floats."""
    if not jax.tree.leaves(params):
        raise ValueError("there are no parameters to train; expected at least one array of floats")
    for path, leaf in jax.tree.leaves_with_path(params):
        name, dtype = jax.tree_util.keystr(path) or "params", jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating) or not jnp.size(leaf):
            raise ValueError(
                f"{name} is {dtype}{list(jnp.shape(leaf))}; expected only arrays of floats with at least one "
                "element; exclude other leaves from training"
            )


def check_gradient(gradient: Tree, params: Tree, axis_name: str) -> None:
    """Raises ValueError unless this is a valid gradient of one worker for these parameters."""
    found: Any = jax.tree.structure(gradient)
    expected: Any = jax.tree.structure(params)
    if found != expected:
        raise ValueError(f"the gradient has structure {found}; expected that of the parameters, {expected}")
    check_floats(gradient)
    checked = sums_by_itself(axis_name)
    for (path, leaf), model in zip(jax.tree.leaves_with_path(gradient), jax.tree.leaves(params), strict=True):
        name = jax.tree_util.keystr(path)
        if jnp.shape(leaf) != jnp.shape(model):
            raise ValueError(
                f"gradient{name} has shape {jnp.shape(leaf)}; expected that of its parameter, {jnp.shape(model)}"
            )
        if checked and axis_name not in jax.typeof(leaf).manual_axis_type.varying:
            raise ValueError(
                f"gradient{name} is the same on all workers, since shard_map checks types and has already summed it "
                f"over {axis_name!r}, so no packet can be lost; give each worker a row of the parameters (in_specs="
                f"P({axis_name!r})) or pass check_vma=False, and do not average the gradients"
            )


def own_packets(layout: Layout, axis_name: str) -> Bool[Array, "workers 1"]:
    """Marks as arrived all packets that a worker sends to itself."""
    return (jnp.arange(layout.workers) == lax.axis_index(axis_name))[:, None]


def _layout(x: Float[Array, "workers shard"], axis_name: str, arrived: Bool[Array, "workers packets"]) -> Layout:
    workers = count_workers(axis_name)
    if x.ndim != 2 or arrived.ndim != 2 or x.shape[0] != workers or arrived.shape[0] != workers:
        raise ValueError(
            f"the data have shape {x.shape}, and the mask has shape {arrived.shape}; expected [workers, shard] and "
            f"[workers, packets] for {workers} workers"
        )
    layout = Layout(workers, (x.size,), max(1, -(-x.shape[1] // arrived.shape[1])))
    if layout.packets != arrived.shape[1]:
        raise ValueError(
            f"{arrived.shape[1]} packets: a shard of {x.shape[1]} elements needs only {layout.packets} packets of "
            f"{layout.packet} elements; give one column for each packet"
        )
    return layout


SAMPLE = 256  # maximum number of elements of a shard from which the drift between copies is estimated


class LossyLog(NamedTuple):
    """Masks of the packets from this worker that arrived in the last step, eight packets per byte (`numpy.packbits`
    along the last axis)."""

    gradient: UInt8[Array, "receivers bytes"]  # packets of the reduce-scatter
    parameter: UInt8[Array, "receivers bytes"]  # packets of the all-gather


class LossyReport(NamedTuple):
    """The losses of the last step, and the drift of the copies; the same on every worker."""

    gradient_loss: Float32[Array, ""]  # share of the gradient packets between different workers that were lost
    parameter_loss: Float32[Array, ""]  # the same share of the parameter packets
    # number of packets of which no summand arrived, so that their gradient is that of the previous step
    unreduced: UInt32[Array, ""]
    move: Float32[Array, ""]  # s^2, mean square of the owners' parameter updates
    # mean square of the difference between a copy and its owner's shard, estimated as `pair_drift` is
    owner_drift: Float32[Array, ""]
    # mean square of the difference between two copies other than the owner's, from a sample of up to `SAMPLE` elements
    # of each shard; NaN with two workers, which have only one copy. Theory: `drift.pair_drift`
    pair_drift: Float32[Array, ""]
    norm: Float32[Array, ""]  # Euclidean norm of the aggregated gradient; 0 without `tighten`


def recorded(logs: Sequence[LossyLog], params: Tree, *, packet: int | None = None) -> tuple[Recorded, Recorded]:
    """Returns channels that replay the losses of a run, from the logs of its steps.

    Args:
        logs: the log of each step, from all workers; its leaves are uint8 [senders, receivers, bytes].
        params: the parameters of one worker.
        packet: the argument `packet` of `lossy_zero2` in that run.

    Returns:
        Channels for `p_grad` and `p_param`. The replay must not use `tighten`; `parity` and `reliable` have no effect.

    Raises:
        ValueError: there are no steps, or the logs are from a run with another model, number of workers or packet size.
    """
    if not logs:
        raise ValueError("the log has no steps; replay a run with at least one step")
    found = []
    for name in LossyLog._fields:
        packed = np.stack([np.asarray(getattr(log, name)) for log in logs])
        if packed.ndim != 4 or packed.shape[1] != packed.shape[2]:
            raise ValueError(
                f"the logs have shape {packed.shape}; expected uint8 [steps, senders, receivers, bytes] of all workers"
            )
        packets = Layout.of(params, packed.shape[1], packet).packets
        arrived = np.unpackbits(packed, axis=-1).astype(np.bool_)
        # Packets of a worker to itself always arrive, so they show the number of packets.
        own = np.einsum("swwp->swp", arrived)
        if packed.shape[3] != -(-packets // 8) or not (own == (np.arange(arrived.shape[-1]) < packets)).all():
            raise ValueError(
                f"a log of {packed.shape[3]} bytes per link does not fit {packets} packets; give the model and "
                "the packet size of the recorded run"
            )
        found.append(Recorded(arrived[..., :packets]))
    return found[0], found[1]


def _sample(rows: Float[Array, "workers shard"]) -> Float[Array, "workers sample"]:
    """Returns up to `SAMPLE` elements of each row at equal distances."""
    size = rows.shape[1]
    apart = -(-size // SAMPLE)
    # For a slice with a large stride, XLA would load whole rows into a TPU's fast memory, which they exceed.
    if not manual_in_part():
        return jnp.take(rows, np.arange(0, size, apart), axis=1)
    # XLA may abort if it must shard a gather.
    first = rows[:, : size // apart * apart].reshape(len(rows), -1, apart)[:, :, 0]
    return jnp.concatenate([first, rows[:, first.shape[1] * apart :][:, :1]], axis=1)


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
    """Returns a report of the losses of a step and of the drift of the copies; its `norm` is 0."""
    others = ~own_packets(layout, axis_name)
    # Using all elements would take another pass over all parameters.
    pairs = [(_sample(copy), _sample(owner)) for copy, owner in zip(copies, owners, strict=True)]
    sampled = jnp.concatenate([(copy - owner).astype(jnp.float32) for copy, owner in pairs], axis=1)
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
    sent, size = layout.workers * copies_of_one * layout.packets, max(1, sum(layout.sizes))
    drift = jnp.float32(jnp.nan)
    if copies_of_one > 1:
        # The mean of (a - b)^2 over pairs; the owner's own error is 0 and contributes to neither sum.
        spread = copies_of_one * second - jnp.square(first)
        # If copies differ by less than the rounding error, the difference of the sums can be negative.
        drift = 2 * jnp.maximum(jnp.mean(spread), 0) / (copies_of_one * (copies_of_one - 1))
    owner_drift = jnp.mean(second) / copies_of_one
    return LossyReport(gradient / sent, parameter / sent, unreduced, move / size, owner_drift, drift, jnp.float32(0))


def sum_of_squares(leaves: Sequence[Float[Array, "..."]]) -> Float32[Array, ""]:
    """Returns the sum of squares over all leaves, in float32."""
    return sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves), jnp.float32(0))


class LossyState(NamedTuple):
    """State of `lossy_zero2`; shards are flat and padded."""

    inner: optax.OptState  # state of the optimizer, on this worker's shards
    step: Int32[Array, ""]  # number of steps done
    previous: Tree  # this worker's shards of the last aggregated gradient
    delivered: Any  # with `stale`: mask of the packets that ever arrived, and their last contents; otherwise ()
    channels: tuple[Any, Any]  # states of this worker's links, for gradients and for parameters
    strongest: Float32[Array, ""]  # largest norm of an aggregated gradient so far
    report: LossyReport  # losses of the last step
    log: LossyLog  # packets of the last step


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
    stale: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Shards an optimizer as ZeRO-2 does, with collectives that lose packets.

    `update` takes this worker's own gradient, before any all-reduce, and its own copy of the parameters; `init` and
    `update` run under the worker axis. Each leaf is flattened, padded with zeros to a multiple of the number of
    workers, and divided into shards; the optimizer sees flat shards in the structure of the parameters. The optimizer
    must therefore work element by element, as SGD, momentum and Adam do. An optimizer that depends on the shape of a
    leaf (Adafactor's factored moments) or on the whole leaf (a norm) would use the shape or the elements of a shard
    instead.

    Args:
        optimizer: any optax optimizer; its state is sharded.
        axis_name: the axis of the workers, bound.
        p_grad: probability that a packet of gradients is lost, or a channel.
        p_param: the same for packets of parameters.
        packet: number of elements per packet, all from one leaf; None for one packet per step and link, as in the
            paper.
        seed: seed of all random draws.
        reliable: share of the packets to each receiver that are sent reliably: those with the largest norm of the
            gradient, or of the change of the parameters.
        parity: number of data packets per XOR parity packet. If a group lost one data packet, but not its parity
            packet, the data packet is recovered bit for bit. Traffic grows by a factor of 1 + 1/parity. None for no
            parity.
        tighten: exponent with which links improve as training converges: loss rates are multiplied by (||ghat|| / the
            largest ||ghat|| so far)^tighten, where ghat is the aggregated gradient of the previous step; they are
            unchanged if ghat is not finite. 0 for constant rates.
        stale: whether the last packet that arrived stands in for a lost packet of gradients (algorithm 1 of the paper),
            which takes the memory of one gradient; otherwise the mean is of the packets that arrive (section 3).

    Returns:
        An optimizer with `LossyState`, whose `update` takes `weight`, the weight of this worker's gradient in the mean,
        such as its number of completed micro-batches (default: 1; not with `stale`). The updates of this optimizer are
        assignments: nothing may be chained after it.

    Raises:
        ValueError: a probability, the packet size or `parity` is out of range; in `init` and `update`: the axis is not
            bound or has fewer than two workers, or a parameter has no elements or is not a float; in `update`: the
            state belongs to another optimizer, model or number of workers, the gradient does not fit the parameters, or
            `shard_map`, which checks types, has already summed it.
    """
    check_axis("axis_name", axis_name)
    check_probability("reliable", reliable)
    if reliable and packet is None:
        raise ValueError(
            f"reliable={reliable}: with one packet per link, every packet would be reliable; give packet too"
        )
    check_some("parity", parity, "packets")
    if not 0 <= tighten < math.inf:
        raise ValueError(f"tighten={tighten}: expected an exponent of at least 0")
    check_some("packet", packet, "elements")
    if not isinstance(stale, bool):
        raise ValueError(f"stale={stale!r}: expected True or False")
    for name, rate in (("p_grad", p_grad), ("p_param", p_param)):
        if not isinstance(rate, Channel):
            check_probability(name, rate, ", or a Channel")
    inner = checked_optimizer(optimizer)
    channels = [rate if isinstance(rate, Channel) else Independent(rate) for rate in (p_grad, p_param)]

    def deliver(channel: Channel, key: Array, state: Any, sent: Sent, squares: Any) -> tuple[Any, Any]:
        """Draws which packets arrive; returns their mask and the channel's state. `squares` determines which packets
        are sent reliably."""
        if isinstance(channel, Recorded):  # a log already includes repairs
            return channel.draw(key, state, sent)
        workers, packets = sent.workers, sent.packets
        if parity is None:
            arrived, state = channel.draw(key, state, sent)
        else:
            groups = -(-packets // parity)
            drawn, state = channel.draw(key, state, sent._replace(packets=groups * (parity + 1)))
            group = drawn.reshape(workers, groups, parity + 1)
            real = (jnp.arange(groups * parity) < packets).reshape(groups, parity)
            data, spare = group[..., :-1] | ~real, group[..., -1:]
            mended = data | ((jnp.sum(~data, axis=-1, keepdims=True) == 1) & spare)
            arrived = mended.reshape(workers, -1)[:, :packets]
        if squares is not None:
            # NaN has the highest priority; among packets of equal norm, the first are used.
            largest = lax.top_k(jnp.nan_to_num(squares, nan=jnp.inf), math.ceil(reliable * packets))[1]
            arrived |= jnp.zeros_like(arrived).at[jnp.arange(workers)[:, None], largest].set(True)
        return arrived, state

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
            (jnp.zeros((workers, layout.packets), bool), [jnp.zeros_like(leaf) for leaf in layout.cut(params)])
            if stale
            else (),
            (channels[0].init(workers), channels[1].init(workers)),
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
        check_update(state, LossyState, params)
        shards = tuple(leaf.size for leaf in jax.tree.leaves(state.previous))
        if shards != layout.shards or state.log.gradient.shape != (workers, -(-layout.packets // 8)):
            raise ValueError(
                f"the state has shards of {shards} elements and a log of shape {state.log.gradient.shape}; expected "
                f"{layout.shards} for {workers} workers with {layout.packets} packets; "
                "create the state with init, for this model, number of workers and packet size"
            )
        if stale != bool(state.delivered):
            raise ValueError(f"stale={stale}, but the state is of stale={not stale}; create the state with init")
        if stale and weight is not None:
            raise ValueError("weight has no meaning with stale, whose packets may be of earlier steps; leave it out")
        check_floats(params)
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

        def delivered(which: int, moved: Sequence[Array]) -> tuple[Array, Any]:
            squares = layout.squares(moved) if reliable else None
            arrived, links = deliver(channels[which], keys[which], state.channels[which], sent, squares)
            return arrived | itself, links

        gradients = layout.cut(gradient)
        sent_gradient, gradient_channel = delivered(0, gradients)
        previous = jax.tree.leaves(state.previous)
        counted, latest = sent_gradient, state.delivered
        if stale:
            ever, contents = state.delivered
            counted = sent_gradient | ever
            masks = layout.spread(sent_gradient)
            gradients = [jnp.where(*each) for each in zip(masks, gradients, contents, strict=True)]
            latest = (counted, gradients)
        means, received = reduce_scatter(gradients, layout, axis_name, counted, previous, weight)

        old = layout.cut(params)
        before = own(old)
        mean, owned = jax.tree.unflatten(structure, means), jax.tree.unflatten(structure, before)
        new, inner_state = stepped(inner, mean, state.inner, owned, **extra)
        new = jax.tree.leaves(new)
        moved = [(b - a)[None] for a, b in zip(before, new, strict=True)]
        sent_parameter, parameter_channel = delivered(1, moved)
        copies, owners, _ = all_gather(new, layout, axis_name, sent_parameter, old)

        norm = jnp.zeros((), jnp.float32)
        if tighten:
            norm = jnp.sqrt(lax.psum(sum_of_squares(means), axis_name))
        report = measured_losses(layout, axis_name, sent_gradient, sent_parameter, received, moved, copies, owners)
        log = LossyLog(jnp.packbits(sent_gradient, axis=-1), jnp.packbits(sent_parameter, axis=-1))
        return assign(layout.join(copies, params)), LossyState(
            inner_state,
            state.step + 1,
            mean,
            latest,
            (gradient_channel, parameter_channel),
            jnp.where(jnp.isfinite(norm), jnp.maximum(state.strongest, norm), state.strongest),
            report._replace(norm=norm),
            log,
        )

    return optax.GradientTransformationExtraArgs(init, update)
