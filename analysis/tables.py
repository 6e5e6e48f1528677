"""The tables of a report: built once, shown as Markdown, as HTML and on a terminal."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from .bootstrap import bootstrap_interval
from .equality import COMPARED
from .series import Row, count, mapping, number, sequence, worst
from .statistics import frequency_upper_bound
from .summary import SUBMODULES
from .verdict import COUNTS

NOT_MEASURED = "–"
TOO_FEW = "too few steps with a mismatch"
RESTS_ON = (
    "Intervals are of the block bootstrap over steps, which allows for bursts; with too few bursts there is none. "
    "Below: what a run without a mismatch says if elements fail independently. With bursts it says less."
)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of finished text.

    Attributes:
        caption: what it shows.
        header: names of the columns.
        rows: cells, one per column; the first names the row.
        note: what to know when reading it; may be empty.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """The table in GitHub's Markdown, with every character of its text shown literally."""
        lines = [
            f"**{escape(self.caption)}**",
            "",
            _line(self.header),
            _line(["---", *["---:"] * (len(self.header) - 1)]),
        ]
        lines += [_line([escape(cell) for cell in row]) for row in self.rows]
        return "\n".join(lines + (["", escape(self.note)] if self.note else [])) + "\n"


def escape(text: str) -> str:
    """Text that Markdown shows literally, on one line."""
    return re.sub(r"([\\`*_\[\]<>|&~#$])", r"\\\1", " ".join(text.split()))


def show(value: Any, *, digits: int = 3) -> str:
    """A number for reading: some digits; counts in full with separators; a dash for what was not measured."""
    found = number(value)
    if found is None:
        return NOT_MEASURED
    if math.isnan(found):
        return "NaN"
    if math.isinf(found):
        return "∞" if found > 0 else "-∞"
    return f"{value:,}" if isinstance(value, int) else f"{found:.{digits}g}"


def submodules(summary: Row, steps: Sequence[Row]) -> Table | None:
    """Measured frequency and severity of each site, beside the published values where the run simulates a node.

    Args:
        summary: contents of `summary.json`.
        steps: lines of `steps.jsonl`, from whose counts intervals are computed.

    Returns:
        The table; None where no site was compared.
    """
    sites = {**mapping(summary.get("submodules")), **mapping(summary.get("other_sites"))}
    if not any(site["checked"] for site in sites.values()):
        return None
    published, expected = mapping(summary.get("published")), mapping(summary.get("expected"))
    beside = ("published", "measured / published") if published else ()
    header = ("site", "frequency (2)", "95 % interval", *(["expected here"] if expected else []), *beside)
    rows = []
    for name, site in sites.items():
        known = mapping(published.get(name))
        interval = _interval([mapping(mapping(row.get("sites")).get(name)) for row in steps], site)
        row = [name, show(site["frequency"]), interval, *([show(expected.get(name))] if expected else [])]
        row += _beside(site["frequency"], known.get("frequency")) if published else []
        row += [show(site["severity"]), *(_beside(site["severity"], known.get("severity")) if published else [])]
        rows.append(tuple(row))
    note = RESTS_ON
    if expected:
        note += " Expected here: the published mean, shaped in time as the node's bursts are, over the planned steps."
    if published:
        note += (
            " Published: mean frequency, and largest severity of 4,500 steps, of that node in the study. Severities "
            "have a heavy tail, so that a run of fewer steps meets milder ones; and severe steps hit few elements, so "
            "that frequencies of a short run scatter more than their counts would let expect."
        )
    return Table("Mismatch frequency and severity by submodule", (*header, "severity (4)", *beside), tuple(rows), note)


def counts(summary: Row) -> Table | None:
    """Element counts behind the frequencies, and the injected ones, which are the ground truth of a simulation."""
    sites = {**mapping(summary.get("submodules")), **mapping(summary.get("other_sites"))}
    if not any(site["checked"] or site["injected"] for site in sites.values()):
        return None
    rows = tuple((name, *_counted(site)) for name, site in sites.items())
    note = ""
    if any(site["checked"] for site in sites.values()) and summary.get("simulated"):
        differ = [name for name, site in sites.items() if site["checked"] and site["mismatched"] != site["injected"]]
        note = f"Mismatched differs from injected at {', '.join(differ)}: the check or the injection is at fault."
        note = note if differ else "Mismatched equals injected at every site that was compared."
    return Table("Elements by submodule", ("site", *(name.replace("_", " ") for name in COUNTS)), rows, note)


def _counted(site: Row) -> list[str]:
    """The counts of a site: what was not compared is not nought."""
    measured = ("mismatched", "zero_reference", "nonfinite")
    compared = {"checked": "not compared", **dict.fromkeys(measured, "-")} if not site["checked"] else {}
    return [compared.get(key, show(site[key])) for key in COUNTS]


