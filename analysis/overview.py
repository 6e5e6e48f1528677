"""The index of a folder of runs: one row for each, the gravest first; what cannot be read is listed too."""

import dataclasses
import datetime
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any

from sdc.records import KINDS, MANIFEST, SUMMARY, RecordError, read_record

from .rendering import render
from .report import RUNS, report_of, summary_of_record, write_page, write_pages
from .series import mapping, sequence
from .tables import show
from .verdict import grave, gravest

NAME = "index.html"
TRACES = {MANIFEST, SUMMARY, *(file.name for kind in KINDS.values() for file in kind.files)}
"""Files of which one at least is in the folder of every run, whole or damaged."""
DAMAGED = "CANNOT BE READ"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A run in the index.

    Attributes:
        name: its folder.
        verdict: its verdict; `inconclusive` if it cannot be read.
        label: the verdict for reading.
        sentence: what happened, or why it cannot be read.
        kind: kind of the record.
        created: when it started.
        host: where.
        steps: how many steps, of how many planned.
        report: its page, relative to the index; None where there is none.
    """

    name: str
    verdict: str | None
    label: str
    sentence: str
    kind: str = "–"
    created: str = "–"
    host: str = "–"
    steps: str = "–"
    report: str | None = None


def runs_in(path: Path) -> list[Path]:
    """The folders directly below that hold a run, or what is left of one."""
    try:
        inside = sorted(path.iterdir())
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}); mend that and try again") from error
    return [folder for folder in inside if folder.is_dir() and any((folder / name).exists() for name in TRACES)]


def write_overview(folder: str | PathLike[str]) -> dict[str, Any]:
    """Writes the report of every run in a folder, and `index.html`, which lists them.

    A run that is damaged is listed with the reason, and counts as inconclusive; so does one that has not ended, unless
    it is corrupt already.

    Args:
        folder: a folder whose subfolders are runs.

    Returns:
        `verdict`, the gravest of all, `runs` with name, verdict and sentence of each, the gravest first, and the path
        of the page (`report`).

    Raises:
        RecordError: the folder holds no run, or cannot be written.
    """
    path = Path(folder)
    found = runs_in(path)
    if not found:
        raise RecordError(f"{path} holds no run, and none of its folders does; give the folder of a run, or of runs")
    entries = sorted((_entry(run) for run in found), key=lambda entry: (grave(entry.verdict), entry.name))
    said = [
        entry.label.lower() if entry.label == DAMAGED else entry.verdict or "without a verdict" for entry in entries
    ]
    counts = list(Counter(said).items())
    title = path.resolve().name or "runs"
    write_page(path / NAME, render("index.html.jinja", title=title, entries=entries, counts=counts))
    return {
        "verdict": gravest(entry.verdict for entry in entries),
        "runs": [
            {"run": entry.name, "verdict": entry.verdict, "label": entry.label, "sentence": entry.sentence}
            for entry in entries
        ],
        "report": str(path / NAME),
    }


def _entry(folder: Path) -> Entry:
    try:
        record = read_record(folder)
        summary = summary_of_record(record)
        report = report_of(record, summary)
        page = write_pages(folder, report)
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:  # one run does not hide the others
        return Entry(folder.name, "inconclusive", DAMAGED, str(error) or type(error).__name__)
    manifest = record.manifest
    devices = map(mapping, sequence(manifest.get("devices")))
    hosts = dict.fromkeys(str(device["host"]) for device in devices if device.get("host"))
    own = mapping(manifest.get("host")).get("name")
    planned = manifest.get("steps")
    verdict = summary.get("verdict")
    if not record.ended and verdict is None:
        verdict = "inconclusive"
    steps = show(planned)
    if record.kind.name in RUNS:
        steps = f"{summary['steps']:,} of {steps}"
    return Entry(
        folder.name, verdict, report.label, report.headline.sentence, report.kind, _when(manifest.get("created")),
        ", ".join(hosts) or str(own or "–"), steps, f"{folder.name}/{page.name}",
    )  # fmt: skip


def _when(created: Any) -> str:
    """A time to the minute, as people write it."""
    try:
        return f"{datetime.datetime.fromisoformat(str(created)):%Y-%m-%d %H:%M}"
    except ValueError:
        return "–"
