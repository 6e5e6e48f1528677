"""Lock-step twins: one step on a healthy and a suspect device, compared and repaired at every probe.

At each site the twins exchange 64-bit digests over the twin axis. Only where some digest differs, anywhere on the mesh,
do tensors move: the reference compares each twin's tensor with its own and all twins go on with the reference's, bit
for bit. What a suspect computes wrong is therefore counted where it arises and never spreads: computation
synchronization in the words of Ma et al. 2025 (arXiv:2502.12340, section 3.2).

Most steps are the same on all twins. So optimistic lock-step (`exchange="step"` or `"call"`) runs a (micro)step without
a look at the other twins, and keeps the digest of each probe; behind the last one all are exchanged together. Where
none differs, that was it: one exchange in the place of one at each probe, of which a network between hosts makes each
wait for the slowest. Otherwise the (micro)step is repeated from its start, with the gate at every probe, and what it
gives then is what counts. A fault that does not come again leaves no trace in the repetition: the first digest that
differed says where it was, in the order of the program, and nothing says how large it was.

What twins exchange, under a bound axis name (`shard_map`, `pmap` or `vmap`), is bits and never floats: a masked sum of
floats would turn -0.0 into 0.0 and mix the payloads of NaNs.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32, Shaped, UInt, UInt32

from sdc.bits import as_bits, from_bits

from .. import program
from .digests import digest, fmix32, tree_digest
from .first_differences import place_of
from .mismatch import Difference, Mismatch, difference, merge, merge_mismatches, no_difference

Tree = TypeVar("Tree")


class Agreement(NamedTuple):
    """What the digests of all twins say.

    Attributes:
        reference: index of the reference: twin 0 of two; of three or more, a twin of the largest group that agrees.
        undecided: 1 where no more than half of three or more twins agree, so that the reference is a guess; else 0.
        differs: whether any twin differs from its reference, anywhere on the mesh: the same on every device.
    """

    reference: Int32[Array, ""]
    undecided: UInt32[Array, ""]
    differs: Bool[Array, ""]


def agreement(leaves: list[Shaped[Array, "..."]], axis_name: str) -> Agreement:
    """Compares the digests of some arrays over the twin axis; 8 bytes per twin cross it."""
    digests = exchanged(digest(leaves[0]) if len(leaves) == 1 else tree_digest(leaves), axis_name)
    same = jnp.all(digests[:, None] == digests[None, :], axis=-1)
    if len(digests) == 2:
        reference, undecided = jnp.int32(0), jnp.uint32(0)
    else:
        votes = jnp.sum(same, axis=1, dtype=jnp.int32)
        reference = jnp.argmax(votes).astype(jnp.int32)
        undecided = (2 * jnp.max(votes) <= len(digests)).astype(jnp.uint32)
    return Agreement(reference, undecided, anywhere(jnp.any(~same), axis_name))


def anywhere(differs: Bool[Array, ""], axis_name: str) -> Bool[Array, ""]:
    """Whether it holds on any device: a conditional around a collective needs the same branch on all of them.

    It is not asked over the twin axis: each twin has the digests of all twins, and over it the network may be slow.
    """
    others = other_axes(differs, axis_name)
    return lax.pmax(program.varying(differs.astype(jnp.int32), others), others) > 0 if others else differs


def other_axes(x: Shaped[Array, "..."], axis_name: str) -> tuple[str, ...]:
    """The axes but the twins' over which a value may vary.

    Over axes of size one nothing varies, but `shard_map` may take them to vary.
    """
    typed = jax.typeof(x).manual_axis_type.varying
    return tuple(
        axis for axis, size in program.bound_axes().items() if axis != axis_name and (size > 1 or axis in typed)
    )


def wrong(digests: UInt32[Array, "twins rows 2"]) -> Bool[Array, "twins rows"]:
    """Which twins are apart from the reference, row by row."""
    same = jnp.all(digests[:, None] == digests[None, :], axis=-1)
    if len(digests) == 2:
        return ~same[0]
    reference = jnp.argmax(jnp.sum(same, axis=1, dtype=jnp.int32), axis=0)
    return ~jnp.take_along_axis(same, reference[None, None], axis=0)[0]


def gather_twins(x: Shaped[Array, "*shape"], axis_name: str) -> list[Shaped[Array, "*shape"]]:
    """The tensor as each twin holds it, bit for bit, on every device."""
    rows = exchanged(as_bits(x), axis_name)
    return [from_bits(row, x) for row in rows]


def from_reference(tree: Tree, axis_name: str, reference: Int32[Array, ""]) -> Tree:
    """The reference twin's arrays on every twin, bit for bit."""
    mine = axis_place(axis_name) == reference

    def broadcast(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        bits = as_bits(x)
        return from_bits(lax.psum(jnp.where(mine, bits, jnp.zeros_like(bits)), axis_name), x)

    return jax.tree.map(broadcast, tree)


def measure(
    leaves: list[Shaped[Array, "..."]], axis_name: str, reference: Int32[Array, ""]
) -> tuple[list[Shaped[Array, "..."]], Difference]:
    """Compares every twin with the reference, element by element."""
    size = lax.axis_size(axis_name)
    total: Difference | None = None
    chosen = []
    for leaf in leaves:
        copies = gather_twins(leaf, axis_name)
        chosen.append(lax.select_n(reference, *copies))
        rows = [difference(chosen[-1], copy) for copy in copies]
        new = Difference(*(jnp.stack(column) for column in zip(*rows, strict=True)))
        total = new if total is None else merge(total, new)
    assert total is not None
    others = jnp.arange(size) != reference
    total = jax.tree.map(lambda row: jnp.where(others, row, jnp.zeros_like(row)), total)
    return chosen, from_reference(total, axis_name, reference)


def nothing_found(leaves: list[Shaped[Array, "..."]], axis_name: str, reference: Int32[Array, ""]) -> Difference:
    """The result of `measure` where all twins agree."""
    elements = jnp.uint32(sum(leaf.size for leaf in leaves))
    return no_difference(jnp.where(jnp.arange(lax.axis_size(axis_name)) != reference, elements, jnp.uint32(0)))


def squared_distance(
    leaves: list[Shaped[Array, "..."]], axis_name: str, replicas: list[int], reference: Int32[Array, ""]
) -> Float32[Array, "twins"]:
    """Squared L2 distance of every twin from the reference, over arrays that are sharded on the other axes.

    Args:
        leaves: the local shards.
        axis_name: the twin axis.
        replicas: how many devices of a twin hold the same shard, for each array.
        reference: index of the reference.
    """
    others = tuple(axis for axis in program.bound_axes() if axis != axis_name)
    total = jnp.zeros((), jnp.float32)
    for leaf, count in zip(leaves, replicas, strict=True):
        delta = leaf.astype(jnp.float32) - from_reference(leaf, axis_name, reference).astype(jnp.float32)
        total += jnp.sum(jnp.square(delta)) / count
    if others:
        total = lax.psum(total, others)
    return lax.bitcast_convert_type(exchanged(lax.bitcast_convert_type(total, jnp.uint32), axis_name), jnp.float32)


def axis_place(axis_name: str) -> Int32[Array, ""]:
    """This device's index along a bound axis: `lax.axis_index`, also where a mesh is manual in part.

    There XLA's compiler for TPUs moves the number of a device to where it means nothing, if a program asks for it at
    several places, and refuses the program. So a sum gives each device its part.
    """
    if not program.manual_in_part():
        return lax.axis_index(axis_name)
    size = lax.axis_size(axis_name)
    places = program.varying(jnp.arange(size, dtype="int32"), [axis_name])
    return lax.psum_scatter(places, axis_name, tiled=True)[0] // size


def exchanged(mine: UInt[Array, "*shape"], axis_name: str) -> UInt[Array, "twins *shape"]:
    """All twins' values, one row each, equal on every device also for `shard_map`'s type checker."""
    row = jnp.arange(lax.axis_size(axis_name)) == axis_place(axis_name)
    rows = jnp.where(lax.expand_dims(row, range(1, mine.ndim + 1)), mine[None], jnp.zeros_like(mine)[None])
    return lax.psum(rows, axis_name)


Compare: TypeAlias = Literal["gated", "always"]
Exchange: TypeAlias = Literal["probe", "step", "call"]


def lockstep(
    step: Callable[..., Any],
    axis_name: str,
    *,
    where: program.Where = program.probes,
    compare: Compare = "gated",
    exchange: Exchange = "probe",
) -> Callable[..., tuple[Any, program.Reports]]:
    """Transforms a step into lock-step twins along a mapped axis.

    Call the result where `axis_name` is bound: under `shard_map` (twins on several devices or hosts), `pmap`, or
    `vmap` (all twins on one device).

    Args:
        step: the step of one twin. It need not know of twins.
        axis_name: the twin axis. With two twins index 0 is the reference; with three or more the majority is.
        where: selects the sites to compare and repair; by default every probe.
        compare: `"gated"` moves tensors only where digests differ; `"always"` moves and compares them every time.
        exchange: `"probe"` exchanges digests at every site. `"step"` exchanges those of all sites once in a
            (micro)step, and repeats that from its start, with the gate at every site, only if any differs. For a fault
            that does not come again it names the place and not the size (`Mismatch.unrepeated`). `"call"` does so once
            in a call of the step, all microsteps of a loop together.

    Returns:
        A function that returns `(out, mismatches)`, `mismatches` a `Mismatch` for each site.

    Raises:
        ValueError: `axis_name` is not bound, has fewer than two twins, `compare` or `exchange` is unknown, or no site
            is selected (a probe whose value the step does not use is none); or `exchange` is not `"probe"` and the step
            cannot be repeated (arrays changed in place, ordered effects), or `compare="always"`.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> step = sdc.lockstep(lambda x: sdc.probe(2.0 * x, "double"), "twin")
        >>> out, mismatches = jax.vmap(step, axis_name="twin")(jnp.asarray([[1.0, 2.0], [1.0, 3.0]]))
        >>> out.tolist()
        [[2.0, 4.0], [2.0, 4.0]]
        >>> mismatches["fwd/double"].difference.mismatched[0].tolist()
        [0, 1]
    """
    _check_compare(compare)
    if exchange not in get_args(Exchange):
        raise ValueError(f"exchange={exchange!r} is unknown; expected 'probe', 'step' or 'call'")
    if exchange != "probe" and compare == "always":
        raise ValueError("compare='always' moves tensors at every probe; give exchange='probe', or compare='gated'")
    rule = _Lockstep(axis_name, compare)
    around = None if exchange == "probe" else _Optimistic(axis_name, rule, whole=exchange == "call")
    twins = program.rewrite(step, where, rule, required=True, around=around)

    @program.taking(step)
    def stepped(*args: Any, **kwargs: Any) -> tuple[Any, program.Reports]:
        program.axis_size(axis_name, "twin")
        return twins(*args, **kwargs)

    return stepped


def synchronize(
    tree: Tree, axis_name: str, *, repair: bool = True, compare: Compare = "gated", agreed: Agreement | None = None
) -> tuple[Tree, Mismatch]:
    """Compares a pytree between twins and overwrites it with the reference's, bit for bit.

    Parameter synchronization is this, applied to the parameters and the optimizer's state after each step.

    Args:
        tree: arrays, for instance a training state. What is no array passes through.
        axis_name: the twin axis, bound.
        repair: whether to overwrite; otherwise the tree is only compared.
        compare: see `lockstep`.
        agreed: what `twins.agreement` says of the tree's leaves, where that is known already.

    Returns:
        The tree, and one `Mismatch` over all its leaves.

    Raises:
        ValueError: see `lockstep`.
    """
    _check_compare(compare)
    program.axis_size(axis_name, "twin")
    whole, structure = jax.tree.flatten(tree)
    arrays = [number for number, leaf in enumerate(whole) if program.is_array(leaf, numbers=True)]
    if not arrays:
        nothing = no_difference(jnp.zeros(lax.axis_size(axis_name), jnp.uint32))
        return tree, Mismatch(nothing, jnp.uint32(0))
    leaves = [jnp.asarray(whole[number]) for number in arrays]
    repaired, mismatch = _synchronize(leaves, agreed or agreement(leaves, axis_name), axis_name, compare)
    for number, leaf in zip(arrays, repaired, strict=True):
        whole[number] = leaf
    return jax.tree.unflatten(structure, whole) if repair else tree, mismatch


class _Lockstep:
    def __init__(self, axis_name: str, compare: Compare) -> None:
        self.axis_name, self.compare = axis_name, compare

    def __call__(
        self, place: program.Place, bind: Callable[..., program.Values], *inputs: Any
    ) -> tuple[program.Values, Mismatch]:
        return _synchronized(bind(*inputs), self.axis_name, self.compare)

    merge = staticmethod(merge_mismatches)


@functools.partial(program.traced_once, static_argnums=(1, 2))
def _synchronized(outs: program.Values, axis_name: str, compare: Compare) -> tuple[program.Values, Mismatch]:
    # XLA may compute a value twice, once for each fusion that uses it: behind the barrier, what is compared is what is
    # consumed.
    outs = lax.optimization_barrier(outs)
    return _synchronize(outs, agreement(outs, axis_name), axis_name, compare)


def _synchronize(
    leaves: program.Values, agreed: Agreement, axis_name: str, compare: Compare
) -> tuple[program.Values, Mismatch]:
    reference, undecided, differs = agreed

    def repair(state: tuple[program.Values, Difference], reference: Array) -> tuple[program.Values, Difference]:
        leaves, _ = state
        chosen, found = measure(leaves, axis_name, reference)
        return [program.varying(new, like=old) for new, old in zip(chosen, leaves, strict=True)], program.varying(found)

    kept = list(leaves), program.varying(nothing_found(leaves, axis_name, reference))
    leaves, found = repair(kept, reference) if compare == "always" else program.rarely(differs, repair, kept, reference)
    return leaves, Mismatch(found, undecided)


def _check_compare(compare: str) -> None:
    if compare not in ("gated", "always"):
        raise ValueError(f"compare={compare!r} is unknown; expected 'gated' or 'always'")


class _Seen(NamedTuple):
    """What the first pass says of a site: the digest of its outputs, and what there is to report if all agree."""

    digest: UInt32[Array, "*rows 2"]
    nothing: Mismatch


class _Optimistic:
    """What becomes of the part of a step that holds the probes; see the module."""

    def __init__(self, axis_name: str, gated: program.Rule, *, whole: bool) -> None:
        self.axis_name, self.gated, self.whole = axis_name, gated, whole

    def __call__(
        self, region: program.Region, iteration: Any, inputs: program.Values
    ) -> tuple[program.Values, dict[str, Any]]:
        outs, seen = region.run(_Watch(self.axis_name), iteration, inputs)
        order = _order(region, {name: one.digest.shape[:-1] for name, one in seen.items()})

        def repeat(
            before: Any, mine: Any, iteration: Any, inputs: program.Values
        ) -> tuple[program.Values, dict[str, Mismatch]]:
            rows = exchanged(mine, self.axis_name)  # which of them differ is asked only if any does
            outs, found = region.run(self.gated, iteration, inputs)
            return outs, _with_unrepeated(found, order, rows, self.axis_name)

        with jax.named_scope(program.Tags.HIDDEN):
            digests = [one.digest.reshape(-1, 2) for one in seen.values()]
            _, (mine, differs) = _compared(digests, self.axis_name)
            nothing = {name: program.varying(one.nothing) for name, one in seen.items()}
            return program.rarely(differs, repeat, (outs, nothing), mine, iteration, inputs)


class _Watch:
    def __init__(self, axis_name: str) -> None:
        self.axis_name = axis_name

    def __call__(self, place: program.Place, bind: Any, *inputs: Any) -> tuple[program.Values, _Seen]:
        return _watched(bind(*inputs), self.axis_name)

    def merge(self, total: _Seen, new: _Seen) -> _Seen:
        return _Seen(fmix32(total.digest) + new.digest, merge_mismatches(total.nothing, new.nothing))


@functools.partial(program.traced_once, static_argnums=1)
def _watched(outs: program.Values, axis_name: str) -> tuple[program.Values, _Seen]:
    outs = lax.optimization_barrier(outs)  # what is compared is what is consumed
    difference = nothing_found(outs, axis_name, jnp.int32(0))
    nothing = Mismatch(difference, jnp.uint32(0), jnp.zeros_like(difference.checked))
    return outs, _Seen(tree_digest(outs), nothing)


@functools.partial(program.traced_once, static_argnums=1)
def _compared(digests: program.Values, axis_name: str) -> tuple[program.Values, Any]:
    """One digest of all of them crosses the twin axis: 8 bytes, however many sites there are."""
    mine = jnp.concatenate(digests)
    whole = exchanged(tree_digest(mine), axis_name)
    return digests, (mine, anywhere(jnp.any(whole != whole[:1]), axis_name))


def _with_unrepeated(
    found: dict[str, Mismatch], order: "dict[str, _Order]", rows: Any, axis_name: str
) -> dict[str, Mismatch]:
    """What the repetition found, and the first differences that it did not find again."""
    rank, loop = (
        jnp.asarray(np.concatenate([getattr(one, name).ravel() for one in order.values()])) for name in ("rank", "loop")
    )
    apart = wrong(rows)
    first = jnp.min(jnp.where(apart, rank, len(rank)), axis=1)
    if others := other_axes(first, axis_name):
        first = lax.pmin(program.varying(first, others), others)
    counts = [one.difference.mismatched.reshape(-1, len(rows)) for one in found.values()]
    again = jax.ops.segment_max(jnp.concatenate(counts), loop, len(rank))[loop]
    alone = apart & (rank == first[:, None]) & (again.T == 0)
    start, reports = 0, {}
    for name, mismatch in found.items():
        shape = order[name].rank.shape
        here = alone[:, start : start + order[name].rank.size].reshape(-1, *shape)
        start += order[name].rank.size
        reports[name] = mismatch._replace(unrepeated=program.varying(jnp.moveaxis(here, 0, -1).astype(jnp.uint32)))
    return reports


class _Order(NamedTuple):
    """When the digests of a site are made, among those of the region; the same on all devices."""

    rank: Int[np.ndarray, "*rows"]  # the smaller, the earlier
    # Equal numbers for what lies in the same `while` loop, whose turns share one digest: which of its sites was the
    # first, nobody knows. All others have numbers of their own.
    loop: Int[np.ndarray, "*rows"]


def _order(region: program.Region, shapes: dict[str, tuple[int, ...]]) -> dict[str, _Order]:
    places: dict[Any, tuple[int, ...]] = {}
    loops: dict[Any, Any] = {}
    for site in region.sites:
        dims = site.dims[region.outside :]
        around = site.dims[: region.outside].count("scan") * (0,)
        for index in np.ndindex(*shapes[site.name]):
            turns = tuple(number for number, name in zip(index, dims, strict=True) if name == "scan")
            place = places[site.name, index] = place_of(site, around + turns)
            inside = "while" in site.order
            loops[site.name, index] = place[: site.order.index("while") + 1] if inside else (site.name, index)
    ranks, numbers = (
        {key: number for number, key in enumerate(keys)}
        for keys in (sorted(set(places.values())), dict.fromkeys(loops.values()))
    )
    order = {name: _Order(*(np.zeros(shape, np.int32) for _ in range(2))) for name, shape in shapes.items()}
    for (name, index), place in places.items():
        order[name].rank[index], order[name].loop[index] = ranks[place], numbers[loops[name, index]]
    return order
