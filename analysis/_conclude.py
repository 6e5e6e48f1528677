"""What follows from a record: verdict, tables and report, written beside it."""

from os import PathLike
from pathlib import Path
from typing import Any

from sdc.records import read_record, write_summary

from .report import report_of, summary_of_record, write_pages


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
    return _conclude(Path(folder), write=True)


def report_anew(folder: str | PathLike[str]) -> dict[str, Any]:
    """Writes the report of a record anew, and leaves all else in its folder as it is.

    Args:
        folder: as in `conclude`.

    Returns:
        What `conclude` returns.

    Raises:
        RecordError: see `conclude`.
    """
    return _conclude(Path(folder), write=False)


def summarize_folder(path: Path) -> dict[str, Any]:
    """The summary of a record, ended or not.

    Raises:
        RecordError: see `conclude`.
    """
    return summary_of_record(read_record(path))


def _conclude(path: Path, *, write: bool) -> dict[str, Any]:
    record = read_record(path)
    summary = summary_of_record(record)
    report = report_of(record, summary)
    if write and (summary.get("complete") or record.ended):
        write_summary(path, summary)
    page = write_pages(path, report)
    return {**summary, "sentence": report.headline.sentence, "run": str(path), "report": str(page)}
