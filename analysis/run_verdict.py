"""Derives the verdict of a run from values that must be equal, differences, and counts of checked and missing values.

This is the only place where a verdict is derived from the lines of a record.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from sdc import schema
from sdc.checksums import judge_rows, lacking_coverage
from sdc.guarding import judge_silence
from sdc.schema import MismatchRow, RunManifest, RunSummary, StepRow
from sdc.verdict import Judgement, Verdict, gravest, limit

from .report import show
from .series import each, real, whole
from .statistics import frequency_upper_bound

BITWISE = {"loss": "losses", "gradient_norm": "gradient norms", "parameter_norm": "parameter norms"}
"""Fields that hold one number for each twin; these numbers are equal if the twins are equal."""
APART = {
    "gradient_difference": "gradients", "parameter_difference": "parameters", "noise_to_signal": "gradients"
}  # fmt: skip
"""Fields that hold the distance of each twin from the reference, which is zero if the twins are equal."""
COMPARED = {"state": "parameters and optimizer state", "gradient": "gradients"}
COUNTS = ("checked", "mismatched", "injected", "zero_reference", "nonfinite")
DIFFERENT = ("mismatched", "zero_reference", "nonfinite", "undecided", "unrepeated")
"""Fields that count the elements and ranks that differed."""
SIZES = ("frequency", "severity", "relative_max")
"""Fields that hold the extent and size of the differences."""
REHEARSAL = "a rehearsal, not a test of hardware: all twins share one processor"
PRODUCTS = ("checked", "examined", "flagged", "confirmed", "corrected", "nonfinite")
"""Counts of rows of matrix products."""
Comparison: TypeAlias = schema.SiteCounts | schema.TwinCounts | MismatchRow


def inconclusive(reason: str) -> Judgement:
    """Makes an inconclusive judgement."""
    return Judgement(Verdict.INCONCLUSIVE, reason)


def graver(one: Judgement, other: Judgement) -> Judgement:
    """Returns the more severe of two judgements, or the first if they are equally severe."""
    return one if gravest([one.verdict, other.verdict]) is one.verdict else other


def judge(
    manifest: RunManifest,
    steps: Sequence[StepRow],
    mismatches: Sequence[MismatchRow],
    summary: RunSummary,
    *,
    whole_run: bool = True,
) -> Judgement:
    """Derives the verdict from the lines of all or some steps of a run, and from the totals of these lines."""
    total = {name: sum(getattr(site, name) for site in summary.sites.values()) for name in COUNTS}
    products: Judgement | None = None
    if summary.abft is not None:
        least = (real(manifest.abft.least_coverage) if manifest.abft else None) or 0.0
        products = _products(summary.abft, steps, total["injected"], least)
    elif whole_run and manifest.abft is not None:
        products = inconclusive("no row of a matrix product was checked, because no step was completed")
    if manifest.kind != "twin":
        trace = manifest.kind == "trace"
        alone = "a trace must be compared with another trace" if trace else "a training run has no twin to compare with"
        watched = None if summary.guard is None else guarded(summary.guard, len(steps), total["injected"])
        return _both(watched, products) or Judgement(None, alone)
    found = _twins(manifest, steps, summary, total, whole_run)
    if found.verdict is Verdict.CLEAN and (lacking := _gap(manifest, steps, mismatches, whole_run)):
        found = inconclusive(lacking)
    return _both(found, products) or found


def _both(found: Judgement | None, products: Judgement | None) -> Judgement | None:
    """Returns the more severe of two findings, with both reasons: agreement of twins, for example, does not clear a
    flagged matrix product."""
    if found is None or products is None or products.verdict is Verdict.CLEAN:
        return found or products
    return Judgement(gravest([found.verdict, products.verdict]), f"{found.reason}; {products.reason}")


def guarded(found: schema.GuardTotals, steps: int, injected: int) -> Judgement:
    """Evaluates what a guard found in a number of steps, or what its silence excludes."""
    if found.findings:
        first = next((one for one in found.findings if one.proof), found.findings[0])
        on = f" on {', '.join(first.devices)}" if first.devices else ""
        more = f"; {len(found.findings):,} findings in all" if len(found.findings) > 1 else ""
        said = f"{first.layer}: {first.what}{on}, at step {show(first.step)}{more}"
        if first.proof:
            return Judgement(Verdict.CORRUPT, said)
        return inconclusive(f"the guard has a suspicion, but no proof: {said}")
    if injected:
        return inconclusive(f"{injected:,} values were deliberately corrupted, but the guard found none of them")
    if (watched := whole(found.steps)) is None:
        return inconclusive("the guard has found nothing so far; it reports at the end of the run")
    layers = []
    for layer in found.layers:
        wrong, coverage = real(layer.most_wrong), real(layer.coverage)
        known = wrong is not None and 0 <= wrong <= watched and coverage is not None and 0 <= coverage <= 1
        if wrong is not None and known and whole(layer.checks) and steps:
            layers.append((str(layer.name), str(layer.compares), coverage, (wrong + max(0, steps - watched)) / steps))
    return judge_silence(steps, layers)


def final_states(manifest: RunManifest, digests: Sequence[str] | None, *, ended: bool = True) -> Judgement | None:
    """Evaluates the digests of the twins' final states, since bits may change after the last compared step."""
    found = digests or ()
    if manifest.kind != "twin" or not (found or ended):
        return None
    if len(set(found)) < 2:
        twins = manifest.twins or len(found)
        said = f"the record has {len(found)} final states for {twins} twins"
        return inconclusive(said) if len(found) != twins else None
    said = ", ".join(f"twin {twin} has {digest}" for twin, digest in enumerate(found))
    return Judgement(Verdict.CORRUPT, f"the twins' final states differ, as their digests show: {said}")


