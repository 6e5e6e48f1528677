"""Fault injection: a step in which simulated hardware faults corrupt values, and the ground truth of these changes."""

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float32, Int, Int32, PRNGKeyArray, Shaped, UInt, UInt32

from sdc.bits import as_bits, from_bits
from sdc.results import counted, total
from sdc.settings import SettingError
from sdc.verdict import Judgement

from .. import program
from .fault import Fault, One, Whole, parse_fault
from .kinds import Change, FaultKind, by_layer

# Elements are counted by 32-bit integers.
LARGEST = 2**31 - 1
# Above this rate, drawing a random number for every element is cheaper than scattering the hits.
DENSE = 1 / 16
# Maximum number of elements of one plan that is drawn before the step begins, and of all of them together.
LARGEST_PLAN, LARGEST_EARLY = 256, 1 << 17
ROUNDED = 256  # number of hits up to which the room for hits is a power of two
P = ParamSpec("P")  # of a step
Out = TypeVar("Out")


@program.aside
class Moment(NamedTuple):
    """The number of a step, and the PRNG key from which its faults are drawn.

    Attributes:
        key: PRNG key of the run. The same key, step, site, iteration and device give the same faults, regardless of
            how the mesh is mapped.
        step: number of the step.
    """

    key: PRNGKeyArray
    step: Int[Array, ""]


class Hits(NamedTuple):
    """The first elements that changed, in order of output and index; unused rows are zero.

    Attributes:
        output: number of the operation's output.
        element: flat index of the element, row-major.
        old: bits of the element before the fault, as two 32-bit words, lower word first.
        new: bits of the element after the fault, in the same form.
    """

    output: UInt32[Array, "k"]
    element: UInt32[Array, "k"]
    old: UInt32[Array, "k 2"]
    new: UInt32[Array, "k 2"]


class Events(NamedTuple):
    """Ground truth of the faults at one site.

    Attributes:
        drawn: number of elements that faults struck, counted once per fault.
        changed: number of elements whose bits changed, all of which an exact comparison detects.
        hits: the first changed elements if `record` asked for them, else None.
    """

    drawn: UInt32[Array, ""]
    changed: UInt32[Array, ""]
    hits: Hits | None = None

    @property
    def simulates(self) -> bool:
        """Whether verdicts on the same step concern simulated faults."""
        return True

    def summary(self, site: program.Site | None = None) -> dict[str, int]:
        """Returns the totals over all iterations and devices; waits for them."""
        return {"elements struck": total(self.drawn), "changed": total(self.changed)}

    @staticmethod
    def judge(reports: program.Reports["Events"]) -> Judgement:
        """Returns how many elements simulated faults changed, which is no verdict; waits for the counts."""
        changed = [count for one in reports.values() if (count := one.summary()["changed"])]
        said = f"simulated faults changed {counted(sum(changed), 'element')}"
        return Judgement(None, f"{said} at {len(changed)} of {counted(len(reports), 'site')}")


def corruptible(x: Any) -> bool:
    """Returns whether faults can corrupt an array: whether it holds real numbers (not booleans) of at least 8 bits."""
    real = jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
    return real and jax.dtypes.itemsize_bits(x.dtype) >= 8


def strikable(x: Any) -> bool:
    """Returns whether an array has an element that faults can corrupt."""
    return corruptible(x) and math.prod(x.shape) > 0


NUMBERS = program.Selector("real numbers", lambda site: any(map(strikable, site.outputs)))  # corruptible sites


def words(x: Shaped[Array, "*n"]) -> UInt32[Array, "*n 2"]:
    """Returns the bits of each real number as two 32-bit words, lower word first."""
    return _words(as_bits(x))


def _words(bits: UInt[Array, "*n"]) -> UInt32[Array, "*n 2"]:
    if bits.dtype.itemsize > 4:
        return lax.bitcast_convert_type(bits, jnp.uint32)
    return jnp.stack([bits.astype(jnp.uint32), jnp.zeros(bits.shape, jnp.uint32)], axis=-1)


