"""From the lines of a run record to its verdict and totals: the contents of `summary.json`.

Numbers in brackets are those of the equations in Ma et al., "Understanding Silent Data Corruption in LLM Training"
(arXiv 2502.12340); `definitions` restates them.
"""

import math
import statistics
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sdc.record.reading import Contents

from .products import products_verdict, summarize_products
from .series import Row, count, mapping, number, sequence, worst
from .statistics import frequency_upper_bound

SUBMODULES = ("fwd/attn", "fwd/ffn", "bwd/attn", "bwd/ffn")
COUNTS = ("checked", "mismatched", "injected", "zero_reference", "nonfinite")
BITWISE = {"loss": "losses", "gradient_norm": "gradient norms"}
COMPARED = {"state": "parameters and optimizer state", "gradient": "gradients"}


def summarize(manifest: Row, steps: Sequence[Row], mismatches: Sequence[Row]) -> dict[str, Any]:
    """Computes the summary of a run, finished or not.

    Args:
        manifest: contents of `manifest.json`.
        steps: lines of `steps.jsonl`.
        mismatches: lines of `mismatches.jsonl`.

    Returns:
        Contents of `summary.json`. `verdict` is `corrupt` if anything mismatched anywhere, `clean` only if at least one
        step was done, something was checked and nothing was injected unseen, else `inconclusive`; None for a training
        run that neither compares nor checks anything. Frequencies are None where nothing was checked, severities where
        none was measured.

    Example:
        >>> site = {"checked": 1000, "mismatched": 2, "injected": 2, "severity": 3.0}
        >>> row = {"step": 0, "loss": [2.0, 2.0], "sites": {"fwd/attn": site}}
        >>> summary = summarize({"kind": "twin", "layers": 2}, [row], [])
        >>> summary["verdict"], summary["submodules"]["fwd/attn"]["frequency"]
        ('corrupt', 0.002)
    """
    others = sorted({site for row in steps for site in mapping(row.get("sites"))} - set(SUBMODULES))
    sites = {site: _site(steps, site) for site in (*SUBMODULES, *others)}
    last = steps[-1] if steps else {}
    seconds = [value for row in steps if (value := number(row.get("seconds"))) is not None and math.isfinite(value)]
    drift = [row["parameter_difference"] for row in steps if sequence(row.get("parameter_difference"))]
    suspect = mapping(manifest.get("suspect"))
    summary = {
        "steps": len(steps),
        "sync": manifest.get("sync"),
        "submodules": {site: sites[site] for site in SUBMODULES},
        "other_sites": {site: sites[site] for site in others},
        "layers": _layers(manifest, steps, mismatches, sites),
        **{part: _total(mapping(row.get(part)) for row in steps) for part in COMPARED},
        "worst_noise_to_signal": worst(value for row in steps for value in sequence(row.get("noise_to_signal"))),  # (5)
        "parameter_difference": worst(sequence(drift[-1])) if drift else None,
        "final_loss": list(sequence(last.get("loss"))),
        "published": manifest.get("published"),
        "expected": manifest.get("expected"),
        "simulated": bool(suspect.get("simulated")),
        "seconds_per_step": statistics.median(seconds) if seconds else None,
        "first_mismatch_step": _first_mismatch(steps, mismatches),
        "abft": summarize_products(steps),
    }
    verdict, reason = _verdict(manifest, steps, summary, sites)
    return {"verdict": verdict, "reason": reason, **summary}


def summary_of(run: Contents) -> dict[str, Any]:
    """The summary of a run as read from its folder, finished or not.

    What the run wrote itself wins over what its lines say: it may know of a peer that vanished. But of two verdicts the
    graver one stands, and what a step showed counts although it was run again. A verdict is never `clean` before its
    time: a run that has not ended is `corrupt` already, or `inconclusive`.
    """
    # A trace has digests in the place of mismatches.
    details = [] if run.kind.name == "trace" else run.details
    summary = summarize(run.manifest, run.lines, details)
    again = summarize(run.manifest, run.discarded, [])
    if run.discarded and _grave(again["verdict"]) < _grave(summary["verdict"]):
        reason = f"{summary['reason']}; but in {len(run.discarded)} steps that were run again, {again['reason']}"
        summary |= {"verdict": again["verdict"], "reason": reason}
    if run.summary is not None:
        own = {key: summary[key] for key in ("verdict", "reason")}
        graver = _grave(own["verdict"]) < _grave(run.summary.get("verdict"))
        return summary | run.summary | (own if graver else {})
    if run.kind.name == "trace" and run.manifest.get("against"):  # it writes at its end what it found
        summary |= {"verdict": "inconclusive", "reason": "the run has not ended"}
    elif summary["verdict"] == "clean":
        summary |= {"verdict": "inconclusive", "reason": f"the run has not ended; so far: {summary['reason']}"}
    return summary


def _site(steps: Sequence[Row], site: str) -> dict[str, Any]:
    """Totals of one site: frequency (2) over all microsteps, severity (4) as the largest of all steps."""
    rows = [mapping(mapping(row.get("sites")).get(site)) for row in steps]
    total = _total(rows, COUNTS)
    checked, mismatched = total["checked"], total["mismatched"]
    return {
        "frequency": mismatched / checked if checked else None,
        "severity": worst(row.get("severity") for row in rows),
        **total,
        "frequency_upper_95": frequency_upper_bound(min(mismatched, checked), checked) if checked else None,
    }


def _total(rows: Iterable[Row], names: Sequence[str] = COUNTS[:2]) -> dict[str, int]:
    """Sums counts. A line with something else for a count is damaged: nothing of it counts, least of all as checked."""
    total = dict.fromkeys(names, 0)
    for row in rows:
        counts = {name: found for name in names if (found := count(row.get(name, 0))) is not None}
        if len(counts) == len(names):
            for name in names:
                total[name] += counts[name]
    return total


