"""Optimistic lock-step: the digests of all probes cross the twin axis at once, and a step is repeated if they differ.

Most steps are the same on all twins. So a (micro)step runs without a look at the other twins, and keeps the digest of
each probe; behind the last one all are exchanged together. Where none differs, that was it: one exchange in the place
of one at each probe, of which a network between hosts makes each wait for the slowest. Otherwise the (micro)step is
repeated from its start, with the gate at every probe, and what it gives then is what counts.

A fault that does not come again leaves no trace in the repetition. Of it is known where it was, the first digest that
differed, in the order of the program; how large it was, nobody knows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, UInt32

from ..program import Place, Region, Rule, Tags, Values, rarely, traced_once, varying
from ._agreement import anywhere, exchanged, nothing_found, other_axes, wrong
from ._first_difference import place_of
from .digests import fmix32, tree_digest
from .mismatch import Mismatch, merge


class _Seen(NamedTuple):
    """What the first pass says of a site: the digest of its outputs, and what there is to report if all agree."""

    digest: UInt32[Array, "*rows 2"]
    nothing: Mismatch


class Optimistic:
    """What becomes of the part of a step that holds the probes; see the module.

    Args:
        axis_name: the twin axis.
        gated: the rule of the repetition.
        whole: whether all microsteps of a step are one such part, or each of them.
    """

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
        return _Seen(fmix32(total.digest) + new.digest, merge(total.nothing, new.nothing))


@functools.partial(traced_once, static_argnums=1)
def _watched(outs: Values, axis_name: str) -> tuple[Values, _Seen]:
    outs = lax.optimization_barrier(outs)  # see `_lockstep`: what is compared is what is consumed
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
    """When the digests of a site are made, among those of the region; the same on all devices.

    Attributes:
        rank: the smaller, the earlier.
        loop: equal numbers for what lies in the same `while` loop, whose turns share one digest: which of its sites
            was the first, nobody knows. All others have numbers of their own.
    """

    rank: Int[np.ndarray, "*rows"]
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
