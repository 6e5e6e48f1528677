"""`sdc report`: the report of a run, written anew from its record."""

from sdc.record.reading import read_manifest

from ..errors import VERDICTS, usage_errors
from ..options import ReportOptions
from ..output import show


def run(options: ReportOptions) -> int:
    """Writes the report and returns the exit code of the run's verdict."""
    with usage_errors():
        kind = read_manifest(options.run)["kind"]
        from sdc.analysis import summarize_folder, write_report  # They import JAX: a wrong path is told before.

        page = write_report(options.run)
        summary = summarize_folder(options.run)
    show(kind, {**summary, "run": str(options.run), "report": str(page)}, as_json=options.json)
    return int(VERDICTS[summary.get("verdict")])
