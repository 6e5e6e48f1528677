"""Several runs on one page: settings that differ, verdicts, figures over or beside each other, tables."""

import dataclasses
import itertools
import os.path
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from sdc.records import Contents, read_record

from . import recoveries
from .campaign_report import SIMULATED
from .canvas import COLOURS, LeftOut, Picture, rename
from .findings import Chart, Line, draw
from .page import Report
from .rendering import render
from .report import report_of, summary_of_record, write_page
from .series import per_twin, step_numbers
from .tables import NOT_MEASURED, Table, flat
from .verdict import gravest

ALWAYS = ("command", "created", "schema", "version", "devices", "host")
"""Fields of a manifest that are no settings: they differ between any two runs."""
SHOWN = 8
"""Settings that are shown above all else; the others are folded away."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the runs.

    Attributes:
        record: the run.
        summary: its summary.
        report: its report.
        page: where its own page is, from the page of all.
    """

    record: Contents
    summary: dict[str, Any]
    report: Report
    page: str


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
    sides = [_side(path, target) for path in paths]
    settings = differing(*(side.record.manifest for side in sides))
    page = target / f"beside-{'-'.join(path.resolve().name for path in paths[:-1])}.html"
    write_page(page, render("beside.html.jinja", sides=sides, **_parts(sides, settings)))
    return {
        "verdict": gravest(side.summary.get("verdict") for side in sides),
        "runs": [
            {
                "run": str(path),
                "verdict": side.summary.get("verdict"),
                "label": side.report.label,
                "sentence": side.report.headline.sentence,
            }
            for path, side in zip(paths, sides, strict=True)
        ],
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


def _side(path: Path, target: Path) -> Side:
    record = read_record(path)
    summary = summary_of_record(record)
    report = report_of(record, summary)
    page = os.path.relpath(path.resolve() / "report.html", target.resolve())
    return Side(record, summary, report, page)


def _parts(sides: list[Side], settings: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    names = [side.report.title for side in sides]
    simulated = any(side.report.simulated for side in sides)
    cost = recoveries.compared([(side.report.title, side.record.lines) for side in sides])
    if cost is not None and simulated:
        cost = dataclasses.replace(cost, caption=f"[{SIMULATED}] {cost.caption}")
    rows = tuple((name, *pair) for name, pair in settings.items())
    lead = _losses(sides)
    pictures = [[picture for picture in (side.report.lead, *side.report.pictures) if picture] for side in sides]
    titles = dict.fromkeys(picture.title for picture in itertools.chain(*pictures))
    captions = dict.fromkeys(table.caption for side in sides for table in side.report.measured)
    return {
        "settings": [
            Table(caption, ("setting", *names), part)
            for caption, part in (("Settings that differ", rows[:SHOWN]), ("More settings that differ", rows[SHOWN:]))
        ],
        "lead": lead if isinstance(lead, Picture) else None,
        "cost": cost,
        "pictures": [[_named(here, title, side) for side, here in enumerate(pictures)] for title in titles],
        "tables": [
            [next((t for t in side.report.measured if t.caption == caption), None) for side in sides]
            for caption in captions
        ],
    }


def _named(pictures: list[Picture], title: str, side: int) -> Picture | None:
    """The picture of that title, with ids that the other run's pictures do not have."""
    for picture in pictures:
        if picture.title == title:
            return dataclasses.replace(picture, svg=rename(picture.svg, f"side{side}"))
    return None


def _losses(sides: list[Side]) -> Picture | LeftOut:
    """The losses of all runs over each other."""
    lines = []
    for side in sides:
        loss = per_twin(side.record.lines, "loss")
        for twin, values in enumerate([] if loss is None else loss):
            name = side.report.title + (f", twin {twin}" if loss is not None and len(loss) > 1 else "")
            x = step_numbers(side.record.lines)
            lines.append(Line(name, x.tolist(), values.tolist(), dashed=side is not sides[0]))
    both = len(sides) == 2
    dotted = "the second run is dotted" if both else "all runs but the first are dotted"
    caption = f"Training loss of each step; {dotted}. Lines that cover each other are equal."
    mark = SIMULATED if any(side.report.simulated for side in sides) else ""
    title = "Losses of both runs" if both else "Losses of the runs"
    return draw("beside-losses", Chart(title, caption, "step", "loss", tuple(lines)), mark)
