"""`sdc report`: the report of a run, written anew from its record; an index of several; several side by side."""

import os
from typing import Any

from sdc.records import MANIFEST, read_manifest

from .. import VERDICTS, CommandError, ReportOptions, show, usage_errors


def run(options: ReportOptions) -> int:
    """Writes the report and returns the exit code of the gravest verdict."""
    with usage_errors():
        kind, result = _written(options)
    show(kind, result, as_json=options.json)
    return int(VERDICTS[result.get("verdict")])


def _written(options: ReportOptions) -> tuple[str, dict[str, Any]]:
    """What to show, and its kind. `sdc.analysis` imports JAX: what is no run is told before."""
    first, *more = options.runs or (None,)
    if first is None:
        raise CommandError("no folder: expected a run, a folder of runs, or several runs")
    if not more and options.output is not None:
        raise CommandError("--output: one run has its report in its own folder; give several, or leave the flag out")
    if more:
        for folder in options.runs:
            read_manifest(folder)
        from sdc.analysis import write_beside

        return "several", write_beside(first, more[0], options.output, more=more[1:])
    if os.path.isdir(first) and not os.path.exists(first / MANIFEST) and any(first.glob(f"*/{MANIFEST}")):
        from sdc.analysis import write_overview

        return "several", write_overview(first)
    kind = str(read_manifest(first)["kind"])
    from sdc.analysis import report_anew

    return kind, report_anew(first)