def inject(
    step: Callable[P, Out], faults: Sequence[Fault | str], *, record: int = 0
) -> Callable[Concatenate[Moment, P], tuple[Out, program.Reports[Events]]]:
    """Transforms a step so that faults corrupt its values, to simulate faulty hardware.

    At low rates, the cost grows with the number of hits, not with the size of the tensors: the distances between hits
    are drawn from their geometric distribution, so a hit starts at each element independently, at exactly the given
    rate.

    Args:
        step: any function that JAX can trace.
        faults: faults, or their text forms (see `parse_fault`); faults that strike the same element are applied in
            order. A fault strikes all sites with real numbers that the fault's selector chooses (operations,
            collectives, arguments of the step, probes), or the probes that it names.
        record: number of changed elements to list for each site.

    Returns:
        A function of `(moment, *args)`, where `moment` is a `Moment`, that returns `(out, events)`; `events` holds
        `Events` for each site that a fault can strike.

    Raises:
        SettingError: a fault has no rate.
        ValueError: a fault refers to a site, layer or mesh axis that the step does not have, to a site without real
            numbers, or to bits that the site's numbers do not have.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> from sdc.program import primitive
        >>> fault = sdc.Fault(sdc.faults.Scale(2.0), rate=1.0, site=primitive("sin"))
        >>> step = sdc.inject(lambda x: jnp.sin(x) + 1.0, [fault])
        >>> out, events = step(sdc.Moment(jax.random.key(0), jnp.int32(0)), jnp.zeros(3) + jnp.pi / 2)
        >>> out.tolist(), int(events["fwd/sin"].changed)
        ([3.0, 3.0, 3.0], 3)
    """
    decorated = program.taking(step, "moment")  # comes first, so that the step is checked before the faults
    known = _read(faults)

    @decorated
    def injected(moment: Moment, /, *args: Any, **kwargs: Any) -> tuple[Any, program.Reports[Events]]:
        if not isinstance(moment, Moment):
            raise TypeError(f"the first argument is {type(moment).__name__}; expected an sdc.Moment(key, step)")
        if not isinstance(moment.key, jax.Array):
            raise TypeError(f"{moment}: expected a key, such as jax.random.key(0), and a step number")
        moment = Moment(moment.key, jnp.asarray(moment.step))
        if moment.step.shape or not jnp.issubdtype(moment.step.dtype, jnp.integer):
            raise TypeError(f"{moment}: expected a whole number for the step")
        with jax.named_scope(program.Tags.HIDDEN):
            rule = _Inject(known, moment, record)
        selector = program.Selector("faults", rule.chosen, terms=[fault.selector for fault in known])
        out, events = program.rewrite(step, selector, rule, begin=rule.begin)(*args, **kwargs)
        for number in sorted(set(range(len(known))) - rule.placed):
            if not known[number].by_name:
                program.sites(step, *args, where=known[number].selector, **kwargs)
            _refuse(known[number], program.sites(step, *args, **kwargs))
        return out, events

    return injected


def _read(faults: Sequence[Fault | str]) -> tuple[Fault, ...]:
    if isinstance(faults, (Fault, str)):
        raise SettingError("faults", faults, "expected a sequence of faults, such as a list of one fault")
    known = tuple(parse_fault(fault) if isinstance(fault, str) else fault for fault in faults)
    for fault in known:
        if not isinstance(fault, Fault):
            raise SettingError("faults", fault, "expected an sdc.Fault(kind, rate, site), or the text of a fault")
        if fault.rate is None:
            raise SettingError("rate", None, f"missing in {fault}; give the probability of a hit, as in rate=1e-4")
    return known


def _refuse(fault: Fault, all_sites: Sequence[program.Site]) -> None:
    """Raises a ValueError that says why a fault can strike no site."""
    chosen = [site for site in all_sites if fault.selector(site)]
    if not fault.by_name:
        what = f"selector {fault.selector}"
    else:
        what = f"site {fault.site!r}"
        if not chosen:
            names = sorted({site.name for site in all_sites if program.probes(site)})
            raise ValueError(f"{what} matches no probe of the step; available probes: {', '.join(names) or 'none'}")
    numbers = [site for site in chosen if any(map(corruptible, site.outputs))]
    if numbers and not any(fault.strikes(x) for site in numbers for x in site.outputs):
        held = ", ".join(dict.fromkeys(x.dtype.name for site in numbers for x in site.outputs))
        raise ValueError(f"{what} selects arrays of {held}, but the fault has dtype={fault.dtype}; choose another")
    if numbers:
        trips = numbers[0].trips[-1:]
        where = f"in a loop of {trips[0]} iterations" if trips else "outside of any loop"
        raise ValueError(
            f"{what} selects {numbers[0].name!r}, which is {where}, but the fault has layer={fault.layer}; "
            "choose another layer, or leave layer out"
        )
    held = " and ".join(dict.fromkeys(out.dtype.name for out in chosen[0].outputs)) or "no array"
    raise ValueError(
        f"{what} selects {chosen[0].name!r}, which holds {held}, but faults can corrupt only real numbers of 8 bits or "
        "more; choose another site (sdc.sites lists sites with their types)"
    )


class PlannedHits(NamedTuple):
    """The hits of a fault on one array: where they are, and how the elements change.

    Attributes:
        groups: flat indices of the elements that each hit strikes; the array's size for unused entries.
        parts: parts of the change that are drawn, by name (see `Change`).
        order: order of the elements of all groups by index, and their indices, each listed once; None if every group
            is a single element, since these are in order already.
        drawn: the kind's draw for the step and layer, and the layer; None for kinds that draw nothing.
    """

    groups: Int32[Array, "hits n"]
    parts: Mapping[str, Shaped[Array, "..."]]
    order: tuple[Int32[Array, "_"], Int32[Array, "_"]] | None
    drawn: tuple[Float32[ArrayLike, ""], Int[Array, ""]] | None


