"""What follows from a record: verdict, tables and report, written beside it."""

from os import PathLike
from pathlib import Path
from typing import Any

from sdc.record.files import write_sealed
from sdc.record.identity import stamp
from sdc.record.kinds import SUMMARY
from sdc.record.reading import read_record

from . import campaigns
from .report import write_report
from .summary import summary_of


def conclude(folder: str | PathLike[str]) -> dict[str, Any]:
    """Computes the summary of a record, and writes it and the report into its folder.

    The summary of what has not ended is computed, but not written.

    Args:
        folder: folder of a run, a trace, a campaign or a study.

    Returns:
        Contents of `summary.json`, and the paths of the folder (`run`) and of the page (`report`).

    Raises:
        RecordError: the folder holds no readable record, or cannot be written.
    """
    path = Path(folder)
    summary = summarize_folder(path)
    if summary.get("complete") or (path / SUMMARY).is_file():
        write_sealed(path / SUMMARY, {**stamp(lasting=True), **summary})
    return {**summary, "run": str(path), "report": str(write_report(path))}


def summarize_folder(path: Path) -> dict[str, Any]:
    """The summary of a record, ended or not.

    Raises:
        RecordError: see `conclude`.
    """
    record = read_record(path)
    if record.kind.name == "campaign":
        return campaigns.summary_of(record)
    return summary_of(record) if record.kind.name in ("twin", "train", "trace") else record.summary or {}
