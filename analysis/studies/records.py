"""The record of a study: its findings, and the report that shows them."""

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sdc.records import SUMMARY, Contents, Record, environment, read_json
from sdc.train.studies import Measured, NodesMeasured, ProductsMeasured

from ..report import Finding, Findings, Json, Report, study_page, summarize_findings, write_page
from . import _nodes, _paft, _scar, _shadow, dropcompute, estimates, lossy, products

STUDY = "aggregation study"
# How the page of each kind of study is made, of its name, its manifest and its summary.
PAGES: Mapping[str, Callable[[str, Json, Json], Report]] = {
    products.STUDY: products.build,
    estimates.STUDY: estimates.build,
    **dict.fromkeys((STUDY, _scar.STUDY, _nodes.STUDY), study_page),
}
# The kinds of study whose summary follows from their lines.
SUMMARIES: Mapping[str, Callable[[Contents], Json]] = {_scar.STUDY: _scar.summary_of}
FINDINGS: Mapping[str, Callable[[Any], Iterable[Finding]]] = {
    "paft": _paft.findings,
    "dropcompute": dropcompute.findings,
    "lossy": lossy.findings,
    "shadow": _shadow.findings,
    "nodes": _nodes.findings,
}


def findings_of(measured: Measured | NodesMeasured) -> Findings:
    """Tables, figures and claims of a study of robust aggregation or of the simulated nodes, beside the published ones.

    Args:
        measured: what `sdc.train.studies.study` returned, or `sdc.train.studies.NodesStudy` found.
    """
    return Findings.of(FINDINGS[measured.study.name](measured))


def write_study(
    folder: Path, measured: Measured | NodesMeasured | ProductsMeasured, manifest: Json | None = None
) -> Json:
    """Writes the record and the report of a study.

    Args:
        folder: a new one.
        measured: what `sdc.train.studies.study` returned, or what `NodesStudy` or `ProductsStudy` measured.
        manifest: what else the manifest is to say, such as the command and the name of the profile.

    Returns:
        The summary, with what `conclude` adds: `sentence`, and the paths `run` (the folder) and `report` (the page).

    Raises:
        RecordError: the folder exists already, or cannot be written.
    """
    study = measured.study
    about: Json
    if isinstance(measured, ProductsMeasured):
        summary = products.summarize_products(measured.counts, measured.magnitudes)
        about = {
            "kind": products.STUDY,
            "config": dict(measured.config),
            "steps": study.steps,
            "marked_steps": list(measured.study.marked),
            "where": measured.study.where,
            "seed": study.seed,
            "arithmetic": dataclasses.asdict(measured.rounding),
            "departs": list(measured.departs),
            "magnitudes": list(measured.magnitudes),
        }
    else:
        summary = summarize_findings(measured.study.name, findings_of(measured))
        about = {"kind": _nodes.STUDY, "study": measured.study.name, "seed": study.seed}
        if isinstance(measured, Measured):
            own = {"workers": measured.study.workers, "steps": study.steps, "workloads": dict(measured.sources)}
            about |= {"kind": STUDY, **own}
    return _write(folder, {**about, **(manifest or {})}, summary)


def write_estimate(folder: Path, rows: Iterable[Json], manifest: Json | None = None) -> Json:
    """Writes the record and the report of what programs cost on chips that are not here.

    Args:
        folder: a new one.
        rows: for each program the fields of its `sdc.costs.Estimate`, and `tool`.
        manifest: what else the manifest is to say, such as the command.

    Returns:
        The same as `write_study`.

    Raises:
        RecordError: the folder exists already, or cannot be written.
    """
    return _write(folder, {"kind": estimates.STUDY, **(manifest or {})}, estimates.summarize_estimates(rows))


def _write(folder: Path, manifest: Json, summary: Json) -> Json:
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"created": created, "environment": environment(), **manifest}
    with Record.create(folder, about) as record:
        record.finish(summary)
    report = PAGES[about["kind"]](folder.resolve().name, about, summary)
    page = write_page(report, folder / "report.html")
    sentence = "" if report.banner is None else report.banner.sentence
    return {**read_json(folder / SUMMARY), "sentence": sentence, "run": str(folder), "report": str(page)}
