"""The verdict, tables and report of a record, which are written into the record's folder, and the index of a folder of
records."""

from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from sdc.records import KINDS, MANIFEST, SUMMARY, RecordError, read_record, write_summary
from sdc.schema import PAGE, Ending, RunSummary
from sdc.verdict import Verdict, gravest

from . import campaign_page, campaigns, run_page
from .report import NOT_MEASURED, Banner, Conclusion, IndexEntry, Link, Report, Section, Table, moment, show, write_page
from .studies import conclude_study
from .summary import contents_of, summary_of

INDEX = "index.html"
TRACES = {MANIFEST, SUMMARY, *(file.name for kind in KINDS.values() for file in kind.files)}
"""File names; every run folder, intact or damaged, contains at least one of these files."""
DAMAGED = "CANNOT BE READ"


class Overview(msgspec.Struct, kw_only=True):
    """Several runs, their most severe verdict, and the path of their page."""

    verdict: Verdict | None
    runs: list[IndexEntry]
    report: str


def conclude(folder: str | PathLike[str], *, write: bool = True) -> dict[str, Any]:
    """Computes the summary of a record, and writes the summary and the report into the record's folder.

    The summary of an incomplete record is computed but not written.

    Args:
        folder: folder of a run, a trace, a campaign or a study.
        write: whether to write the summary; if false, only the report is written, and nothing else in the folder
            changes.

    Returns:
        Contents of `summary.json`, the verdict in one `sentence`, and the paths of the folder (`run`) and of the page
        (`report`).

    Raises:
        RecordError: the folder holds no readable record, or cannot be written.
    """
    return draw_conclusion(folder, write=write).contents


def write_report(path: Path) -> Path:
    """Writes `report.html` and `report.md` into a run folder, each atomically.

    Equal records yield files with equal bytes.

    Args:
        path: folder of a complete or incomplete run.

    Returns:
        Path of the HTML page.

    Raises:
        RecordError: the folder holds no readable run, or cannot be written.
    """
    return Path(draw_conclusion(path, write=False).contents["report"])


def summarize_folder(path: Path) -> Ending:
    """Returns the summary of a complete or incomplete record.

    Raises:
        RecordError: see `conclude`.
    """
    return describe(path).summary


def draw_conclusion(folder: str | PathLike[str], *, write: bool = True) -> Conclusion:
    """Implements `conclude`; if `write` is false, the summary is not written."""
    found = describe(folder)
    path = Path(folder)
    if write and found.ended:
        write_summary(path, found.fields)
    write_page(found.report, path / PAGE)
    return found


def describe(folder: str | PathLike[str]) -> Conclusion:
    """Computes the conclusion of a record as `conclude` does, but writes nothing."""
    record = read_record(folder)
    if record.kind.name == "campaign":
        campaign = campaigns.summary_of(record)
        page = campaign_page.build(record, campaign)
        return Conclusion(record, campaign, contents_of(campaign, record.summary), page)
    if record.kind.name in run_page.KINDS:
        run = summary_of(record)
        return Conclusion(record, run, contents_of(run, record.summary), run_page.build(record, run))
    return conclude_study(record)


def write_overview(folder: str | PathLike[str]) -> Overview:
    """Writes the report of every run in a folder, and an `index.html` that lists the runs.

    A damaged run is listed with the reason why it counts as damaged. Damaged runs count as inconclusive, as do
    incomplete runs that are not already corrupt.

    Args:
        folder: a folder whose subfolders are runs.

    Returns:
        The most severe `verdict`; `runs`, with the name, verdict and sentence of each run, starting with the most
        severe verdict; and the path of the page (`report`).

    Raises:
        RecordError: the folder holds no run, or cannot be written.
    """
    path = Path(folder)
    try:
        inside = sorted(path.iterdir())
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}); correct the cause and try again") from error
    runs = [folder for folder in inside if folder.is_dir() and any((folder / name).exists() for name in TRACES)]
    if not runs:
        raise RecordError(
            f"{path} contains no run, nor do its subfolders; give the folder of a run, or of several runs"
        )
    order = [*Verdict, None]
    found = sorted(map(_entry, runs), key=lambda one: (order.index(one[0].verdict), one[0].run))
    entries = [entry for entry, *_ in found]
    words = (one.label.lower() if one.label == DAMAGED else one.verdict or "without a verdict" for one in entries)
    said = ", ".join(f"{number} {word}" for word, number in Counter(words).items())
    rows = tuple((one.label, link, one.sentence, *about) for one, link, *about in found)
    header = ("verdict", "run", "what happened", "started", "host", "steps")
    table = Table("Runs", header, rows, style="runs", tones=tuple(one.verdict or "neutral" for one in entries))
    banner = Banner(entries[0].verdict, f"{len(entries)} RUNS", said)
    sections = (Section("Runs, the most severe first", (table,)),)
    page = Report(path.resolve().name or "runs", "runs of a folder", banner, sections)
    written = write_page(page, path / INDEX, markdown=False)
    return Overview(verdict=gravest(entry.verdict for entry in entries), runs=entries, report=str(written))


def _entry(folder: Path) -> tuple[IndexEntry, str | Link, str, str, str]:
    """Returns a run's entry in the index: the link to its page, its start time, its host and its number of steps."""
    name = folder.name
    try:
        found = draw_conclusion(folder, write=False)
    except (
        ArithmeticError,
        LookupError,
        OSError,
        TypeError,
        ValueError,
    ) as error:  # a damaged run must not hide the others
        damaged = IndexEntry(name, Verdict.INCONCLUSIVE, DAMAGED, str(error) or type(error).__name__)
        return damaged, name, NOT_MEASURED, NOT_MEASURED, NOT_MEASURED
    record, manifest, entry = found.record, found.record.manifest, found.entry(name)
    hosts = dict.fromkeys(str(device["host"]) for device in manifest.get("devices") or () if device.get("host"))
    host = ", ".join(hosts) or str((manifest.get("host") or {}).get("name") or NOT_MEASURED)
    if not record.ended and entry.verdict is None:
        entry = msgspec.structs.replace(entry, verdict=Verdict.INCONCLUSIVE)
    steps = show(manifest.get("steps"))
    if isinstance(found.summary, RunSummary):
        steps = f"{found.summary.steps:,} of {steps}"
    return entry, Link(name, f"{name}/{PAGE}"), moment(manifest.get("created")), host, steps
