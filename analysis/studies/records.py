"""The record of a study: its findings, and a report on them."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sdc.records import SUMMARY, Contents, Given, Record, RecordError, environment, read_record, to_json
from sdc.schema import PAGE, EstimateSummary, ProductsSummary, ProgramEstimate
from sdc.train.finetuning import FinetuneMeasured
from sdc.train.studies import Measured, NodesMeasured, ProductsMeasured

from ..report import Conclusion, Finding, Findings, StudyFindings, study_page, summarize_findings, write_page
from . import _nodes, _paft, _scar, _shadow, dropcompute, estimates, finetune, lossy, products

FINDINGS: Mapping[str, Callable[[Any], Iterable[Finding]]] = {
    "paft": _paft.findings,
    "dropcompute": dropcompute.findings,
    "lossy": lossy.findings,
    "shadow": _shadow.findings,
    "nodes": _nodes.findings,
    "finetune": finetune.findings,
}


def findings_of(measured: Measured | NodesMeasured | FinetuneMeasured) -> Findings:
    """Returns the tables, figures and claims of a study of robust aggregation or of the simulated nodes, together with
    the published values.

    Args:
        measured: the result of `sdc.train.studies.study`, or the measurements of `sdc.train.studies.NodesStudy`.
    """
    return Findings.of(FINDINGS[measured.study.name](measured))


def conclude_study(record: Contents) -> Conclusion:
    """Makes the summary and the page of a complete or incomplete study or estimate."""
    stored, kind = record.summary or {}, record.kind.name
    if kind == products.STUDY:
        shares = msgspec.convert(stored, ProductsSummary)
        return Conclusion(record, shares, stored, products.build(record, shares))
    if kind == estimates.STUDY:
        costs = msgspec.convert(stored, EstimateSummary)
        return Conclusion(record, costs, stored, estimates.build(record, costs))
    if kind == _scar.STUDY:  # the summary of this study is computed from the lines of its record
        found = _scar.summary_of(record)
        every = msgspec.to_builtins(found, enc_hook=to_json)
        own = {name: every[name] for name in ("complete", "study", "grids", "charts", "checks")}
        return Conclusion(record, found, own, study_page(record, found))
    try:
        found = msgspec.convert(stored, StudyFindings)
    except msgspec.ValidationError as error:
        raise RecordError(f"{record.path / SUMMARY} is damaged ({error}); restore it or run the study again") from error
    return Conclusion(record, found, stored, study_page(record, found))


def write_study(
    place: Path | Record, measured: Measured | NodesMeasured | FinetuneMeasured | ProductsMeasured, **manifest: Any
) -> dict[str, Any]:
    """Writes the record and the report of a study.

    Args:
        place: a new folder, or the open record of the study with its parts.
        measured: the result of `sdc.train.studies.study`, or the measurements of `NodesStudy` or `ProductsStudy`.
        **manifest: in a new folder, further fields of the manifest, such as the command and the name of the profile.

    Returns:
        The summary, with the fields that `conclude` adds: `sentence`, and the paths `run` (the folder) and `report`
        (the page).

    Raises:
        RecordError: the folder exists already, or cannot be written.
    """
    if isinstance(measured, ProductsMeasured):
        shares = products.summarize_products(measured.counts, measured.magnitudes)
        checked = {
            "kind": products.STUDY,
            "config": dict(measured.config),
            "marked_steps": list(measured.study.marked),
            "where": measured.study.where,
            "arithmetic": dataclasses.asdict(measured.rounding),
            "departs": list(measured.departs),
            "magnitudes": list(measured.magnitudes),
        }
        return _write(
            place, shares, **{**checked, "steps": measured.study.steps, "seed": measured.study.seed, **manifest}
        ).contents
    own = measured.study.manifest()
    if isinstance(measured, Measured):
        own["workloads"] = dict(measured.sources)
    found = summarize_findings(measured.study.name, findings_of(measured))
    return _write(place, found, **{**own, **manifest}).contents


def write_estimate(folder: Path, programs: Iterable[ProgramEstimate], **manifest: Any) -> dict[str, Any]:
    """Writes the record and the report of the estimated costs of programs on chips that are not present.

    Args:
        folder: a new folder.
        programs: the estimated cost of each program, without its ratio to the first program.
        **manifest: further fields of the manifest, such as the command.

    Returns:
        The summary, with the same additional fields as the summary that `write_study` returns.

    Raises:
        RecordError: the folder exists already, or cannot be written.
    """
    summary, rows = estimates.summarize_estimates(programs), []
    for row in summary.programs:  # a program that does not fit has no other fields
        fits = row.does_not_fit is None
        names = set(row.__struct_fields__) - {"does_not_fit"} if fits else {"tool", "target", "does_not_fit", "ratio"}
        rows.append({name: value for name, value in msgspec.to_builtins(row).items() if name in names})
    contents = {"verdict": None, "reason": summary.reason, "programs": rows}
    return _write(folder, contents, kind=estimates.STUDY, **manifest).contents


def _write(place: Path | Record, summary: Given, **manifest: Any) -> Conclusion:
    if not isinstance(place, Record):
        place = Record.create(place, {"environment": environment(), **manifest})
    with place as record:
        record.finish(summary)
    found = conclude_study(read_record(record.path))
    write_page(found.report, record.path / PAGE)
    return found
