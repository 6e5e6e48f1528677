"""A strike: one fault as data, so that one compiled program serves every fault.

`inject` compiles given faults, with their rates, into a step. In a strike, by contrast, the site, the iteration, the
device, the elements and the change of these elements are arrays, so a campaign of thousands of faults compiles only
once. Each site that can be struck is followed by a conditional, which costs nothing if its branch is not taken.
"""

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int32, PRNGKeyArray, Shaped, UInt32

from sdc.bits import as_bits, select
from sdc.settings import SettingError

from .. import program
from ._inject import NUMBERS, Events, Hits, corruptible, strikable, words
from .fault import Fault, One, as_fault
from .kinds import Change, FaultKind, apply, neutral

LOOPS = 4  # number of loops that can enclose a struck site
P = ParamSpec("P")  # of a step
Out = TypeVar("Out")


@program.aside
class Strike(NamedTuple):
    """One fault as data; create it with `strike_on` or `no_strike`.

    Attributes:
        site: number of the site (see `site_number`); 0 for a strike that corrupts nothing.
        output: index of the output that is struck.
        iteration: index in each enclosing loop, outermost first; -1 for all iterations, and for unused entries.
        device: index along each mesh axis; -1 for all devices along that axis.
        elements: flat indices of the elements struck together; -1 for unused entries.
        change: how these elements change.
    """

    site: UInt32[ArrayLike, ""]
    output: Int32[ArrayLike, ""]
    iteration: Int32[ArrayLike, "loops"]
    device: dict[str, Int32[ArrayLike, ""]]
    elements: Int32[ArrayLike, "room"]
    change: Change


def site_number(name: str) -> int:
    """Returns the number of a site: the CRC-32 of its name, or 1 if the CRC-32 is 0."""
    return zlib.crc32(name.encode()) or 1


def no_strike(*, room: int = 1, axes: Sequence[str] = ()) -> Strike:
    """Returns a strike that corrupts nothing, for a clean run of the same program.

    Args:
        room: number of elements that one strike of this program can corrupt.
        axes: mesh axes along which strikes of this program select a device.
    """
    everywhere: dict[str, ArrayLike] = {axis: np.int32(-1) for axis in sorted(set(axes))}
    return Strike(
        np.uint32(0), np.int32(0), np.full(LOOPS, -1, np.int32), everywhere, np.full(room, -1, np.int32), neutral()
    )


