"""Several runs on one page: settings that differ, verdicts, overlaid or adjacent figures, and tables."""

import itertools
import os.path
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from sdc.schema import PAGE
from sdc.verdict import gravest

from . import report
from .conclusion import Overview, describe
from .report import (
    Chart,
    Conclusion,
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
    line_figure,
    marked,
)
from .run_page import SIMULATED
from .series import per_twin, step_numbers
from .state_losses import losses_compared

ALWAYS = ("command", "created", "schema", "version", "devices", "host")
"""Fields of a manifest that are not settings: they differ between any two runs."""
SHOWN = 8
"""Number of settings that are visible initially; the others are collapsed."""


class RunsBeside(Overview, kw_only=True):
    """Several runs side by side."""

    settings: dict[str, tuple[str, ...]]  # settings that differ, by name


def write_beside(
    first: str | PathLike[str],
    second: str | PathLike[str],
    folder: str | PathLike[str] | None = None,
    *,
    more: Sequence[str | PathLike[str]] = (),
) -> RunsBeside:
    """Writes one page that shows two or more runs side by side.

    Args:
        first: folder of a complete or incomplete run.
        second: folder of another run.
        folder: where to write the page (default: the folder of the last run).
        more: folders of further runs.

    Returns:
        The most severe `verdict`; `runs`, with the folder, verdict and sentence of each run; the `settings` that
        differ, by name; and the path of the page (`report`), whose name consists of `beside-` and the names of all runs
        except the last.

    Raises:
        ValueError: a folder is given twice, or there are more runs than colors.
        RecordError: a folder holds no readable record, or the page cannot be written.
    """
    paths = [Path(first), Path(second), *map(Path, more)]
    if len(paths) > len(report.COLOURS):
        raise ValueError(
            f"{len(paths)} runs are too many to distinguish on one page; give at most {len(report.COLOURS)}"
        )
    for place, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:place]]:
            raise ValueError(f"{path} is given twice; give different folders")
    target = Path(folder) if folder is not None else paths[-1]
    sides = [describe(path) for path in paths]
    settings = differing(*(side.record.manifest for side in sides))
    page = target / f"beside-{'-'.join(path.resolve().name for path in paths[:-1])}.html"
    links = [os.path.relpath(path.resolve() / PAGE, target.resolve()) for path in paths]
    report.write_page(_page(sides, links, settings), page, markdown=False)
    return RunsBeside(
        verdict=gravest(side.verdict for side in sides),
        runs=[side.entry(str(path)) for path, side in zip(paths, sides, strict=True)],
        settings=settings,
        report=str(page),
    )


def differing(*manifests: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the settings that differ between manifests, by name; a dash marks a missing setting."""
    every = []
    for one in manifests:
        table = report.flat("", {key: value for key, value in one.items() if key not in ALWAYS})
        every.append({name: value for name, value, *_ in table.rows} if table else {})
    values = {name: tuple(one.get(name, report.NOT_MEASURED) for one in every) for one in every for name in one}
    return {name: several for name, several in values.items() if len(set(several)) > 1}


def _page(sides: Sequence[Conclusion], links: Sequence[str], settings: Mapping[str, tuple[str, ...]]) -> Report:
    reports = [side.report for side in sides]
    names = [one.title for one in reports]
    mark = SIMULATED if any(one.banner and one.banner.simulated for one in reports) else ""
    losses, cost = _losses(sides), losses_compared([(side.report.title, side.record.steps) for side in sides])
    verdicts = (
        Section(Link(one.title, link), (one.banner,), "column")
        for one, link in zip(reports, links, strict=True)
        if one.banner
    )
    answers = (Section(one.title, _parts(one, Facts)[:1], "column") for one in reports)
    rows = tuple((name, *values) for name, values in settings.items())
    first, more = (
        Table(caption, ("setting", *names), part, style="settings folded")
        for caption, part in (("Settings that differ", rows[:SHOWN]), ("More settings that differ", rows[SHOWN:]))
    )
    differ = (first, *([Section(f"{len(more.rows)} more", (more,), "folded")] if more.rows else ()))
    sections = [
        Section("", tuple(verdicts), "pair"),
        *([Section("Losses overlaid", (marked(losses, mark),), "figures")] if isinstance(losses, Figure) else ()),
        *([Section("State losses and their cost", (marked(cost, mark),))] if cost else ()),
        Section("Answers", tuple(answers), "pair"),
        Section("Settings that differ", differ if rows else (Text("The runs have the same settings."),)),
        Section("Figures", _beside(reports, Figure, "figure")),
        Section("Measured", _beside(reports, Table, "table")),
    ]
    return Report(" beside ".join(names), "runs side by side", None, tuple(sections))


def _parts(part: Report | Section, kind: type[Part]) -> tuple[Any, ...]:
    """Returns all parts of a given type, in order, without the settings."""
    if isinstance(part, Section) and part.heading == "How to reproduce":
        return ()
    return tuple(
        found
        for each in (part.sections if isinstance(part, Report) else part.parts)
        for found in (_parts(each, kind) if isinstance(each, Section) else [each])
        if isinstance(found, kind)
    )


def _beside(reports: Sequence[Report], kind: type[Table] | type[Figure], noun: str) -> tuple[Part, ...]:
    """Arranges the parts of the runs in rows; all parts in a row have the same name."""
    name = "caption" if kind is Table else "title"
    found = [{getattr(part, name): part for part in _parts(one, kind)} for one in reports]
    return tuple(
        Section("", tuple(
            parts.get(name, Text(f"{one.title} has no such {noun}.", "note"))
            for one, parts in zip(reports, found, strict=True)
        ), "row")
        for name in dict.fromkeys(itertools.chain(*found))
    )  # fmt: skip


def _losses(sides: Sequence[Conclusion]) -> Figure | LeftOut:
    """Draws the losses of all runs in one figure."""
    lines = []
    for side in sides:
        loss = per_twin(side.record.steps, "loss")
        for twin, values in enumerate([] if loss is None else loss):
            name = side.report.title + (f", twin {twin}" if loss is not None and len(loss) > 1 else "")
            x = step_numbers(side.record.steps)
            lines.append(Line(name, x, values, dashed=side is not sides[0]))
    both = len(sides) == 2
    dotted = "the second run is dotted" if both else "all runs but the first are dotted"
    caption = f"Training loss of each step; {dotted}. Overlapping lines are equal."
    title = "Losses of both runs" if both else "Losses of the runs"
    return line_figure(Chart(title, caption, "step", "loss", tuple(lines)))