class _Packed(NamedTuple):
    """The plans of a fault for several evaluations, as the words of one array.

    XLA compiles equal kernels once. Which plan a kernel takes must therefore not be a part of the kernel: it is a
    constant array of indices, whereas XLA would put a constant number into the kernel.
    """

    words: UInt32[Array, "rows_times_words"]
    layout: PlannedHits  # of `jax.ShapeDtypeStruct`
    same: dict[str, Any]  # see `Draw.planned`

    @property
    def size(self) -> int:
        """Number of words of a plan."""
        return sum(map(_word_count, jax.tree.leaves(self.layout)))

    def plan(self, words: UInt32[Array, "rows_times_words"], at: Int32[Array, "words"]) -> PlannedHits:
        """Returns the plan that consists of the words at these indices."""
        words = words.at[at].get(mode="promise_in_bounds")
        parts, structure = jax.tree.flatten(self.layout)
        ends = np.cumsum([_word_count(part) for part in parts])
        found = []
        for part, end in zip(parts, ends, strict=True):
            wide = _wide(part.dtype)
            piece = words[end - _word_count(part) : end].reshape(*part.shape, *([2] if wide.itemsize == 8 else []))
            found.append(lax.bitcast_convert_type(piece, wide).astype(part.dtype))
        return jax.tree.unflatten(structure, found)


def _wide(dtype: Any) -> np.dtype:
    """Returns the type of whole words that represents all numbers of a type."""
    if dtype.itemsize >= 4:
        return np.dtype(dtype)
    return np.dtype(np.float32 if jnp.issubdtype(dtype, jnp.floating) else np.int32)


def _word_count(part: jax.ShapeDtypeStruct) -> int:
    return math.prod(part.shape) * _wide(part.dtype).itemsize // 4


def _packed(plan: PlannedHits) -> UInt32[Array, "words"]:
    wide = [jnp.asarray(part).astype(_wide(jnp.asarray(part).dtype)) for part in jax.tree.leaves(plan)]
    return jnp.concatenate([lax.bitcast_convert_type(part, jnp.uint32).reshape(-1) for part in wide])


# A function of the array's bits, further arrays, and where a fault strikes; it returns the bits after the fault, and
# the struck elements, or None if these are where the last argument says.
Corrupt: TypeAlias = Callable[[Any, Any, Any], tuple[Any, Any]]


