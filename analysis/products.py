"""What the checks of matrix products found: totals and verdict."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .series import Row, count, mapping, number, sequence, worst
from .statistics import frequency_upper_bound

COUNTS = ("checked", "examined", "flagged", "confirmed", "corrected", "nonfinite")
MARGINS = ("margin", "first_margin")
PLACE = ("site", "layer", "twin", "data", "model")


def summarize_products(steps: Sequence[Row]) -> dict[str, Any] | None:
    """Totals over the lines of `steps.jsonl`; None for a run that checked no products.

    Returns:
        Counts and the largest margins, altogether and by `sites`; `places`: rows flagged by site, layer and rank, the
        most often flagged first; `first_step` with a flag.
    """
    lines = [(row["step"], mapping(row.get("abft"))) for row in steps if mapping(row.get("abft"))]
    if not lines:
        return None
    sites: dict[str, dict[str, Any]] = {}
    flagged: Counter[tuple[Any, ...]] = Counter()
    confirmed: Counter[tuple[Any, ...]] = Counter()
    for _, line in lines:
        for name, found in mapping(line.get("sites")).items():
            total = sites.setdefault(name, {**dict.fromkeys(COUNTS, 0), **dict.fromkeys(MARGINS, 0.0)})
            for key in COUNTS:
                total[key] += count(mapping(found).get(key)) or 0
            for key in MARGINS:
                total[key] = worst([total[key], mapping(found).get(key)])
        for row in map(mapping, sequence(line.get("rows"))):
            place = tuple(row.get(key) for key in PLACE)
            flagged[place] += count(row.get("flagged")) or 0
            confirmed[place] += count(row.get("confirmed")) or 0
    covered = [share for _, line in lines if (share := number(line.get("coverage"))) is not None]
    return {
        **{key: sum(site[key] for site in sites.values()) for key in COUNTS},
        **{key: worst(site[key] for site in sites.values()) for key in MARGINS},
        "first_step": next((step for step, line in lines if count(line.get("flagged"))), None),
        "coverage": min(covered, default=None),
        "skipped": list(sequence(lines[-1][1].get("skipped"))),
        "sites": sites,
        "places": [
            {**dict(zip(PLACE, place, strict=True)), "flagged": rows, "confirmed": confirmed[place]}
            for place, rows in sorted(flagged.items(), key=lambda item: (-item[1], str(item[0])))
        ],
    }


def products_verdict(found: Row, *, steps: int, injected: int, least: float = 0.0) -> tuple[str, str]:
    """Verdict and reason of what `summarize_products` returns.

    Args:
        found: totals.
        steps: steps of the run.
        injected: values that simulated faults changed.
        least: share of the products' work that must be checked for a verdict of clean.
    """
    if found["flagged"]:
        hit = [name for name, site in found["sites"].items() if site["flagged"]]
        where = f"{len(hit)} of {len(found['sites'])} products, first at step {found['first_step']}"
        rows = f"{found['flagged']:,} of {found['checked']:,} checked rows of matrix products are wrong, in {where}"
        if found["confirmed"]:
            mended = f", and {found['corrected']:,} were replaced" if found["corrected"] else ""
            return "corrupt", f"{rows}; {found['confirmed']:,} of them are right when computed again{mended}"
        return "inconclusive", (
            f"{rows}, and as wrong when computed again: a permanent fault or a false alarm; "
            "run the same steps on another device"
        )
    blind = found["nonfinite"]
    unjudged = f" ({blind:,} rows of products had inputs that are not finite, and cannot be judged)" if blind else ""
    if not found["checked"]:
        return "inconclusive", f"no row of a matrix product was checked in {steps} steps{unjudged}"
    if injected:
        return (
            "inconclusive",
            f"{injected:,} values were corrupted on purpose and no check of a product saw any of them{unjudged}",
        )
    covered = found.get("coverage")
    if covered is not None and covered < least:
        several = len(found["skipped"])
        first = mapping(found["skipped"][0]) if several else {}
        named = f": {first.get('site')} ({first.get('source')}): {first.get('reason')}" if first else ""
        more = f", and {several - 1} more" if several > 1 else ""
        return "inconclusive", (
            f"no flag in {found['checked']:,} checked rows, but only {covered:.1%} of the work of matrix products was "
            f"checked (least coverage {least:.1%}){named}{more}"
        )
    return "clean", (
        f"no flag in {found['checked']:,} checked rows of matrix products over {steps} steps{unjudged}; at 95 % "
        f"confidence fewer than {frequency_upper_bound(0, found['checked']):.2g} of the rows have an error that the "
        "check can see, if rows fail independently"
    )


def gap(steps: Sequence[Row]) -> str | None:
    """Why the lines of a run without a flag do not speak for all its products; None where they do.

    Args:
        steps: lines of `steps.jsonl`.
    """
    for row in steps:
        line, step = mapping(row.get("abft")), row["step"]
        if not line:
            return f"step {step} has no counts of its products; no row is flagged in all else"
        covered = number(line.get("coverage", 1.0))
        if covered is None or not 0 <= covered <= 1:
            return f"step {step} has no readable coverage of its products; no row is flagged in all else"
        sites = [mapping(site) for site in mapping(line.get("sites")).values()]
        for key in COUNTS:
            parts = [count(site.get(key)) for site in sites]
            if None in parts or count(line.get(key)) != sum(part or 0 for part in parts):
                return f"step {step} has counts of products that do not add up ({key}); no row is flagged in all else"
        if any(count(mapping(place).get("flagged")) != 0 for place in sequence(line.get("rows"))):
            return f"step {step} names flagged rows of products that its counts do not have"
    return None
