"""`witness`: compares what a step computes twice.

Under activation checkpointing (`jax.checkpoint`), the backward pass computes parts of the forward pass again. If the
two results differ, the hardware was wrong once. In production, this comparison found 12 of 18 incidents in 35 million
GPU hours (Lei et al., OSDI 2026, section 5.1.2).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from sdc.bits import same_bits
from sdc.results import counted, total
from sdc.verdict import Judgement, Verdict, limit

from .. import program
from ..twins import DigestRule, FirstDifference, first_difference
from .shard_rule import ShardDigestRule
from .silence import LEAST_COVERED

KERNELS = ("pallas_call", "ffi_call")
SMALL = 8
P = ParamSpec("P")  # of a step
Out = TypeVar("Out")


class Witnessed(NamedTuple):
    """The digests of an operation's results and of their recomputations.

    Digests of zeros alone belong to a branch that did not run.

    Attributes:
        first: digests of the operation's n results when they were first computed; the leading axes are those of
            `Site.dims`.
        again: digests of each of the m recomputations.
    """

    first: UInt32[Array, "*axes n 2"]
    again: UInt32[Array, "*axes m n 2"]

    def summary(self, site: program.Site | None = None) -> dict[str, int]:
        """Returns the totals over all iterations and devices; waits for them."""
        return {"recomputations compared": total(self.compared), "mismatched": total(self.differs)}

    def verdict(self) -> Judgement:
        """Returns the verdict on this operation, in which a difference alone is a suspicion; waits for the digests."""
        return _judged([self.summary()], "", "")

    @staticmethod
    def judge(reports: program.Reports["Witnessed"]) -> Judgement:
        """Returns the verdict on a step, in which a difference alone is a suspicion; waits for the digests."""
        totals = [one.summary() for one in reports.values()]
        differ = any(each["mismatched"] for each in totals)
        covered = witnessed_share(reports)
        share = f" ({limit(100 * covered, 3, up=False)} % of the forward pass)"
        found = _judged(totals, share, f", first {first_mismatch(reports)}" if differ else "")
        few = found.verdict is Verdict.CLEAN and covered < LEAST_COVERED
        return Judgement(Verdict.INCONCLUSIVE, f"{found.reason}, but they are too few") if few else found

    @property
    def compared(self) -> Bool[Array, "*axes m"]:
        """Whether the operation ran."""
        return jnp.any(self.again != 0, (-1, -2)) | jnp.any(self.first != 0, (-1, -2))[..., None]

    @property
    def differs(self) -> Bool[Array, "*axes m"]:
        """Whether a recomputation has other bits than the first computation."""
        return jnp.any(self.first[..., None, :, :] != self.again, (-1, -2))


def _judged(totals: Sequence[Mapping[str, int]], share: str, first: str) -> Judgement:
    compared, differ = (sum(each[key] for each in totals) for key in ("recomputations compared", "mismatched"))
    if differ:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"{differ:,} of {counted(compared, 'recomputation')}{share} differ{first}; run the step again: if others "
            "differ, the hardware is wrong, and if the same do, XLA may round them differently "
            "(sdc.guarding.calibrate)",
        )
    if not compared:
        return Judgement(Verdict.INCONCLUSIVE, "no recomputation was compared")
    return Judgement(Verdict.CLEAN, f"{counted(compared, 'recomputation')}{share} agree with the first computation")


def comparable(site: program.Site) -> bool:
    """Selects matrix products, kernels (the contents of which are opaque), and reductions to an eighth of the elements
    or less.

    XLA fuses other operations with their neighbours, so that the bits of the two passes may differ. Digests of
    reductions cost little, and end such fusions.
    """
    if site.products != 0 or site.primitive in KERNELS:
        return True
    size = sum(x.size for x in site.outputs)
    return site.primitive.startswith("reduce_") and site.flops >= SMALL * size


def witness(
    step: Callable[P, Out],
    where: program.Where = comparable,
    *,
    last: bool = False,
    devices: int = 1,
    whole: Collection[str] = (),
) -> Callable[P, tuple[Out, program.Reports[Witnessed]]]:
    """Transforms a step so that it also returns digests of what it computes twice.

    Recomputations are found by value numbers (`sdc.program.numbering`), whether they come from `jax.checkpoint` and its
    policies, from Flax or Equinox, or from the step itself. Operations that XLA merges do not count. Healthy bits may
    differ if XLA fuses the two passes differently: `calibrate` finds the operations for which this is the case, and
    `WitnessCalibration.where` selects the others.

    Args:
        step: any function that JAX can trace; it is transformed after differentiation, so that it contains both passes.
        where: selects the operations, in the form of their first computation; by default, those of
            `comparable`.
        last: whether to compare only the last of several selected operations that are computed from each other. This
            costs less; what differs is then named less exactly, and errors that are rounded away in between are missed.
        devices: number of devices of the mesh on which XLA shards the step (automatic sharding). If it is above 1, each
            of the n digests becomes one for each device's shard, in the order of the mesh; outside of `shard_map`.
        whole: names of operations of which whole results are compared in any case.

    Returns:
        A function that returns `(out, witnessed)`, with `Witnessed` for each operation that runs at least twice.
        `witnessed.skipped` lists the operations of the forward pass that are not compared, with the reason and their
        share of the forward pass. A step without recomputations returns no reports; `witnessed_share` is then 0.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
        >>> loss = lambda w, x: jnp.sum(jax.lax.scan(lambda x, _: (layer(w, x), None), x, length=2)[0])
        >>> out, witnessed = jax.jit(sdc.witness(jax.grad(loss)))(jnp.eye(4), jnp.ones((2, 4)))
        >>> witnessed["fwd/jvp()/dot_general"].differs.tolist()
        [[False], [False]]
    """

    @program.taking(step)
    def witnessed(*args: Any, **kwargs: Any) -> tuple[Any, program.Reports[Witnessed]]:
        found, undivided = program.Recomputations((), ()), set[str]()

        def twice(live: Any) -> program.Where:
            nonlocal found
            found = program.Recomputations.of(live, where, last=last)
            for first, again, _ in found.groups:
                undivided.update(site.name for site in (first, *again) if first.name in whole)
            return lambda site: site.name in found.names

        rule = DigestRule()
        if devices > 1:
            rule = ShardDigestRule(devices, undivided)
        out, digests = program.rewrite(step, program.everything, rule, among=twice)(*args, **kwargs)
        values = [
            Witnessed(digests[first.name], jnp.stack([digests[one.name] for one in again], axis=-3))
            for first, again, _ in found.groups
        ]
        return out, program.Reports([group.first for group in found.groups], values, found.skipped, digests.simulated)

    return witnessed


def witnessed_share(witnessed: program.Reports[Witnessed]) -> float:
    """Returns the share of the forward pass's floating-point operations on which comparisons depend, from 0 to 1."""
    return 1 - sum(one.share or 0.0 for one in witnessed.skipped) if len(witnessed) else 0.0


