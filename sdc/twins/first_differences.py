"""The first difference between the fingerprints of two runs of one program, and bisection.

Digests are compared in the order in which the program computes the values: equations in program order, and iterations
of a loop in sequence (from the last to the first for a backward loop). Program order respects dependencies, so no
digested value before the first difference is wrong. If every operation is selected, the first difference is therefore
the operation that computed a different result from the same inputs.

Bisection identifies the first operation that differs, but need not digest every operation. Each round digests the few
values that leave the scopes at a given depth. An error inside a scope becomes visible outside the scope only through
these values, so the first value that differs identifies the faulty scope; the next round digests values inside that
scope. Each round is a different program, which both sides must run, so a fault that does not recur cannot be narrowed
down.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from jaxtyping import Bool

from sdc.results import Result, ResultTable
from sdc.verdict import Judgement, Verdict

from ..program import Reports, Selector, Site, boundary, inside
from ..schema import DifferencePlace, OperationPlace

Iteration: TypeAlias = tuple[int, ...]
FEW = 24  # the largest number of operations that are all digested in one round


@dataclasses.dataclass(frozen=True, repr=False)
class FirstDifference(Result):
    """The first difference between two fingerprints.

    Attributes:
        site: the operation, with its source line.
        iteration: index in each enclosing `scan`, outermost first; the last index is the layer of a scanned model.
        devices: mesh coordinates of every device on which the operation differs; one empty mapping without a mesh.
        outputs: indices of the operation's outputs that differ.
        agreeing: number of digests before the difference, all of which agree.
        before: the last values that were compared before the difference, in order.
        simulated: whether faults were simulated in one of the runs.
    """

    site: Site
    iteration: Iteration
    devices: tuple[dict[str, int], ...]
    outputs: tuple[int, ...]
    agreeing: int
    before: tuple[tuple[Site, Iteration], ...] = ()
    simulated: bool = False

    def describe(self, step: int) -> DifferencePlace:
        """Returns the place of the difference in the form that records use; `step` is the first step in which the
        traces differ."""
        place = msgspec.structs.asdict(describe_place(self.site, self.iteration))
        return DifferencePlace(**place, step=step, devices=list(self.devices), outputs=list(self.outputs))

    def verdict(self) -> Judgement:
        """Returns the verdict on the two runs, of which either may be wrong."""
        said = f"the runs differ first at {self}; {self.agreeing:,} digests before it agree"
        found = Judgement(Verdict.CORRUPT, said)
        return found.marked() if self.simulated else found

    def table(self) -> ResultTable:
        """Returns the values that were compared last before the difference, and the first that differs."""
        places = [
            *((site, iteration, "equal") for site, iteration in self.before),
            (self.site, self.iteration, "differs"),
        ]
        rows = tuple((site.name, ", ".join(map(str, at)), how, site.source) for site, at, how in places)
        return ResultTable(("site", "iteration", "digests", "line"), rows)

    def __repr__(self) -> str:
        return f"FirstDifference({self})"

    def __str__(self) -> str:
        devices = "; ".join(" ".join(f"{axis}={index}" for axis, index in device.items()) for device in self.devices)
        parts = [self.site.name]
        if self.iteration:
            parts.append(f"iteration {', '.join(map(str, self.iteration))}")
        if devices:
            parts.append(f"on {devices}")
        if self.site.source:
            parts.append(f"at {self.site.source}")
        if "while" in self.site.order:
            parts.append("or another operation of the same while loop, whose iterations share one digest")
        return ", ".join(parts)


def describe_place(site: Site, iteration: Iteration) -> OperationPlace:
    """Returns the place of an operation in the form that records use."""
    return OperationPlace(
        site=site.name, operation=site.primitive, direction=site.direction, scope=site.scope, source=site.source,
        iteration=list(iteration), layer=iteration[-1] if iteration else None,
    )  # fmt: skip


def first_difference(a: Reports[Any], b: Reports[Any], *, nearest: int = 5) -> FirstDifference | None:
    """Compares two fingerprints of one program.

    Args:
        a: digests of one run, as `fingerprint` returns them.
        b: digests of another run of the same program.
        nearest: number of preceding values to list in `before`.

    Returns:
        The first difference, or None if the fingerprints agree. The iterations of a `while` loop share one digest, so
        inside such a loop the result is the first operation that differs in any iteration. This operation need not be
        the faulty one, as the text of the result states.

    Raises:
        ValueError: the sites or shapes differ, which means that the fingerprints belong to different programs.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> from sdc.program import operations
        >>> run = sdc.fingerprint(lambda x: jnp.sin(x) * jnp.cos(x), where=operations)
        >>> a, b = (run(jnp.float32(x))[1] for x in (1.0, 2.0))
        >>> sdc.first_difference(a, a) is None, sdc.first_difference(a, b).site.primitive
        (True, 'sin')
    """
    _check_same(a, b)
    first: tuple[tuple[int, ...], Site, Bool[np.ndarray, "*axes n"], Iteration] | None = None
    for site, x, y in zip(a.sites, a.values(), b.values(), strict=True):
        differs = (np.asarray(x) != np.asarray(y)).any(-1)
        if not differs.any():
            continue
        across = tuple(axis for axis, name in enumerate(_axes(site, differs.ndim - 1)) if name != "scan")
        for index in np.argwhere(differs.any((*across, differs.ndim - 1))):
            iteration = tuple(map(int, index))
            place = place_of(site, iteration)
            if first is None or place < first[0]:
                first = place, site, differs, iteration
    if first is None:
        return None
    place, site, differs, iteration = first
    axes, indices = _axes(site, differs.ndim - 1), iter(iteration)
    here = differs[tuple(next(indices) if name == "scan" else slice(None) for name in axes)]  # every device
    names = [name for name in axes if name != "scan"]
    agreeing, before = _before(a, place, nearest)
    devices = tuple(dict(zip(names, map(int, at), strict=True)) for at in np.argwhere(here.any(-1)))
    outputs = tuple(int(output) for output in np.flatnonzero(here.any(tuple(range(here.ndim - 1)))))
    return FirstDifference(site, iteration, devices, outputs, agreeing, before, a.simulated or b.simulated)


def _check_same(a: Reports[Any], b: Reports[Any]) -> None:
    for given in (a, b):
        if not isinstance(given, Reports):
            raise ValueError(
                f"expected digests, not {type(given).__name__}; give the second value returned by a function that "
                "sdc.fingerprint transformed"
            )
        if odd := [value for value in given.values() if not _is_digests(value)]:
            raise ValueError(
                f"expected digests, not reports of {type(odd[0]).__name__}, which have their own verdict(); give the "
                "second value returned by a function that sdc.fingerprint transformed"
            )
    if what := _unlike(a, b):
        raise ValueError(f"these are fingerprints of different programs: {what}; compare runs of the same program")


def _is_digests(value: Any) -> bool:
    return getattr(value, "dtype", None) == np.uint32 and np.shape(value)[-1:] == (2,)


def _unlike(a: Reports[Any], b: Reports[Any]) -> str:
    """Returns a description of how the programs of two fingerprints differ; an empty string if they do not."""
    if [site.name for site in a.sites] != [site.name for site in b.sites]:
        only = sorted({site.name for site in a.sites} ^ {site.name for site in b.sites})
        return f"only one of them has {only[0]!r}" if only else "their sites are in a different order"
    for site, other in zip(a.sites, b.sites, strict=True):
        if site.outputs != other.outputs:
            one, two = (" ".join(f"{x.dtype.name}{list(x.shape)}" for x in each.outputs) for each in (site, other))
            return f"the outputs of {site.name!r} are {one} in one and {two} in the other"
    for site, x, y in zip(a.sites, a.values(), b.values(), strict=True):
        if np.shape(x) != np.shape(y):
            return f"{site.name!r} has digests of shape {np.shape(x)} in one and {np.shape(y)} in the other"
    return ""


def _axes(site: Site, ndim: int) -> tuple[str, ...]:
    """Returns names for the axes of a site's digests; axes added outside the transformation come first."""
    return (*(f"axis{number}" for number in range(ndim - len(site.dims))), *site.dims)