def odd_digests(digests: Sequence[str] | None) -> list[int]:
    """Returns the twins whose final state differs from the final state of the majority; returns the second twin if
    there are only two and their final states differ. The result is empty if all twins agree or if there is no majority.
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
        times = f"{guesses:,} comparison{'s' * (guesses != 1)}"
        guessed = f"; {times} had no majority, so the reference was chosen arbitrarily" if guesses else ""
        found = f"{_evidence(steps, summary, total)}; first at step {summary.first_mismatch_step}{guessed}"
        return Judgement(Verdict.CORRUPT, found)
    if not steps:
        return inconclusive("no step was completed")
    checked = {"submodule outputs and input gradients": total["checked"]}
    checked |= {name: getattr(summary, part).checked for part, name in reversed(COMPARED.items())}
    what, elements = next((item for item in checked.items() if item[1]), ("", 0))
    if whole_run and not elements:
        return inconclusive(f"nothing was checked in {len(steps)} steps")
    if total["injected"]:
        return inconclusive(
            f"{total['injected']:,} values were deliberately corrupted, but no check detected any of them"
        )
    if whole_run and elements < (least := manifest.least_elements or 0):
        return inconclusive(
            f"no mismatch, but only {elements:,} elements ({what}) were checked over {len(steps)} steps; at least "
            f"{least:,} are required, so run more steps"
        )
    if not elements:
        return Judgement(Verdict.CLEAN, "nothing was checked, and no check was required")
    less = ""  # a caveat of the verdict
    if summary.rehearsal:
        less = f"; {REHEARSAL}"
    elif manifest.placement == "vmap":
        less = "; twins shared their devices, so a reproducible fault would affect all of them equally"
    return Judgement(
        Verdict.CLEAN,
        f"no mismatch in {elements:,} checked elements ({what}) over {len(steps)} steps; at 95 % confidence the "
        f"mismatch frequency is below {limit(frequency_upper_bound(0, elements), 2, up=True)} per element, if "
        f"elements fail independently{less}",
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
        parts.append(f"{digests} whose difference did not recur in the repetition, so its size is unknown")
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
    return f"{who or 'the twins differ'} in {'; '.join(parts) or 'a step whose totals are not recorded'}"


def _products(found: schema.ProductTotals, steps: Sequence[StepRow], injected: int, least: float) -> Judgement:
    """Evaluates the checks of matrix products, given the number of injected faulty values and the required coverage."""
    counts = {name: getattr(found, name) for name in PRODUCTS}
    hit = [name for name, site in found.sites.items() if site.flagged]
    where = f"{len(hit)} of {len(found.sites)} products, first at step {found.first_step}"
    judged = judge_rows(counts, where, f" over {len(steps)} steps")
    if judged.verdict is not Verdict.CLEAN:
        return judged
    if injected:
        return inconclusive(
            f"{injected:,} values were deliberately corrupted, but no check of a matrix product detected any of them",
        )
    left = [(one.site, one.source, one.reason) for one in found.skipped]
    if found.coverage is not None and (partly := lacking_coverage(found.checked, found.coverage, least, left)):
        return partly
    for row in steps:  # look for lines that have no flag but do not cover all matrix products
        if (line := row.abft) is None:
            return inconclusive(
                f"step {row.step} has no counts of its matrix products; no row is flagged in the other steps"
            )
        lacking: list[str] = []
        if not 0 <= (-1.0 if line.coverage is None else line.coverage) <= 1:
            lacking.append("no readable coverage of its matrix products")
        for key in PRODUCTS:
            parts = [whole(getattr(site, key)) for site in line.sites.values()]
            if None in parts or whole(getattr(line, key)) != sum(part or 0 for part in parts):
                lacking.append(f"counts of matrix products whose sum is not the recorded total ({key})")
        if lacking:
            return inconclusive(f"step {row.step} has {lacking[0]}; no row is flagged in the other steps")
        if any(whole(place.flagged) != 0 for place in line.rows):
            return inconclusive(
                f"step {row.step} lists flagged rows of matrix products, but its counts do not include those rows"
            )
    return Judgement(
        Verdict.CLEAN,
        f"{judged.reason}; at 95 % confidence the share of rows with a detectable error is below "
        f"{limit(frequency_upper_bound(0, int(found.checked or 0)), 2, up=True)}, if rows fail independently",
    )


def what_differs(steps: Sequence[StepRow]) -> list[str]:
    """Returns the names of the quantities that differ between twins in lines of `steps.jsonl`; the list is empty if all
    are equal."""
    names = [name for key, name in BITWISE.items() if any(_unequal(row, key) for row in steps)]
    names += [f"distances of the {name}" for key, name in APART.items() if any(_apart(row, key) for row in steps)]
    names += ["digests of operations"] * any(row.operations and whole(row.operations.mismatched) for row in steps)
    names += [f"counts of {name}" for row in steps for name, entry in compared(row).items() if is_apart(entry)]
    return list(dict.fromkeys(names))


def compared(row: StepRow) -> dict[str, schema.SiteCounts | schema.TwinCounts]:
    """Returns the comparisons of a line by name: first those of its sites, and then those of the gradient and the
    state."""
    parts = {name: part for name in COMPARED if (part := getattr(row, name)) is not None}
    return {**row.sites, **parts}


def _unequal(row: StepRow, key: str) -> bool:
    """Returns whether the twins' numbers differ in any bit; NaNs are considered equal."""
    values = [found for value in each(getattr(row, key)) if (found := real(value)) is not None]
    return len({b"NaN" if math.isnan(value) else struct.pack("<d", value) for value in values}) > 1