def first_mismatch(witnessed: program.Reports[Witnessed]) -> FirstDifference | None:
    """Returns the first operation whose recomputation differs, on the host; None if all agree.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> from sdc.guarding import first_mismatch
        >>> layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
        >>> gradient = jax.grad(lambda w, x: jnp.sum(jax.lax.scan(lambda x, _: (layer(w, x), None), x, length=2)[0]))
        >>> out, witnessed = jax.jit(sdc.witness(gradient))(jnp.eye(4), jnp.ones((2, 4)))
        >>> first_mismatch(witnessed) is None
        True
    """
    first, other = [], []
    for one in witnessed.values():
        mine = theirs = np.asarray(one.first)
        for again in np.moveaxis(np.asarray(one.again), -3, 0):
            theirs = np.where(mine == theirs, again, theirs)
        first.append(mine)
        other.append(theirs)
    return first_difference(program.Reports(witnessed.sites, first), program.Reports(witnessed.sites, other))


Watched: TypeAlias = tuple[Any, program.Reports[Witnessed]]  # what a step with a witness returns


class NotRepeatable(ValueError):
    """A step that computes other bits from the same inputs."""


@dataclasses.dataclass(frozen=True)
class WitnessCalibration:
    """What healthy steps say about the comparisons of `witness`.

    Attributes:
        run: the compiled step with the comparisons that are left, which returns `(out, witnessed)`.
        names: the operations that it compares.
        differing: operations whose bits differ between the two passes, with the reason. They are not compared.
        batches: number of batches that were run.
        whole: operations of which whole results are compared, because XLA divides the two among devices differently.
    """

    run: Callable[..., tuple[Any, program.Reports[Witnessed]]]
    names: tuple[str, ...]
    differing: Mapping[str, str]
    batches: int
    whole: frozenset[str] = frozenset()

    @property
    def where(self) -> program.Selector:
        """Selects the operations that are compared."""
        nothing = program.Selector("nothing", lambda site: False)
        return program.named(*self.names) if self.names else nothing


