"""From the lines of a run record to its verdict and totals: the contents of `summary.json`.

Numbers in brackets are those of the equations in Ma et al., "Understanding Silent Data Corruption in LLM Training"
(arXiv 2502.12340); `definitions` restates them.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sdc.records import Contents

from .equality import COMPARED, first_mismatch
from .products import summarize_products
from .series import Row, count, mapping, number, sequence, worst
from .statistics import frequency_upper_bound
from .verdict import COUNTS, Verdict, final_states, grave, graver, is_rehearsal, judge, odd_twins

MOST_LAYERS = 10_000
"""Layers of a table: no model has more."""
SUBMODULES = ("fwd/attn", "fwd/ffn", "bwd/attn", "bwd/ffn")


def summarize(manifest: Row, steps: Sequence[Row], mismatches: Sequence[Row], *, whole: bool = True) -> dict[str, Any]:
    """Computes the summary of a run, finished or not.

    Args:
        manifest: contents of `manifest.json`.
        steps: lines of `steps.jsonl`.
        mismatches: lines of `mismatches.jsonl`.
        whole: the lines are those of the whole run, so that none may be missing; else those of some of its steps.

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
        "simulated": bool(suspect.get("simulated")) or any(site["injected"] for site in sites.values()),
        "seconds_per_step": statistics.median(seconds) if seconds else None,
        "first_mismatch_step": first_mismatch(steps, mismatches),
        "odd_twins": odd_twins(steps, mismatches),
        "twins": count(manifest.get("twins")),
        "hosts": count(manifest.get("hosts")),
        "rehearsal": is_rehearsal(manifest),
        "abft": summarize_products(steps),
    }
    verdict, reason = judge(manifest, steps, mismatches, summary, sites, whole=whole)
    return {"verdict": verdict, "reason": reason, **summary}


def summary_of(run: Contents) -> dict[str, Any]:
    """The summary of a run as read from its folder, finished or not.

    The verdict is computed anew. What the run wrote itself can only make it graver, as does what a step showed although
    it was run again, and twins whose final states differ. A verdict is never `clean` before its time: a run that has
    not ended is `corrupt` already, or `inconclusive`.
    """
    # A trace has digests in the place of mismatches.
    details = [] if run.kind.name == "trace" else run.details
    stored = run.summary or {}
    summary = stored | summarize(run.manifest, run.lines, details)
    verdict = summary["verdict"], summary["reason"]
    again = summarize(run.manifest, run.again.lines, run.again.details, whole=False)
    summary["simulated"] |= again["simulated"]
    if run.discarded and grave(again["verdict"]) < grave(verdict[0]):
        told = f"in {len(run.discarded)} steps that were run again, {again['reason']}; after that, {verdict[1]}"
        verdict = again["verdict"], told
    if found := final_states(run.manifest, stored.get("state_digest"), ended=run.ended):
        verdict = graver(verdict, found)
    if (ended := count(stored.get("steps"))) is not None and ended != len(run.lines):
        verdict = graver(verdict, ("inconclusive", f"{len(run.lines)} of the {ended} steps are on record"))
    if run.summary is not None:
        verdict = graver(verdict, _stored(stored, verdict))
    elif run.kind.name == "trace" and run.manifest.get("against"):  # it writes at its end what it found
        verdict = "inconclusive", "the run has not ended"
    elif verdict[0] == "clean":
        verdict = "inconclusive", f"the run has not ended; so far: {verdict[1]}"
    return {**summary, "verdict": verdict[0], "reason": verdict[1]}


def _stored(stored: Row, computed: Verdict) -> Verdict:
    """The verdict that the run wrote itself, and that it is not what follows from its lines, if anything does."""
    verdict, reason = stored.get("verdict"), str(stored.get("reason"))
    if verdict != "corrupt" or computed[0] is None:
        return verdict, reason
    return verdict, f"summary.json says {verdict} ({reason}), although the lines do not: {computed[1]}"


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
    layers = min(max([_total([manifest], ["layers"])["layers"], *(row["layer"] + 1 for row in rows)]), MOST_LAYERS)
    table: dict[str, dict[str, list[Any]]] = {}
    for site, total in sites.items():
        here: list[list[Row]] = [[] for _ in range(layers)]
        for row in rows:
            if row.get("site") == site and 0 <= row["layer"] < layers:
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
