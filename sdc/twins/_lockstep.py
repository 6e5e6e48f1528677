"""Lock-step twins: one step on a healthy and a suspect device, compared and repaired at every probe.

At each site, the twins exchange 64-bit digests over the twin axis. Tensors move only if a digest differs anywhere on
the mesh: each twin's tensor is then compared with the reference's, and all twins continue with the reference's tensor,
bit for bit. A suspect's errors are therefore counted where they arise and never spread. Ma et al. 2025
(arXiv:2502.12340, section 3.2) call this procedure "computation synchronization".

In most steps, all twins agree. Optimistic lock-step (`exchange="step"` or `"call"`) therefore runs a (micro)step
without communication between twins and keeps the digest of each probe; after the last probe, a single exchange compares
all digests. If no digest differs, this exchange replaces the exchanges at all probes, each of which would wait for the
slowest host. Otherwise, the (micro)step is repeated from its start with a gated comparison at every probe, and the
results of the repetition are used. A fault that does not recur leaves no mismatch in the repetition; the first digest
that differed, in program order, then locates the error, but the size of the error stays unknown.

Along a bound axis (`shard_map`, `pmap` or `vmap`), twins exchange bits, never floats, because a masked sum of floats
would turn -0.0 into 0.0 and mix the payloads of NaNs.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar, get_args

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
P = ParamSpec("P")  # of a step
Out = TypeVar("Out")


class Agreement(NamedTuple):
    """The result of comparing the digests of all twins.

    Attributes:
        reference: index of the reference: 0 if there are two twins; if there are three or more, that of a twin in the
            largest group that agrees.
        undecided: 1 if there are three or more twins of which at most half agree, so that the reference is a guess;
            otherwise 0.
        differs: whether any twin differs from its reference anywhere on the mesh; equal on all devices.
    """

    reference: Int32[Array, ""]
    undecided: UInt32[Array, ""]
    differs: Bool[Array, ""]


def agreement(leaves: list[Shaped[Array, "..."]], axis_name: str) -> Agreement:
    """Compares the digests of the twins' arrays along the twin axis; each twin sends 8 bytes."""
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
    """Returns whether `differs` is true on any device. The answer is the same on all devices, because a branch with a
    collective must be taken on all of them or on none.

    The reduction omits the twin axis, because each twin already has the digests of all twins, and the network along
    this axis may be slow.
    """
    others = other_axes(differs, axis_name)
    return lax.pmax(program.varying(differs.astype(jnp.int32), others), others) > 0 if others else differs


def other_axes(x: Shaped[Array, "..."], axis_name: str) -> tuple[str, ...]:
    """Returns the axes other than the twin axis over which a value may vary.

    No value varies over an axis of size one, but `shard_map` may type a value as varying over it.
    """
    typed = jax.typeof(x).manual_axis_type.varying
    return tuple(
        axis for axis, size in program.bound_axes().items() if axis != axis_name and (size > 1 or axis in typed)
    )


def wrong(digests: UInt32[Array, "twins rows 2"]) -> Bool[Array, "twins rows"]:
    """Returns, for each row, which twins differ from the reference."""
    same = jnp.all(digests[:, None] == digests[None, :], axis=-1)
    if len(digests) == 2:
        return ~same[0]
    reference = jnp.argmax(jnp.sum(same, axis=1, dtype=jnp.int32), axis=0)
    return ~jnp.take_along_axis(same, reference[None, None], axis=0)[0]


def gather_twins(x: Shaped[Array, "*shape"], axis_name: str) -> list[Shaped[Array, "*shape"]]:
    """Returns every twin's tensor, bit for bit, on every device."""
    rows = exchanged(as_bits(x), axis_name)
    return [from_bits(row, x) for row in rows]


