"""Reduce-scatter and all-gather over links that lose packets, of which `zero2` is built.

Weintraub, Banner, Orda, *Distributed Training under Packet Loss* (2025). Parameters are cut into N shards; worker j
owns shard j. Gradients are reduced over what arrived, and parameters that did not arrive stay stale:

    ghat_j = sum_i s_ij g_i^(j) / sum_i s_ij,    s_ij = 1 where the piece from i to j arrived, s_jj = 1

Shards are cut into packets, numbered alike for every receiver. What a collective loses is given as a mask of the
packets that a worker *sends* to each receiver (`channels` draws them); receivers learn of it by the same collective
that carries the data, at one number a packet.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from .assignment import Tree
from .workers import at_least_float32, check_some, count_workers, sums_by_itself


@dataclasses.dataclass(frozen=True)
class Layout:
    """How arrays are cut into shards and packets."""

    workers: int  # N, number of shards
    sizes: tuple[int, ...]  # elements of each array
    packet: int | None  # elements of a packet; None for one packet that holds a worker's shards of all arrays

    def __post_init__(self) -> None:
        check_some("packet", self.packet, "elements")

    @classmethod
    def of(cls, tree: Tree, workers: int, packet: int | None) -> "Layout":
        """The layout of the leaves of a tree."""
        return cls(workers, tuple(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)), packet)

    @property
    def shards(self) -> tuple[int, ...]:
        """Elements of a shard of each array: sizes that do not divide are padded with zeros at the end."""
        return tuple(-(-size // self.workers) for size in self.sizes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Packets of a shard of each array; with one packet for all, each array is counted as that one."""
        return tuple(1 if self.packet is None else max(1, -(-shard // self.packet)) for shard in self.shards)

    @property
    def packets(self) -> int:
        """Packets from one worker to another."""
        return 1 if self.packet is None else sum(self.counts)

    def parts(self, packets: Array) -> list[Array]:
        """Numbers of packets [..., packets], cut into those of each array."""
        if self.packet is None:
            return [packets for _ in self.sizes]
        ends = [sum(self.counts[: place + 1]) for place in range(len(self.counts))]
        return jnp.split(packets, ends[:-1], axis=-1)

    def spread(self, packets: Array) -> list[Array]:
        """Gives every element of each array's shard its packet's number: [..., packets] to [..., shard]."""
        return [self._spread(part, shard) for part, shard in zip(self.parts(packets), self.shards, strict=True)]

    def _spread(self, part: Array, shard: int) -> Array:
        length = shard if self.packet is None else min(self.packet, shard)
        wide = jnp.broadcast_to(part[..., None], (*part.shape, length))
        return wide.reshape(*part.shape[:-1], -1)[..., :shard]

    def squares(self, leaves: Sequence[Float[Array, "workers shard"]]) -> Float32[Array, "workers packets"]:
        """Squared Euclidean norm of each packet."""
        sums = []
        for leaf, count in zip(leaves, self.counts, strict=True):
            square = jnp.square(leaf.astype(jnp.float32))
            length = leaf.shape[-1] if self.packet is None else min(self.packet, leaf.shape[-1])
            padded = jnp.pad(square, ((0, 0), (0, count * length - leaf.shape[-1])))
            sums.append(jnp.sum(padded.reshape(leaf.shape[0], count, length), axis=-1))
        return sum(sums[1:], sums[0]) if self.packet is None else jnp.concatenate(sums, axis=-1)

    def cut(self, tree: Tree) -> list[Array]:
        """The leaves as [workers, shard]."""
        return [
            jnp.pad(jnp.ravel(leaf), (0, shard * self.workers - leaf.size)).reshape(self.workers, shard)
            for leaf, shard in zip(jax.tree.leaves(tree), self.shards, strict=True)
        ]

    def join(self, leaves: Sequence[Array], like: Tree) -> Tree:
        """The inverse of `cut`."""
        models, structure = jax.tree.flatten(like)
        return jax.tree.unflatten(
            structure,
            [
                leaf.reshape(-1)[: model.size].reshape(model.shape).astype(model.dtype)
                for leaf, model in zip(leaves, models, strict=True)
            ],
        )


def lossy_psum_scatter(
    x: Float[Array, "workers shard"],
    axis_name: str,
    arrived: Bool[Array, "workers packets"],
    *,
    previous: Float[Array, "shard"],
    weight: Float32[Array, ""] | float | None = None,
) -> tuple[Float[Array, "shard"], Float32[Array, "packets"]]:
    """Reduce-scatter of a mean over what arrived.

        ghat_j = sum_i s_ij w_i x_i[j] / sum_i s_ij w_i

    Args:
        x: this worker's summand for every receiver.
        axis_name: the axis of the workers, bound.
        arrived: which packets from this worker arrive at each receiver; its own always do. A shard is cut into as many
            packets as there are columns, all but the last of one length.
        previous: what a packet is of which nothing arrived, as where all weights are 0.
        weight: w_i of this worker, for instance its finished micro-batches; 1 by default.

    Returns:
        This worker's shard of the mean, and for each of its packets the sum of the weights that arrived.

    Raises:
        ValueError: the axis is not bound or has fewer than two workers, or shapes do not fit.

    References:
        Weintraub, Banner, Orda (2025), section 3 and algorithm 1.
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
    """All-gather in which what did not arrive stays as it was.

    Args:
        shard: this worker's shard.
        axis_name, arrived: see `lossy_psum_scatter`.
        stale: this worker's copies of all shards.

    Returns:
        The new copies, and which packets from each worker arrived here.

    Raises:
        ValueError: as `lossy_psum_scatter`.
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
    """`lossy_psum_scatter` of several arrays, whose packets are numbered one after the other."""
    arrived |= own_packets(layout, axis_name)
    weight = None if weight is None else jnp.asarray(weight, jnp.float32)
    sent = arrived.astype(jnp.float32) if weight is None else jnp.where(arrived, weight, 0)
    received = lax.psum_scatter(sent, axis_name)
    means = []
    for leaf, mask, share, before in zip(
        leaves, layout.spread(arrived), layout.spread(received), previous, strict=True
    ):
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
    """`lossy_all_gather` of several arrays; returns the owners' shards too, which a real network would not have."""
    arrived |= own_packets(layout, axis_name)
    received = lax.all_to_all(arrived.astype(jnp.uint8), axis_name, 0, 0, tiled=True) > 0
    owners = [lax.all_gather(shard, axis_name) for shard in shards]
    copies = [
        jnp.where(mask, owner, copy) for mask, owner, copy in zip(layout.spread(received), owners, stale, strict=True)
    ]
    return copies, owners, received


def check_floats(params: Tree) -> None:
    """Raises ValueError unless all leaves are floats that can be cut into shards."""
    if not jax.tree.leaves(params):
        raise ValueError("there are no parameters to train; expected one float or more")
    for path, leaf in jax.tree.leaves_with_path(params):
        name, dtype = jax.tree_util.keystr(path) or "params", jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating) or not jnp.size(leaf):
            raise ValueError(
                f"{name} is {dtype}{list(jnp.shape(leaf))}; expected floats only, one element or more: keep the rest "
                "out of what is trained"
            )


def check_gradient(gradient: Tree, params: Tree, axis_name: str) -> None:
    """Raises ValueError unless this can be one worker's gradient of these parameters."""
    found: Any = jax.tree.structure(gradient)
    expected: Any = jax.tree.structure(params)
    if found != expected:
        raise ValueError(f"a gradient of structure {found}; expected that of the parameters, {expected}")
    check_floats(gradient)
    checked = sums_by_itself(axis_name)
    for (path, leaf), model in zip(jax.tree.leaves_with_path(gradient), jax.tree.leaves(params), strict=True):
        name = jax.tree_util.keystr(path)
        if jnp.shape(leaf) != jnp.shape(model):
            raise ValueError(
                f"gradient{name} has shape {jnp.shape(leaf)}; expected {jnp.shape(model)}, its parameter's"
            )
        if checked and axis_name not in jax.typeof(leaf).manual_axis_type.varying:
            raise ValueError(
                f"gradient{name} is the same on all workers, for shard_map checks types and has added it up over "
                f"{axis_name!r}: nothing is left to lose; give each worker a row of the parameters (in_specs="
                f"P({axis_name!r})), or pass check_vma=False, and take no mean"
            )


def own_packets(layout: Layout, axis_name: str) -> Bool[Array, "workers 1"]:
    """What a worker sends to itself always arrives."""
    return (jnp.arange(layout.workers) == lax.axis_index(axis_name))[:, None]


def _layout(x: Float[Array, "workers shard"], axis_name: str, arrived: Bool[Array, "workers packets"]) -> Layout:
    workers = count_workers(axis_name)
    if x.ndim != 2 or arrived.ndim != 2 or x.shape[0] != workers or arrived.shape[0] != workers:
        raise ValueError(
            f"data of shape {x.shape} and packets of shape {arrived.shape}: expected [workers, shard] and "
            f"[workers, packets] for {workers} workers"
        )
    layout = Layout(workers, (x.size,), max(1, -(-x.shape[1] // arrived.shape[1])))
    if layout.packets != arrived.shape[1]:
        raise ValueError(
            f"{arrived.shape[1]} packets: a shard of {x.shape[1]} elements falls into {layout.packets} of "
            f"{layout.packet}; give as many columns"
        )
    return layout
