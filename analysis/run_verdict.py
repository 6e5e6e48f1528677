"""The verdict of a run, and what it follows from: what must be equal, what differs, what was checked, what is missing.

This is the one place where a verdict follows from the lines of a record.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from sdc.schema import (
    MismatchRow,
    OperationCounts,
    ProductTotals,
    RunManifest,
    RunSummary,
    SiteCounts,
    StepRow,
    TwinCounts,
)
from sdc.verdict import Verdict, gravest

from .series import each, real, whole
from .statistics import frequency_upper_bound

BITWISE = {"loss": "losses", "gradient_norm": "gradient norms", "parameter_norm": "parameter norms"}
"""What a line has once for each twin: equal numbers, if the twins are equal."""
APART = {
    "gradient_difference": "gradients", "parameter_difference": "parameters", "noise_to_signal": "gradients"
}  # fmt: skip
"""How far each twin is from the reference: zeros, if the twins are equal."""
COMPARED = {"state": "parameters and optimizer state", "gradient": "gradients"}
COUNTS = ("checked", "mismatched", "injected", "zero_reference", "nonfinite")
ALL_COUNTS = (*COUNTS, "undecided", "unrepeated")
DIFFERENT = ("mismatched", "zero_reference", "nonfinite", "undecided", "unrepeated")
"""Counts of elements that differed, and of ranks where they did."""
SIZES = ("frequency", "severity", "relative_max")
"""How much of it differed, and by how much."""
REHEARSAL = "a rehearsal, not a test of hardware: all twins share one processor"
NOTHING = {
    "trace": "a trace has to be compared with another", "train": "a training run has no twin to compare with"
}  # fmt: skip
Comparison: TypeAlias = SiteCounts | TwinCounts | MismatchRow | OperationCounts
PRODUCTS = ("checked", "examined", "flagged", "confirmed", "corrected", "nonfinite")
"""Counts of rows of matrix products."""


class Judgement(NamedTuple):
    """A verdict, None where nothing is compared, and the reason in words."""

    verdict: Verdict | None
    reason: str


def inconclusive(reason: str) -> Judgement:
    """Too little is known to say."""
    return Judgement(Verdict.INCONCLUSIVE, reason)


def graver(one: Judgement, other: Judgement) -> Judgement:
    """The graver of two judgements; the first where they are alike."""
    return one if gravest([one.verdict, other.verdict]) is one.verdict else other


def judge(
    manifest: RunManifest,
    steps: Sequence[StepRow],
    mismatches: Sequence[MismatchRow],
    summary: RunSummary,
    *,
    whole_run: bool = True,
) -> Judgement:
    """The verdict that follows from the lines of a run, or of some of its steps, and from their totals."""
    sites = {**summary.submodules, **summary.other_sites}
    total = {name: sum(getattr(site, name) for site in sites.values()) for name in COUNTS}
    products: Judgement | None = None
    if summary.abft is not None:
        least = real(manifest.abft.least_coverage) if manifest.abft else None
        products = _products(summary.abft, steps=len(steps), injected=total["injected"], least=least or 0.0)
        if products.verdict is Verdict.CLEAN and (lacking := _products_gap(steps)):
            products = inconclusive(lacking)
    elif whole_run and manifest.abft is not None:
        products = inconclusive("no row of a matrix product was checked: no step was done")
    if manifest.kind != "twin":
        return products or Judgement(None, NOTHING.get(manifest.kind, NOTHING["train"]))
    found = _twins(manifest, steps, summary, total, whole_run)
    if found.verdict is Verdict.CLEAN and (lacking := _gap(manifest, steps, mismatches, whole_run=whole_run)):
        found = inconclusive(lacking)
    if products is None or products.verdict is Verdict.CLEAN:
        return found
    # Of two findings the graver one is the verdict; twins that agree do not clear a product that is flagged.
    return Judgement(gravest([found.verdict, products.verdict]), f"{found.reason}; {products.reason}")


def final_states(manifest: RunManifest, digests: Sequence[str] | None, *, ended: bool = True) -> Judgement | None:
    """What the digests of the twins' final states say: bits may change after the last step was compared."""
    found = digests or ()
    if manifest.kind != "twin" or not (found or ended):
        return None
    if len(set(found)) < 2:
        twins = manifest.twins or len(found)
        said = f"the record has {len(found)} final states of {twins} twins"
        return inconclusive(said) if len(found) != twins else None
    said = ", ".join(f"twin {twin} has {digest}" for twin, digest in enumerate(found))
    return Judgement(Verdict.CORRUPT, f"the twins' final states differ, by their digests: {said}")


