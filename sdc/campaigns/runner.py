"""Campaigns: thousands of single faults in a training step, and the outcome of training after each fault.

The step is compiled twice: once with a strike as data, and once unchanged. The clean run is executed once, and the
state before each of its steps is kept. Every injection starts from the state just before its step, runs the struck step
and then a few unchanged steps, and is compared with the clean run until the outcome is certain. The bits after the
struck step are compared with those that the same program computes without a strike. Later steps run the unchanged
program, whose results differ in the last bits from those of the program with a strike, so only the losses and norms of
these steps are compared.

A Kronecker sequence distributes injections over sites, steps, iterations, devices, elements, kinds of faults and bits,
and the first n injections, for any n, are distributed as evenly as all of them. Injection number i is the same in every
campaign with the same seed, so a campaign can be stopped and resumed.
"""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sdc.settings import SettingError, check_several

from ..checksums import abft as checked, accumulators
from ..faults import (
    NUMBERS,
    BitFlip,
    Events,
    Fault,
    FaultKind,
    Hits,
    Strike,
    StuckBit,
    as_fault,
    field_bits,
    field_of,
    no_strike,
    strikable,
    strike,
    strike_on,
)
from ..program import Site, Where, arithmetic, as_selector, functional, sites
from ..twins import tree_digest
from .outcomes import ABFT, Observed, classify, decided, thresholds

# `(state, metrics) -> {"loss": ..., "gradient_norm": ..., "history": ...}`; the last two keys may be absent.
Observe = Callable[[Any, Any], Mapping[str, Any]]


