"""Several runs on one page: settings that differ, verdicts, figures over or beside each other, tables."""

import itertools
import os.path
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from sdc.verdict import gravest

from . import recoveries
from .conclusion import Conclusion, describe
from .report import (
    COLOURS,
    NOT_MEASURED,
    Chart,
    Facts,
    Figure,
    LeftOut,
    Line,
    Link,
    Part,
    Report,
    Section,
    Table,
    Text,
    flat,
    line_figure,
    marked,
    write_page,
)
from .run_page import SIMULATED
from .series import per_twin, step_numbers

ALWAYS = ("command", "created", "schema", "version", "devices", "host")
"""Fields of a manifest that are no settings: they differ between any two runs."""
SHOWN = 8
"""Settings that are shown above all else; the others are folded away."""


def write_beside(
    first: str | PathLike[str],
    second: str | PathLike[str],
    folder: str | PathLike[str] | None = None,
    *,
    more: Sequence[str | PathLike[str]] = (),
) -> dict[str, Any]:
    """Writes one page of two or more runs, side by side.

    Args:
        first: folder of a run, ended or not.
        second: folder of another.
        folder: where to write the page; by default the folder of the last run.
        more: folders of further runs.

    Returns:
        `verdict`, the gravest of all, `runs` with folder, verdict and sentence of each, `settings` that differ by name,
        and the path of the page (`report`), which is named `beside-FIRST.html`, with the names of all but the last.

    Raises:
        ValueError: two are the same folder, or there are more than can be told apart.
        RecordError: one holds no readable record, or the page cannot be written.
    """
    paths = [Path(first), Path(second), *map(Path, more)]
    if len(paths) > len(COLOURS):
        raise ValueError(f"{len(paths)} runs cannot be told apart on one page; give at most {len(COLOURS)}")
    for place, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:place]]:
            raise ValueError(f"{path} would be shown beside itself; give runs of different folders")
    target = Path(folder) if folder is not None else paths[-1]
    sides = [describe(path) for path in paths]
    settings = differing(*(side.record.manifest for side in sides))
    page = target / f"beside-{'-'.join(path.resolve().name for path in paths[:-1])}.html"
    links = [os.path.relpath(path.resolve() / "report.html", target.resolve()) for path in paths]
    write_page(_page(sides, links, settings), page, markdown=False)
    return {
        "verdict": gravest(side.verdict for side in sides),
        "runs": [side.entry(str(path)) for path, side in zip(paths, sides, strict=True)],
        "settings": settings,
        "report": str(page),
    }


def differing(*manifests: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The settings of manifests that differ, by name; a dash where one lacks it."""
    every = [_settings(one) for one in manifests]
    values = {name: tuple(one.get(name, NOT_MEASURED) for one in every) for one in every for name in one}
    return {name: several for name, several in values.items() if len(set(several)) > 1}


def _settings(manifest: Mapping[str, Any]) -> dict[str, str]:
    table = flat("", {key: value for key, value in manifest.items() if key not in ALWAYS})
    return {} if table is None else {name: value for name, value, *_ in table.rows}


def _page(sides: Sequence[Conclusion], links: Sequence[str], settings: Mapping[str, tuple[str, ...]]) -> Report:
    reports = [side.report for side in sides]
    names = [report.title for report in reports]
    mark = SIMULATED if any(report.banner and report.banner.simulated for report in reports) else ""
    losses, cost = _losses(sides), recoveries.compared([(side.report.title, side.record.steps) for side in sides])
    verdicts = (
        Section(Link(report.title, link), (report.banner,), "column")
        for report, link in zip(reports, links, strict=True)
        if report.banner
    )
    answers = (Section(report.title, _parts(report, Facts)[:1], "column") for report in reports)
    sections = [
        Section("", tuple(verdicts), "pair"),
        *([Section("Over each other", (marked(losses, mark),), "figures")] if isinstance(losses, Figure) else ()),
        *([Section("What was lost, and what that cost", (marked(cost, mark),))] if cost else ()),
        Section("Answers", tuple(answers), "pair"),
        Section("Settings that differ", _settings_that_differ(names, settings)),
        Section("Figures", _beside(reports, Figure, "figure")),
        Section("Measured", _beside(reports, Table, "table")),
    ]
    return Report(" beside ".join(names), "runs side by side", None, tuple(sections))


def _parts(part: Report | Section, kind: type[Part]) -> tuple[Any, ...]:
    """All parts of a kind but the settings, in their order."""
    inside = part.sections if isinstance(part, Report) else part.parts
    if isinstance(part, Section) and part.heading == "How to reproduce":
        return ()
    return tuple(
        found
        for each in inside
        for found in (_parts(each, kind) if isinstance(each, Section) else [each])
        if isinstance(found, kind)
    )


def _beside(reports: Sequence[Report], kind: type[Table] | type[Figure], noun: str) -> tuple[Part, ...]:
    """Rows of what is called the same."""
    found = [{_name(part): part for part in _parts(report, kind)} for report in reports]
    return tuple(
        Section("", tuple(
            parts.get(name, Text(f"{report.title} has no such {noun}.", "note"))
            for report, parts in zip(reports, found, strict=True)
        ), "row")
        for name in dict.fromkeys(itertools.chain(*found))
    )  # fmt: skip


def _name(part: Table | Figure) -> str:
    return part.caption if isinstance(part, Table) else part.title


def _settings_that_differ(names: Sequence[str], settings: Mapping[str, tuple[str, ...]]) -> tuple[Part, ...]:
    rows = tuple((name, *values) for name, values in settings.items())
    if not rows:
        return (Text("None: the runs had the same settings."),)
    first, more = (
        Table(caption, ("setting", *names), part, style="settings folded")
        for caption, part in (("Settings that differ", rows[:SHOWN]), ("More settings that differ", rows[SHOWN:]))
    )
    return (first, *([Section(f"{len(more.rows)} more", (more,), "folded")] if more.rows else ()))


def _losses(sides: Sequence[Conclusion]) -> Figure | LeftOut:
    """The losses of all runs over each other."""
    lines = []
    for side in sides:
        loss = per_twin(side.record.steps, "loss")
        for twin, values in enumerate([] if loss is None else loss):
            name = side.report.title + (f", twin {twin}" if loss is not None and len(loss) > 1 else "")
            x = step_numbers(side.record.steps)
            lines.append(Line(name, x, values, dashed=side is not sides[0]))
    both = len(sides) == 2
    dotted = "the second run is dotted" if both else "all runs but the first are dotted"
    caption = f"Training loss of each step; {dotted}. Lines that cover each other are equal."
    title = "Losses of both runs" if both else "Losses of the runs"
    return line_figure(Chart(title, caption, "step", "loss", tuple(lines)))