def place_of(site: Site, iteration: Iteration) -> tuple[int, ...]:
    """Returns a key that sorts operations into the order of evaluation; iterations of a `while` loop share one digest
    and hence one key."""
    indices = iter(iteration)
    number = {"scan": lambda: next(indices), "reversed": lambda: -next(indices), "while": lambda: 0}
    return tuple(part if isinstance(part, int) else number[part]() for part in site.order)


def _before(
    reports: Reports[Any], place: tuple[int, ...], nearest: int
) -> tuple[int, tuple[tuple[Site, Iteration], ...]]:
    """Returns the number of digests before a place, and the places of the last `nearest` of them."""
    count = 0
    places: list[tuple[tuple[int, ...], Site, Iteration]] = []
    for site, value in zip(reports.sites, reports.values(), strict=True):
        shape = np.shape(value)[:-1]
        axes = _axes(site, len(shape) - 1)
        loops = tuple(size for name, size in zip(axes, shape, strict=False) if name == "scan")
        earlier = [
            (at, site, iteration) for iteration in np.ndindex(*loops) if (at := place_of(site, iteration)) < place
        ]
        count += len(earlier) * int(np.prod(shape)) // max(int(np.prod(loops)), 1)
        places += earlier
    places.sort(key=lambda entry: entry[0])
    return count, tuple((site, iteration) for _, site, iteration in places[len(places) - nearest :])


