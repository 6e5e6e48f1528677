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
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, UInt32

from ..program import (
    Place,
    Region,
    Reports,
    Rule,
    Tags,
    Values,
    Where,
    axis_size,
    is_array,
    probes,
    rarely,
    rewrite,
    taking,
    traced_once,
    varying,
)
from ._agreement import Agreement, agreement, anywhere, exchanged, measure, nothing_found, other_axes, wrong
from .digests import fmix32, tree_digest
from .first_differences import place_of
from .mismatch import Difference, Mismatch, merge_mismatches, no_difference

Compare: TypeAlias = Literal["gated", "always"]
Exchange: TypeAlias = Literal["probe", "step", "call"]
Tree = TypeVar("Tree")


def lockstep(
    step: Callable[..., Any],
    axis_name: str,
    *,
    where: Where = probes,
    compare: Compare = "gated",
    exchange: Exchange = "probe",
) -> Callable[..., tuple[Any, Reports]]:
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
    twins = rewrite(step, where, rule, required=True, around=around)

    @taking(step)
    def stepped(*args: Any, **kwargs: Any) -> tuple[Any, Reports]:
        axis_size(axis_name, "twin")
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
    axis_size(axis_name, "twin")
    whole, structure = jax.tree.flatten(tree)
    arrays = [number for number, leaf in enumerate(whole) if is_array(leaf, numbers=True)]
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

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Mismatch]:
        return _synchronized(bind(*inputs), self.axis_name, self.compare)

    merge = staticmethod(merge_mismatches)


@functools.partial(traced_once, static_argnums=(1, 2))
def _synchronized(outs: Values, axis_name: str, compare: Compare) -> tuple[Values, Mismatch]:
    # XLA may compute a value twice, once for each fusion that uses it: behind the barrier, what is compared is what is
    # consumed.
    outs = lax.optimization_barrier(outs)
    return _synchronize(outs, agreement(outs, axis_name), axis_name, compare)


def _synchronize(leaves: Values, agreed: Agreement, axis_name: str, compare: Compare) -> tuple[Values, Mismatch]:
    reference, undecided, differs = agreed

    def repair(state: tuple[Values, Difference], reference: Array) -> tuple[Values, Difference]:
        leaves, _ = state
        chosen, found = measure(leaves, axis_name, reference)
        return [varying(new, like=old) for new, old in zip(chosen, leaves, strict=True)], varying(found)

    kept = list(leaves), varying(nothing_found(leaves, axis_name, reference))
    leaves, found = repair(kept, reference) if compare == "always" else rarely(differs, repair, kept, reference)
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

    def __init__(self, axis_name: str, gated: Rule, *, whole: bool) -> None:
        self.axis_name, self.gated, self.whole = axis_name, gated, whole

    def __call__(self, region: Region, iteration: Any, inputs: Values) -> tuple[Values, dict[str, Any]]:
        outs, seen = region.run(_Watch(self.axis_name), iteration, inputs)
        order = _order(region, {name: one.digest.shape[:-1] for name, one in seen.items()})

        def repeat(before: Any, mine: Any, iteration: Any, inputs: Values) -> tuple[Values, dict[str, Mismatch]]:
            rows = exchanged(mine, self.axis_name)  # which of them differ is asked only if any does
            outs, found = region.run(self.gated, iteration, inputs)
            return outs, _with_unrepeated(found, order, rows, self.axis_name)

        with jax.named_scope(Tags.HIDDEN):
            digests = [one.digest.reshape(-1, 2) for one in seen.values()]
            _, (mine, differs) = _compared(digests, self.axis_name)
            nothing = {name: varying(one.nothing) for name, one in seen.items()}
            return rarely(differs, repeat, (outs, nothing), mine, iteration, inputs)


class _Watch:
    """The rule of the first pass."""

    def __init__(self, axis_name: str) -> None:
        self.axis_name = axis_name

    def __call__(self, place: Place, bind: Any, *inputs: Any) -> tuple[Values, _Seen]:
        return _watched(bind(*inputs), self.axis_name)

    def merge(self, total: _Seen, new: _Seen) -> _Seen:
        return _Seen(fmix32(total.digest) + new.digest, merge_mismatches(total.nothing, new.nothing))


@functools.partial(traced_once, static_argnums=1)
def _watched(outs: Values, axis_name: str) -> tuple[Values, _Seen]:
    outs = lax.optimization_barrier(outs)  # what is compared is what is consumed
    difference = nothing_found(outs, axis_name, jnp.int32(0))
    nothing = Mismatch(difference, jnp.uint32(0), jnp.zeros_like(difference.checked))
    return outs, _Seen(tree_digest(outs), nothing)


@functools.partial(traced_once, static_argnums=1)
def _compared(digests: Values, axis_name: str) -> tuple[Values, Any]:
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
        first = lax.pmin(varying(first, others), others)
    counts = [one.difference.mismatched.reshape(-1, len(rows)) for one in found.values()]
    again = jax.ops.segment_max(jnp.concatenate(counts), loop, len(rank))[loop]
    alone = apart & (rank == first[:, None]) & (again.T == 0)
    start, reports = 0, {}
    for name, mismatch in found.items():
        shape = order[name].rank.shape
        here = alone[:, start : start + order[name].rank.size].reshape(-1, *shape)
        start += order[name].rank.size
        reports[name] = mismatch._replace(unrepeated=varying(jnp.moveaxis(here, 0, -1).astype(jnp.uint32)))
    return reports


class _Order(NamedTuple):
    """When the digests of a site are made, among those of the region; the same on all devices."""

    rank: Int[np.ndarray, "*rows"]  # the smaller, the earlier
    # Equal numbers for what lies in the same `while` loop, whose turns share one digest: which of its sites was the
    # first, nobody knows. All others have numbers of their own.
    loop: Int[np.ndarray, "*rows"]


def _order(region: Region, shapes: dict[str, tuple[int, ...]]) -> dict[str, _Order]:
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