def _layers(
    manifest: Row, steps: Sequence[Row], mismatches: Sequence[Row], sites: Mapping[str, Row]
) -> dict[str, dict[str, list[Any]]]:
    """Per-layer frequency (1) and severity (3); every layer has the same number of checked elements."""
    recorded = {row["step"] for row in steps}  # a crash can leave mismatches of a step that has no line
    rows = [row for row in mismatches if row["step"] in recorded and isinstance(row.get("layer"), int)]
    layers = max([_total([manifest], ["layers"])["layers"], *(row["layer"] + 1 for row in rows)])
    table: dict[str, dict[str, list[Any]]] = {}
    for site, total in sites.items():
        here: list[list[Row]] = [[] for _ in range(layers)]
        for row in rows:
            if row.get("site") == site and row["layer"] >= 0:
                here[row["layer"]].append(row)
        counts = [_total(lines, ("mismatched", "injected")) for lines in here]
        checked = total["checked"] / layers if layers else 0
        table[site] = {
            "frequency": [each["mismatched"] / checked if checked else None for each in counts],
            "severity": [worst(row.get("severity") for row in lines) for lines in here],
            "mismatched": [each["mismatched"] for each in counts],
            "injected": [each["injected"] for each in counts],
        }
    return table


def _differ(values: Sequence[Any]) -> bool:
    """Whether the twins' numbers differ in any bit; two NaNs are equal."""
    numbers = [found for value in values if (found := number(value)) is not None]
    return len({b"NaN" if math.isnan(value) else struct.pack("<d", value) for value in numbers}) > 1


def _first_mismatch(steps: Sequence[Row], mismatches: Sequence[Row]) -> int | None:
    found = [row["step"] for row in mismatches if count(row.get("mismatched"))]
    for row in steps:
        compared = [*mapping(row.get("sites")).values(), *(row.get(part) for part in COMPARED)]
        counted = any(count(mapping(entry).get("mismatched")) for entry in compared)
        if counted or any(_differ(sequence(row.get(key))) for key in BITWISE):
            found.append(row["step"])
    return min(found, default=None)


def _verdict(manifest: Row, steps: Sequence[Row], summary: Row, sites: Mapping[str, Row]) -> tuple[str | None, str]:
    products = None
    if summary["abft"] is not None:
        injected = sum(site["injected"] for site in sites.values())
        products = products_verdict(
            summary["abft"],
            steps=len(steps),
            injected=injected,
            least=number(mapping(manifest.get("abft")).get("least_coverage")) or 0.0,
        )
    elif mapping(manifest.get("abft")):
        products = "inconclusive", "no row of a matrix product was checked: no step was done"
    if manifest.get("kind") != "twin":
        return products or (None, "a training run has no twin to compare with")
    verdict, reason = _twin_verdict(steps, summary, sites)
    if products is None or products[0] == "clean":
        return verdict, reason
    # Of two findings the graver one is the verdict; twins that agree do not clear a product that is flagged.
    return min(verdict, products[0], key=_grave), f"{reason}; {products[1]}"


def _grave(verdict: str | None) -> int:
    """The place of a verdict, the gravest first."""
    return ("corrupt", "inconclusive", "clean", None).index(verdict)


def _twin_verdict(steps: Sequence[Row], summary: Row, sites: Mapping[str, Row]) -> tuple[str, str]:
    total = {name: sum(site[name] for site in sites.values()) for name in COUNTS}
    first = summary["first_mismatch_step"]
    if first is not None:
        guesses = sum(
            mapping(site).get("undecided") or 0 for row in steps for site in mapping(row.get("sites")).values()
        )
        guessed = f"; {guesses:,} times no majority agreed, so that the reference was a guess" if guesses else ""
        return "corrupt", f"{_evidence(steps, summary, sites, total)}; first at step {first}{guessed}"
    if not summary["steps"]:
        return "inconclusive", "no step was done"
    checked = {"submodule outputs and input gradients": total["checked"]}
    checked |= {name: summary[part]["checked"] for part, name in reversed(COMPARED.items())}
    what, elements = next((item for item in checked.items() if item[1]), ("", 0))
    if not elements:
        return "inconclusive", f"nothing was checked in {summary['steps']} steps"
    if total["injected"]:
        return "inconclusive", f"{total['injected']:,} values were corrupted on purpose and no check saw any of them"
    bound = frequency_upper_bound(0, elements)
    return "clean", (
        f"no mismatch in {elements:,} checked elements ({what}) over {summary['steps']} steps; at 95 % confidence the "
        f"mismatch frequency is below {bound:.2g} per element, if elements fail independently"
    )


def _evidence(steps: Sequence[Row], summary: Row, sites: Mapping[str, Row], total: Mapping[str, int]) -> str:
    parts = []
    if total["mismatched"]:
        hit = [name for name, site in sites.items() if site["mismatched"]]
        parts.append(f"{total['mismatched']:,} of {total['checked']:,} elements at {', '.join(hit)}")
    for part, name in COMPARED.items():
        counts = summary[part]
        if counts["mismatched"]:
            parts.append(f"{counts['mismatched']:,} of {counts['checked']:,} elements of the {name}")
    for key, name in BITWISE.items():
        differing = sum(_differ(sequence(row.get(key))) for row in steps)
        if differing:
            parts.append(f"the {name} of {differing:,} steps")
    return f"the twins differ in {'; '.join(parts) or 'a step whose totals are not on record'}"
