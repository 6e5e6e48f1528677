"""Verdicts from counts of rows of matrix products: of a step, and of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from sdc.verdict import Judgement, Verdict, limit

LEAST_COVERAGE = 0.9  # of the work in matrix products, for a verdict of clean


def judge_rows(counts: Mapping[str, Any], where: str, over: str) -> Judgement:
    """Returns the verdict on the rows of matrix products of a step, or of a run.

    Args:
        counts: numbers of rows by the names of `Flags`.
        where: products that have flagged rows, in words.
        over: steps that were checked, in words.
    """
    if counts["flagged"]:
        rows = f"{counts['flagged']:,} of {counts['checked']:,} checked rows of matrix products are wrong, in {where}"
        if counts["confirmed"]:
            mended = f", and {counts['corrected']:,} were replaced" if counts["corrected"] else ""
            again = f"{counts['confirmed']:,} of them are correct when recomputed"
            return Judgement(Verdict.CORRUPT, f"{rows}; {again}{mended}")
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"{rows}, and were equally wrong when recomputed, which indicates a permanent fault or a false alarm; run "
            "the same steps on another device",
        )
    blind = counts["nonfinite"]
    unjudged = f" ({blind:,} rows had non-finite inputs and could not be checked)" if blind else ""
    if not counts["checked"]:
        return Judgement(Verdict.INCONCLUSIVE, f"no row of a matrix product was checked{over}{unjudged}")
    return Judgement(Verdict.CLEAN, f"no flag in {counts['checked']:,} checked rows of matrix products{over}{unjudged}")


def lacking_coverage(
    checked: Any, coverage: float, least: float, skipped: Sequence[tuple[Any, Any, Any]]
) -> Judgement | None:
    """Returns an inconclusive verdict if too little work was checked, with the first product that was not: its name,
    line and reason."""
    if coverage >= least:
        return None
    named = [f": {site} ({line}): {reason}" for site, line, reason in skipped[:1]]
    more = f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
    return Judgement(
        Verdict.INCONCLUSIVE,
        f"no flag in {checked:,} checked rows, but only {limit(100 * coverage, 3, up=False)} % of the work in matrix "
        f"products was checked (required: at least {100 * least:.3g} %){''.join(named)}{more}",
    )