def from_reference(tree: Tree, axis_name: str, reference: Int32[Array, ""]) -> Tree:
    """Returns the reference twin's arrays on every twin, bit for bit."""
    mine = axis_place(axis_name) == reference

    def broadcast(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        bits = as_bits(x)
        return from_bits(lax.psum(jnp.where(mine, bits, jnp.zeros_like(bits)), axis_name), x)

    return jax.tree.map(broadcast, tree)


def measure(
    leaves: list[Shaped[Array, "..."]], axis_name: str, reference: Int32[Array, ""]
) -> tuple[list[Shaped[Array, "..."]], Difference]:
    """Compares the arrays of every twin with those of the reference, element by element."""
    size = lax.axis_size(axis_name)
    total: Difference | None = None
    chosen = []
    for leaf in leaves:
        copies = gather_twins(leaf, axis_name)
        chosen.append(lax.select_n(reference, *copies))
        if size == 2:  # half of the work: the row of the reference is zero, as set below
            rows = [difference(chosen[-1], lax.select_n(1 - reference, *copies))] * size
        else:
            rows = [difference(chosen[-1], copy) for copy in copies]
        new = Difference(*(jnp.stack(column) for column in zip(*rows, strict=True)))
        total = new if total is None else merge(total, new)
    assert total is not None
    others = jnp.arange(size) != reference
    total = jax.tree.map(lambda row: jnp.where(others, row, jnp.zeros_like(row)), total)
    return chosen, from_reference(total, axis_name, reference)


def nothing_found(leaves: list[Shaped[Array, "..."]], axis_name: str, reference: Int32[Array, ""]) -> Difference:
    """Returns the difference that `measure` would return if all twins agreed."""
    elements = jnp.uint32(sum(leaf.size for leaf in leaves))
    return no_difference(jnp.where(jnp.arange(lax.axis_size(axis_name)) != reference, elements, jnp.uint32(0)))


def squared_distance(
    leaves: list[Shaped[Array, "..."]], axis_name: str, replicas: list[int], reference: Int32[Array, ""]
) -> Float32[Array, "twins"]:
    """Returns the squared L2 distance of every twin from the reference, over arrays sharded on the other axes.

    Args:
        leaves: local shards of the arrays.
        axis_name: the twin axis.
        replicas: for each array, the number of devices of one twin that hold the same shard.
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
    """Returns this device's index along a bound axis, as `lax.axis_index` does, but also on a partly manual mesh.

    On such a mesh, XLA's compiler for TPUs rejects programs that read the device index at several places, because the
    compiler moves the operation out of the region in which it is valid. This function computes the index with a
    reduce-scatter instead.
    """
    if not program.manual_in_part():
        return lax.axis_index(axis_name)
    size = lax.axis_size(axis_name)
    places = program.varying(jnp.arange(size, dtype="int32"), [axis_name])
    return lax.psum_scatter(places, axis_name, tiled=True)[0] // size


def exchanged(mine: UInt[Array, "*shape"], axis_name: str) -> UInt[Array, "twins *shape"]:
    """Returns the values of all twins, one row per twin; `shard_map` types the result as equal on all devices."""
    row = jnp.arange(lax.axis_size(axis_name)) == axis_place(axis_name)
    rows = jnp.where(lax.expand_dims(row, range(1, mine.ndim + 1)), mine[None], jnp.zeros_like(mine)[None])
    return lax.psum(rows, axis_name)


Compare: TypeAlias = Literal["gated", "always"]
Exchange: TypeAlias = Literal["probe", "step", "call"]


def lockstep(
    step: Callable[P, Out],
    axis_name: str,
    *,
    where: program.Where = program.probes,
    compare: Compare = "gated",
    exchange: Exchange = "probe",
) -> Callable[P, tuple[Out, program.Reports[Mismatch]]]:
    """Transforms a step into lock-step twins along a mapped axis.

    Call the transformed step where `axis_name` is bound: under `shard_map` (twins on several devices or hosts), `pmap`,
    or `vmap` (all twins on one device).

    Args:
        step: the step of one twin, which does not refer to the other twins.
        axis_name: the twin axis. If there are two twins, the reference is twin 0; if there are three or more, the
            reference is a twin in the largest group that agrees.
        where: selects the sites to compare and repair; by default, every probe.
        compare: `"gated"` moves tensors only if digests differ; `"always"` moves and compares tensors every time.
        exchange: `"probe"` exchanges digests at every site. `"step"` exchanges the digests of all sites once per
            (micro)step and, only if any digest differs, repeats the (micro)step with a gated comparison at every site;
            a fault that does not recur is located but not measured (`Mismatch.unrepeated`). `"call"` exchanges digests
            once per call of the step, for all microsteps of a loop together.

    Returns:
        A function that returns `(out, mismatches)`, where `mismatches` holds a `Mismatch` for each site.

    Raises:
        ValueError: `axis_name` is not bound or has fewer than two twins; `compare` or `exchange` is unknown; no site is
            selected (a probe whose value the step does not use is not a site); or `exchange` is not `"probe"`, although
            `compare` is `"always"` or the step cannot be repeated (it changes arrays in place or has ordered effects).

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
        raise ValueError("compare='always' requires exchange='probe'; give exchange='probe' or compare='gated'")
    rule = _Lockstep(axis_name, compare)
    around = None if exchange == "probe" else _Optimistic(axis_name, rule, whole=exchange == "call")
    twins = program.rewrite(step, where, rule, required=True, around=around)

    @program.taking(step)
    def stepped(*args: Any, **kwargs: Any) -> tuple[Any, program.Reports[Mismatch]]:
        program.axis_size(axis_name, "twin")
        return twins(*args, **kwargs)

    return stepped


def synchronize(
    tree: Tree, axis_name: str, *, repair: bool = True, compare: Compare = "gated", agreed: Agreement | None = None
) -> tuple[Tree, Mismatch]:
    """Compares a pytree between twins and overwrites it with the reference's pytree, bit for bit.

    Applied to the parameters and the optimizer state after each step, this function implements parameter
    synchronization.

    Args:
        tree: pytree of arrays, for instance a training state; other leaves are returned unchanged.
        axis_name: the twin axis, which must be bound.
        repair: whether to overwrite the tree; otherwise, it is only compared.
        compare: see `lockstep`.
        agreed: the result of `twins.agreement` for the tree's leaves, if already known.

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
    # XLA may compute a value twice, once for each fusion that uses it. The barrier ensures that the compared value is
    # the one that the step uses.
    outs = lax.optimization_barrier(outs)
    return _synchronize(outs, agreement(outs, axis_name), axis_name, compare)


@functools.partial(program.traced_once, static_argnums=(2, 3))
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
    """Results of the first pass at a site: the digest of its outputs, and the report to return if all twins agree."""

    digest: UInt32[Array, "*rows 2"]
    nothing: Mismatch


class _Optimistic:
    """Optimistic execution of the part of a step that contains the probes; see the module's docstring."""

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
            outs, found = region.run(self.gated, iteration, inputs)
            # All digests are exchanged only if any differs.
            complete = program.traced_once(functools.partial(_with_unrepeated, order=order, axis_name=self.axis_name))
            _, reports = complete([mine], [found[name] for name in order])
            return outs, dict(zip(order, reports, strict=True))

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
    outs = lax.optimization_barrier(outs)  # the compared value must be the one that the step uses
    difference = nothing_found(outs, axis_name, jnp.int32(0))
    nothing = Mismatch(difference, jnp.uint32(0), jnp.zeros_like(difference.checked))
    return outs, _Seen(tree_digest(outs), nothing)


@functools.partial(program.traced_once, static_argnums=1)
def _compared(digests: program.Values, axis_name: str) -> tuple[program.Values, Any]:
    """Compares a single digest, computed from all digests, between the twins; each twin sends 8 bytes, regardless of
    the number of sites."""
    mine = jnp.concatenate(digests)
    whole = exchanged(tree_digest(mine), axis_name)
    return digests, (mine, anywhere(jnp.any(whole != whole[:1]), axis_name))


def _with_unrepeated(
    digests: program.Values, found: list[Mismatch], *, order: "dict[str, _Order]", axis_name: str
) -> tuple[program.Values, list[Mismatch]]:
    """Adds the first differences that did not recur in the repetition to the mismatches of the repetition."""
    rows = exchanged(digests[0], axis_name)
    rank, loop = (
        jnp.asarray(np.concatenate([getattr(one, name).ravel() for one in order.values()])) for name in ("rank", "loop")
    )
    apart = wrong(rows)
    first = jnp.min(jnp.where(apart, rank, len(rank)), axis=1)
    if others := other_axes(first, axis_name):
        first = lax.pmin(program.varying(first, others), others)
    counts = [one.difference.mismatched.reshape(-1, len(rows)) for one in found]
    again = jax.ops.segment_max(jnp.concatenate(counts), loop, len(rank))[loop]
    alone = apart & (rank == first[:, None]) & (again.T == 0)
    start, reports = 0, []
    for place, mismatch in zip(order.values(), found, strict=True):
        here = alone[:, start : start + place.rank.size].reshape(-1, *place.rank.shape)
        start += place.rank.size
        reports.append(mismatch._replace(unrepeated=program.varying(jnp.moveaxis(here, 0, -1).astype(jnp.uint32))))
    return digests, reports


class _Order(NamedTuple):
    """Positions of a site's digests in the order of all digests of the region; equal on all devices."""

    rank: Int[np.ndarray, "*rows"]  # position in the order, the earliest first
    # Sites in the same `while` loop have equal numbers, because the iterations of the loop share one digest and it is
    # therefore unknown which of these sites was the first to differ. All other sites have distinct numbers.
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