def strike_on(
    site: program.Site,
    fault: Fault | FaultKind | str,
    elements: int | Sequence[int],
    *,
    iteration: int | Sequence[int] = (),
    device: Mapping[str, int] | None = None,
    output: int = 0,
    key: PRNGKeyArray | None = None,
    room: int | None = None,
    axes: Sequence[str] = (),
) -> Strike:
    """Returns a strike of one fault on one site.

    Args:
        site: a site of the step, as `sdc.sites` lists it.
        fault: a fault, its kind, or its text (see `as_fault`). The pattern of the fault determines which elements are
            struck together with the given one; the fault's `layer` and `at` apply unless `iteration` and `device` are
            given. A strike occurs once, in the step that receives it, so `rate` and `when` are ignored.
        elements: row-major flat index into the output; several indices are allowed only if the fault has no pattern.
        iteration: index in each enclosing loop, outermost first, or a single index if there is only one loop; all
            iterations by default.
        device: index along each mesh axis; all devices along axes that are not given.
        output: index of the output to strike.
        key: key for random draws, such as the bit that flips; derived from the elements by default.
        room: see `no_strike`; by default, the number of elements. Strikes with equal room and axes share a compiled
            program.
        axes: further mesh axes (see `no_strike`).

    Raises:
        SettingError: `site` is not a `Site` but, for example, its name.
        ValueError: the fault selects another site, the site has no such output, element or loop, or the fault cannot
            change the site's numbers.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> from sdc.faults import BitFlip
        >>> from sdc.program import primitive
        >>> step, where = lambda x: jnp.sin(x) + 1.0, primitive("sin")
        >>> [sine] = sdc.sites(step, jnp.zeros(3), where=where)
        >>> run = jax.jit(sdc.strike(step, where))
        >>> out, events = run(sdc.strike_on(sine, BitFlip(bits=(30,)), 1), jnp.zeros(3))
        >>> out.tolist(), int(events["fwd/sin"].changed)
        ([1.0, 3.0, 1.0], 1)
    """
    fault = as_fault(fault)
    if fault.band or fault.dtype:
        raise ValueError(f"fault {fault}: a strike changes given elements; leave band and dtype to inject")
    iteration = (iteration,) if isinstance(iteration, int) else iteration
    if not isinstance(site, program.Site):
        raise SettingError("site", site, "expected a site, as listed by sdc.sites(step, ...)")
    if fault.site != "*" and not fault.selector(site):
        raise ValueError(f"fault {fault} does not select {site.name}; choose a site that it selects")
    device = fault.at if device is None else device
    if device is not None and not isinstance(device, Mapping):
        raise SettingError("device", device, "expected an index for each mesh axis, as in {'data': 1}")
    indices = np.atleast_1d(np.asarray(elements))
    if not np.issubdtype(indices.dtype, np.integer) or len(set(indices.tolist())) < indices.size:
        raise ValueError(f"elements {indices.tolist()} of {site.name}: expected distinct integers")
    if not 0 <= output < len(site.outputs):
        raise ValueError(f"output={output} of {site.name}: expected a number from 0 to {len(site.outputs) - 1}")
    struck = site.outputs[output]
    if not corruptible(struck):
        raise ValueError(f"output {output} of {site.name} holds {struck.dtype}; choose an output of real numbers")
    size = int(np.prod(struck.shape))
    if not indices.size or indices.min() < 0 or indices.max() >= size:
        raise ValueError(f"elements {indices.tolist()} of {site.name}: expected indices from 0 to {size - 1}")
    if fault.pattern != One():
        if indices.size > 1:
            raise ValueError(
                f"elements {indices.tolist()} of {site.name}: the pattern of {fault} starts at one element; "
                "give only its index"
            )
        start: Any = indices.astype(np.int32)  # with NumPy indices, positions are NumPy arrays as well
        covered = np.asarray(fault.pattern.positions(start, struck.shape))[0]
        indices = covered[covered < size]
    layer = fault.layer if fault.layer is not None and site.loops and not iteration else None
    if layer is not None:
        iteration = (*[0] * (site.loops - 1), layer)
    if len(iteration) not in (0, site.loops) or len(iteration) > LOOPS:
        raise ValueError(
            f"iteration {tuple(iteration)} of {site.name}: the number of enclosing loops is {site.loops}; "
            "give one index for each loop, outermost first, or omit iteration to strike all iterations"
        )
    for index, trips in zip(iteration, site.trips, strict=False):
        if index < 0 or (trips and index >= trips):
            raise ValueError(
                f"iteration {tuple(iteration)} of {site.name}: the loops have {site.trips} iterations (0 if unknown); "
                "each index must be at least 0 and less than the number of iterations of its loop"
            )
    for axis, index in (device or {}).items():
        if index < 0 or index >= dict(site.mesh).get(axis, math.inf):
            raise ValueError(
                f"device {axis}={index} of {site.name} is not on its mesh {dict(site.mesh)}; choose another index"
            )
    room = indices.size if room is None else room
    if room < indices.size:
        raise ValueError(f"{indices.size} elements do not fit into room={room}; increase room")
    key = jax.random.fold_in(jax.random.key(0), int(indices[0])) if key is None else key
    innermost = jnp.int32(iteration[-1] if iteration else 0)
    if layer is not None:
        iteration = (*[-1] * (site.loops - 1), layer)  # in every iteration of the outer loops
    base = no_strike(room=room, axes=[*axes, *(device or {})])
    return base._replace(
        site=np.uint32(site_number(site.name)),
        output=np.int32(output),
        iteration=np.asarray([*iteration, *[-1] * (LOOPS - len(iteration))], np.int32),
        device=base.device | {axis: np.int32(index) for axis, index in (device or {}).items()},
        elements=np.concatenate([indices, np.full(room - indices.size, -1)]).astype(np.int32),
        change=jax.tree.map(np.asarray, fault.what.change(key, (), struck.dtype, innermost)),
    )