def odd_digests(digests: Sequence[str] | None) -> list[int]:
    """Numbers of the twins whose final state is not that of the majority; of two, by convention, the second.

    Empty where all agree, or no majority does.
    """
    found = digests or ()
    if len(found) == 2:
        return [1] if found[0] != found[1] else []
    most = next((digest for digest, times in Counter(found).items() if 2 * times > len(found)), None)
    return [] if most is None else [twin for twin, digest in enumerate(found) if digest != most]


def odd_twins(steps: Sequence[StepRow], mismatches: Sequence[MismatchRow]) -> list[int]:
    """Numbers of the twins that differ from the reference: the majority of three or more, the first of two."""
    parts: list[MismatchRow | TwinCounts] = [*mismatches]
    parts += [part for row in steps for part in (row.state, row.gradient) if part is not None]
    apart = (rank for part in parts for rank in part.ranks if whole(rank.mismatched) or whole(rank.unrepeated))
    return sorted({twin for rank in apart if (twin := whole(rank.twin)) is not None})


def is_rehearsal(manifest: RunManifest) -> bool:
    """Whether all twins ran on one processor, as simulated devices do: they share the hardware that could be wrong."""
    environment = manifest.environment
    if manifest.kind != "twin" or isinstance(environment, str | None) or environment.platform != "cpu":
        return False
    if not manifest.devices:  # of a record that does not name them
        return manifest.processes == 1
    machines = {device.machine or device.host for device in manifest.devices}
    return min(len(machines), manifest.hosts or len(machines)) == 1


def _twins(
    manifest: RunManifest, steps: Sequence[StepRow], summary: RunSummary, total: Mapping[str, int], whole_run: bool
) -> Judgement:
    first = summary.first_mismatch_step
    if first is not None:
        guesses = sum(whole(part.undecided) or 0 for row in steps for part in compared(row).values())
        guessed = f"; {guesses:,} times no majority agreed, so that the reference was a guess" if guesses else ""
        return Judgement(Verdict.CORRUPT, f"{_evidence(steps, summary, total)}; first at step {first}{guessed}")
    if not steps:
        return inconclusive("no step was done")
    checked = {"submodule outputs and input gradients": total["checked"]}
    checked |= {name: getattr(summary, part).checked for part, name in reversed(COMPARED.items())}
    what, elements = next((item for item in checked.items() if item[1]), ("", 0))
    if whole_run and not elements:
        return inconclusive(f"nothing was checked in {len(steps)} steps")
    if total["injected"]:
        return inconclusive(f"{total['injected']:,} values were corrupted on purpose and no check saw any of them")
    if whole_run and elements < (least := manifest.least_elements or 0):
        return inconclusive(
            f"no mismatch, but only {elements:,} elements ({what}) were checked over {len(steps)} steps, and at "
            f"least {least:,} were asked for; run more steps"
        )
    if not elements:
        return Judgement(Verdict.CLEAN, "nothing was checked, nor had to be")
    bound = frequency_upper_bound(0, elements)
    return Judgement(
        Verdict.CLEAN,
        f"no mismatch in {elements:,} checked elements ({what}) over {len(steps)} steps; at 95 % confidence the "
        f"mismatch frequency is below {bound:.2g} per element, if elements fail independently{_rests_on(manifest)}",
    )


def _rests_on(manifest: RunManifest) -> str:
    """What a clean verdict rests on, where that is less than one would think."""
    if is_rehearsal(manifest):
        return f"; {REHEARSAL}"
    if manifest.placement == "vmap":
        return "; twins shared their devices, so that a fault that repeats itself would hit all of them alike"
    return ""


