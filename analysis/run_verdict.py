"""The verdict of a run, and what it follows from: what must be equal, what differs, what was checked, what is missing.

This is the one place where a verdict follows from the lines of a record.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from sdc import schema
from sdc.schema import MismatchRow, RunManifest, RunSummary, StepRow
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
DIFFERENT = ("mismatched", "zero_reference", "nonfinite", "undecided", "unrepeated")
"""Counts of elements that differed, and of ranks where they did."""
SIZES = ("frequency", "severity", "relative_max")
"""How much of it differed, and by how much."""
REHEARSAL = "a rehearsal, not a test of hardware: all twins share one processor"
PRODUCTS = ("checked", "examined", "flagged", "confirmed", "corrected", "nonfinite")
"""Counts of rows of matrix products."""
Comparison: TypeAlias = schema.SiteCounts | schema.TwinCounts | MismatchRow


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
    total = {name: sum(getattr(site, name) for site in summary.sites.values()) for name in COUNTS}
    products: Judgement | None = None
    if summary.abft is not None:
        least = (real(manifest.abft.least_coverage) if manifest.abft else None) or 0.0
        products = _products(summary.abft, steps, total["injected"], least)
    elif whole_run and manifest.abft is not None:
        products = inconclusive("no row of a matrix product was checked: no step was done")
    if manifest.kind != "twin":
        trace = manifest.kind == "trace"
        alone = "a trace has to be compared with another" if trace else "a training run has no twin to compare with"
        return products or Judgement(None, alone)
    found = _twins(manifest, steps, summary, total, whole_run)
    if found.verdict is Verdict.CLEAN and (lacking := _gap(manifest, steps, mismatches, whole_run)):
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


def _twins(
    manifest: RunManifest, steps: Sequence[StepRow], summary: RunSummary, total: Mapping[str, int], whole_run: bool
) -> Judgement:
    if summary.first_mismatch_step is not None:
        guesses = sum(whole(part.undecided) or 0 for row in steps for part in compared(row).values())
        guessed = f"; {guesses:,} times no majority agreed, so that the reference was a guess" if guesses else ""
        found = f"{_evidence(steps, summary, total)}; first at step {summary.first_mismatch_step}{guessed}"
        return Judgement(Verdict.CORRUPT, found)
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
    less = ""  # than one would think, a verdict rests on
    if summary.rehearsal:
        less = f"; {REHEARSAL}"
    elif manifest.placement == "vmap":
        less = "; twins shared their devices, so that a fault that repeats itself would hit all of them alike"
    return Judgement(
        Verdict.CLEAN,
        f"no mismatch in {elements:,} checked elements ({what}) over {len(steps)} steps; at 95 % confidence the "
        f"mismatch frequency is below {frequency_upper_bound(0, elements):.2g} per element, if elements fail "
        f"independently{less}",
    )


def _evidence(steps: Sequence[StepRow], summary: RunSummary, total: Mapping[str, int]) -> str:
    parts = []
    if total["mismatched"]:
        hit = [name for name, site in summary.sites.items() if site.mismatched]
        parts.append(f"{total['mismatched']:,} of {total['checked']:,} elements at {', '.join(hit)}")
    once: Counter[str] = Counter()
    for row in steps:
        once.update({name: whole(site.unrepeated) or 0 for name, site in row.sites.items()})
    if times := once.total():
        digests = f"{times:,} digest{'s' * (times > 1)} at {', '.join(name for name in once if once[name])}"
        parts.append(f"{digests} that did not differ again when repeated, so by how much is not known")
    for part, name in COMPARED.items():
        counts = getattr(summary, part)
        if counts.mismatched:
            parts.append(f"{counts.mismatched:,} of {counts.checked:,} elements of the {name}")
    for key, name in BITWISE.items():
        if differing := sum(_unequal(row, key) for row in steps):
            parts.append(f"the {name} of {differing:,} steps")
    if operations := sum(whole(row.operations.mismatched) or 0 for row in steps if row.operations):
        parts.append(f"{operations:,} digests of operations")
    parts = parts or [f"the {name}" for key, name in APART.items() if any(_apart(row, key) for row in steps)]
    odd = summary.odd_twins
    who = f"twin {' and '.join(map(str, odd))} differs from the majority" if odd and (summary.twins or 0) > 2 else ""
    return f"{who or 'the twins differ'} in {'; '.join(parts) or 'a step whose totals are not on record'}"


def _products(found: schema.ProductTotals, steps: Sequence[StepRow], injected: int, least: float) -> Judgement:
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
        return inconclusive(f"no row of a matrix product was checked in {len(steps)} steps{unjudged}")
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
    for row in steps:  # lines without a flag that do not speak for all products
        if (line := row.abft) is None:
            return inconclusive(f"step {row.step} has no counts of its products; no row is flagged in all else")
        lacking: list[str] = []
        if not 0 <= (-1.0 if line.coverage is None else line.coverage) <= 1:
            lacking.append("no readable coverage of its products")
        for key in PRODUCTS:
            parts = [whole(getattr(site, key)) for site in line.sites.values()]
            if None in parts or whole(getattr(line, key)) != sum(part or 0 for part in parts):
                lacking.append(f"counts of products that do not add up ({key})")
        if lacking:
            return inconclusive(f"step {row.step} has {lacking[0]}; no row is flagged in all else")
        if any(whole(place.flagged) != 0 for place in line.rows):
            return inconclusive(f"step {row.step} names flagged rows of products that its counts do not have")
    return Judgement(
        Verdict.CLEAN,
        f"no flag in {found.checked:,} checked rows of matrix products over {len(steps)} steps{unjudged}; at 95 % "
        f"confidence fewer than {frequency_upper_bound(0, int(found.checked)):.2g} of the rows have an error that the "
        "check can see, if rows fail independently",
    )


def what_differs(steps: Sequence[StepRow]) -> list[str]:
    """What lines of `steps.jsonl` say that differs between the twins, as words; empty where all is equal."""
    names = [name for key, name in BITWISE.items() if any(_unequal(row, key) for row in steps)]
    names += [f"distances of the {name}" for key, name in APART.items() if any(_apart(row, key) for row in steps)]
    names += ["digests of operations"] * any(row.operations and whole(row.operations.mismatched) for row in steps)
    names += [f"counts of {name}" for row in steps for name, entry in compared(row).items() if is_apart(entry)]
    return list(dict.fromkeys(names))


def compared(row: StepRow) -> dict[str, schema.SiteCounts | schema.TwinCounts]:
    """The comparisons of a line by name: its sites, then gradient and state."""
    parts = {name: part for name in COMPARED if (part := getattr(row, name)) is not None}
    return {**row.sites, **parts}


def _unequal(row: StepRow, key: str) -> bool:
    """Whether the twins' numbers differ in any bit; two NaNs are equal."""
    values = [found for value in each(getattr(row, key)) if (found := real(value)) is not None]
    return len({b"NaN" if math.isnan(value) else struct.pack("<d", value) for value in values}) > 1