def _apart(row: StepRow, key: str) -> bool:
    """Returns whether any twin differs from the reference."""
    return any(real(value) not in (None, 0.0) for value in each(getattr(row, key)))


def _gap(
    manifest: RunManifest, steps: Sequence[StepRow], mismatches: Iterable[MismatchRow], whole_run: bool
) -> str | None:
    """Returns the reason why lines without a difference do not cover their steps or the whole run, or None if they
    cover them."""
    first = steps[0] if whole_run and steps else None
    at_first = {} if first is None else compared(first)
    for place, row in enumerate(steps):
        if whole_run and row.step != place:
            return f"step {place} is not recorded; the {len(steps)} recorded steps have no difference"
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
                lacking.append(f"has {len(values)} values of {key} for {expected} twins")
        if lacking:
            return f"step {row.step} {lacking[0]}; the other steps have no difference"
    for detail in mismatches:
        if problem := _unreadable(detail):
            return f"a mismatch of step {detail.step} has no readable {problem}; the other steps have no difference"
    last = each(steps[-1].loss) if whole_run and steps else ()
    if not all(math.isfinite(real(loss) or 0.0) for loss in last):
        return (
            "the final losses are not finite, and NaNs hide differences; repeat the run with other settings, for "
            "example a lower learning rate"
        )
    return None


def is_apart(entry: Comparison) -> bool:
    """Returns whether any number in a comparison shows a difference."""
    ranks = getattr(entry, "ranks", ())
    counts = (*(getattr(entry, key, None) for key in DIFFERENT), *(rank.mismatched for rank in ranks))
    sizes = (getattr(entry, key, None) for key in SIZES)
    return any(map(whole, filter(None, counts))) or any(map(real, filter(None, sizes)))  # most are 0 or None


def _unreadable(entry: Comparison) -> str | None:
    """Returns the name of a field that the verdict needs and that is not a valid count; None if all such fields are
    valid."""
    for key in (*COUNTS, "undecided", "unrepeated"):
        if (value := getattr(entry, key, None)) is not None and whole(value) is None:
            return key
    if (entry.checked is None) != (entry.mismatched is None):
        return "checked" if entry.checked is None else "mismatched"
    ranks = getattr(entry, "ranks", ())
    return "ranks" if any(rank.mismatched is not None and whole(rank.mismatched) is None for rank in ranks) else None