class Draw(NamedTuple):
    """A fault at one site, with the random draw of the elements that it strikes."""

    fault: Fault
    keys: PRNGKeyArray  # two keys: one for the places, one for the changes
    rate: Float32[Array, ""]  # probability that a hit starts at an element
    like: jax.ShapeDtypeStruct  # dtype of the array, and its shape if the pattern of the fault depends on it
    size: Int[ArrayLike, ""]  # number of elements of the array
    room: int  # see `_room`
    layer: Int[Array, ""]
    u: Float32[ArrayLike, ""]  # the kind's draw for the step and layer

    def found(self) -> Bool[Array, "*#size"]:
        """Returns whether the fault strikes the array or, for a dense fault, which elements it strikes, since this
        costs no more."""
        if isinstance(self.fault.pattern, Whole):  # a hit anywhere strikes all elements: 1 - (1 - rate)^size
            any_start = -jnp.expm1(self.size * jnp.log1p(-jnp.minimum(self.rate, 1 - 2.0**-24)))
            return (jax.random.uniform(self.keys[0]) < any_start) & (self.rate > 0)
        if _sparse(self.fault):  # there is a hit if the first distance lies inside the array
            return self._gaps()[0] <= self.size
        if self.fault.pattern != One():
            raise ValueError(
                f"rate={self.fault.rate} with a pattern of several elements would corrupt most of the tensor; "
                f"give a rate of at most {DENSE:g}, including bursts, or the pattern Whole()"
            )
        return jax.random.uniform(self.keys[0], (self.like.size,)) < self.rate

    def where(self, bits: UInt[Array, "*shape"], hit: Bool[Array, "*#size"]) -> UInt[Array, "*shape"]:
        """Returns the bits after the fault has changed the elements for which `hit` is true."""
        mask = hit.reshape(bits.shape) if hit.ndim else hit
        numbers = lax.bitcast_convert_type(bits.reshape(-1), self.like.dtype)
        after = as_bits(self._what(self.keys[1], numbers, self.layer))
        return jnp.where(mask, after.reshape(bits.shape), bits)

    def planned(self) -> tuple[PlannedHits, dict[str, Any]]:
        """Draws the hits; returns their plan, and the parts of their change that are the same in every draw.

        If patterns overlap, the first pattern determines the value of an element; in hardware, the order of two writes
        to one place would be arbitrary as well.
        """
        # Saturating sums cannot wrap, and are associative.
        most = jnp.asarray(self.size, jnp.uint32) + 1
        starts = (lax.associative_scan(lambda a, b: jnp.minimum(a + b, most), self._gaps()) - 1).astype(jnp.int32)
        groups, order = self.fault.pattern.positions(starts, self.like.shape), None
        if groups.shape[-1] > 1:
            groups = jnp.sort(groups, axis=-1)  # elements cut off at an edge come last
            at = groups.reshape(-1)
            rank = jnp.argsort(at)
            at = at[rank]
            again = jnp.concatenate([jnp.zeros(1, jnp.bool_), at[1:] == at[:-1]])
            order = rank.astype(jnp.int32), jnp.where(again, self.size, at).astype(at.dtype)
        change = self._what.change(self.keys[1], groups.shape, self.like.dtype, self.layer)._asdict()
        parts = {name: part for name, part in change.items() if isinstance(part, jax.core.Tracer)}
        drawn = (self.u, self.layer) if self.fault.kind.draws else None
        same = {name: part for name, part in change.items() if name not in parts}
        return PlannedHits(groups, parts, order, drawn), same

    @property
    def _what(self) -> FaultKind:
        return self.fault.kind.on(self.u, self.layer)

    def _gaps(self) -> UInt32[Array, "hits"]:
        """Draws the distances from the start of one hit to the start of the next; the first is measured from index -1.

        The distances have a geometric distribution: 1 + floor(log(1 - u) / log(1 - rate)).
        """
        size = jnp.asarray(self.size, jnp.float32)
        # Drawn from 32 random bits rather than 23, so that small distances keep their probability at very low rates.
        bits = jax.random.bits(self.keys[0], (self.room,), jnp.uint32)
        u = (bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
        gap = jnp.floor(jnp.log1p(-u) / jnp.log1p(-jnp.maximum(self.rate, 1e-30)))
        return jnp.where(self.rate > 0, jnp.minimum(gap, size), size).astype(jnp.uint32) + 1


def _sparse(fault: Fault) -> bool:
    """Returns whether hits are so rare that drawing their places costs less than drawing a number for every element."""
    return not isinstance(fault.pattern, Whole) and fault.largest_rate() <= DENSE


def _room(fault: Fault, size: int) -> int:
    """Returns the number of hits for which an array has room: those expected at the largest rate, plus eight standard
    deviations, plus twelve; further hits would be lost. Small numbers are rounded up to powers of two, so that arrays
    of different sizes can share a draw; with partitionable threefry, the draws do not depend on the room."""
    expected = size * fault.largest_rate()
    room = int(expected + 8 * np.sqrt(expected)) + 12
    return 1 << (room - 1).bit_length() if room <= ROUNDED else min(room, size)


class Struck(NamedTuple):
    """Elements that hits have struck, each listed once, by index; unused entries have an index out of range."""

    at: Int32[Array, "n"]
    old: UInt[Array, "n"]
    new: UInt[Array, "n"]


def _apply(
    like: jax.ShapeDtypeStruct, what: FaultKind, same: Mapping[str, Any], bits: UInt[Array, "*shape"], plan: PlannedHits
) -> tuple[UInt[Array, "*shape"], Struck]:
    """Returns the bits after the planned hits, and the struck elements."""
    count = jnp.sum(plan.groups < like.size, axis=-1, dtype=jnp.int32)
    before = take(bits, plan.groups)
    numbers = lax.bitcast_convert_type(before, like.dtype)
    kind = what if plan.drawn is None else what.on(*plan.drawn)
    after = as_bits(kind.changed(numbers, Change(**plan.parts, **same), count))
    struck = Struck(plan.groups.reshape(-1), before.reshape(-1), after.reshape(-1))
    if plan.order is not None:
        rank, at = plan.order
        struck = Struck(at, struck.old[rank], struck.new[rank])
    return bits.at[_indices(struck.at, bits.shape)].set(struck.new, mode="drop"), struck


def _corrupt_packed(
    packed: _Packed, like: jax.ShapeDtypeStruct, what: FaultKind, bits: UInt[Array, "*shape"], arrays: Any, _: Any
) -> tuple[UInt[Array, "*shape"], Struck]:
    """Returns the bits after the hits of a plan, given as in `_Packed.plan`, and the struck elements."""
    return _apply(like, what, packed.same, bits, packed.plan(*arrays))


def _corrupt_drawn(
    draw: Draw, bits: UInt[Array, "*shape"], arrays: Mapping[str, Any], hit: Bool[Array, "*#size"]
) -> tuple[UInt[Array, "*shape"], Struck | None]:
    """Draws the hits again, from `arrays`, and returns the bits after them, and the struck elements."""
    draw = draw._replace(**arrays)
    if not _sparse(draw.fault):
        return draw.where(bits, hit), None
    plan, same = draw.planned()
    return _apply(draw.like, draw.fault.kind, same, bits, plan)


def take(x: Shaped[Array, "*shape"], at: Int32[Array, "*n"]) -> Shaped[Array, "*n"]:
    """Returns elements of an array by flat index; for indices out of range, the result is arbitrary."""
    return x.at[_indices(at, x.shape)].get(mode="clip")


def _indices(at: Int32[Array, "*n"], shape: tuple[int, ...]) -> tuple[Int32[Array, "*n"], ...]:
    """Converts flat indices to indices along each axis; indices out of range stay out of range.

    Flattening the array instead would lose the sharding of some of its axes.
    """
    found: list[Int32[Array, "*n"]] = []
    for number in reversed(shape[1:]):
        found.append(lax.rem(at, jnp.int32(number)))
        at = lax.div(at, jnp.int32(number))
    return at, *reversed(found)


class _Inject:
    def __init__(self, faults: tuple[Fault, ...], moment: Moment, record: int) -> None:
        self.faults, self.record = faults, record
        # Values shared by all sites are computed here, outside all loops, since random numbers compile slowly.
        key = jax.random.fold_in(_own_key(moment.key), moment.step)
        # A spike affects a whole device at once, not single sites: faults with equal `at` and `when` share spikes.
        alike = [(fault.when, fault.at) for fault in faults]
        factors = [
            fault.when.factor(jax.random.fold_in(key, alike.index((fault.when, fault.at))), moment.step)
            for fault in faults
        ]
        self.key, self.factors = program.closable((key, factors))
        self._corrupted = program.traced_once(self._corrupt_all, static_argnums=6)
        self.placed: set[int] = set()  # numbers of the faults that can strike a site of the step
        # Plans that were drawn early, with the number of the first: by site, output and fault.
        self._early: dict[str, dict[tuple[int, int], tuple[_Packed, int]]] = {}
        self._elements = 0  # of these plans
        self._planned: dict[Any, Callable[..., Any]] = {}  # `_corrupt_planned` for sites with equal plans

    def chosen(self, site: program.Site) -> bool:
        if not any(map(corruptible, site.outputs)):
            return False
        placed = set(self._numbers(site))
        self.placed |= placed
        return bool(placed)

    def _numbers(self, site: program.Site) -> tuple[int, ...]:
        return tuple(number for number, fault in enumerate(self.faults) if _may_hit(fault, site))

    def begin(self, sites: Sequence[program.Site]) -> None:
        """Draws the hits of all sites whose number of evaluations is known, together for sites of the same dtype.

        Random numbers compile slowly: a program in which each site drew its own took minutes to compile.
        """
        sizes = {site.name: self._planned_elements(site) for site in sites}
        groups: dict[Any, list[program.Site]] = {}
        for site in sorted(sites, key=lambda site: sizes[site.name]):
            if 0 < sizes[site.name] <= LARGEST_EARLY - self._elements:
                self._elements += int(sizes[site.name])
                numbers = self._numbers(site)
                faults = [self.faults[number] for number in numbers]
                for output, x in enumerate(site.outputs):
                    if strikable(x):
                        rooms = tuple(_room(fault, x.size) for fault in faults)
                        shape = () if all(fault.pattern == One() for fault in faults) else x.shape
                        like = jax.ShapeDtypeStruct(shape, x.dtype)
                        groups.setdefault((numbers, output, like, rooms, site.loops), []).append(site)
        for (numbers, output, like, rooms, _), group in groups.items():
            self._draw_early(numbers, output, like, rooms, group)

    def _planned_elements(self, site: program.Site) -> float:
        """Returns the number of elements of a site's plans; infinity if the site must draw its own hits."""
        faults = [self.faults[number] for number in self._numbers(site)]
        arrays, runs = [x for x in site.outputs if strikable(x)], math.prod(site.trips)
        small = all(x.size < LARGEST for x in arrays)
        known = runs > 0 and program.bound_axes().keys() >= dict(site.mesh).keys()
        if not small or not known or not all(map(_sparse, faults)):
            return math.inf
        found = [_room(fault, x.size) * fault.pattern.size(x.shape) for fault in faults for x in arrays]
        return runs * sum(found) if max(found, default=0) <= LARGEST_PLAN else math.inf

    def _draw_early(
        self,
        numbers: tuple[int, ...],
        output: int,
        like: jax.ShapeDtypeStruct,
        rooms: tuple[int, ...],
        group: Sequence[program.Site],
    ) -> None:
        """Draws the hits on an output of several sites, in all iterations of their loops."""
        runs = [math.prod(site.trips) for site in group]
        grids = [
            np.indices(site.trips, np.int32).reshape(site.loops, each) for site, each in zip(group, runs, strict=True)
        ]
        names = np.asarray([zlib.crc32(site.name.encode()) for site in group], np.uint32)
        sizes = np.asarray([math.prod(site.outputs[output].shape) for site in group], np.int32)
        now = [self._now(number, group, grids) for number in numbers]
        layouts: dict[int, tuple[PlannedHits, dict[str, Any]]] = {}

        def draw(_: program.Values, key: Any, factors: Any, rows: Any) -> tuple[program.Values, Any]:
            def one(name: Any, size: Any, iteration: Any, now: Any) -> Any:
                words = {}
                for number, draw in self._draws(numbers, key, factors, name, iteration, now, output, like, size, rooms):
                    plan, same = draw.planned()
                    layouts[number] = jax.eval_shape(lambda hits: hits, plan), same
                    words[number] = _packed(plan)
                return words

            return [], {number: words.reshape(-1) for number, words in jax.vmap(one)(*rows).items()}

        rows = np.repeat(names, runs), np.repeat(sizes, runs), tuple(np.concatenate(grids, axis=1)), now
        words = program.closable(program.traced_once(draw)([], self.key, self.factors, rows)[1])
        packed = {number: _Packed(each, *layouts[number]) for number, each in words.items()}
        first = np.cumsum([0, *runs])
        for site, row in zip(group, map(int, first), strict=False):
            self._early.setdefault(site.name, {}).update({(output, each): (packed[each], row) for each in packed})

    def _now(
        self, number: int, group: Sequence[program.Site], grids: Sequence[Int32[np.ndarray, "loops runs"]]
    ) -> Bool[ArrayLike, "rows"]:
        """Returns whether a fault's selector chooses each site in each iteration."""
        fault, found = self.faults[number], []
        for site, grid in zip(group, grids, strict=True):
            now = fault.by_name or fault.selector.now(site, tuple(map(jnp.asarray, grid)))
            found.append(np.full(grid.shape[1], now) if isinstance(now, bool) else now)
        # Concatenation by NumPy keeps constants out of the program.
        return jnp.concatenate(found) if any(isinstance(now, jax.Array) for now in found) else np.concatenate(found)

    def _draws(
        self,
        numbers: Sequence[int],
        step_key: PRNGKeyArray,
        factors: Sequence[Float32[Array, ""]],
        site: UInt32[ArrayLike, ""],
        iteration: Sequence[Int[Array, ""]],
        here: Sequence[Bool[ArrayLike, ""]],
        output: int,
        like: jax.ShapeDtypeStruct,
        size: Int[ArrayLike, ""],
        rooms: Sequence[int],
    ) -> Iterator[tuple[int, Draw]]:
        """Yields the draws of the faults with these numbers for an output of a site, as far as `here` enables the
        faults in this iteration."""
        # Every site, iteration and device has its own key. Axes of size one are ignored, so that draws do not depend
        # on which of these axes are mapped.
        key = jax.random.fold_in(step_key, site)
        for index in iteration:
            key = jax.random.fold_in(key, index)
        for axis, devices in sorted(program.bound_axes().items()):
            if devices > 1:
                key = jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(axis.encode())), lax.axis_index(axis))
        key = key if output == 0 else jax.random.fold_in(key, output)
        layer = iteration[-1] if iteration else jnp.int32(0)
        for number, now, room in zip(numbers, here, rooms, strict=True):
            fault = self.faults[number]
            u = _draw(fault, step_key, number, layer)
            rate = self._rate(fault, factors[number], now, layer, u) * np.float32(fault.strikes(like))
            keys = jax.random.split(jax.random.fold_in(key, number))
            yield number, Draw(fault, keys, rate, like, size, room, layer, u)

    def __call__(
        self, place: program.Place, bind: Callable[..., program.Values], *inputs: Any
    ) -> tuple[program.Values, Events]:
        before = bind(*inputs)
        for x in before:
            if corruptible(x) and x.size >= LARGEST:
                raise ValueError(
                    f"site {place.site.name!r} has {x.size:,} elements on one device, but faults can strike "
                    f"only tensors of fewer than {LARGEST:,} elements; shard the tensor, or choose another site"
                )
        if early := self._early.get(place.site.name):
            row: Any = np.int32(0)
            for trips, index in zip(place.site.trips, place.iteration, strict=True):
                row = row * np.int32(trips) + index
            given = {}
            for key, (packed, number) in early.items():
                own = np.arange(number * packed.size, (number + 1) * packed.size, dtype=np.int32)
                given[key] = packed.words, own + row * np.int32(packed.size)
            plans = {key: packed for key, (packed, _) in early.items()}
            shared = tuple((key, id(packed)) for key, packed in plans.items())
            if shared not in self._planned:
                self._planned[shared] = program.traced_once(functools.partial(self._corrupt_planned, plans))
            after, events = self._planned[shared](before, given)
        else:
            numbers = self._numbers(place.site)
            chosen = [self.faults[number] for number in numbers]
            now = [fault.by_name or fault.selector.now(place.site, place.iteration) for fault in chosen]
            name = np.uint32(zlib.crc32(place.site.name.encode()))
            after, events = self._corrupted(before, self.key, self.factors, name, place.iteration, now, numbers)
        for old, new in zip(before, after, strict=True):
            # With check_vma=True, a fault on one device cannot strike a value that is typed as equal on all devices.
            if added := jax.typeof(new).manual_axis_type.varying - jax.typeof(old).manual_axis_type.varying:
                raise ValueError(
                    f"site {place.site.name!r} does not vary over {sorted(added)[0]!r} according to shard_map, but a "
                    "fault on one device makes it vary; give the step inputs that vary over that axis, or pass "
                    "check_vma=False"
                )
        return after, events

    def _corrupt_all(
        self,
        before: program.Values,
        step_key: PRNGKeyArray,
        factors: Sequence[Float32[Array, ""]],
        site: UInt32[ArrayLike, ""],
        iteration: tuple[Int[Array, ""], ...],
        here: Sequence[Bool[ArrayLike, ""]],
        numbers: tuple[int, ...],
    ) -> tuple[program.Values, Events]:
        """Draws the hits of the faults with these numbers at a site, and applies them."""
        struck: dict[int, list[tuple[Bool[Array, "*#size"], Any, Corrupt]]] = {}
        for output, x in enumerate(before):
            if strikable(x):
                rooms = [_room(self.faults[number], x.size) for number in numbers]
                like = jax.ShapeDtypeStruct(x.shape, x.dtype)
                draws = self._draws(numbers, step_key, factors, site, iteration, here, output, like, x.size, rooms)
                for _, draw in draws:
                    arrays = {name: getattr(draw, name) for name in ("keys", "rate", "layer", "u")}
                    corrupt = functools.partial(_corrupt_drawn, draw)
                    struck.setdefault(output, []).append((draw.found(), arrays, corrupt))
        return self._all_outputs(before, struck)

    def _corrupt_planned(
        self, packed: Mapping[tuple[int, int], _Packed], before: program.Values, given: Mapping[tuple[int, int], Any]
    ) -> tuple[program.Values, Events]:
        """Applies planned hits; `given` holds the words of all plans, and the indices of those of this evaluation."""
        struck: dict[int, list[tuple[Bool[Array, "*#size"], Any, Corrupt]]] = {}
        for (output, number), arrays in given.items():
            x, own = before[output], packed[output, number]
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            corrupt = functools.partial(_corrupt_packed, own, like, self.faults[number].kind)
            struck.setdefault(output, []).append((own.plan(*arrays).groups < like.size, arrays, corrupt))
        return self._all_outputs(before, struck)

    def _all_outputs(
        self, before: program.Values, struck: Mapping[int, Sequence[tuple[Any, Any, Corrupt]]]
    ) -> tuple[program.Values, Events]:
        after, events = [*before], []
        for output, x in enumerate(before):
            if corruptible(x):
                after[output], event = self._corrupt(struck.get(output, ()), output, x)
                events.append(event)
        return after, functools.reduce(self.merge, events)

    def merge(self, total: Events, new: Events) -> Events:
        hits = None
        if total.hits is not None and new.hits is not None:
            at = total.changed.astype(jnp.int32) + jnp.arange(self.record, dtype=jnp.int32)
            # Rows without a hit are zero, so addition merges the two lists.
            hits = jax.tree.map(lambda a, b: a.at[at].add(b, mode="drop"), total.hits, new.hits)
        return Events(total.drawn + new.drawn, total.changed + new.changed, hits)

    def _corrupt(
        self,
        struck: Sequence[tuple[Bool[Array, "*#size"], Any, Corrupt]],
        output: int,
        before: Shaped[Array, "*shape"],
    ) -> tuple[Shaped[Array, "*shape"], Events]:
        # Works on bits throughout: XLA widens narrow floats to move them, and so loses the payloads of NaNs.
        old = as_bits(before).reshape(before.shape or (1,))
        none, pairs = jnp.zeros(self.record, jnp.uint32), jnp.zeros((self.record, 2), jnp.uint32)
        nothing = program.varying(
            (jnp.uint32(0), jnp.uint32(0), Hits(none, none, pairs, pairs) if self.record else None)
        )
        if not struck:
            return before, Events(*nothing)

        def change(carried: Any, given: Sequence[Any]) -> Any:
            old, *_ = carried
            new, touched, masked, drawn = old, [], [], jnp.uint32(0)
            for (hit, arrays), (_, _, corrupt) in zip(given, struck, strict=True):
                new, found = corrupt(new, arrays, hit)
                if found is not None:
                    drawn += jnp.sum(found.at < old.size, dtype=jnp.uint32)
                    touched.append(found)
                else:
                    drawn += jnp.sum(jnp.broadcast_to(hit, (old.size,)), dtype=jnp.uint32)
                    masked.append(jnp.atleast_1d(hit))
            found = touched[0] if len(struck) == len(touched) == 1 else _struck(old, new, touched, masked)
            return new, *program.varying((drawn, *self._compare(output, found, old.size)))

        given = [(hit, arrays) for hit, arrays, _ in struck]
        any_hit = program.agreed(functools.reduce(jnp.logical_or, (jnp.any(hit) for hit, _ in given)))
        new, *events = program.rarely(any_hit, change, (old, *nothing), given)
        return from_bits(new.reshape(before.shape), before), Events(*events)

    def _rate(
        self,
        fault: Fault,
        factor: Float32[Array, ""],
        now: Bool[ArrayLike, ""],
        layer: Int[Array, ""],
        u: Float32[ArrayLike, ""],
    ) -> Float32[Array, ""]:
        """Returns the probability that a hit starts at an element, on this device in this iteration."""
        assert fault.rate is not None
        rate, here = by_layer(fault.rate, layer), now
        if fault.layer is not None:
            here &= layer == fault.layer
        axes = program.bound_axes()
        for axis, index in fault.at.items():
            if axis not in axes:
                raise ValueError(
                    f"a fault is on device {axis}={index}, but no axis {axis!r} is mapped here; "
                    f"mapped axes: {', '.join(sorted(axes)) or 'none'}"
                )
            if not 0 <= index < axes[axis]:
                raise ValueError(
                    f"a fault is on device {axis}={index}, but axis {axis!r} has size {axes[axis]}; give another index"
                )
            here &= lax.axis_index(axis) == index
        if fault.kind.draws:
            factor *= fault.kind.share(u)
        return jnp.where(here, jnp.minimum(rate * factor, 1.0), 0.0)

    def _compare(self, output: int, struck: Struck, size: int) -> tuple[UInt32[Array, ""], Hits | None]:
        """Counts the struck elements whose bits changed, and lists the first of these elements.

        Elements that were not struck are ignored: XLA may compute a value once for the step and once for this
        comparison, and the two results occasionally differ in the last bit.
        """
        at, old, new = struck
        differs = (at < size) & (old != new)
        changed = jnp.sum(differs, dtype=jnp.uint32)
        if not self.record:
            return changed, None
        (rows,) = jnp.nonzero(differs, size=self.record, fill_value=at.size)
        known = rows < at.size

        def pick(x: Shaped[Array, "n *rest"]) -> Shaped[Array, "k *rest"]:
            picked = x.at[rows].get(mode="clip")
            return jnp.where(known.reshape(-1, *[1] * (x.ndim - 1)), picked, 0).astype(jnp.uint32)

        outputs = jnp.where(known, jnp.uint32(output), 0).astype(jnp.uint32)
        return changed, Hits(outputs, pick(at), pick(_words(old)), pick(_words(new)))