def _evidence(steps: Sequence[StepRow], summary: RunSummary, total: Mapping[str, int]) -> str:
    parts = []
    if total["mismatched"]:
        sites = {**summary.submodules, **summary.other_sites}
        hit = [name for name, site in sites.items() if site.mismatched]
        parts.append(f"{total['mismatched']:,} of {total['checked']:,} elements at {', '.join(hit)}")
    parts += _unrepeated(steps)
    for part, name in COMPARED.items():
        counts = getattr(summary, part)
        if counts.mismatched:
            parts.append(f"{counts.mismatched:,} of {counts.checked:,} elements of the {name}")
    for key, name in BITWISE.items():
        if differing := sum(unequal(row, key) for row in steps):
            parts.append(f"the {name} of {differing:,} steps")
    if digests := sum(whole(row.operations.mismatched) or 0 for row in steps if row.operations):
        parts.append(f"{digests:,} digests of operations")
    if not parts:
        parts = [f"the {name}" for key, name in APART.items() if any(apart(row, key) for row in steps)]
    odd = summary.odd_twins
    who = f"twin {' and '.join(map(str, odd))} differs from the majority" if odd and (summary.twins or 0) > 2 else ""
    return f"{who or 'the twins differ'} in {'; '.join(parts) or 'a step whose totals are not on record'}"


def _unrepeated(steps: Sequence[StepRow]) -> list[str]:
    """What differed once and not when the step was repeated; empty where there is none."""
    found: Counter[str] = Counter()
    for row in steps:
        for name, site in row.sites.items():
            found[name] += whole(site.unrepeated) or 0
    if not (times := sum(found.values())):
        return []
    hit, many = ", ".join(name for name in found if found[name]), "s" * (times > 1)
    return [f"{times:,} digest{many} at {hit} that did not differ again when repeated, so by how much is not known"]


def _products(found: ProductTotals, *, steps: int, injected: int, least: float) -> Judgement:
    """What the checks of matrix products say; so many values were changed on purpose, so much had to be checked."""
    if found.flagged:
        hit = [name for name, site in found.sites.items() if site.flagged]
        where = f"{len(hit)} of {len(found.sites)} products, first at step {found.first_step}"
        rows = f"{found.flagged:,} of {found.checked:,} checked rows of matrix products are wrong, in {where}"
        if found.confirmed:
            mended = f", and {found.corrected:,} were replaced" if found.corrected else ""
            again = f"{found.confirmed:,} of them are right when computed again"
            return Judgement(Verdict.CORRUPT, f"{rows}; {again}{mended}")
        return inconclusive(
            f"{rows}, and as wrong when computed again: a permanent fault or a false alarm; "
            "run the same steps on another device"
        )
    blind = found.nonfinite
    unjudged = f" ({blind:,} rows of products had inputs that are not finite, and cannot be judged)" if blind else ""
    if not found.checked:
        return inconclusive(f"no row of a matrix product was checked in {steps} steps{unjudged}")
    if injected:
        return inconclusive(
            f"{injected:,} values were corrupted on purpose and no check of a product saw any of them{unjudged}",
        )
    if found.coverage is not None and found.coverage < least:
        named = [f": {one.site} ({one.source}): {one.reason}" for one in found.skipped[:1]]
        more = f", and {len(found.skipped) - 1} more" if len(found.skipped) > 1 else ""
        return inconclusive(
            f"no flag in {found.checked:,} checked rows, but only {found.coverage:.1%} of the work of matrix products "
            f"was checked (least coverage {least:.1%}){''.join(named)}{more}"
        )
    bound = frequency_upper_bound(0, int(found.checked))
    return Judgement(
        Verdict.CLEAN,
        f"no flag in {found.checked:,} checked rows of matrix products over {steps} steps{unjudged}; at 95 % "
        f"confidence fewer than {bound:.2g} of the rows have an error that the check can see, if rows fail "
        "independently",
    )


def _products_gap(steps: Sequence[StepRow]) -> str | None:
    """Why the lines of a run without a flag do not speak for all its products; None where they do."""
    for row in steps:
        line, step = row.abft, row.step
        if line is None:
            return f"step {step} has no counts of its products; no row is flagged in all else"
        if not 0 <= (-1.0 if line.coverage is None else line.coverage) <= 1:
            return f"step {step} has no readable coverage of its products; no row is flagged in all else"
        for key in PRODUCTS:
            parts = [whole(getattr(site, key)) for site in line.sites.values()]
            if None in parts or whole(getattr(line, key)) != sum(part or 0 for part in parts):
                return f"step {step} has counts of products that do not add up ({key}); no row is flagged in all else"
        if any(whole(place.flagged) != 0 for place in line.rows):
            return f"step {step} names flagged rows of products that its counts do not have"
    return None


def first_mismatch(steps: Iterable[StepRow], mismatches: Iterable[MismatchRow]) -> int | None:
    """Number of the first step in which anything differs that must be equal; the steps are in order."""
    found = [row.step for row in mismatches if _found(row)]
    found += [row.step for row in [next(filter(differs, steps), None)] if row is not None]
    return min(found, default=None)


