"""What follows from a record: verdict, tables and report, written beside it; and the index of a folder of records."""

import dataclasses
import datetime
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from sdc.records import KINDS, MANIFEST, SUMMARY, Contents, RecordError, read_record, write_summary
from sdc.verdict import Verdict, gravest

from . import campaign_page, campaigns, run_page
from .report import NOT_MEASURED, Banner, Link, Report, Section, Table, show, write_page
from .studies import PAGES, SUMMARIES
from .summary import contents_of, summary_of

PAGE, INDEX = "report.html", "index.html"
TRACES = {MANIFEST, SUMMARY, *(file.name for kind in KINDS.values() for file in kind.files)}
"""Files of which one at least is in the folder of every run, whole or damaged."""
DAMAGED = "CANNOT BE READ"


@dataclasses.dataclass(frozen=True)
class Conclusion:
    """A record, its summary, and its report."""

    record: Contents
    summary: dict[str, Any]
    report: Report

    @property
    def verdict(self) -> Verdict | None:
        """The verdict; None where nothing is compared."""
        found = self.summary.get("verdict")
        return None if found is None else Verdict(found)

    @property
    def sentence(self) -> str:
        """What happened."""
        return "" if self.report.banner is None else self.report.banner.sentence

    @property
    def contents(self) -> dict[str, Any]:
        """What `conclude` returns."""
        path = Path(self.record.path)
        return {**self.summary, "sentence": self.sentence, "run": str(path), "report": str(path / PAGE)}

    def entry(self, name: str) -> dict[str, Any]:
        """What is said of it among others."""
        label = "" if self.report.banner is None else self.report.banner.label
        return {"run": name, "verdict": self.summary.get("verdict"), "label": label, "sentence": self.sentence}


def conclude(folder: str | PathLike[str]) -> dict[str, Any]:
    """Computes the summary of a record, and writes it and the report into its folder.

    The summary of what has not ended is computed, but not written.

    Args:
        folder: folder of a run, a trace, a campaign or a study.

    Returns:
        Contents of `summary.json`, the verdict in one `sentence`, and the paths of the folder (`run`) and of the page
        (`report`).

    Raises:
        RecordError: the folder holds no readable record, or cannot be written.
    """
    return draw_conclusion(folder).contents


def report_anew(folder: str | PathLike[str]) -> dict[str, Any]:
    """Writes the report of a record anew, and leaves all else in its folder as it is.

    Args:
        folder: as in `conclude`.

    Returns:
        What `conclude` returns.

    Raises:
        RecordError: see `conclude`.
    """
    return draw_conclusion(folder, write=False).contents


def write_report(path: Path) -> Path:
    """Writes `report.html` and `report.md` into a run folder, each whole or not at all.

    The same record gives the same bytes.

    Args:
        path: a run folder, of a run that has ended or not.

    Returns:
        Path of the HTML page.

    Raises:
        RecordError: the folder holds no readable run, or cannot be written.
    """
    return Path(draw_conclusion(path, write=False).contents["report"])


def summarize_folder(path: Path) -> dict[str, Any]:
    """The summary of a record, ended or not.

    Raises:
        RecordError: see `conclude`.
    """
    return describe(path).summary


def draw_conclusion(folder: str | PathLike[str], *, write: bool = True) -> Conclusion:
    """What `conclude` does; without `write` the summary stays as it is."""
    found = describe(folder)
    path = Path(folder)
    if write and (found.summary.get("complete") or found.record.ended):
        write_summary(path, found.summary)
    write_page(found.report, path / PAGE)
    return found


def describe(folder: str | PathLike[str]) -> Conclusion:
    """What `conclude` does, but nothing is written."""
    record = read_record(folder)
    if (page := PAGES.get(record.kind.name)) is not None:
        contents = SUMMARIES.get(record.kind.name, _stored)(record)
        return Conclusion(record, contents, page(Path(folder).resolve().name, record.manifest, contents))
    if record.kind.name == "campaign":
        campaign = campaigns.summary_of(record)
        return Conclusion(record, contents_of(campaign, record.summary), campaign_page.build(record, campaign))
    run = summary_of(record)
    return Conclusion(record, contents_of(run, record.summary), run_page.build(record, run))


def _stored(record: Contents) -> dict[str, Any]:
    return record.summary or {}


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
    found = _runs_in(path)
    if not found:
        raise RecordError(f"{path} holds no run, and none of its folders does; give the folder of a run, or of runs")
    order = [*Verdict, None]
    entries = sorted(map(_entry, found), key=lambda entry: (order.index(entry.verdict), entry.run))
    words = (one.label.lower() if one.label == DAMAGED else one.verdict or "without a verdict" for one in entries)
    said = ", ".join(f"{number} {word}" for word, number in Counter(words).items())
    worst = gravest(entry.verdict for entry in entries)
    rows = tuple(
        (one.label, Link(one.run, one.page) if one.page else one.run, one.sentence, *one.about) for one in entries
    )
    header = ("verdict", "run", "what happened", "started", "host", "steps")
    table = Table("Runs", header, rows, style="runs", tones=tuple(one.verdict or "neutral" for one in entries))
    banner = Banner(entries[0].verdict, f"{len(entries)} RUNS", said)
    sections = (Section("Runs, the gravest first", (table,)),)
    page = Report(path.resolve().name or "runs", "runs of a folder", banner, sections)
    return {
        "verdict": worst,
        "runs": [
            {"run": one.run, "verdict": one.verdict, "label": one.label, "sentence": one.sentence} for one in entries
        ],
        "report": str(write_page(page, path / INDEX, markdown=False)),
    }


class IndexEntry(NamedTuple):
    """A run in the index."""

    run: str
    verdict: Verdict | None
    label: str
    sentence: str
    about: tuple[str, str, str] = (NOT_MEASURED, NOT_MEASURED, NOT_MEASURED)  # when it started, where, steps
    page: str = ""  # relative to the index; empty where there is none


def _runs_in(path: Path) -> list[Path]:
    """The folders directly below that hold a run, or what is left of one."""
    try:
        inside = sorted(path.iterdir())
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}); mend that and try again") from error
    return [folder for folder in inside if folder.is_dir() and any((folder / name).exists() for name in TRACES)]


def _entry(folder: Path) -> IndexEntry:
    try:
        found = draw_conclusion(folder, write=False)
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:  # one run does not hide the others
        return IndexEntry(folder.name, Verdict.INCONCLUSIVE, DAMAGED, str(error) or type(error).__name__)
    record, manifest = found.record, found.record.manifest
    devices = manifest.get("devices") or ()
    hosts = dict.fromkeys(str(device["host"]) for device in devices if device.get("host"))
    host = ", ".join(hosts) or str((manifest.get("host") or {}).get("name") or NOT_MEASURED)
    verdict = found.verdict
    if not record.ended and verdict is None:
        verdict = Verdict.INCONCLUSIVE
    steps = show(manifest.get("steps"))
    if record.kind.name in run_page.KINDS:
        steps = f"{found.summary['steps']:,} of {steps}"
    about = (_when(manifest.get("created")), host, steps)
    label = "" if found.report.banner is None else found.report.banner.label
    return IndexEntry(folder.name, verdict, label, found.sentence, about, f"{folder.name}/{PAGE}")


def _when(created: Any) -> str:
    """A time to the minute, as people write it."""
    try:
        return f"{datetime.datetime.fromisoformat(str(created)):%Y-%m-%d %H:%M}"
    except ValueError:
        return NOT_MEASURED