def _struck(
    before: UInt[Array, "*shape"],
    after: UInt[Array, "*shape"],
    touched: list[Struck],
    masked: list[Bool[Array, "#size"]],
) -> Struck:
    """Returns the elements that at least one of several faults has struck, with their bits before and after all."""
    if masked:
        hit = jnp.zeros(before.size, jnp.bool_)
        for mask in masked:
            hit |= mask
        for each in touched:
            hit = hit.at[each.at].set(True, mode="drop")
        at = jnp.where(hit, jnp.arange(before.size, dtype=jnp.int32), before.size)
        return Struck(at, before.reshape(-1), after.reshape(-1))
    at = jnp.sort(jnp.concatenate([each.at for each in touched]))
    again = jnp.concatenate([jnp.zeros(1, jnp.bool_), at[1:] == at[:-1]])
    return Struck(jnp.where(again, before.size, at), take(before, at), take(after, at))


def _own_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns a threefry key, made of the words of a key of another kind.

    Under `vmap`, draws of JAX's hardware generators depend on the other rows.
    """
    if jax.random.key_impl(key) == "threefry2x32":
        return key
    own = jax.random.key(0, impl="threefry2x32")
    for word in jax.random.key_data(key):
        own = jax.random.fold_in(own, word)
    return own


def _draw(fault: Fault, key: PRNGKeyArray, number: int, layer: Int[Array, ""]) -> Float32[ArrayLike, ""]:
    """Draws a fault's random number for a step and layer, which is the same on all devices and in all microsteps."""
    if not fault.kind.draws:
        return np.float32(1)
    for index in (number, 2, layer):  # `When` uses 1
        key = jax.random.fold_in(key, index)
    return fault.kind.draw(key)


def _may_hit(fault: Fault, site: program.Site) -> bool:
    """Returns whether a fault can strike a site. Outside loops, the layer is 0; a `while` can have any trip count."""
    trips = site.trips[-1] if site.loops else 1
    here = not fault.layer or not trips or fault.layer < trips
    return here and any(map(fault.strikes, site.outputs)) and fault.selector(site)
