"""Two runs on one page: the settings that differ, the verdicts, the figures over or beside each other, the tables."""

import dataclasses
import itertools
import os.path
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from sdc.record.reading import Contents, read_record

from .canvas import LeftOut, Picture, rename
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
    """One of the two runs.

    Attributes:
        record: the run.
        summary: its summary.
        report: its report.
        page: where its own page is, from the page of both.
    """

    record: Contents
    summary: dict[str, Any]
    report: Report
    page: str


def write_beside(
    first: str | PathLike[str], second: str | PathLike[str], folder: str | PathLike[str] | None = None
) -> dict[str, Any]:
    """Writes one page of two runs, side by side.

    Args:
        first: folder of a run, ended or not.
        second: folder of another.
        folder: where to write the page; by default the folder of the second run.

    Returns:
        `verdict`, the graver of both, `runs` with folder, verdict and sentence of each, `settings` that differ by name,
        and the path of the page (`report`), which is named `beside-FIRST.html`.

    Raises:
        ValueError: both are the same folder.
        RecordError: one holds no readable record, or the page cannot be written.
    """
    paths = [Path(first), Path(second)]
    if paths[0].resolve() == paths[1].resolve():
        raise ValueError(f"{first} would be shown beside itself; give two runs")
    target = Path(folder) if folder is not None else paths[1]
    sides = [_side(path, target) for path in paths]
    settings = differing(*(side.record.manifest for side in sides))
    page = target / f"beside-{paths[0].resolve().name}.html"
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


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The settings of two manifests that differ, by name; a dash where one lacks it."""
    left, right = (_settings(one) for one in (a, b))
    names = dict.fromkeys([*left, *right])
    pairs = {name: (left.get(name, NOT_MEASURED), right.get(name, NOT_MEASURED)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _settings(manifest: Mapping[str, Any]) -> dict[str, str]:
    table = flat("", {key: value for key, value in manifest.items() if key not in ALWAYS})
    return {} if table is None else {name: value for name, value, *_ in table.rows}


def _side(path: Path, target: Path) -> Side:
    record = read_record(path)
    summary = summary_of_record(record)
    report = report_of(record, summary)
    page = os.path.relpath(path.resolve() / "report.html", target.resolve())
    return Side(record, summary, report, page)


def _parts(sides: list[Side], settings: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    names = [side.report.title for side in sides]
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
    """The losses of both runs over each other."""
    lines = []
    for side in sides:
        loss = per_twin(side.record.lines, "loss")
        for twin, values in enumerate([] if loss is None else loss):
            name = side.report.title + (f", twin {twin}" if loss is not None and len(loss) > 1 else "")
            x = step_numbers(side.record.lines)
            lines.append(Line(name, x.tolist(), values.tolist(), dashed=side is sides[1]))
    caption = "Training loss of each step; the second run is dotted. Lines that cover each other are equal."
    mark = "simulated faults" if any(side.report.simulated for side in sides) else ""
    return draw("beside-losses", Chart("Losses of both runs", caption, "step", "loss", tuple(lines)), mark)
