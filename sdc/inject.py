"""Fault injection: a step in which simulated hardware corrupts values, and the ground truth of what it did."""

import zlib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32, PRNGKeyArray, Shaped, UInt32

from .bits import as_bits
from .compare import mismatch
from .faults import Fault, by_layer
from .rewrite import Place, Reports, Values, bound_axes, rewrite
from .sites import Site, probes

# From this share of hit elements on, drawing for every element is cheaper than scattering the hits.
DENSE = 1 / 16


class Moment(NamedTuple):
    """When an injected step runs, and the randomness of its faults.

    Attributes:
        key: PRNG key of the run. The same key, step, site, iteration and device draw the same faults, however the mesh
            is mapped.
        step: number of the step.
    """

    key: PRNGKeyArray
    step: Int[Array, ""]


class Events(NamedTuple):
    """What faults did at one site: the ground truth.

    Attributes:
        drawn: hits, one element counted once per fault.
        changed: elements whose bits are not what they were; what an exact comparison finds.
    """

    drawn: UInt32[Array, ""]
    changed: UInt32[Array, ""]


def inject(step: Callable[..., Any], faults: Sequence[Fault]) -> Callable[..., tuple[Any, Reports]]:
    """Transforms a step: its probes are corrupted as the faults say. A simulation; real hardware needs none.

    At low rates the cost follows the number of faults, not the size of the tensors: the distances between hits are
    drawn from their geometric distribution, so that every element is hit independently with exactly its rate.

    Args:
        step: any function that JAX can trace, with probes.
        faults: applied in order where several meet.

    Returns:
        A function of `(moment, *args)`, `moment` a `Moment`, that returns `(out, events)`: `Events` for each site that
        a fault can hit.

    Raises:
        ValueError: a fault names a site, layer or mesh axis that the step does not have.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> fault = sdc.Fault(sdc.faults.Scale(2.0), rate=1.0, site="fwd/p")
        >>> step = sdc.inject(lambda x: sdc.probe(x, "p"), [fault])
        >>> out, events = step(sdc.Moment(jax.random.key(0), jnp.int32(0)), jnp.ones(3))
        >>> out.tolist(), int(events["fwd/p"].changed)
        ([2.0, 2.0, 2.0], 3)
    """

    def injected(moment: Moment, *args: Any, **kwargs: Any) -> tuple[Any, Reports]:
        rule = _Inject(tuple(faults), moment)
        out, events = rewrite(step, rule.where, rule)(*args, **kwargs)
        rule.check_all_faults_have_a_site()
        return out, events

    return injected


class _Inject:
    def __init__(self, faults: tuple[Fault, ...], moment: Moment) -> None:
        self.faults, self.moment = faults, moment
        self._seen: set[str] = set()
        self._hit: set[int] = set()

    def where(self, site: Site) -> bool:
        if not probes(site):
            return False
        self._seen.add(site.name)
        hit = {index for index, fault in enumerate(self.faults) if fnmatchcase(site.name, fault.site)}
        self._hit |= hit
        return bool(hit)

    def check_all_faults_have_a_site(self) -> None:
        for index, fault in enumerate(self.faults):
            if index not in self._hit:
                raise ValueError(
                    f"site {fault.site!r} matches no probe of the step; it has {', '.join(sorted(self._seen))}"
                )

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Events]:
        # The corrupted value goes through the probe, so that a transformation around this one sees it there.
        corrupted, events = self._corrupt(place, inputs[0])
        return bind(corrupted), events

    def merge(self, total: Events, new: Events) -> Events:
        return Events(total.drawn + new.drawn, total.changed + new.changed)

    def _corrupt(self, place: Place, x: Shaped[Array, "*shape"]) -> tuple[Shaped[Array, "*shape"], Events]:
        if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
            raise ValueError(f"site {place.site.name!r} holds {x.dtype}; faults hit real numbers, name another site")
        key = _key(self.moment, place)
        layer = place.iteration[-1] if place.iteration else jnp.int32(0)
        before, flat = x, x.reshape(-1)
        drawn = jnp.uint32(0)
        touched: list[Int32[Array, hits]] = []
        dense = False
        for number, fault in enumerate(self.faults):
            if not fnmatchcase(place.site.name, fault.site) or not flat.size:
                continue
            element_key, value_key = jax.random.split(jax.random.fold_in(key, number))
            rate = self._rate(number, fault, layer)
            if fault.largest_rate() > DENSE:
                dense = True
                hit = jax.random.uniform(element_key, flat.shape) < rate
                flat = jnp.where(hit, fault.what(value_key, flat, layer), flat)
                drawn += jnp.sum(hit, dtype=jnp.uint32)
            else:
                at = _bernoulli_positions(element_key, rate, flat.size, fault.largest_rate())
                values = fault.what(value_key, flat.at[at].get(mode="clip"), layer)
                flat = flat.at[at].set(values, mode="drop")
                drawn += jnp.sum(at < flat.size, dtype=jnp.uint32)
                touched.append(at)
        after = flat.reshape(x.shape)
        _check_varies(place, before, after)
        changed = jnp.sum(mismatch(before, after), dtype=jnp.uint32) if dense else _changed(before, after, touched)
        return after, Events(drawn, changed)

    def _rate(self, number: int, fault: Fault, layer: Int[Array, ""]) -> Float32[Array, ""]:
        """Probability that an element is hit, here and now."""
        rate = by_layer(fault.rate, layer)
        here = jnp.bool_(True)
        if fault.layer is not None:
            here &= layer == fault.layer
        axes = bound_axes()
        for axis, index in fault.at.items():
            if axis not in axes:
                raise ValueError(
                    f"a fault sits at {axis}={index}, but no axis {axis!r} is mapped here; "
                    f"mapped axes: {', '.join(sorted(axes)) or 'none'}"
                )
            if not 0 <= index < axes[axis]:
                raise ValueError(f"a fault sits at {axis}={index}, but axis {axis!r} has size {axes[axis]}")
            here &= lax.axis_index(axis) == index
        # Spikes come upon the whole device at once, not upon single sites.
        spikes = jax.random.fold_in(jax.random.fold_in(self.moment.key, self.moment.step), number)
        return jnp.where(here, jnp.minimum(rate * fault.when.factor(spikes, self.moment.step), 1.0), 0.0)


