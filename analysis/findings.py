"""Tables, figures and claims as data, and the report of a study of robust aggregation that is made of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from .advice import Action
from .canvas import COLOURS, DASHES, MARKERS, LeftOut, Picture, canvas, powers, whole_numbers
from .headline import Headline
from .page import Report, make_report
from .series import Row, mapping, sequence
from .tables import Table, show

STUDY = "aggregation study"
SIMULATED = "simulated errors, delays and losses"
SOURCES = {
    "paft": "Capturing and Mitigating Gradient Aggregation Errors for Fault-Tolerant Distributed Training.",
    "dropcompute": "Giladi et al., DropCompute (NeurIPS 2023, arXiv:2306.10598).",
    "lossy": "Weintraub, Banner, Orda, Distributed Training under Packet Loss (2025).",
    "scar": "Qiao, Aragam, Zhang, Xing, Fault Tolerance in Iterative-Convergent Machine Learning (ICML 2019).",
    "shadow": "Ma et al. 2025 (arXiv:2502.12340), section 7.2, where a shadow replica is proposed.",
    "nodes": "Ma et al., Understanding Silent Data Corruption in LLM Training (2025, arXiv:2502.12340).",
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a figure.

    Attributes:
        label: label for the legend.
        x, y: coordinates, of one length; what is not finite is left out.
        dashed: whether the line is dashed, for theory beside what was measured.
        points: points without a line between them.
        error: half-lengths of the 95 % intervals of `y`, or none.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    points: bool = False
    error: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class Chart:
    """A figure as data.

    Attributes:
        title, caption: text.
        x, y: what the axes show, with units.
        lines: the lines, at most two dozen.
        log: which axes are logarithmic.
    """

    title: str
    caption: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log: Literal["", "x", "y", "xy"] = ""


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table as data.

    Attributes:
        caption: what it shows.
        header: names of the columns.
        rows: cells: text, numbers, or None where nothing was measured; the first names the row.
        note: what to know when reading it.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """Something that the paper says, and whether it was seen here.

    Attributes:
        claim: one sentence.
        holds: whether it was seen.
        seen: the figures.
    """

    claim: str
    holds: bool
    seen: str


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that a study has to say."""

    grids: tuple[Grid, ...] = ()
    charts: tuple[Chart, ...] = ()
    checks: tuple[Check, ...] = ()

    def __add__(self, other: "Findings") -> "Findings":
        return Findings(self.grids + other.grids, self.charts + other.charts, self.checks + other.checks)


def summarize_findings(study: str, findings: Findings) -> dict[str, Any]:
    """Contents of `summary.json`."""
    return {"study": study, **dataclasses.asdict(findings)}


def build(title: str, manifest: Row, summary: Row) -> Report:
    """Collects the text, tables and figures of a study's report."""
    study = str(summary.get("study"))
    checks = [mapping(check) for check in sequence(summary.get("checks"))]
    missing = [check for check in checks if not check.get("holds")]
    held = len(checks) - len(missing)
    measured = [
        Table(
            f"[{SIMULATED}] {grid['caption']}",
            tuple(map(str, grid["header"])),
            tuple(tuple(_cell(cell) for cell in row) for row in grid["rows"]),
            str(grid["note"]),
        )
        for grid in map(mapping, sequence(summary.get("grids")))
    ]
    if checks:
        rows = tuple((str(c["claim"]), "yes" if c["holds"] else "NO", str(c["seen"])) for c in checks)
        measured.insert(0, Table("What the paper says", ("claim", "seen here", "figures"), rows))
    drawn = [
        draw(f"{study}-{n}", _chart(mapping(chart)), SIMULATED)
        for n, chart in enumerate(sequence(summary.get("charts")))
    ]
    seen = f"{held} of {len(checks)} of the paper's statements were seen at this scale"
    return make_report(
        manifest,
        kind=f"study of {study}",
        title=title,
        verdict="neutral",
        label=f"STUDY: {study.upper()} ({SIMULATED})",
        headline=headline_of_study(
            seen if summary else "the study has not ended", "; ".join(str(check.get("claim")) for check in missing)
        ),
        simulated="gradients, delays, losses or faults were simulated on sound hardware",
        facts=[(name, manifest.get(name)) for name in ("workers", "steps", "seed", "parts", "created", "seconds")],
        measured=measured,
        drawn=drawn,
        settings={
            "Study": {
                key: manifest[key] for key in ("workers", "steps", "seed", "settings", "workloads") if key in manifest
            }
        },
        definitions=(),
        definitions_source=SOURCES.get(study, ""),
        bursts="",
    )


def headline_of_study(sentence: str, missing: str = "") -> Headline:
    """The headline of a study, which is no test of a device.

    Args:
        sentence: what was found.
        missing: statements that were not seen; empty if all were.
    """
    none = "none: a study of methods, not a test of a device"
    actions = [Action("Compare with your own training", "A study is of small workloads: the tables say of which.")]
    if missing:
        actions.insert(0, Action("Look at what was not seen", f"It may need more steps, workers or trials: {missing}."))
    return Headline(sentence, none, none, "not asked", "simulated, all of it", tuple(actions))


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else show(value, digits=4)


def _chart(record: Mapping[str, Any]) -> Chart:
    """A figure as it was before it went into a record."""
    return Chart(**{**record, "lines": tuple(Line(**line) for line in record["lines"])})


def draw(name: str, chart: Chart, mark: str) -> Picture | LeftOut:
    """Draws a figure.

    Args:
        name: name for ids within the page.
        chart: what to draw.
        mark: text drawn into the figure, such as that faults are simulated; may be empty.
    """
    if not any(np.isfinite(np.asarray(line.y, np.float64)).any() for line in chart.lines):
        return LeftOut(chart.title, "nothing finite was measured")
    with canvas(name, mark, height=3.2) as drawing:
        axes = drawing.figure.subplots()
        for place, line in enumerate(chart.lines):
            x, y = np.asarray(line.x, np.float64), np.asarray(line.y, np.float64)
            wanted = np.isfinite(y) & ((y > 0) | ("y" not in chart.log))
            few = wanted.sum() <= 24 and not line.dashed
            if line.error:
                reach = np.asarray(line.error, np.float64)[wanted]
                axes.errorbar(x[wanted], y[wanted], reach, fmt="none", ecolor=COLOURS[place % 6], elinewidth=0.8)
            axes.plot(
                x[wanted], y[wanted], label=line.label, color=COLOURS[place % 6], linewidth=1.1,
                marker=MARKERS[place % 6] if few or line.points else None, markersize=2 if line.points else 3.5,
                linestyle="none" if line.points else DASHES[2] if line.dashed else DASHES[(place // 6) % 2],
            )  # fmt: skip
        axes.set_xlabel(chart.x)
        axes.set_ylabel(chart.y)
        if chart.x == "step":
            whole_numbers(axes.xaxis)
        for which in chart.log:
            powers(axes, which)
        if len(chart.lines) > 1:
            drawing.legend(axes)
    return drawing.picture(chart.title, chart.caption)