def calibrate(
    step: Callable[..., Any],
    arguments: Iterable[Sequence[Any]],
    where: program.Where = comparable,
    *,
    last: bool = False,
    alone: bool = False,
) -> WitnessCalibration:
    """Determines which recomputations of a step have the bits of the first computation, by running it.

    Each batch runs twice, since the step must repeat itself: otherwise, a difference would say nothing about the
    hardware. Operations that differ are excluded, and the step is compiled again without their digests, until none
    differs.

    Args:
        step: a function of arrays; it must not be wrapped in a `jax.jit` that donates its arguments.
        arguments: the arguments of several calls, from healthy devices; arrays of several processes are allowed.
        where: selects the operations.
        last: see `witness`.
        alone: whether the compiled step returns `None` instead of the step's output. XLA then omits what only the
            output needs: the gradients of parameters, and the optimizer.

    Raises:
        NotRepeatable: the step computes other bits from the same inputs.
        ValueError: there are no arguments.
    """
    batches = [(tuple(one), tuple(one)) for one in arguments]
    if not batches:
        raise ValueError("calibrate was given no arguments; give those of at least one call, as in [(state, batch)]")
    return calibrated(step, batches, where, last=last, alone=alone)


def calibrated(
    step: Callable[..., Any],
    batches: Sequence[tuple[Sequence[Any], Sequence[Any]]],
    where: program.Where,
    *,
    last: bool,
    alone: bool,
    devices: int = 1,
) -> WitnessCalibration:
    """Implements `calibrate`, with the arguments of both runs of each batch. With `devices`, the shards of these are
    compared, except where XLA divides the two results differently."""
    differing: dict[str, str] = {}
    parted: set[str] = set()
    while True:
        left = program.as_selector(where) & program.Selector("left", lambda site: site.name not in differing)
        compared = witness(step, left, last=last, devices=devices, whole=parted.copy())
        run = jax.jit((lambda *args, compared=compared: (None, compared(*args)[1])) if alone else compared)
        found: dict[str, int] = {}
        names: tuple[str, ...] = ()
        for args, same in batches:
            first, again = run(*args), run(*same)
            names = tuple(first[1])
            _check_repeats(first, again)
            for name, differs in _differing(first[1]).items():
                found[name] = found.get(name, 0) + bool(differs)
        bad = {name: count for name, count in found.items() if count}
        if not bad:
            return WitnessCalibration(run, names, differing, len(batches), frozenset(parted))
        if devices > 1 and not bad.keys() <= parted:
            parted |= bad.keys()
            continue
        after = {
            group.first.name: group.after for group in program.recomputations(step, *batches[0][0], where=left).groups
        }
        for name, count in bad.items():
            wrong = [one for one in after.get(name, ()) if one in bad]
            why = f"its input {wrong[0]} differs" if wrong else "XLA compiles the two passes to other instructions here"
            differing[name] = f"{why} ({count} of {len(batches)} batches)"


@jax.jit
def _differing(witnessed: program.Reports[Witnessed]) -> dict[str, Bool[Array, ""]]:
    return {name: jnp.any(one.differs) for name, one in witnessed.items()}


def _check_repeats(first: Watched, again: Watched) -> None:
    apart = {name for name, same in _equal(first[1], again[1]).items() if not same}
    if apart or not bool(_same_bits(first[0], again[0])):
        names = (f"{site.name} ({site.source}) or its recomputation" for site in first[1].sites if site.name in apart)
        where = next(names, "its result")
        raise NotRepeatable(
            f"the step computed other bits from the same inputs, first at {where}, so a difference between two "
            "computations would say nothing about the hardware; make it deterministic (see sdc doctor), or, if it is, "
            "test the devices (see sdc burnin)"
        )


@jax.jit
def _equal(first: program.Reports[Witnessed], again: program.Reports[Witnessed]) -> dict[str, Bool[Array, ""]]:
    return {name: jnp.all(one.first == again[name].first) & jnp.all(one.again == again[name].again)
            for name, one in first.items()}  # fmt: skip


@jax.jit
def _same_bits(first: Any, again: Any) -> Bool[Array, ""]:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
    return functools.reduce(jnp.logical_and, (same_bits(a, b) for a, b in pairs), jnp.bool_(True))
