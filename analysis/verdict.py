"""From the totals of a run to its verdict: what differs, what was checked, and what that rests on."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .equality import APART, BITWISE, COMPARED, OPERATIONS, apart, gap, unequal
from .products import gap as products_gap, products_verdict
from .series import Row, count, mapping, number, sequence
from .statistics import frequency_upper_bound

COUNTS = ("checked", "mismatched", "injected", "zero_reference", "nonfinite")
REHEARSAL = "a rehearsal, not a test of hardware: all twins share one processor"
NOTHING = {
    "trace": "a trace has to be compared with another", "train": "a training run has no twin to compare with"
}  # fmt: skip

Verdict = tuple[str | None, str]
"""`corrupt`, `clean`, `inconclusive` or None, and the reason in words."""


def judge(
    manifest: Row,
    steps: Sequence[Row],
    mismatches: Sequence[Row],
    summary: Row,
    sites: Mapping[str, Row],
    *,
    whole: bool = True,
) -> Verdict:
    """The verdict that follows from the lines of a run.

    Args:
        manifest: contents of `manifest.json`.
        steps: lines of `steps.jsonl`.
        mismatches: lines of `mismatches.jsonl`.
        summary: their totals.
        sites: totals by site.
        whole: the lines are those of the whole run; else those of some of its steps.
    """
    products = None
    if summary["abft"] is not None:
        injected = sum(site["injected"] for site in sites.values())
        products = products_verdict(
            summary["abft"],
            steps=len(steps),
            injected=injected,
            least=number(mapping(manifest.get("abft")).get("least_coverage")) or 0.0,
        )
        if products[0] == "clean" and (lacking := products_gap(steps)):
            products = "inconclusive", lacking
    elif whole and mapping(manifest.get("abft")):
        products = "inconclusive", "no row of a matrix product was checked: no step was done"
    if manifest.get("kind") != "twin":
        return products or (None, NOTHING.get(str(manifest.get("kind")), NOTHING["train"]))
    verdict, reason = _twins(manifest, steps, summary, sites, whole)
    if verdict == "clean" and (lacking := gap(manifest, steps, mismatches, whole=whole)):
        verdict, reason = "inconclusive", lacking
    if products is None or products[0] == "clean":
        return verdict, reason
    # Of two findings the graver one is the verdict; twins that agree do not clear a product that is flagged.
    return min(verdict, products[0], key=grave), f"{reason}; {products[1]}"


def grave(verdict: str | None) -> int:
    """The place of a verdict, the gravest first."""
    return ("corrupt", "inconclusive", "clean", None).index(verdict)


def gravest(verdicts: Iterable[str | None]) -> str | None:
    """The gravest of some verdicts."""
    return min(verdicts, key=grave, default=None)


def graver(one: Verdict, other: Verdict) -> Verdict:
    """The graver of two verdicts; the first where they are alike."""
    return other if grave(other[0]) < grave(one[0]) else one


def final_states(manifest: Row, digests: object, *, ended: bool = True) -> Verdict | None:
    """What the digests of the twins' final states say: bits may change after the last step was compared.

    Args:
        manifest: contents of `manifest.json`.
        digests: one for each twin.
        ended: the run has ended, so that there must be some.

    Returns:
        A verdict, or None where they agree, or need not be there.
    """
    found = [str(digest) for digest in sequence(digests)]
    if manifest.get("kind") != "twin" or not (found or ended):
        return None
    if len(set(found)) < 2:
        twins = count(manifest.get("twins")) or len(found)
        told = f"the record has {len(found)} final states of {twins} twins"
        return ("inconclusive", told) if len(found) != twins else None
    told = ", ".join(f"twin {twin} has {digest}" for twin, digest in enumerate(found))
    return "corrupt", f"the twins' final states differ, by their digests: {told}"


def odd_digests(digests: object) -> list[int]:
    """Numbers of the twins whose final state is not that of the majority; of two, by convention, the second.

    Empty where all agree, or no majority does.
    """
    found = [str(digest) for digest in sequence(digests)]
    if len(found) == 2:
        return [1] if found[0] != found[1] else []
    most = next((digest for digest, times in Counter(found).items() if 2 * times > len(found)), None)
    return [] if most is None else [twin for twin, digest in enumerate(found) if digest != most]


def odd_twins(steps: Sequence[Row], mismatches: Sequence[Row]) -> list[int]:
    """Numbers of the twins that differ from the reference: the majority of three or more, the first of two."""
    rows = [*mismatches, *(mapping(row.get(part)) for row in steps for part in COMPARED)]
    ranks = [mapping(rank) for row in rows for rank in sequence(row.get("ranks"))]
    apart = (rank for rank in ranks if any(count(rank.get(key)) for key in ("mismatched", "unrepeated")))
    found = {count(rank.get("twin")) for rank in apart}
    return sorted(twin for twin in found if twin is not None)


def is_rehearsal(manifest: Row) -> bool:
    """Whether all twins ran on one processor, as simulated devices do: they share the hardware that could be wrong."""
    if manifest.get("kind") != "twin":
        return False
    devices = [mapping(device) for device in sequence(manifest.get("devices"))]
    if not devices:  # of a record that does not name them
        environment = mapping(manifest.get("environment"))
        return environment.get("platform") == "cpu" and manifest.get("processes") == 1
    machines = {device.get("machine") or device.get("host") for device in devices}
    return min(len(machines), count(manifest.get("hosts")) or len(machines)) == 1 and (
        mapping(manifest.get("environment")).get("platform") == "cpu"
    )


def _twins(manifest: Row, steps: Sequence[Row], summary: Row, sites: Mapping[str, Row], whole: bool) -> Verdict:
    total = {name: sum(site[name] for site in sites.values()) for name in COUNTS}
    first = summary["first_mismatch_step"]
    if first is not None:
        guesses = sum(
            count(mapping(part).get("undecided")) or 0
            for row in steps
            for part in (*mapping(row.get("sites")).values(), *(row.get(name) for name in COMPARED))
        )
        guessed = f"; {guesses:,} times no majority agreed, so that the reference was a guess" if guesses else ""
        return "corrupt", f"{_evidence(steps, summary, sites, total)}; first at step {first}{guessed}"
    if not summary["steps"]:
        return "inconclusive", "no step was done"
    checked = {"submodule outputs and input gradients": total["checked"]}
    checked |= {name: summary[part]["checked"] for part, name in reversed(COMPARED.items())}
    what, elements = next((item for item in checked.items() if item[1]), ("", 0))
    if whole and not elements:
        return "inconclusive", f"nothing was checked in {summary['steps']} steps"
    if total["injected"]:
        return "inconclusive", f"{total['injected']:,} values were corrupted on purpose and no check saw any of them"
    if whole and elements < (least := count(manifest.get("least_elements")) or 0):
        return "inconclusive", (
            f"no mismatch, but only {elements:,} elements ({what}) were checked over {summary['steps']} steps, and at "
            f"least {least:,} were asked for; run more steps"
        )
    if not elements:
        return "clean", "nothing was checked, nor had to be"
    bound = frequency_upper_bound(0, elements)
    return "clean", (
        f"no mismatch in {elements:,} checked elements ({what}) over {summary['steps']} steps; at 95 % confidence the "
        f"mismatch frequency is below {bound:.2g} per element, if elements fail independently{_rests_on(manifest)}"
    )


def _rests_on(manifest: Row) -> str:
    """What a clean verdict rests on, where that is less than one would think."""
    if is_rehearsal(manifest):
        return f"; {REHEARSAL}"
    if manifest.get("placement") == "vmap":
        return "; twins shared their devices, so that a fault that repeats itself would hit all of them alike"
    return ""


def _evidence(steps: Sequence[Row], summary: Row, sites: Mapping[str, Row], total: Mapping[str, int]) -> str:
    parts = []
    if total["mismatched"]:
        hit = [name for name, site in sites.items() if site["mismatched"]]
        parts.append(f"{total['mismatched']:,} of {total['checked']:,} elements at {', '.join(hit)}")
    parts += _unrepeated(steps)
    for part, name in COMPARED.items():
        counts = summary[part]
        if counts["mismatched"]:
            parts.append(f"{counts['mismatched']:,} of {counts['checked']:,} elements of the {name}")
    for key, name in BITWISE.items():
        if differing := sum(unequal(row, key) for row in steps):
            parts.append(f"the {name} of {differing:,} steps")
    if digests := sum(count(mapping(row.get(OPERATIONS)).get("mismatched")) or 0 for row in steps):
        parts.append(f"{digests:,} digests of operations")
    if not parts:
        parts = [f"the {name}" for key, name in APART.items() if any(apart(row, key) for row in steps)]
    odd = summary["odd_twins"]
    who = f"twin {' and '.join(map(str, odd))} differs from the majority" if odd and (summary["twins"] or 0) > 2 else ""
    return f"{who or 'the twins differ'} in {'; '.join(parts) or 'a step whose totals are not on record'}"


def _unrepeated(steps: Sequence[Row]) -> list[str]:
    """What differed once and not when the step was repeated; empty where there is none."""
    found: Counter[str] = Counter()
    for row in steps:
        for name, site in mapping(row.get("sites")).items():
            found[name] += count(mapping(site).get("unrepeated")) or 0
    if not (times := sum(found.values())):
        return []
    hit, many = ", ".join(name for name in found if found[name]), "s" * (times > 1)
    return [f"{times:,} digest{many} at {hit} that did not differ again when repeated, so by how much is not known"]