class Round(NamedTuple):
    """One round of a bisection.

    Attributes:
        where: selector of the digested sites.
        sites: number of digested sites.
        first: the first difference between the two sides, or None.
    """

    where: Selector
    sites: int
    first: FirstDifference | None


class Bisection(NamedTuple):
    """The result of a bisection.

    Attributes:
        first: the first difference in the last round that had one; None if no round had one.
        exact: whether every operation that could be the first to differ was digested.
        rounds: all rounds, in order.
    """

    first: FirstDifference | None
    exact: bool
    rounds: tuple[Round, ...]


def next_round(sites: Sequence[Site], where: Selector | None, first: FirstDifference | None) -> Selector | None:
    """Selects the sites of the next round.

    Args:
        sites: all sites of the step.
        where: selector of the last round; None before the first round.
        first: the first difference in the last round.

    Returns:
        A selector, or None if nothing remains to be narrowed down.
    """
    scope, depth = "", 0
    if where is not None:
        if first is None or (guilty := guilty_scope(where, first)) is None:
            return None
        scope, depth = guilty
    within = [site for site in sites if inside(scope)(site)]
    deepest = max((site.leaves for site in within), default=1)
    for finer in range(depth + 1, deepest + 1):
        chosen = inside(scope) & boundary(finer)
        count = sum(map(chosen, within))
        before = sum(map(where, within)) if where is not None else 0
        if len(within) <= FEW or count == len(within):
            return inside(scope)
        if count > before:
            return chosen
    return inside(scope)


def bisect(sites: Sequence[Site], run: Callable[[Selector], tuple[Reports[Any], Reports[Any]]]) -> Bisection:
    """Narrows a difference between two sides down to one operation.

    Args:
        sites: all sites of the step, as `sdc.sites` lists them.
        run: a function that runs `fingerprint(step, where)` on both sides, from the same state, and returns the digests
            of both.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> def step(x, broken):
        ...     with jax.named_scope("first"):
        ...         x = jnp.sin(jnp.cos(x))
        ...     with jax.named_scope("second"):
        ...         return jnp.tanh(jnp.exp(x) + broken)
        >>> x = jnp.ones(3)
        >>> def run(where):
        ...     digests = jax.jit(lambda broken: sdc.fingerprint(lambda x: step(x, broken), where)(x)[1])
        ...     return digests(jnp.float32(0.0)), digests(jnp.float32(1e-3))
        >>> found = sdc.bisect(sdc.sites(lambda x: step(x, jnp.float32(0.0)), x), run)
        >>> found.first.site.name, found.exact
        ('fwd/second/add', True)
    """
    rounds: list[Round] = []
    where = next_round(sites, None, None)
    last: FirstDifference | None = None
    while where is not None:
        first = first_difference(*run(where))
        rounds.append(Round(where, sum(map(where, sites)), first))
        last = first or last
        where = next_round(sites, where, first)
    exact = bool(rounds) and rounds[-1].first is not None and "boundary" not in rounds[-1].where.text
    return Bisection(last, exact, tuple(rounds))


def guilty_scope(where: Selector, first: FirstDifference) -> tuple[str, int] | None:
    """Returns the scope that contains the error, and its depth; None if every operation in the scope was digested.

    Args:
        where: selector of the round, which may contain a `boundary` of some depth.
        first: the first difference in that round.
    """
    depths = [int(leaf.text[len("boundary(") : -1]) for leaf in where.leaves() if leaf.text.startswith("boundary(")]
    if not depths:
        return None
    return "/".join(first.site.scope.split("/")[: depths[0]]), depths[0]
