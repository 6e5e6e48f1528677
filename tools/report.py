"""`sdc report`: the report of a run, written anew from its record."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from sdc.analysis import findings
from sdc.analysis.campaign import summary_of as summary_of_campaign
from sdc.analysis.report import write_report
from sdc.analysis.studies import products
from sdc.analysis.summary import summary_of
from sdc.record.records import read_campaign, read_kind, read_run

from .errors import VERDICTS, Exit, usage_errors
from .output import show, show_campaign, show_findings, show_study


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Writes report.html and report.md of a run, finished or not, and prints its summary.

    Example: sdc report runs/demo

    Exit codes are those of the run: 0 clean, 1 corruption found, 2 bad usage, 3 inconclusive.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    json: bool = False
    """Print the summary as JSON."""


def report(options: ReportOptions) -> int:
    """Writes the report and returns the exit code of the run's verdict."""
    with usage_errors():
        page = write_report(options.run)
        kind = read_kind(options.run)
        if kind == "campaign":
            summary = summary_of_campaign(read_campaign(options.run))
            show_campaign({**summary, "run": str(options.run), "report": str(page)}, as_json=options.json)
            return int(Exit.CLEAN)
        run = read_run(options.run)
    if kind == products.STUDY:
        found = run.summary or {"variants": {}}
        show_study({**found, "run": str(options.run), "report": str(page)}, as_json=options.json)
        return int(Exit.CLEAN)
    if kind == findings.STUDY:
        told = run.summary or {"grids": [], "checks": []}
        show_findings({**told, "run": str(options.run), "report": str(page)}, as_json=options.json)
        return int(Exit.CLEAN)
    summary = summary_of(run)
    show({**summary, "run": str(options.run), "report": str(page)}, as_json=options.json)
    return int(VERDICTS[summary["verdict"]])