def _check_varies(place: Place, before: Shaped[Array, "*shape"], after: Shaped[Array, "*shape"]) -> None:
    """Under `shard_map(check_vma=True)` a fault of one device cannot hit a value that is typed as equal on all."""
    added = jax.typeof(after).manual_axis_type.varying - jax.typeof(before).manual_axis_type.varying
    if added:
        raise ValueError(
            f"site {place.site.name!r} does not vary over {sorted(added)[0]!r} in the eyes of shard_map, but a fault "
            "would make it; give the step inputs that vary over that axis, or pass check_vma=False"
        )


def _key(moment: Moment, place: Place) -> PRNGKeyArray:
    """A key of its own for every step, site, iteration and device.

    Axes of size one count for nothing, so that draws do not depend on which of them are mapped.
    """
    key = jax.random.fold_in(moment.key, moment.step)
    key = jax.random.fold_in(key, zlib.crc32(place.site.name.encode()))
    for index in place.iteration:
        key = jax.random.fold_in(key, index)
    for axis, size in sorted(bound_axes().items()):
        if size > 1:
            key = jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(axis.encode())), lax.axis_index(axis))
    return key


def _bernoulli_positions(
    key: PRNGKeyArray, rate: Float32[Array, ""], size: int, largest_rate: float
) -> Int32[Array, "hits"]:
    """Sorted positions of the hits among `size` elements, each hit with probability `rate`, filled up with `size`.

    Distances between hits are geometric: 1 + floor(log(1 - u) / log(1 - rate)). There is room for eight standard
    deviations more hits than expected at the largest rate, and for a dozen more; beyond that hits would be lost.
    """
    expected = size * largest_rate
    room = min(size, int(expected + 8 * np.sqrt(expected)) + 12)
    # From 32 random bits rather than 23, so that small distances keep their probability at very low rates.
    u = (jax.random.bits(key, (room,)).astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
    gap = jnp.floor(jnp.log1p(-u) / jnp.log1p(-jnp.maximum(rate, 1e-30)))
    gap = jnp.where(rate > 0, jnp.minimum(gap, size), size).astype(jnp.uint32) + 1
    # Saturating sums cannot wrap, and are associative.
    after = lax.associative_scan(lambda a, b: jnp.minimum(a + b, jnp.uint32(size + 1)), gap)
    return (after - 1).astype(jnp.int32)


def _changed(
    before: Shaped[Array, "*shape"], after: Shaped[Array, "*shape"], touched: list[Int32[Array, "hits"]]
) -> UInt32[Array, ""]:
    """Elements among those touched, each counted once, whose bits changed."""
    if not touched:
        return jnp.uint32(0)
    at = jnp.sort(jnp.concatenate(touched))
    first: Bool[Array, hits] = jnp.concatenate([jnp.ones(1, jnp.bool_), at[1:] != at[:-1]]) & (at < before.size)
    old, new = (as_bits(x).reshape(-1).at[at].get(mode="clip") for x in (before, after))
    return jnp.sum(first & (old != new), dtype=jnp.uint32)