def strike(
    step: Callable[P, Out], where: program.Where
) -> Callable[Concatenate[Strike, P], tuple[Out, program.Reports[Events]]]:
    """Transforms a step so that an additional argument, the strike, selects the site to corrupt, if any.

    Args:
        step: any function that JAX can trace.
        where: selects the sites that can be struck; sites without real numbers are ignored.

    Returns:
        A function of `(strike, *args)`, where `strike` is a `Strike`. The function returns `(out, events)`; `events`
        holds the changed bits of each site as `Events`.

    Raises:
        ValueError: nothing is selected, an axis of the strike is not mapped, or two sites have the same number.

    Example: see `strike_on`.
    """

    @program.taking(step, "strike")
    def struck(strike: Strike, /, *args: Any, **kwargs: Any) -> tuple[Any, program.Reports[Events]]:
        if not isinstance(strike, Strike):
            raise TypeError(
                f"the first argument is {type(strike).__name__}; expected a Strike, as sdc.strike_on returns it"
            )
        rule = _Strike(strike)
        out, events = program.rewrite(step, program.as_selector(where) & NUMBERS, rule, required=True)(*args, **kwargs)
        if unknown := sorted(set(strike.device) - rule.mapped):
            raise ValueError(
                f"the strike selects a device along {unknown[0]!r}, but this axis is not mapped at any selected site; "
                f"mapped axes: {', '.join(sorted(rule.mapped)) or 'none'}"
            )
        return out, events

    return struck


class _Strike:
    def __init__(self, strike: Strike) -> None:
        self.strike = program.closable(strike)
        self.mapped: set[str] = set()  # mesh axes that enclose some site
        self._names: dict[int, str] = {}
        self._struck = program.traced_once(self._strike_here)

    def __call__(
        self, place: program.Place, bind: Callable[..., program.Values], *inputs: Any
    ) -> tuple[program.Values, Events]:
        number = site_number(place.site.name)
        if self._names.setdefault(number, place.site.name) != place.site.name:
            raise ValueError(
                f"sites {place.site.name!r} and {self._names[number]!r} have the same number; "
                "rename a scope of one of them"
            )
        self.mapped |= set(program.bound_axes())
        return self._struck(bind(*inputs), self.strike, np.uint32(number), place.iteration)

    def _strike_here(
        self, outs: program.Values, strike: Strike, number: UInt32[Array, ""], iteration: tuple[Int32[Array, ""], ...]
    ) -> tuple[program.Values, Events]:
        outs, axes = [*outs], program.bound_axes()
        here = jnp.asarray(strike.site) == number
        for wanted, index in zip(jnp.asarray(strike.iteration), iteration, strict=False):
            here &= (wanted < 0) | (wanted == index)
        for axis, device in strike.device.items():
            chosen = jnp.asarray(device)
            here &= (chosen < 0) | ((lax.axis_index(axis) == chosen) if axis in axes else False)
        (room,) = jnp.shape(strike.elements)
        none, pairs = jnp.zeros(room, jnp.uint32), jnp.zeros((room, 2), jnp.uint32)
        nothing = program.varying(Events(jnp.uint32(0), jnp.uint32(0), Hits(none, none, pairs, pairs)))
        total = nothing
        for output, x in enumerate(outs):
            if strikable(x):
                hit = here & (strike.output == output)
                run = functools.partial(_hit, output)
                outs[output], events = program.rarely(program.agreed(hit), run, (x, nothing), strike, hit)
                total = self.merge(total, events)
        return outs, total

    def merge(self, total: Events, new: Events) -> Events:
        """Sums the counts; if several iterations of a loop are struck, `hits` lists the hits of the first one."""
        first = total.changed == 0
        hits = jax.tree.map(lambda a, b: jnp.where(first, b, a), total.hits, new.hits)
        return Events(total.drawn + new.drawn, total.changed + new.changed, hits)


def _hit(
    output: int, state: tuple[Shaped[Array, "*shape"], Events], strike: Strike, here: Bool[Array, ""]
) -> tuple[Shaped[Array, "*shape"], Events]:
    x, _ = state
    flat = x.reshape(-1)
    elements = jnp.asarray(strike.elements)
    known = (elements >= 0) & (elements < flat.size) & here
    at = jnp.where(known, elements, flat.size)
    old = flat.at[at].get(mode="clip")
    count = jnp.sum(known, dtype=jnp.uint32)
    new = apply(old, strike.change, count=count)
    new = select(known, new, old)
    differs = known & (as_bits(new) != as_bits(old))

    def shown(values: Any) -> UInt32[Array, "room *rest"]:
        return jnp.where(differs.reshape(-1, *[1] * (values.ndim - 1)), values, 0).astype(jnp.uint32)

    hits = Hits(shown(jnp.full(at.shape, output)), shown(at), shown(words(old)), shown(words(new)))
    events = Events(count, jnp.sum(differs, dtype=jnp.uint32), hits)
    return flat.at[at].set(new, mode="drop").reshape(x.shape), program.varying(events)
