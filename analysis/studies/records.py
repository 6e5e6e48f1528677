"""The record of a study: its findings, and the report that shows them."""

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sdc.records import SUMMARY, Contents, Record, environment, read_json
from sdc.train.studies import Measured, NodesMeasured, ProductsMeasured

from ..report import Findings, Report, study_page, summarize_findings, write_page
from . import _nodes, _paft, _scar, _shadow, dropcompute, estimates, lossy, products

STUDY = "aggregation study"
PAGES: Mapping[str, Callable[[str, Mapping[str, Any], Mapping[str, Any]], Report]] = {
    products.STUDY: products.build,
    estimates.STUDY: estimates.build,
    **dict.fromkeys((STUDY, _scar.STUDY, _nodes.STUDY), study_page),
}
"""How the page of each kind of study is made, of its name, its manifest and its summary."""
SUMMARIES: Mapping[str, Callable[[Contents], dict[str, Any]]] = {_scar.STUDY: _scar.summary_of}
"""The kinds of study whose summary follows from their lines."""
FINDINGS: Mapping[str, Callable[[Any], Findings]] = {
    "paft": _paft.findings,
    "dropcompute": dropcompute.findings,
    "lossy": lossy.findings,
    "shadow": _shadow.findings,
}


def findings_of(measured: Measured) -> Findings:
    """Tables, figures and claims of a study of robust aggregation, beside the published ones.

    Args:
        measured: what `sdc.train.studies.study` returned.

    Example:
        >>> from sdc.analysis.studies import findings_of
        >>> from sdc.train.studies.measurements import LossyMeasured
        >>> about = dict(workers=8, steps=20, seed=0, sources={})
        >>> measured = LossyMeasured(**about, rates=(), packet=64, burst=8.0, trainings=(), walks={0.4: 0.95})
        >>> findings_of(measured).checks[0].holds
        True
    """
    return FINDINGS[measured.study](measured)


def write_study(folder: Path, measured: Measured, manifest: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Writes the record and the report of a study of robust aggregation.

    Args:
        folder: a new one.
        measured: what `sdc.train.studies.study` returned.
        manifest: what else the manifest is to say, such as the command.

    Returns:
        The summary, with what `conclude` adds: `sentence`, and the paths `run` (the folder) and `report` (the page).

    Raises:
        RecordError: the folder exists already, or cannot be written.
    """
    about = {
        "study": measured.study,
        "workers": measured.workers,
        "steps": measured.steps,
        "seed": measured.seed,
        "workloads": dict(measured.sources),
    }
    summary = summarize_findings(measured.study, findings_of(measured))
    return _write(folder, {"kind": STUDY, **about, **(manifest or {})}, summary)


def write_products_study(
    folder: Path, measured: ProductsMeasured, manifest: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes the record and the report of a study of checked products.

    Args:
        folder: a new one.
        measured: what `sdc.train.studies.ProductsStudy` returned.
        manifest: what else the manifest is to say, such as the command and the name of the profile.

    Returns:
        The summary, with what `conclude` adds: `sentence`, and the paths `run` (the folder) and `report` (the page).

    Raises:
        RecordError: the folder exists already, or cannot be written.
    """
    about = {
        "config": dict(measured.config),
        "steps": measured.steps,
        "marked_steps": list(measured.marked),
        "where": measured.where,
        "seed": measured.seed,
        "arithmetic": dataclasses.asdict(measured.rounding),
        "departs": list(measured.departs),
        "magnitudes": list(measured.magnitudes),
    }
    summary = products.summarize_products(measured.counts, measured.magnitudes)
    return _write(folder, {"kind": products.STUDY, **about, **(manifest or {})}, summary)


def write_nodes_study(
    folder: Path, measured: NodesMeasured, manifest: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes the record and the report of a study of the simulated nodes.

    Args:
        folder: a new one.
        measured: what `sdc.train.studies.NodesStudy` found.
        manifest: what else the manifest is to say, such as the command.

    Returns:
        The summary, with what `conclude` adds: `sentence`, and the paths `run` (the folder) and `report` (the page).

    Raises:
        RecordError: the folder exists already, or cannot be written.
    """
    summary = summarize_findings(measured.study, _nodes.findings(measured))
    return _write(folder, {"kind": _nodes.STUDY, "study": "nodes", "seed": measured.seed, **(manifest or {})}, summary)


def write_estimate(
    folder: Path, rows: Iterable[Mapping[str, Any]], manifest: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes the record and the report of what programs cost on chips that are not here.

    Args:
        folder: a new one.
        rows: for each program the fields of its `sdc.costs.Estimate`, and `tool`.
        manifest: what else the manifest is to say, such as the command.

    Returns:
        The summary, with what `conclude` adds: `sentence`, and the paths `run` (the folder) and `report` (the page).

    Raises:
        RecordError: the folder exists already, or cannot be written.
    """
    return _write(folder, {"kind": estimates.STUDY, **(manifest or {})}, estimates.summarize_estimates(rows))


def _write(folder: Path, manifest: Mapping[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"created": created, "environment": environment(), **manifest}
    with Record.create(folder, about) as record:
        record.finish(summary)
    report = PAGES[about["kind"]](folder.resolve().name, about, summary)
    page = write_page(report, folder / "report.html")
    sentence = "" if report.banner is None else report.banner.sentence
    return {**read_json(folder / SUMMARY), "sentence": sentence, "run": str(folder), "report": str(page)}
