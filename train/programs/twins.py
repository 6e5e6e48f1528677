"""Twins: in lock-step, free, or with digests of every operation, and what is compared between them after a step."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sdc
from sdc.program import Reports, Selector, everything
from sdc.records import program_fingerprint
from sdc.twins import Compare, Exchange, FirstDifference, agreement, describe_place, place_of, squared_distance

from .device import NONE, Instrumented, Rows, described, scalar_row
from .model import DATA, MODEL
from .placement import RANKS, TWIN, fetch
from .tallies import tally, tally_flags, total


@dataclasses.dataclass(frozen=True, eq=False)
class TwinProgram(Instrumented):
    """Trains twins side by side and compares them.

    Attributes:
        work: the step of one twin, which returns the gradient in its metrics.
        placement: where the program runs, with twins.
        donate, faults, checks, seed: see `SingleProgram`.
        sync: `compute` compares and repairs at every probe and after the step, `params` after the step, `none` only
            compares.
        compare, exchange: see `sdc.lockstep`.
    """

    _: dataclasses.KW_ONLY
    sync: str = "compute"
    compare: Compare = "gated"
    exchange: Exchange = "probe"

    def around(self, step: Callable[..., Any]) -> Callable[..., tuple[Any, Reports]]:
        if self.sync != "compute":
            return super().around(step)
        return sdc.lockstep(step, TWIN, compare=self.compare, exchange=self.exchange)

    @functools.cached_property
    def compiled_observation(self) -> jax.stages.Wrapped:
        """`(state, gradient) -> (state, reports)`, jitted: twins compared after the step, and the suspect repaired."""
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
        # What the step returned belongs to nobody else.
        return self.placement.jit(lambda state, gradient: mapped((state, gradient), None), donate=True)

    def observe(self, state: Any, out: Any) -> tuple[Any, Any]:
        return self.compiled_observation(state, out[0].gradient)

    def rows(self, number: int, out: Any, seen: Any) -> Rows:
        metrics, reports = out
        metrics, (mismatches, events, flags), seen = fetch((metrics._replace(gradient=None), reports, seen))
        sites, rows = tally(mismatches, events, step=number)
        squares = {name: np.sqrt(value[:, 0, 0].astype(np.float64)) for name, value in seen["squares"].items()}
        difference, norms = squares["gradient_difference"][0], metrics.gradient_norm.astype(np.float64)
        signal = norms[int(np.argmin(difference))]  # the reference differs by nothing from itself
        row = {
            **scalar_row(metrics),
            "sites": sites,
            "state": total(seen["state"]),
            "gradient": total(seen["gradient"]),
            "gradient_difference": difference,
            # Equation (5) of the study is the largest of these over the steps.
            "noise_to_signal": np.where(difference == 0, 0.0, difference / signal if signal else np.inf),
            "parameter_difference": squares["parameter_difference"][0],
            "parameter_norm": squares["parameter_norm"],
        }
        return Rows(row | ({} if self.checks is None else {"abft": tally_flags(flags, twins=True)}), rows)

    def fingerprint(self) -> dict[str, str]:
        state = self.abstract()
        metrics = jax.eval_shape(self.compiled, state, (self.batch, self.beside()))[1]
        shardings = self.placement.sharding(self.placement.spec(self.work.metrics_specs.gradient))
        gradient = described(metrics.gradient, shardings)
        return super().fingerprint() | {
            "observe": program_fingerprint(self.compiled_observation.lower(state, gradient))
        }


@dataclasses.dataclass(frozen=True, eq=False)
class OperationsProgram(TwinProgram):
    """Trains twins that start each step from the same state, and compares the digests of what each operation gave.

    Nothing is exchanged inside of a step, so that devices wait for nobody; digests are compared after it, by the
    processes. `sync` is `params`, since that is when twins are compared and repaired.
    """

    _: dataclasses.KW_ONLY
    where: Selector = everything

    def around(self, step: Callable[..., Any]) -> Callable[..., tuple[Any, Reports]]:
        return sdc.fingerprint(step, self.where)

    def rows(self, number: int, out: Any, seen: Any) -> Rows:
        metrics, (digests, events, flags) = out
        rows = super().rows(number, (metrics, (NONE, events, flags)), seen)
        found = first_operation(fetch(digests))
        counts: dict[str, Any] = {"checked": sum(value.size // 2 for value in digests.values())}
        return Rows({**rows.row, "operations": counts if found is None else counts | found}, rows.details)


def first_operation(digests: Reports) -> dict[str, Any] | None:
    """The first operation whose digests differ between twins, as JSON; None where all agree."""
    values = [np.asarray(value) for value in digests.values()]
    copies = [Reports(digests.sites, [value[twin] for value in values]) for twin in range(len(values[0]))]
    whole = [b"".join(value[twin].tobytes() for value in values) for twin in range(len(copies))]
    if len(set(whole)) == 1:
        return None
    reference = _reference(whole)
    apart = {
        twin: found
        for twin, copy in enumerate(copies)
        if (found := sdc.first_difference(copies[reference], copy, nearest=0)) is not None
    }
    when = {twin: place_of(found.site, found.iteration) for twin, found in apart.items()}
    early = {twin: found for twin, found in apart.items() if when[twin] == min(when.values())}
    first = next(iter(early.values()))
    return {
        **describe_place(first.site, first.iteration),
        "mismatched": sum(int((value != value[reference]).any(-1).sum()) for value in values),
        "agreeing": first.agreeing * len(copies),
        "undecided": len(copies) > 2 and 2 * Counter(whole)[whole[reference]] <= len(copies),
        "ranks": [{TWIN: twin, **rank} for twin, found in early.items() for rank in _ranks(found)],
    }


def _reference(whole: Sequence[bytes]) -> int:
    """The first of two twins; of more, one of the largest group that agrees."""
    if len(whole) == 2:
        return 0
    return whole.index(Counter(whole).most_common(1)[0][0])


def _ranks(found: FirstDifference) -> list[dict[str, int]]:
    """Data and model ranks at which an operation differs, under the names of the mesh."""
    names = {"axis0": DATA, "axis1": MODEL}
    return [{names[axis]: index for axis, index in device.items() if axis in names} for device in found.devices]