def campaign(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Any],
    injections: int = 100,
    where: Where = arithmetic,
    faults: Sequence[Fault | FaultKind | str] = ("bitflip",),
    follow: int = 5,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Injects single faults into a training step and classifies the outcome of training.

    Args:
        step: `(state, batch) -> (state, metrics)`, any function that JAX can trace. The step may change Flax NNX
            objects in the state in place, and must return these objects.
        state: state before the first step; it is not modified.
        batches: batches of data, one for each step of the clean run.
        loss: `(state, metrics) -> loss`, a function of the step's results.
        injections: number of faults to inject.
        where: selects the sites; by default, all operations that compute floating-point numbers.
        faults: faults, each given as a `Fault`, as a kind of fault, or as text (see `as_fault`). The campaign chooses
            the place and time of each injection.
        follow: number of steps to run after the struck step to observe the effect.
        seed: seed of the injections.

    Returns:
        One row per injection: the site, the changed elements, and the result of `classify`.

    Raises:
        ValueError: no operation is selected, or there are too few batches.
        NotDeterministic: the clean run is not reproducible bit for bit.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> def step(w, x):
        ...     value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1.0) ** 2))(w)
        ...     return w - 0.1 * gradient, value
        >>> batches = [jnp.full((2, 3), 0.1 * n) for n in range(1, 9)]
        >>> rows = sdc.campaign(step, jnp.zeros(3), batches, loss=lambda state, value: value, injections=20)
        >>> len(rows), {row["outcome"] for row in rows} <= {"masked", "benign", "spike", "divergence", "nonfinite"}
        (20, True)
    """
    count: Any = injections
    if not isinstance(count, Integral) or count < 1:
        raise SettingError("injections", repr(injections), "expected a whole number of at least 1")
    try:
        if not callable(loss):
            raise TypeError
        inspect.signature(loss).bind(None, None)
    except TypeError:
        raise SettingError("loss", repr(loss), "expected a function of (state, metrics)") from None
    except ValueError:  # builtins have no signature
        pass
    runner = Campaign(
        step, state, list(batches), observe=lambda state, metrics: {"loss": loss(state, metrics)}, where=where,
        faults=faults, follow=follow, seed=seed,
    )  # fmt: skip
    return list(runner.run(range(injections)))


class Injection(NamedTuple):
    """One injection of a campaign.

    Attributes:
        step: number of the struck step.
        strike: the fault and its place, as data.
        row: fields of the injection in the record.
    """

    step: int
    strike: Strike
    row: dict[str, Any]


class NotDeterministic(RuntimeError):
    """The clean run is not reproducible bit for bit, so comparisons with this run are meaningless."""


class Campaign:
    """A campaign that is ready to run: the step is compiled, and the clean run is finished.

    Args:
        observe: a function that returns the observed numbers of each step (see `Observe`).
        batch: number of injections that run concurrently, under `vmap`.
        abft: whether `sdc.abft` checks the matrix products of the struck step, as an additional detector. Faults in
            matrix products then strike the sums before they are rounded.

    For the other arguments, see `campaign`.

    Attributes:
        sites: sites that can be struck.
        clean: the clean run, step by step.
        limits: thresholds of the spike detectors.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Any, Any]],
        state: Any,
        batches: Sequence[Any],
        *,
        observe: Observe,
        where: Where = arithmetic,
        faults: Sequence[Fault | FaultKind | str] = ("bitflip",),
        follow: int = 5,
        seed: int = 0,
        batch: int = 1,
        abft: bool = False,
    ) -> None:
        if follow < 0:
            raise SettingError("follow", follow, "expected at least 0 steps")
        if len(batches) <= follow:
            raise ValueError(f"{len(batches)} batches are too few for follow={follow}; give more than {follow} batches")
        check_several("faults", faults)
        if not faults:
            raise SettingError("faults", None, "expected at least one kind of fault, such as 'bitflip'")
        self.faults = [_single(fault) for fault in faults]
        self.batches, self.follow, self.seed, self.batch, self.abft = batches, follow, seed, batch, abft
        step, state, whole = functional(step, state, batches[0])
        step = accumulators(step) if abft else step
        self.where = as_selector(where)
        where = self.where & NUMBERS
        self.sites = sites(step, state, batches[0], where=where)
        # Check that every kind of fault can change the numbers of every site, before hours are spent on injections.
        for dtype, name in {x.dtype: site.name for site in self.sites for x in site.outputs if strikable(x)}.items():
            for fault in self.faults:
                try:
                    fault.what.change(jax.random.key(0), (), dtype, jnp.int32(0))
                except ValueError as error:
                    raise ValueError(
                        f"fault {str(fault)!r} cannot strike the selected site {name!r}: {error}; or exclude the "
                        f"site with ~named({name!r})"
                    ) from error
        struck = strike(step, where)

        def observed(state: Any, metrics: Any) -> Any:
            scalars = {name: _number(name, value) for name, value in observe(whole(state), metrics).items()}
            leaves = [
                x for x in jax.tree.leaves((state, scalars)) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)
            ]
            finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all()
            return scalars, finite, tree_digest((state, scalars))

        def with_strike(strike: Strike, state: Any, batch: Any) -> Any:
            flagged = jnp.uint32(0)
            if abft:
                ((state, metrics), events), flags = checked(struck)(strike, state, batch)
                flagged += sum(jnp.sum(flag.flagged, dtype=jnp.uint32) for flag in flags.values())
            else:
                (state, metrics), events = struck(strike, state, batch)
            return state, observed(state, metrics), (_total(events), flagged)

        def plain(state: Any, batch: Any) -> Any:
            state, metrics = step(state, batch)
            return state, observed(state, metrics)

        self._axes = sorted({axis for site in self.sites for axis, _ in site.mesh})
        shapes = [x.shape for site in self.sites for x in site.outputs]
        room = max(fault.pattern.size(shape) for fault in self.faults for shape in shapes)
        self._room = min(room, max(map(math.prod, shapes)))
        self._strike = jax.jit(with_strike if batch == 1 else jax.vmap(with_strike))
        self._plain = jax.jit(plain if batch == 1 else jax.vmap(plain))
        self.clean: list[Observed] = []
        self._states: list[Any] = []
        for number in range(len(batches)):
            self._states.append(state)
            state, seen = self._run_plain(number, state)
            self.clean.append(seen)
        lost = next((number for number, seen in enumerate(self.clean) if not math.isfinite(seen.loss)), None)
        if lost is not None:
            raise ValueError(
                f"the clean run has a loss of {self.clean[lost].loss} at step {lost}, so the effects of faults cannot "
                "be measured; fix the step or its batches first, or give fewer steps"
            )
        self._unstruck = [self._run_unstruck(number) for number in range(len(batches) - follow)]
        self.limits = thresholds(self.clean)
        # Clean steps, repeated from their stored states, must give the same bits.
        twice = [(self.clean[0], self._run_plain(0, self._states[0])[1])]
        twice += [(self._unstruck[number], self._run_unstruck(number)) for number in {0, len(self._unstruck) - 1}]
        if any(before.digest != now.digest for before, now in twice):
            raise NotDeterministic(
                "a step of the clean run gave different bits when repeated: the program is not deterministic on this "
                "machine, or the machine corrupts data; compare this machine with another one in lock-step"
            )

    def plan(self, number: int) -> Injection:
        """Returns injection `number` of the campaign."""
        u = _kronecker(number, self.seed)
        step = int(next(u) * (len(self.batches) - self.follow))
        site = self.sites[int(next(u) * len(self.sites))]
        fault = self.faults[int(next(u) * len(self.faults))]
        what = fault.what
        outputs = [output for output, x in enumerate(site.outputs) if strikable(x)]
        output = outputs[int(next(u) * len(outputs))]
        shape, dtype = site.outputs[output].shape, site.outputs[output].dtype
        bits: list[int] | None = None
        place = next(u)
        if isinstance(what, BitFlip | StuckBit):
            choices = what.bits or field_bits(dtype, what.field)
            if isinstance(what, StuckBit) or what.count == 1:
                bits = [choices[int(place * len(choices))]]
                what = dataclasses.replace(what, bits=tuple(bits), field=None)
        # The number of iterations of a `while` is unknown, so its first iteration is struck.
        iteration = tuple(int(next(u) * length) for length in site.trips)
        device = {axis: int(next(u) * length) for axis, length in site.mesh}
        element = int(next(u) * math.prod(shape))
        key = jax.random.fold_in(jax.random.key(self.seed), number)
        struck = strike_on(
            site, dataclasses.replace(fault, what=what), element, iteration=iteration, device=device, output=output,
            key=key, room=self._room, axes=self._axes,
        )  # fmt: skip
        innermost = site.loops == max(other.loops for other in self.sites)
        row = {
            "injection": number,
            "site": site.name,
            "operation": site.primitive,
            "phase": self._phase(site),
            "scope": site.scope,
            "source": site.source,
            "dtype": dtype.name,
            "shape": list(shape),
            "output": output,
            "iteration": list(iteration),
            "layer": iteration[-1] if iteration and innermost else None,
            "device": device,
            "step": step,
            "fault": str(fault),
            "bits": bits,
            "field": None if bits is None else field_of(dtype, bits[0]),
        }
        return Injection(step, struck, row)

    def _phase(self, site: Site) -> str:
        """Returns the phase of a site: `memory` for arguments and outputs of the step, `update` outside derivatives,
        and otherwise the site's direction."""
        if site.direction in ("arg", "out"):
            return "memory"
        outside = site.direction == "fwd" and "jvp(" not in site.scope
        return "update" if outside and any("jvp(" in other.scope for other in self.sites) else site.direction

    def run(self, numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Runs the injections with the given numbers and yields their rows, in order."""
        planned = map(self.plan, numbers)
        while group := list(itertools.islice(planned, self.batch)):
            yield from self._run(group)

    def _run(self, group: Sequence[Injection]) -> Iterator[dict[str, Any]]:
        """Runs a group of injections concurrently, until the outcome of each is certain."""
        members = [*group, *[group[-1]] * (self.batch - len(group))]
        states, seen, happened = self._strike(
            self._stack([member.strike for member in members]),
            self._stack([self._states[member.step] for member in members]),
            self._stack([self.batches[member.step] for member in members]),
        )
        observed = self._read(seen)
        runs = [[observed[number]] for number in range(len(group))]
        undecided = {
            number
            for number, member in enumerate(group)
            if not decided(self._unstruck[member.step], observed[number], first=True)
        }
        for latency in range(1, self.follow + 1):
            if not undecided:
                break
            states, seen = self._plain(states, self._stack([self.batches[member.step + latency] for member in members]))
            observed = self._read(seen)
            for number in sorted(undecided):
                runs[number].append(observed[number])
                clean = self.clean[members[number].step + latency]
                if decided(clean, observed[number], first=False):
                    undecided.remove(number)
        happened = jax.device_get(happened)
        for number, member in enumerate(group):
            own = happened if self.batch == 1 else jax.tree.map(lambda x, number=number: x[number], happened)
            yield self._row(member, runs[number], *own)

    def _row(self, member: Injection, run: Sequence[Observed], events: Events, flagged: Any) -> dict[str, Any]:
        clean = [*self.clean]
        clean[member.step] = self._unstruck[member.step]
        result = classify(clean, run, member.step, self.limits)
        if self.abft:
            result["detected"][ABFT] = 0 if int(flagged) else None
        assert events.hits is not None
        known = (events.hits.new != events.hits.old).any(-1)
        first = {name: np.asarray(part)[known][:8] for name, part in events.hits._asdict().items()}
        digits = 2 * np.dtype(member.row["dtype"]).itemsize
        if not int(events.drawn):
            result["outcome"] = "not_reached"
        return {
            **member.row,
            "elements": [int(element) for element in first["element"]],
            "changed": int(events.changed),
            "old": [_hexadecimal(words, digits) for words in first["old"]],
            "new": [_hexadecimal(words, digits) for words in first["new"]],
            **result,
        }

    def _run_plain(self, number: int, state: Any) -> tuple[Any, Observed]:
        many, seen = self._plain(*(self._stack([part] * self.batch) for part in (state, self.batches[number])))
        return many if self.batch == 1 else jax.tree.map(lambda x: x[0], many), self._read(seen)[0]

    def _run_unstruck(self, number: int) -> Observed:
        """Runs a step with the program that accepts a strike, without striking anything."""
        nothing = no_strike(room=self._room, axes=self._axes)
        arguments = nothing, self._states[number], self.batches[number]
        return self._read(self._strike(*(self._stack([part] * self.batch) for part in arguments))[1])[0]

    def _stack(self, trees: Sequence[Any]) -> Any:
        if self.batch == 1:
            return trees[0]
        return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *trees)

    def _read(self, seen: Any) -> list[Observed]:
        scalars, finite, digest = jax.device_get(seen)
        if self.batch == 1:
            scalars, finite, digest = jax.tree.map(lambda x: np.asarray(x)[None], (scalars, finite, digest))
        return [
            Observed(
                loss=float(scalars["loss"][number]),
                gradient_norm=float(scalars["gradient_norm"][number]) if "gradient_norm" in scalars else None,
                history=float(scalars["history"][number]) if "history" in scalars else None,
                finite=bool(finite[number]),
                digest=(int(digest[number][0]), int(digest[number][1])),
            )
            for number in range(self.batch)
        ]


def _number(name: str, value: Any) -> Any:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(value)]
    if not isinstance(value, jax.Array | np.ndarray | np.generic | float | int) or shapes != [()]:
        of = f" of shape {shapes[0]}" if len(shapes) == 1 and shapes[0] else ""
        what = "an array" if isinstance(value, jax.Array) else type(value).__name__
        raise SettingError(name, f"{what}{of}", "expected one number per step; reduce the value to a scalar")
    return jnp.asarray(value, jnp.float32)


def _kronecker(number: int, seed: int) -> Iterator[float]:
    """Yields the coordinates of one point of a Kronecker sequence with random shifts: frac(number * a_d + shift_d).

    For each coordinate d, a_d is the square root of a prime; the fractional parts of the multiples of this irrational
    number fill the interval from 0 to 1 evenly.
    """
    shifts = np.random.default_rng(seed)
    for prime in PRIMES:
        yield float((number * math.sqrt(prime) + shifts.random()) % 1.0)


PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def _single(fault: Fault | FaultKind | str) -> Fault:
    """Converts a fault, kind or text to a fault; raises SettingError if it specifies a place or time, which the
    campaign chooses."""
    found = as_fault(fault)
    if found != Fault(found.what, pattern=found.pattern):
        raise SettingError(
            "faults",
            found,
            "a campaign chooses the site, iteration, device and step; give only the kind and pattern, and select sites "
            "with where=",
        )
    found.check_moves()
    return found


def _total(events: Any) -> Events:
    """Sums the events over all sites, iterations and devices; a strike corrupts values at only one place."""

    def total(leaves: Sequence[Any], trailing: int) -> Any:
        return sum(leaf.sum(tuple(range(leaf.ndim - trailing)), dtype=leaf.dtype) for leaf in leaves)

    every = list(events.values())
    hits = [total([event.hits[number] for event in every], trailing) for number, trailing in enumerate((1, 1, 2, 2))]
    return Events(total([event.drawn for event in every], 0), total([event.changed for event in every], 0), Hits(*hits))


def _hexadecimal(words: Any, digits: int) -> str:
    return f"{(int(words[1]) << 32) | int(words[0]):0{digits}x}"
