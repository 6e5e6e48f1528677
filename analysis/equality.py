"""What must be equal between twins: whether a line of a record says that it is, and whether it says anything."""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .series import Row, count, mapping, number, sequence

BITWISE = {"loss": "losses", "gradient_norm": "gradient norms", "parameter_norm": "parameter norms"}
"""What a line has once for each twin: equal numbers, if the twins are equal."""
APART = {
    "gradient_difference": "gradients", "parameter_difference": "parameters", "noise_to_signal": "gradients"
}  # fmt: skip
"""How far each twin is from the reference: zeros, if the twins are equal."""
COMPARED = {"state": "parameters and optimizer state", "gradient": "gradients"}
OPERATIONS = "operations"
"""What twins have that digest each operation: counts of digests, and the first that differs."""
COUNTS = ("checked", "mismatched", "injected", "zero_reference", "nonfinite", "undecided", "unrepeated")
DIFFERENT = ("mismatched", "zero_reference", "nonfinite", "undecided", "unrepeated")
"""Counts of elements that differed, and of ranks where they did."""
SIZES = ("frequency", "severity", "relative_max")
"""How much of it differed, and by how much."""


def first_mismatch(steps: Iterable[Row], mismatches: Iterable[Row]) -> int | None:
    """Number of the first step in which anything differs that must be equal; the steps are in order."""
    found = [row["step"] for row in mismatches if _found(row)]
    found += [row["step"] for row in [next(filter(differs, steps), None)] if row is not None]
    return min(found, default=None)


def differs(row: Row) -> bool:
    """Whether any number of a line of `steps.jsonl` says that the twins differ."""
    counted = any(map(_found, (*compared(row).values(), mapping(row.get(OPERATIONS)))))
    return counted or any(unequal(row, key) for key in BITWISE) or any(apart(row, key) for key in APART)


def what_differs(steps: Sequence[Row]) -> list[str]:
    """Names of what differs anywhere in lines of `steps.jsonl`, for reading."""
    names = [name for key, name in BITWISE.items() if any(unequal(row, key) for row in steps)]
    names += [f"distances of the {name}" for key, name in APART.items() if any(apart(row, key) for row in steps)]
    names += ["digests of operations"] * any(_found(mapping(row.get(OPERATIONS))) for row in steps)
    names += [f"counts of {name}" for row in steps for name, entry in compared(row).items() if _found(entry)]
    return list(dict.fromkeys(names))


def compared(row: Row) -> dict[str, Row]:
    """The comparisons of a line by name: its sites, then gradient and state."""
    parts = {name: mapping(row.get(name)) for name in COMPARED if row.get(name) is not None}
    return {**{name: mapping(site) for name, site in mapping(row.get("sites")).items()}, **parts}


def unequal(row: Row, key: str) -> bool:
    """Whether the twins' numbers differ in any bit; two NaNs are equal."""
    return key in row and len({bits for value in sequence(row[key]) if (bits := _bits(value)) is not None}) > 1


def apart(row: Row, key: str) -> bool:
    """Whether any twin is away from the reference."""
    return key in row and any(number(value) not in (None, 0.0) for value in sequence(row[key]))


def gap(manifest: Row, steps: Sequence[Row], mismatches: Iterable[Row], *, whole: bool) -> str | None:
    """Why the lines of twins that agree do not speak for their steps, or for all of the run; None where they do.

    Args:
        manifest: contents of `manifest.json`.
        steps: lines of `steps.jsonl`.
        mismatches: lines of `mismatches.jsonl`.
        whole: the lines are those of the whole run, so that none may be missing.
    """
    twins = count(manifest.get("twins"))
    first = steps[0] if whole and steps else {}
    at_first = compared(first)
    for place, row in enumerate(steps):
        step = row["step"]
        if whole and step != place:
            return f"step {place} is not on record; nothing differs in the {len(steps)} that are"
        here = compared(row)
        for name, entry in here.items():
            if problem := _unreadable(entry):
                return f"step {step} has no readable {problem} of {name}; nothing differs in all else"
        if lacking := _lacking(at_first, here):
            return f"step {step} did not compare {lacking} as step 0 did; nothing differs in all else"
        for key in (*BITWISE, *APART):
            values = sequence(row.get(key))
            if any(number(value) is None for value in values):
                return f"step {step} has no readable {key}; nothing differs in all else"
            expected = twins or len(values)
            if len(values) not in (expected, 0) or (not values and sequence(first.get(key))):
                return f"step {step} has {len(values)} numbers {key} of {expected} twins; nothing differs in all else"
    for row in mismatches:
        if problem := _unreadable(row):
            return f"a detail of step {row['step']} has no readable {problem}; nothing differs in all else"
    last = sequence(steps[-1].get("loss")) if whole and steps else ()
    if not all(math.isfinite(number(loss) or 0.0) for loss in last):
        return "the losses are not finite in the end, and what is NaN hides differences; train with other settings"
    return None


def _found(entry: Row) -> bool:
    """Whether any of the numbers of a comparison says that something differed."""
    ranks = (mapping(rank).get("mismatched") for rank in sequence(entry.get("ranks")))
    counts = (*(entry.get(key) for key in DIFFERENT), *ranks)
    return any(count(value) for value in counts) or any(number(entry.get(key)) for key in SIZES)


def _unreadable(entry: Row) -> str | None:
    """What in a comparison is no count, though the verdict needs it; None for a sound one."""
    for key in COUNTS:
        if key in entry and count(entry[key]) is None:
            return key
    if ("checked" in entry) != ("mismatched" in entry):
        return "mismatched" if "checked" in entry else "checked"
    ranks = [mapping(rank) for rank in sequence(entry.get("ranks"))]
    return "ranks" if any(count(rank.get("mismatched", 0)) is None for rank in ranks) else None


def _lacking(first: Mapping[str, Row], row: Mapping[str, Row]) -> str | None:
    """A comparison of the first step that is not as large, or not there at all, in this one."""
    return next((name for name in first if row.get(name, {}).get("checked") != first[name].get("checked")), None)


def _bits(value: Any) -> bytes | None:
    found = number(value)
    if found is None:
        return None
    return b"NaN" if math.isnan(found) else struct.pack("<d", found)
