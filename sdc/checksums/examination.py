"""Checks in two programs: one with the first tier alone, which runs at every step, and one that examines.

A product's full check has forty times as many instructions as the product. `abft(examine="again")` therefore compiles a
program with the first tier alone. If a product looks suspicious, the same program runs again from the same inputs:

==================  ==================================================================================================
the same bits       The product is wrong at every repetition, or its terms cancel. The examining program, which has the
                    full check and is compiled when it is first needed, decides.
other bits          A step computes the same bits from the same inputs, so the hardware was wrong, and the fault was
                    intermittent. A third run shows which of the two runs was wrong.
three results       The step does not repeat itself. The examining program decides, and a warning says that intermittent
                    faults may be missed; one that moved a margin from within the bound to far beyond it is kept.
==================  ==================================================================================================
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from sdc.bits import as_bits, same_bits

from ..program import Reports, Site
from ._check import Flags
from .schemes import LOSSY

FAR = 2.0  # margin beyond which the first tier of two programs, which round differently, cannot disagree

UNREPEATED = (
    "a suspicious step did not compute the same bits again from the same inputs, nor did a third run agree with either "
    "of the two. The step is not deterministic, so that intermittent faults may be missed; see sdc doctor"
)
TRACED = (
    "sdc.abft(examine='again') was called inside jit or another transformation, where a step cannot run again; it "
    "examines within the step, as examine='within' does. Call it outside jit, without jit around it"
)


class Screening(NamedTuple):
    """The result of a program with the first tier alone."""

    out: Any  # output of the step
    flags: Reports[Flags]  # `Flags` without examined rows
    suspicious: Bool[Array, ""]  # whether a product must be examined


@jax.jit
def is_suspicious(flags: Reports[Flags]) -> Bool[Array, ""]:
    """Returns whether the first tier passes on any product."""
    return jnp.any(jnp.stack([jnp.any(_passed_on(flag)) for flag in flags.values()]))


@dataclasses.dataclass(frozen=True)
class ScreenedStep:
    """Runs a step with the first tier of a check, and examines suspicious steps by running them again.

    Attributes:
        screen: runs the step with the first tier, from inputs that it leaves intact.
        examine: runs the step with the full check: `(out, flags)`.
        corrects: whether the full check replaces wrong rows.
    """

    screen: Callable[..., Screening]
    examine: Callable[..., tuple[Any, Reports[Flags]]]
    corrects: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Reports[Flags]]:
        """Returns `(out, flags)` as a step with the full check does. The host waits for the result of the first tier.

        An intermittent fault, of which the rows are unknown, counts as one flagged and confirmed row of each product
        whose first tier found it.
        """
        first = self.screen(*args, **kwargs)
        if not first.suspicious:
            return first.out, first.flags
        again = self.screen(*args, **kwargs)
        if _same(first, again):
            del again  # its memory is needed
            return self._examined(first, *args, **kwargs)
        third = self.screen(*args, **kwargs)
        right = next((run for run in (again, first) if _same(run, third)), None)
        if right is None:
            warnings.warn(UNREPEATED, stacklevel=2)
            out, flags = self._examined(first, *args, **kwargs)
            runs = [run.flags for run in (first, again, third)]
            return out, _with_faults(flags, runs, _unlike(runs), self.corrects)
        out, flags = self._examined(right, *args, **kwargs) if right.suspicious else (right.out, right.flags)
        runs = [(first if right is again else again).flags, right.flags]
        return out if self.corrects else first.out, _with_faults(flags, runs, _odd(*runs), self.corrects)

    def _examined(self, screened: Screening, *args: Any, **kwargs: Any) -> tuple[Any, Reports[Flags]]:
        """Examines a step. Its output is that of the first tier's program, unless rows are replaced.

        If the examination finds nothing where the first tier was far beyond its bound, the fault did not recur.
        """
        out, flags = self.examine(*args, **kwargs)
        lost = _lost(flags, screened.flags)
        return out if self.corrects else screened.out, _with_faults(flags, [screened.flags], lost, self.corrects)


def _outermost_loop(site: Site) -> tuple[int | str, ...] | None:
    """Returns the position of the outermost loop around a site."""
    ends = (place for place, part in enumerate(site.order) if isinstance(part, str))
    return None if (end := next(ends, None)) is None else site.order[: end + 1]


Struck: TypeAlias = dict[str, Bool[Array, "*site"]]  # by site, whether a fault struck that did not recur


def _margin(flag: Flags) -> Float32[Array, "*site"]:
    return jnp.maximum(flag.margin, flag.first_margin)


def _passed_on(flag: Flags) -> Bool[Array, "*site"]:
    return ~(_margin(flag) <= 1)


@jax.jit
def _odd(wrong: Reports[Flags], right: Reports[Flags]) -> Struck:
    """Returns where a run differs from two equal ones: products whose first tier found the fault; if there are none,
    those whose margins differ; or else, those that were suspicious."""
    apart = {name: as_bits(_margin(wrong[name])) != as_bits(_margin(right[name])) for name in right}
    suspected = {name: _passed_on(wrong[name]) for name in right}
    levels = (
        {name: apart[name] & suspected[name] for name in right},
        apart,
        {name: suspected[name] | _passed_on(right[name]) for name in right},
    )
    found = [jnp.any(jnp.stack([jnp.any(rows) for rows in level.values()])) for level in levels]
    return {
        name: jnp.where(found[0], levels[0][name], jnp.where(found[1], levels[1][name], levels[2][name]))
        for name in right
    }


@jax.jit
def _unlike(runs: list[Reports[Flags]]) -> Struck:
    """Returns where one of several runs is within the bound and another one far beyond it."""
    margins = {name: jnp.stack([_margin(run[name]) for run in runs]) for name in runs[0]}
    return {name: jnp.any(of > FAR, axis=0) & jnp.any(of <= 1, axis=0) for name, of in margins.items()}


@jax.jit
def _lost(examined: Reports[Flags], screened: Reports[Flags]) -> Struck:
    """Returns where an examination finds no reason for what the first tier found.

    If the examination corrected a product, those after it, and those in the same loop, computed with other values, and
    may have been suspicious because of that product.
    """
    struck, mended, before = {}, jnp.zeros((), jnp.bool_), jnp.zeros((), jnp.bool_)
    loops = [_outermost_loop(site) for site in examined.sites]
    corrected = [jnp.any(flag.corrected > 0) for flag in examined.values()]
    for place, (name, flag) in enumerate(examined.items()):
        if place == 0 or loops[place] is None or loops[place] != loops[place - 1]:
            together = [one for one, loop in zip(corrected, loops, strict=True) if loop and loop == loops[place]]
            mended = functools.reduce(jnp.logical_or, together, before)
        before |= corrected[place]
        unseen = (flag.examined == 0) & (flag.nonfinite == 0) & (_margin(screened[name]) > FAR)
        # A last tier beyond all errors of long sums.
        unseen |= (screened[name].margin > FAR * LOSSY) & (flag.flagged == 0) & (flag.margin <= 1)
        struck[name] = unseen & ~mended
    return struck


@functools.partial(jax.jit, static_argnums=3)
def _with_faults(flags: Reports[Flags], runs: list[Reports[Flags]], struck: Struck, corrects: bool) -> Reports[Flags]:
    """Adds faults that did not recur to the flags of a step."""
    values = []
    for name, flag in flags.items():
        rows = struck[name].astype(jnp.uint32)
        margin = functools.reduce(jnp.maximum, [_margin(run[name]) for run in runs], flag.margin)
        values.append(flag._replace(
            examined=flag.examined + rows,
            flagged=flag.flagged + rows,
            confirmed=flag.confirmed + rows,
            corrected=flag.corrected + rows * jnp.uint32(corrects),
            margin=jnp.where(struck[name], margin, flag.margin),
        ))  # fmt: skip
    return Reports(flags.sites, values, flags.skipped, flags.simulated)


@jax.jit
def _equal(ours: list[Array], theirs: list[Array]) -> Bool[Array, ""]:
    return jnp.all(jnp.stack([same_bits(a, b) for a, b in zip(ours, theirs, strict=True)]))


def _same(one: Screening, other: Screening) -> bool:
    """Returns whether two runs computed the same bits."""
    ours, theirs = ([jnp.asarray(leaf) for leaf in jax.tree.leaves(run[:2])] for run in (one, other))
    return bool(_equal(ours, theirs))
