"""Fault injection: a step in which simulated hardware faults corrupt values, and the ground truth of these changes."""

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float32, Int, Int32, PRNGKeyArray, Shaped, UInt, UInt32

from sdc.bits import as_bits, from_bits
from sdc.settings import SettingError

from .. import program
from .fault import Fault, One, Whole, parse_fault
from .kinds import by_layer

# Elements are counted by 32-bit integers.
LARGEST = 2**31 - 1
# Above this rate, drawing a random number for every element is cheaper than scattering the hits.
DENSE = 1 / 16


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
    step: Callable[..., Any], faults: Sequence[Fault | str], *, record: int = 0
) -> Callable[..., tuple[Any, program.Reports]]:
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
    def injected(moment: Moment, /, *args: Any, **kwargs: Any) -> tuple[Any, program.Reports]:
        if not isinstance(moment, Moment):
            raise TypeError(f"the first argument is {type(moment).__name__}; expected an sdc.Moment(key, step)")
        if not isinstance(moment.key, jax.Array):
            raise TypeError(f"{moment}: expected a key, such as jax.random.key(0), and a step number")
        moment = Moment(moment.key, jnp.asarray(moment.step))
        if moment.step.shape or not jnp.issubdtype(moment.step.dtype, jnp.integer):
            raise TypeError(f"{moment}: expected a whole number for the step")
        with jax.named_scope(program.Tags.HIDDEN):
            rule = _Inject(known, moment, record)
        out, events = program.rewrite(step, program.Selector("faults", rule.chosen), rule)(*args, **kwargs)
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
    if numbers := [site for site in chosen if any(map(corruptible, site.outputs))]:
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