def _apart(row: StepRow, key: str) -> bool:
    """Whether any twin is away from the reference."""
    return any(real(value) not in (None, 0.0) for value in each(getattr(row, key)))


def _gap(
    manifest: RunManifest, steps: Sequence[StepRow], mismatches: Iterable[MismatchRow], whole_run: bool
) -> str | None:
    """Why the lines of twins that agree do not speak for their steps, or for all of the run; None where they do."""
    first = steps[0] if whole_run and steps else None
    at_first = {} if first is None else compared(first)
    for place, row in enumerate(steps):
        if whole_run and row.step != place:
            return f"step {place} is not on record; nothing differs in the {len(steps)} that are"
        here = compared(row)
        lacking: list[str] = []
        for name, entry in here.items():
            if problem := _unreadable(entry):
                lacking.append(f"has no readable {problem} of {name}")
        for name, entry in at_first.items():
            if name not in here or here[name].checked != entry.checked:
                lacking.append(f"did not compare {name} as step 0 did")
        for key in (*BITWISE, *APART):
            values = each(getattr(row, key))
            if any(real(value) is None for value in values):
                lacking.append(f"has no readable {key}")
            expected = manifest.twins or len(values)
            if len(values) not in (expected, 0) or (not values and first is not None and each(getattr(first, key))):
                lacking.append(f"has {len(values)} numbers {key} of {expected} twins")
        if lacking:
            return f"step {row.step} {lacking[0]}; nothing differs in all else"
    for detail in mismatches:
        if problem := _unreadable(detail):
            return f"a detail of step {detail.step} has no readable {problem}; nothing differs in all else"
    last = each(steps[-1].loss) if whole_run and steps else ()
    if not all(math.isfinite(real(loss) or 0.0) for loss in last):
        return "the losses are not finite in the end, and what is NaN hides differences; train with other settings"
    return None


def is_apart(entry: Comparison) -> bool:
    """Whether any of the numbers of a comparison says that something differed."""
    ranks = getattr(entry, "ranks", ())
    counts = (*(getattr(entry, key, None) for key in DIFFERENT), *(rank.mismatched for rank in ranks))
    sizes = (getattr(entry, key, None) for key in SIZES)
    return any(map(whole, filter(None, counts))) or any(map(real, filter(None, sizes)))  # most are 0 or None


def _unreadable(entry: Comparison) -> str | None:
    """What in a comparison is no count, though the verdict needs it; None for a sound one."""
    for key in (*COUNTS, "undecided", "unrepeated"):
        if (value := getattr(entry, key, None)) is not None and whole(value) is None:
            return key
    if (entry.checked is None) != (entry.mismatched is None):
        return "checked" if entry.checked is None else "mismatched"
    ranks = getattr(entry, "ranks", ())
    return "ranks" if any(rank.mismatched is not None and whole(rank.mismatched) is None for rank in ranks) else None