def whole_step(summary: Row, steps: Sequence[Row]) -> Table | None:
    """Bitwise comparison of gradients, and of parameters with the optimizer state.

    Args:
        summary: contents of `summary.json`.
        steps: lines of `steps.jsonl`.
    """
    rows = []
    for part, name in COMPARED.items():
        checked, mismatched = summary[part]["checked"], summary[part]["mismatched"]
        if checked:
            each = [] if summary["sync"] == "none" else [mapping(row.get(part)) for row in steps]
            interval = NOT_MEASURED if mismatched and not each else _interval(each, summary[part])
            rows.append((name, show(checked), show(mismatched), show(mismatched / checked), interval))
    header = ("compared", "checked", "mismatched", "frequency", "95 % interval")
    note = f"Elements summed over steps. {RESTS_ON}"
    if summary["sync"] == "none":
        note += (
            " Without synchronization a difference persists and is counted again at every step, so that there is no "
            "interval either."
        )
    return Table("Whole-step comparison", header, tuple(rows), note) if rows else None


def training(summary: Row) -> Table:
    """Scalars of the training run."""
    loss = sequence(summary["final_loss"])
    names = [f"last loss, twin {twin}" for twin in range(len(loss))] if len(loss) > 1 else ["last loss"]
    # Twins can differ in the last bits: nine digits tell two float32 numbers apart.
    rows = [(name, show(value, digits=9)) for name, value in zip(names, loss, strict=False)]
    rows += [
        (name, show(summary[key]))
        for key, name in (
            ("worst_noise_to_signal", "worst-case noise-to-signal (5)"),
            ("parameter_difference", "parameter difference ‖θ' - θ‖₂ after the last step"),
            ("seconds_per_step", "seconds per step, median"),
        )
        if summary[key] is not None
    ]
    return Table("Training", ("quantity", "value"), tuple(rows))


def ranks(mismatches: Sequence[Row]) -> Table | None:
    """Mismatches by device: where on the mesh the corruption sits."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in mismatches:
        for rank in map(mapping, sequence(row.get("ranks"))):
            if count(rank.get("mismatched")):
                place = (show(rank.get("twin")), show(rank.get("data")), show(rank.get("model")))
                found.setdefault(place, []).append({"site": row.get("site"), **rank})
    rows = tuple(
        (
            " / ".join(place),
            show(sum(count(rank["mismatched"]) or 0 for rank in hits)),
            show(worst(rank.get("relative_max") for rank in hits)),
            ", ".join(sorted({str(rank["site"]) for rank in hits})),
        )
        for place, hits in sorted(found.items())
    )
    header = ("twin / data / model", "mismatched", "largest relative error", "sites")
    return Table("Mismatches by rank", header, rows) if rows else None


def first_mismatches(mismatches: Sequence[Row], limit: int = 10) -> Table | None:
    """The first lines of `mismatches.jsonl` in which something mismatched."""
    hits = [row for row in mismatches if count(row.get("mismatched"))]
    names = ("step", "microstep", "layer", "mismatched", "injected", "severity", "relative_max")
    order = {site: place for place, site in enumerate(SUBMODULES)}
    hits.sort(
        key=lambda row: (row["step"], number(row.get("microstep")) or 0, order.get(str(row.get("site")), len(order)))
    )
    rows = tuple((str(row.get("site")), *(show(row.get(name)) for name in names)) for row in hits[:limit])
    note = f"{len(rows):,} of {len(hits):,} recorded; layers count from 0."
    return (
        Table("First mismatches", ("site", *(name.replace("_", " ") for name in names)), rows, note) if rows else None
    )


def flat(caption: str, value: Any) -> Table | None:
    """A nested record as one row per leaf, `a.b.c` beside its value."""
    rows = tuple(_leaves("", value))
    return Table(caption, ("setting", "value"), rows) if rows else None


def _leaves(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [
            leaf for key, item in value.items() for leaf in _leaves(f"{prefix}.{key}" if prefix else str(key), item)
        ]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return _leaves(prefix, {str(place): item for place, item in enumerate(value)})
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return [] if value is None else [(prefix, str(value))]


def _interval(each: Sequence[Row], total: Row) -> str:
    """The interval of a frequency, from the counts of each step and their total, or why there is none."""
    if not total["checked"]:
        return NOT_MEASURED
    if not total["mismatched"]:
        return f"below {show(frequency_upper_bound(0, total['checked']))}"
    pairs = [(count(row.get("mismatched")), count(row.get("checked"))) for row in each]
    sound = [(hit, of) for hit, of in pairs if hit is not None and of is not None and hit <= of]
    limits = bootstrap_interval([hit for hit, _ in sound], [of for _, of in sound])
    return TOO_FEW if limits is None else f"{show(limits[0])} to {show(limits[1])}"


def _beside(measured: Any, published: Any) -> list[str]:
    """The published value and the ratio of the measured one to it."""
    over, under = number(measured), number(published)
    return [show(published), NOT_MEASURED if over is None or not under else show(over / under)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
