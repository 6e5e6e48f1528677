"""`sdc report`: the report of a run, written anew from its record."""

from sdc.record.reading import read_manifest

from ..errors import VERDICTS, usage_errors
from ..options import ReportOptions
from ..output import show


def run(options: ReportOptions) -> int:
    """Writes the report and returns the exit code of the run's verdict."""
    with usage_errors():
        kind = read_manifest(options.run)["kind"]
        from sdc.analysis import report_anew  # It imports JAX: a wrong path is told before.

        summary = report_anew(options.run)
    show(kind, summary, as_json=options.json)
    return int(VERDICTS[summary.get("verdict")])