def differs(row: StepRow) -> bool:
    """Whether any number of a line of `steps.jsonl` says that the twins differ."""
    counted = any(map(_found, compared(row).values())) or (row.operations is not None and _found(row.operations))
    return counted or any(unequal(row, key) for key in BITWISE) or any(apart(row, key) for key in APART)


def what_differs(steps: Sequence[StepRow]) -> list[str]:
    """Names of what differs anywhere in lines of `steps.jsonl`, for reading."""
    names = [name for key, name in BITWISE.items() if any(unequal(row, key) for row in steps)]
    names += [f"distances of the {name}" for key, name in APART.items() if any(apart(row, key) for row in steps)]
    names += ["digests of operations"] * any(row.operations is not None and _found(row.operations) for row in steps)
    names += [f"counts of {name}" for row in steps for name, entry in compared(row).items() if _found(entry)]
    return list(dict.fromkeys(names))


def compared(row: StepRow) -> dict[str, SiteCounts | TwinCounts]:
    """The comparisons of a line by name: its sites, then gradient and state."""
    parts = {name: part for name in COMPARED if (part := getattr(row, name)) is not None}
    return {**row.sites, **parts}


def unequal(row: StepRow, key: str) -> bool:
    """Whether the twins' numbers differ in any bit; two NaNs are equal."""
    values = [found for value in each(getattr(row, key)) if (found := real(value)) is not None]
    return len({b"NaN" if math.isnan(value) else struct.pack("<d", value) for value in values}) > 1


def apart(row: StepRow, key: str) -> bool:
    """Whether any twin is away from the reference."""
    return any(real(value) not in (None, 0.0) for value in each(getattr(row, key)))


def _gap(
    manifest: RunManifest, steps: Sequence[StepRow], mismatches: Iterable[MismatchRow], *, whole_run: bool
) -> str | None:
    """Why the lines of twins that agree do not speak for their steps, or for all of the run; None where they do."""
    first = steps[0] if whole_run and steps else None
    at_first = {} if first is None else compared(first)
    for place, row in enumerate(steps):
        step = row.step
        if whole_run and step != place:
            return f"step {place} is not on record; nothing differs in the {len(steps)} that are"
        here = compared(row)
        for name, entry in here.items():
            if problem := _unreadable(entry):
                return f"step {step} has no readable {problem} of {name}; nothing differs in all else"
        for name, entry in at_first.items():
            if name not in here or here[name].checked != entry.checked:
                return f"step {step} did not compare {name} as step 0 did; nothing differs in all else"
        for key in (*BITWISE, *APART):
            values = each(getattr(row, key))
            if any(real(value) is None for value in values):
                return f"step {step} has no readable {key}; nothing differs in all else"
            expected = manifest.twins or len(values)
            lost = not values and first is not None and each(getattr(first, key))
            if len(values) not in (expected, 0) or lost:
                return f"step {step} has {len(values)} numbers {key} of {expected} twins; nothing differs in all else"
    for detail in mismatches:
        if problem := _unreadable(detail):
            return f"a detail of step {detail.step} has no readable {problem}; nothing differs in all else"
    last = each(steps[-1].loss) if whole_run and steps else ()
    if not all(math.isfinite(real(loss) or 0.0) for loss in last):
        return "the losses are not finite in the end, and what is NaN hides differences; train with other settings"
    return None


def _found(entry: Comparison) -> bool:
    """Whether any of the numbers of a comparison says that something differed."""
    ranks = [] if isinstance(entry, OperationCounts) else getattr(entry, "ranks", [])
    counts = (*(getattr(entry, key, None) for key in DIFFERENT), *(rank.mismatched for rank in ranks))
    return any(map(whole, counts)) or any(real(getattr(entry, key, None)) for key in SIZES)


def _unreadable(entry: SiteCounts | TwinCounts | MismatchRow) -> str | None:
    """What in a comparison is no count, though the verdict needs it; None for a sound one."""
    for key in ALL_COUNTS:
        if (value := getattr(entry, key, None)) is not None and whole(value) is None:
            return key
    if (entry.checked is None) != (entry.mismatched is None):
        return "checked" if entry.checked is None else "mismatched"
    ranks = getattr(entry, "ranks", [])
    return "ranks" if any(rank.mismatched is not None and whole(rank.mismatched) is None for rank in ranks) else None