class Draw(NamedTuple):
    """A fault at one site, with the random draw of the elements that it strikes."""

    fault: Fault
    keys: PRNGKeyArray  # two keys: one for the places, one for the changes
    rate: Float32[Array, ""]  # probability that a hit starts at an element
    like: jax.ShapeDtypeStruct  # shape and dtype of the array
    layer: Int[Array, ""]
    u: Float32[ArrayLike, ""]  # the kind's draw for the step and layer

    @property
    def sparse(self) -> bool:
        """Whether hits are so rare that drawing their places costs less than drawing a number for every element."""
        return not isinstance(self.fault.pattern, Whole) and self.fault.largest_rate() <= DENSE

    def found(self) -> Bool[Array, "*#size"]:
        """Returns whether the fault strikes the array or, for a dense fault, which elements it strikes, since this
        costs no more."""
        if isinstance(self.fault.pattern, Whole):  # a hit anywhere strikes all elements: 1 - (1 - rate)^size
            any_start = -jnp.expm1(self.like.size * jnp.log1p(-jnp.minimum(self.rate, 1 - 2.0**-24)))
            return (jax.random.uniform(self.keys[0]) < any_start) & (self.rate > 0)
        if self.sparse:  # there is a hit if the first distance lies inside the array
            return self._gaps()[0] <= self.like.size
        if self.fault.pattern != One():
            raise ValueError(
                f"rate={self.fault.rate} with a pattern of several elements would corrupt most of the tensor; "
                f"give a rate of at most {DENSE:g}, including bursts, or the pattern Whole()"
            )
        return jax.random.uniform(self.keys[0], (self.like.size,)) < self.rate

    def where(self, bits: UInt[Array, "*shape"], hit: Bool[Array, "*#size"]) -> UInt[Array, "*shape"]:
        """Returns the bits after the fault has changed the elements for which `hit` is true."""
        mask = hit.reshape(bits.shape) if hit.ndim else hit
        return jnp.where(mask, self._after(bits.reshape(-1)).reshape(bits.shape), bits)

    def at(self, bits: UInt[Array, "*shape"]) -> tuple[UInt[Array, "*shape"], Int32[Array, "_"]]:
        """Returns the bits after the fault, and the index of each struck element, listed once; unused indices are out
        of range.

        If patterns overlap, the first pattern determines the value of an element; in hardware, the order of two writes
        to one place would be arbitrary as well.
        """
        # Saturating sums cannot wrap, and are associative.
        most = jnp.uint32(self.like.size + 1)
        starts = (lax.associative_scan(lambda a, b: jnp.minimum(a + b, most), self._gaps()) - 1).astype(jnp.int32)
        groups = self.fault.pattern.positions(starts, self.like.shape)
        # Elements cut off at an edge come last.
        groups = jnp.sort(groups, axis=-1) if groups.shape[-1] > 1 else groups
        count = jnp.sum(groups < bits.size, axis=-1, dtype=jnp.int32)
        values = self._after(take(bits, groups), count)
        at, values = groups.reshape(-1), values.reshape(-1)
        if groups.shape[-1] > 1:
            order = jnp.argsort(at)
            at, values = at[order], values[order]
            again = jnp.concatenate([jnp.zeros(1, jnp.bool_), at[1:] == at[:-1]])
            at = jnp.where(again, bits.size, at).astype(at.dtype)
        return bits.at[_indices(at, bits.shape)].set(values, mode="drop"), at

    def _gaps(self) -> UInt32[Array, "hits"]:
        """Draws the distances from the start of one hit to the start of the next; the first is measured from index -1.

        The distances have a geometric distribution: 1 + floor(log(1 - u) / log(1 - rate)). The array has room for the
        number of hits expected at the largest rate, plus eight standard deviations, plus twelve; further hits would be
        lost.
        """
        size = self.like.size
        expected = size * self.fault.largest_rate()
        room = min(size, int(expected + 8 * np.sqrt(expected)) + 12)
        # Drawn from 32 random bits rather than 23, so that small distances keep their probability at very low rates.
        u = (jax.random.bits(self.keys[0], (room,)).astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
        gap = jnp.floor(jnp.log1p(-u) / jnp.log1p(-jnp.maximum(self.rate, 1e-30)))
        return jnp.where(self.rate > 0, jnp.minimum(gap, size), size).astype(jnp.uint32) + 1

    def _after(
        self, bits: UInt[Array, "*groups n"], count: Int[Array, "*#groups"] | None = None
    ) -> UInt[Array, "*groups n"]:
        """Returns the bits of the struck elements after the fault."""
        numbers = lax.bitcast_convert_type(bits, self.like.dtype)
        what = self.fault.what.on(self.u, self.layer)
        return as_bits(what(self.keys[1], numbers, self.layer, count))


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
        key = jax.random.fold_in(moment.key, moment.step)
        # A spike affects a whole device at once, not single sites: faults with equal `at` and `when` share spikes.
        alike = [(fault.when, fault.at) for fault in faults]
        factors = [
            fault.when.factor(jax.random.fold_in(key, alike.index((fault.when, fault.at))), moment.step)
            for fault in faults
        ]
        self.key, self.factors = program.closable((key, factors))
        self._corrupted = program.traced_once(self._corrupt_all, static_argnums=6)
        self.placed: set[int] = set()  # numbers of the faults that can strike a site of the step

    def chosen(self, site: program.Site) -> bool:
        if not any(map(corruptible, site.outputs)):
            return False
        placed = {number for number, fault in enumerate(self.faults) if _may_hit(fault, site)}
        self.placed |= placed
        return bool(placed)

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
        numbers = tuple(number for number, fault in enumerate(self.faults) if _may_hit(fault, place.site))
        chosen = [self.faults[number] for number in numbers]
        now = [fault.by_name or fault.selector.now(place.site, place.iteration) for fault in chosen]
        site = np.uint32(zlib.crc32(place.site.name.encode()))
        after, events = self._corrupted(before, self.key, self.factors, site, place.iteration, now, numbers)
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
        """Applies the faults with these numbers to the outputs of a site, as far as `here` enables them in this
        iteration."""
        after, events = [], []
        # Every site, iteration and device has its own key. Axes of size one are ignored, so that draws do not depend
        # on which of these axes are mapped.
        key = jax.random.fold_in(step_key, site)
        for index in iteration:
            key = jax.random.fold_in(key, index)
        for axis, size in sorted(program.bound_axes().items()):
            if size > 1:
                key = jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(axis.encode())), lax.axis_index(axis))
        layer = iteration[-1] if iteration else jnp.int32(0)
        drawn = {number: _draw(self.faults[number], step_key, number, layer) for number in numbers}
        rates = {
            number: self._rate(self.faults[number], factors[number], now, layer, drawn[number])
            for number, now in zip(numbers, here, strict=True)
        }
        for output, x in enumerate(before):
            if corruptible(x):
                own = key if output == 0 else jax.random.fold_in(key, output)
                x, event = self._corrupt(rates, drawn, own, output, layer, x)
                events.append(event)
            after.append(x)
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
        rates: Mapping[int, Float32[Array, ""]],
        drawn_here: Mapping[int, Float32[ArrayLike, ""]],
        key: PRNGKeyArray,
        output: int,
        layer: Int[Array, ""],
        before: Shaped[Array, "*shape"],
    ) -> tuple[Shaped[Array, "*shape"], Events]:
        # Works on bits throughout: XLA widens narrow floats to move them, and so loses the payloads of NaNs.
        old = as_bits(before).reshape(before.shape or (1,))
        none, pairs = jnp.zeros(self.record, jnp.uint32), jnp.zeros((self.record, 2), jnp.uint32)
        nothing = program.varying(
            (jnp.uint32(0), jnp.uint32(0), Hits(none, none, pairs, pairs) if self.record else None)
        )
        if not old.size:
            return before, Events(*nothing)
        like = jax.ShapeDtypeStruct(before.shape, before.dtype)
        draws, found = [], []
        for number, rate in rates.items():
            keys = jax.random.split(jax.random.fold_in(key, number))
            draws.append(Draw(self.faults[number], keys, rate, like, layer, drawn_here[number]))
            found.append(draws[-1].found())
        any_hit = functools.reduce(jnp.logical_or, map(jnp.any, found))

        def change(carried: Any, draws: Sequence[Any], found: Sequence[Any]) -> Any:
            old, *_ = carried
            new, touched, masked, drawn = old, [], [], jnp.uint32(0)
            for number, (keys, rate, layer, u), hit in zip(rates, draws, found, strict=True):
                draw = Draw(self.faults[number], keys, rate, like, layer, u)
                if draw.sparse:
                    new, at = draw.at(new)
                    drawn += jnp.sum(at < old.size, dtype=jnp.uint32)
                    touched.append(at)
                else:
                    new = draw.where(new, hit)
                    drawn += jnp.sum(jnp.broadcast_to(hit, (old.size,)), dtype=jnp.uint32)
                    masked.append(jnp.atleast_1d(hit))
            return new, *program.varying((drawn, *self._compare(output, old, new, touched, masked)))

        arrays = [(draw.keys, draw.rate, draw.layer, draw.u) for draw in draws]
        new, *events = program.rarely(program.agreed(any_hit), change, (old, *nothing), arrays, found)
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
        if fault.what.draws:
            factor *= fault.what.share(u)
        return jnp.where(here, jnp.minimum(rate * factor, 1.0), 0.0)

    def _compare(
        self,
        output: int,
        before: UInt[Array, "*shape"],
        after: UInt[Array, "*shape"],
        touched: list[Int32[Array, "_"]],
        masked: list[Bool[Array, "#size"]],
    ) -> tuple[UInt32[Array, ""], Hits | None]:
        """Counts the struck elements whose bits changed (each element once), and lists the first of these elements.

        Elements that were not struck are ignored: XLA may compute a value once for the step and once for this
        comparison, and the two results occasionally differ in the last bit.
        """
        if masked or not touched:
            at, old, new = jnp.arange(before.size, dtype=jnp.int32), before.reshape(-1), after.reshape(-1)
            hit = jnp.zeros(before.size, jnp.bool_)
            for mask in masked:
                hit |= mask
            for places in touched:
                hit = hit.at[places].set(True, mode="drop")
        else:
            at = jnp.sort(jnp.concatenate(touched))
            hit = jnp.concatenate([jnp.ones(1, jnp.bool_), at[1:] != at[:-1]]) & (at < before.size)
            old, new = (take(x, at) for x in (before, after))
        differs = hit & (old != new)
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


def _draw(fault: Fault, key: PRNGKeyArray, number: int, layer: Int[Array, ""]) -> Float32[ArrayLike, ""]:
    """Draws a fault's random number for a step and layer, which is the same on all devices and in all microsteps."""
    if not fault.what.draws:
        return np.float32(1)
    for index in (number, 2, layer):  # `When` uses 1
        key = jax.random.fold_in(key, index)
    return fault.what.draw(key)


def _may_hit(fault: Fault, site: program.Site) -> bool:
    """Returns whether a fault can strike a site. Outside loops, the layer is 0; a `while` can have any trip count."""
    trips = site.trips[-1] if site.loops else 1
    return fault.selector(site) and (not fault.layer or not trips or fault.layer < trips)
