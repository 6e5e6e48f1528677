"""Programs with transformed steps: for one copy, for a trace, and for twins and their comparison.

Twins run in lock-step, freely, or with digests of every operation.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import sdc
from sdc.checksums import ScreenedStep, Screening, accumulators, is_suspicious
from sdc.program import Reports, Selector, everything
from sdc.twins import (
    SITES,
    Compare,
    Exchange,
    agreement,
    describe_place,
    encode,
    place_of,
    sites_table,
    squared_distance,
)

from .device import Program, StepRows, Transform, described, plain, scalar_row
from .model import DATA, MODEL
from .placement import RANKS, TWIN, fetch
from .tallies import tally, tally_flags, total

NONE: Reports[Any] = Reports((), ())  # the reports of an inactive tool


@dataclasses.dataclass(frozen=True, eq=False)
class Instrumented(Program):
    """A program whose step may have simulated faults and checked matrix products."""

    _: dataclasses.KW_ONLY
    faults: tuple[sdc.Fault, ...] = ()
    checks: Transform | None = None  # transformation that checks matrix products; None for no checks
    seed: int = 0  # seed of the run; the simulated faults use the next seed

    def around(self, step: Callable[..., Any]) -> Callable[..., tuple[Any, Reports[Any]]]:
        """Returns the instrumented step inside the outer transformation (by default, no transformation)."""
        return lambda *args: (step(*args), NONE)

    @functools.cached_property
    def compiled(self) -> jax.stages.Wrapped:
        """Jitted function `(state, (tokens, key)) -> (state, metrics, (reports, events, flags))`; the reports are those
        of the outer transformation."""
        return self.instrumented(self.checks, donate=self.donate)

    def instrumented(self, checks: Transform | None, *, donate: bool) -> jax.stages.Wrapped:
        """Returns the function `compiled` with given checks."""
        # Faults simulate hardware errors, so if matrix products are checked, faults strike the sums before rounding.
        wide = self.work.fn if checks is None else accumulators(self.work.fn)
        faulty = sdc.inject(wide, self.faults) if self.faults else lambda _, *args: (wide(*args), NONE)
        checked = (lambda *args: (faulty(*args), NONE)) if checks is None else checks(faulty)

        # Inputs and outputs are sites too, named by their positions in this signature.
        def instrumented(moment: sdc.Moment, state: Any, tokens: Any) -> tuple[Any, Reports[Any], Reports[Any]]:
            (out, events), flags = checked(moment, state, tokens)
            return out, events, flags

        step = self.around(instrumented)

        def fn(state: Any, shared: tuple[Any, Any]) -> Any:
            tokens, key = shared
            (out, events, flags), reports = step(sdc.Moment(key, state.step), state, tokens)
            return *out, (reports, events, flags)

        return self.jitted(fn, P(), RANKS, donate=donate)

    def beside(self) -> Any:
        return jax.eval_shape(jax.random.key, 0)

    def run(self, *given: Any) -> Any:
        """Runs the compiled step."""
        return self.executables["step"](*given)

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        del number
        state, metrics, reports = self.run(state, (batch, jax.random.key(self.seed + 1)))
        return state, (metrics, reports)


@dataclasses.dataclass(frozen=True, eq=False)
class SingleProgram(Instrumented):
    """A program that trains one copy.

    Attributes:
        work, placement, donate, faults, checks, seed: see `Instrumented`.
        screens: the first tier of the checks alone, which then runs at every step; `checks` examines suspicious steps,
            in a program that is compiled when it is first needed, from inputs that no step donates.
        corrects: whether `checks` replaces wrong rows.
    """

    _: dataclasses.KW_ONLY
    screens: Transform | None = None
    corrects: bool = False

    @functools.cached_property
    def compiled(self) -> jax.stages.Wrapped:
        return super().compiled if self.screens is None else self.instrumented(self.screens, donate=False)

    @functools.cached_property
    def _screened(self) -> ScreenedStep:
        examining = functools.cache(lambda: self.instrumented(self.checks, donate=False).lower(*self.inputs).compile())

        def screen(*given: Any) -> Screening:
            *out, (reports, events, flags) = self.run(*given)
            return Screening((out, reports, events), flags, is_suspicious(flags))

        def examine(*given: Any) -> tuple[Any, Reports[Any]]:
            *out, (reports, events, flags) = examining()(*given)
            return (out, reports, events), flags

        return ScreenedStep(screen, examine, self.corrects)

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        if self.screens is None:
            state, (metrics, reports) = super().step(state, batch, number)
        else:
            given = state, (batch, jax.random.key(self.seed + 1))
            ((state, metrics), *reports), flags = self._screened(*given)
            reports = (*reports, flags)
        return state, (metrics._replace(gradient=None), reports)

    def rows(self, number: int, out: Any, seen: Any) -> StepRows:
        metrics, (_, events, flags) = fetch(out)
        # Add the twin axis, which `tally` expects, to the single copy.
        sites, rows = tally(NONE, jax.tree.map(lambda x: x[None], events), step=number)
        row = scalar_row(metrics) | ({"sites": sites} if sites else {}) | dict(self.work.describe(metrics))
        return StepRows(row | ({} if self.checks is None else {"abft": tally_flags(flags, twins=False)}), rows)


@dataclasses.dataclass(frozen=True, eq=False)
class TraceProgram(Program):
    """A program that trains one copy and computes digests of selected values at every step.

    Attributes:
        work: the step.
        placement: the layout over devices, without twins.
        where: the values whose digests each step returns.
        struck: returns the strike at a step, given the program's sites; None for a program without injection.
        donate: whether a step reuses the memory of its input state.
    """

    where: Selector
    struck: Callable[[Sequence[sdc.Site], int], sdc.Strike] | None = None

    @functools.cached_property
    def _plain(self) -> Any:
        return plain(self.work, self.placement)

    @functools.cached_property
    def sites(self) -> list[sdc.Site]:
        return sdc.sites(self._plain, self.abstract(), self.batch, where=self.where)

    @functools.cached_property
    def compiled(self) -> jax.stages.Wrapped:
        """Jitted function `(state, (tokens, strike)) -> (state, metrics, digests)`."""

        def fn(state: Any, shared: tuple[Any, Any]) -> Any:
            tokens, strike = shared

            def struck(state: Any, tokens: Any) -> Any:
                return sdc.strike(self._plain, self.where)(strike, state, tokens)[0]

            step = self._plain if self.struck is None else struck
            (state, metrics), digests = sdc.fingerprint(step, self.where)(state, tokens)
            return state, metrics, digests

        return self.placement.jit(fn, donate=self.donate)

    def beside(self, number: int = 0) -> Any:
        return None if self.struck is None else self.struck(self.sites, number)

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        state, metrics, digests = self.executables["step"](state, (batch, self.beside(number)))
        return state, (metrics._replace(gradient=None), digests)

    def rows(self, number: int, out: Any, seen: Any) -> StepRows:
        metrics, digests = fetch(out)
        return StepRows(scalar_row(metrics), [encode(number, digests)])

    def files(self) -> Mapping[str, Any]:
        digests = jax.eval_shape(self.compiled, *self.inputs)[2]
        return {SITES: sites_table(digests)}

    def conclude(self, state: Any) -> Mapping[str, Any]:
        return {"verdict": None, "reason": "a trace alone proves nothing; compare it with another trace (sdc diff)"}


@dataclasses.dataclass(frozen=True, eq=False)
class TwinProgram(Instrumented):
    """A program that trains twins side by side and compares them.

    Attributes:
        work: the step of one twin, which returns the gradient in its metrics.
        placement: the layout over devices, with twins.
        donate, faults, checks, seed: see `Instrumented`.
        sync: `compute` compares and repairs at every probe and after the step; `params` does so only after the step;
            `none` only compares.
        compare, exchange: see `sdc.lockstep`.
    """

    _: dataclasses.KW_ONLY
    sync: str = "compute"
    compare: Compare = "gated"
    exchange: Exchange = "probe"

    def around(self, step: Callable[..., Any]) -> Callable[..., tuple[Any, Reports[Any]]]:
        if self.sync != "compute":
            return super().around(step)
        return sdc.lockstep(step, TWIN, compare=self.compare, exchange=self.exchange)

    @functools.cached_property
    def compiled_observation(self) -> jax.stages.Wrapped:
        """Jitted function `(state, gradient) -> (state, reports)`, which compares twins after the step and repairs the
        suspect."""
        specs, gradient_specs = self.work.state_specs, self.work.metrics_specs.gradient
        model = self.placement.mesh.shape[MODEL]
        replicas = [1 if MODEL in spec else model for spec in jax.tree.leaves(gradient_specs)]

        def distance(tree: Any, agreed: Any) -> Any:
            leaves = jax.tree.leaves(tree)
            zeros = jnp.zeros(lax.axis_size(TWIN), jnp.float32)
            return lax.cond(
                agreed.differs,
                lambda: squared_distance(leaves, TWIN, replicas, agreed.reference),
                lambda: zeros,
            )

        def norm(tree: Any) -> Any:
            parts = zip(jax.tree.leaves(tree), replicas, strict=True)
            return lax.psum(sum(jnp.sum(jnp.square(leaf)) / count for leaf, count in parts), (DATA, MODEL))

        def fn(stacked: tuple[Any, Any], _: None) -> Any:
            state, gradient = stacked
            gradients = agreement(jax.tree.leaves(gradient), TWIN)
            params = agreement(jax.tree.leaves(state.params), TWIN)
            squares = {
                "gradient_difference": distance(gradient, gradients),
                "parameter_difference": distance(state.params, params),
                "parameter_norm": norm(state.params),
            }
            _, gradient_mismatch = sdc.synchronize(gradient, TWIN, repair=False, compare=self.compare, agreed=gradients)
            state, mismatch = sdc.synchronize(state, TWIN, repair=self.sync != "none", compare=self.compare)
            return state, {"squares": squares, "gradient": gradient_mismatch, "state": mismatch}

        mapped = self.placement.map(fn, stacked=(specs, gradient_specs), shared=None, out=(specs, RANKS))
        # The outputs of the step have no other user, so they are donated.
        return self.placement.jit(lambda state, gradient: mapped((state, gradient), None), donate=True)

    def observe(self, state: Any, out: Any) -> tuple[Any, Any]:
        return self.executables["observe"](state, out[0].gradient)

    def rows(self, number: int, out: Any, seen: Any) -> StepRows:
        metrics, reports = out
        metrics, (mismatches, events, flags), seen = fetch((metrics._replace(gradient=None), reports, seen))
        sites, rows = tally(mismatches, events, step=number)
        squares = {name: np.sqrt(value[:, 0, 0].astype(np.float64)) for name, value in seen["squares"].items()}
        difference, norms = squares["gradient_difference"][0], metrics.gradient_norm.astype(np.float64)
        signal = norms[int(np.argmin(difference))]  # the reference has a difference of zero from itself
        row = {
            **scalar_row(metrics),
            "sites": sites,
            "state": total(seen["state"]),
            "gradient": total(seen["gradient"]),
            "gradient_difference": difference,
            # Equation (5) of the study is the maximum of these ratios over all steps.
            "noise_to_signal": np.where(difference == 0, 0.0, difference / signal if signal else np.inf),
            "parameter_difference": squares["parameter_difference"][0],
            "parameter_norm": squares["parameter_norm"],
        }
        return StepRows(row | ({} if self.checks is None else {"abft": tally_flags(flags, twins=True)}), rows)

    @functools.cached_property
    def lowered(self) -> Mapping[str, jax.stages.Lowered]:
        metrics = jax.eval_shape(self.compiled, *self.inputs)[1]
        shardings = self.placement.sharding(self.placement.spec(self.work.metrics_specs.gradient))
        observe = self.compiled_observation.lower(self.abstract(), described(metrics.gradient, shardings))
        return {**super().lowered, "observe": observe}


@dataclasses.dataclass(frozen=True, eq=False)
class OperationsProgram(TwinProgram):
    """A program that trains twins from the same state at each step, and compares digests of the result of every
    operation.

    Nothing is exchanged inside a step, so devices do not wait for one another; the processes compare the digests after
    the step. `sync` is `params`, since twins are compared and repaired after the step.
    """

    _: dataclasses.KW_ONLY
    where: Selector = everything

    def around(self, step: Callable[..., Any]) -> Callable[..., tuple[Any, Reports[Any]]]:
        return sdc.fingerprint(step, self.where)

    def rows(self, number: int, out: Any, seen: Any) -> StepRows:
        metrics, (digests, events, flags) = out
        rows = super().rows(number, (metrics, (NONE, events, flags)), seen)
        found = first_operation(fetch(digests))
        counts: dict[str, Any] = {"checked": sum(value.size // 2 for value in digests.values())}
        return StepRows({**rows.row, "operations": counts if found is None else counts | found}, rows.details)


def first_operation(digests: Reports[Any]) -> dict[str, Any] | None:
    """Returns the first operation whose digests differ between twins, as JSON; None if all agree."""
    values = [np.asarray(value) for value in digests.values()]
    copies = [Reports(digests.sites, [value[twin] for value in values]) for twin in range(len(values[0]))]
    whole = [b"".join(value[twin].tobytes() for value in values) for twin in range(len(copies))]
    groups = Counter(whole)
    if len(groups) == 1:
        return None
    # The reference is the first of two twins; with more twins, it is one of the largest group that agrees.
    largest, size = groups.most_common(1)[0]
    reference = 0 if len(copies) == 2 else whole.index(largest)
    apart = {
        twin: found
        for twin, copy in enumerate(copies)
        if (found := sdc.first_difference(copies[reference], copy, nearest=0)) is not None
    }
    when = {twin: place_of(found.site, found.iteration) for twin, found in apart.items()}
    early = {twin: found for twin, found in apart.items() if when[twin] == min(when.values())}
    first = next(iter(early.values()))
    names = {"axis0": DATA, "axis1": MODEL}  # names of the leading axes of digests
    return {
        **msgspec.structs.asdict(describe_place(first.site, first.iteration)),
        "mismatched": sum(int((value != value[reference]).any(-1).sum()) for value in values),
        "agreeing": first.agreeing * len(copies),
        "undecided": len(copies) > 2 and 2 * size <= len(copies),
        "ranks": [
            {TWIN: twin, **{names[axis]: index for axis, index in device.items() if axis in names}}
            for twin, found in early.items()
            for device in found.devices
        ],
    }
