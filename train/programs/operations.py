"""Twins that digest every operation of a step: the first one that differs is named, and the state repaired after it."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import sdc
from sdc.program import Reports, Selector, everything
from sdc.twins import FirstDifference, describe_place, place_of

from .. import DATA, MODEL, RANKS, TWIN, fetch
from .device import NONE, instrument
from .protocol import Rows
from .twins import TwinProgram


@dataclasses.dataclass(frozen=True, eq=False)
class OperationsProgram(TwinProgram):
    """Trains twins that start each step from the same state, and compares the digests of what each operation gave.

    Nothing is exchanged inside of a step, so that devices wait for nobody; digests are compared after it, by the
    processes. `sync` is `params`, since that is when twins are compared and repaired.

    Attributes:
        where: the values that are digested.
    """

    where: Selector = everything

    @functools.cached_property
    def compiled(self) -> jax.stages.Wrapped:
        """`(state, (tokens, key)) -> (state, metrics, (digests, events, flags))`, jitted."""
        instrumented = instrument(self.work.fn, self.faults, self.checks)

        def fn(state: Any, shared: tuple[Any, Any]) -> Any:
            tokens, key = shared
            moment = sdc.Moment(key, state.step)
            (out, events, flags), digests = sdc.fingerprint(instrumented, self.where)(moment, state, tokens)
            return *out, (digests, events, flags)

        return self.jitted(fn, P(), RANKS, donate=self.donate)

    def rows(self, number: int, out: Any, seen: Any) -> Rows:
        metrics, (digests, events, flags) = out
        rows = super().rows(number, (metrics, (NONE, events, flags)), seen)
        found = first_operation(fetch(digests))
        counts: dict[str, Any] = {"checked": sum(value.size // 2 for value in digests.values())}
        return Rows({**rows.row, "operations": counts if found is None else counts | found}, rows.details)


def first_operation(digests: Reports) -> dict[str, Any] | None:
    """The first operation whose digests differ between twins, as JSON; None where all agree.

    Args:
        digests: as `sdc.fingerprint` returns them, behind the axes of twins, data ranks and model ranks.
    """
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
