"""The report of a run: `report.html`, one page that needs no network, and `report.md` with the same tables."""

import importlib.resources
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sdc.record.files import RecordError, write_text
from sdc.record.reading import Contents, read_record

from . import campaign_report, figures, findings, product_tables, replicas, tables
from .campaign_report import SIMULATED
from .canvas import LeftOut
from .page import Report, make_report, sentence
from .series import mapping, sequence
from .statistics import excluded_interval
from .studies import products
from .summary import summary_of
from .tables import Table, escape, show

STUDIES = {products.STUDY: products.build, findings.STUDY: findings.build}
HTML, MARKDOWN = "report.html", "report.md"
LABELS = {"corrupt": "✖ CORRUPT", "clean": "✔ CLEAN", "inconclusive": "? INCONCLUSIVE", "training": "TRAINING RUN"}
SYNC = {
    "compute": "compute: submodules are compared and repaired, forward and backward",
    "params": "params: parameters and optimizer state are overwritten after every step",
    "none": "none: twins run free",
}


def write_report(path: Path) -> Path:
    """Writes `report.html` and `report.md` into a run folder, each whole or not at all.

    The same record gives the same bytes.

    Args:
        path: a run folder, of a run that has ended or not.

    Returns:
        Path of the HTML page.

    Raises:
        RecordError: the folder holds no readable run, or cannot be written.
    """
    record = read_record(path)
    kind = record.kind.name
    if kind == "campaign":
        report = campaign_report.build(record)
    elif kind in STUDIES:
        report = STUDIES[kind](path.resolve().name, record.manifest, record.summary or {})
    else:
        report = build(record)
    html, markdown = to_html(report), to_markdown(report)
    try:
        write_text(path / MARKDOWN, markdown)
        write_text(path / HTML, html)
    except OSError as error:
        raise RecordError(
            f"cannot write a report into {path}: {error.strerror}; make room or make it writable"
        ) from error
    return path / HTML


def build(run: Contents) -> Report:
    """Collects the text, tables and figures of a report."""
    manifest = run.manifest
    details = [] if run.kind.name == "trace" else run.details
    summary = summary_of(run)
    suspect = mapping(manifest.get("suspect"))
    simulated = _simulated(suspect) if summary["simulated"] or suspect.get("simulated") else ""
    # A training run has no verdict.
    verdict = summary["verdict"] or "training"
    label = LABELS.get(verdict, str(verdict))
    if simulated and verdict == "corrupt":
        label += f" ({SIMULATED})"
    if run.summary is None:
        label += ", RUN NOT ENDED"
    mark = SIMULATED if simulated else ""
    twin = manifest.get("kind") == "twin"

    drawn = [figures.losses(run.lines, mark=mark), figures.gradients(run.lines, mark=mark)]
    measured: list[tuple[Table | None, str, str]] = []
    if twin:
        drawn = [
            figures.frequency_over_time(summary, run.lines, mark=mark),
            figures.layers_heat_map(summary, mark=mark),
            drawn[1],
            figures.parameter_difference(run.lines, mark=mark),
            drawn[0],
        ]
        nothing = "no submodule was compared (that needs --sync compute)"
        measured = [
            (tables.submodules(summary), "Mismatch frequency and severity by submodule", nothing),
            (tables.counts(summary), "Elements by submodule", nothing),
            (tables.whole_step(summary), "Whole-step comparison", "no gradient and no parameter was compared"),
            (tables.ranks(details), "Mismatches by rank", "no mismatch at a submodule was recorded"),
            (tables.first_mismatches(details), "First mismatches", "no mismatch at a submodule was recorded"),
        ]
    if mapping(manifest.get("abft")):
        drawn.insert(0, product_tables.flags_over_time(run.lines, mark=mark))
        measured += [
            (product_tables.by_site(summary["abft"]), "Checked matrix products", "no step was done"),
            (product_tables.skipped(summary["abft"]), "Products that were not checked", "every product was checked"),
            (product_tables.by_place(summary["abft"]), "Flagged rows by product, layer and rank", "no row was flagged"),
        ]
    if manifest.get("aggregate"):
        drawn = [*replicas.pictures(run.lines, mark=mark), *drawn]
        measured += [(table, table.caption, "") for table in replicas.summarize_aggregation(run.lines, summary)]
    measured.append((tables.training(summary), "Training", "no step was done"))
    left_out = [LeftOut(title, why) for table, title, why in measured if table is None or not table.rows]
    return make_report(
        manifest,
        mark=mark,
        title=run.path.resolve().name,
        verdict=verdict,
        label=label,
        reason=sentence(summary["reason"]),
        simulated=simulated,
        notes=_notes(run, summary),
        facts=_facts(manifest, summary, suspect),
        measured=[table for table, *_ in measured],
        drawn=drawn,
        left_out=left_out,
        settings={
            "Program and data": {key: manifest.get(key) for key in ("program", "data", "seed")},
            "Configuration": manifest.get("config"),
        },
    )


def to_html(report: Report) -> str:
    """The report as one HTML page without scripts, images or links to elsewhere."""
    template = importlib.resources.files(__package__).joinpath("templates", "report.html.jinja")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["drawing"] = Markup  # matplotlib has escaped the text within its drawings
    return environment.from_string(template.read_text(encoding="utf-8")).render(report=report)


def to_markdown(report: Report) -> str:
    """The report as Markdown: everything but the figures."""
    parts = [f"# {escape(report.title)}: {escape(report.label)}", escape(report.reason)]
    if report.simulated:
        parts.append(f"> **SIMULATED FAULTS**: {escape(report.simulated)}")
    parts += [f"> {escape(note)}" for note in report.notes]
    parts.append("\n".join(f"- {escape(name)}: {escape(value)}" for name, value in report.facts))
    parts += [table.markdown() for table in report.measured]
    if report.left_out:
        parts += [
            "## Left out",
            "\n".join(f"- {escape(item.title)}: {escape(item.reason)}" for item in report.left_out),
        ]
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", report.command)), default=0))
    parts += ["## How to reproduce", f"{fence}\n{report.command}\n{fence}"]
    parts += [table.markdown() for table in report.settings]
    parts += ["## Definitions", escape(report.definitions_source), escape(report.bursts)]
    parts.append(
        "\n".join(
            f"- **{escape(item.name)}** {item.equation}: {escape(item.formula)}. {escape(item.text)}"
            for item in report.definitions
        )
    )
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _simulated(suspect: Any) -> str:
    faults = "; ".join(map(str, sequence(suspect.get("faults"))))
    name = suspect.get("name")
    what = f"suspect {name}" if name else "the suspect"
    return f"{what} ran on sound hardware and was corrupted on purpose" + (f": {faults}" if faults else "")


def _notes(run: Contents, summary: dict[str, Any]) -> list[str]:
    notes = []
    planned = run.manifest.get("steps")
    if run.summary is None:
        notes.append(
            f"This run has not ended: {summary['steps']} of {show(planned)} planned steps are on record, "
            "and everything here is computed from them."
        )
    elif isinstance(planned, int) and summary["steps"] < planned:
        notes.append(f"This run ended early: {summary['steps']} of {planned} planned steps were done.")
    if departs := sequence(mapping(run.manifest.get("abft")).get("departs")):
        notes.append(f"The profile of the products was measured elsewhere: {'; '.join(map(str, departs))}.")
    if summary["verdict"] == "clean":
        notes.append(
            "The bound takes elements to fail independently. Corruption is bursty: what speaks for itself is only that "
            f"{summary['steps']} steps without one exclude (95 %) bursts that come, on average, every "
            f"{excluded_interval(summary['steps']):.3g} steps or oftener."
        )
    return notes


def _facts(manifest: Any, summary: dict[str, Any], suspect: Any) -> list[tuple[str, Any]]:
    mesh = " × ".join(f"{axis} {size}" for axis, size in mapping(manifest.get("mesh")).items())
    steps = f"{summary['steps']} of {show(manifest.get('steps'))} planned"
    facts = [("steps", steps), ("started", manifest.get("created"))]
    if manifest.get("kind") == "twin":
        sync = summary["sync"]
        first = summary["first_mismatch_step"]
        facts += [
            ("suspect", suspect.get("name") or "not named"),
            ("faults", "simulated" if suspect.get("simulated") else "none injected: what is found here is real"),
            ("synchronization", SYNC.get(str(sync), sync)),
            ("first mismatch", "none" if first is None else f"step {first}"),
            ("twins", manifest.get("twins")),
            ("comparison", manifest.get("compare")),
        ]
    if abft := mapping(manifest.get("abft")):
        facts.append(("products", f"{abft.get('where')}, {abft.get('scheme')}, mode {abft.get('mode')}"))
        facts.append(("thresholds", f"{abft.get('profile')} (kappa {show(abft.get('kappa'))})"))
        if manifest.get("kind") != "twin":
            faults = "simulated" if suspect.get("simulated") else "none injected: what is found here is real"
            facts += [("suspect", suspect.get("name") or "not named"), ("faults", faults)]
    if manifest.get("aggregate"):
        facts.append(("aggregation", manifest["aggregate"]))
    return [*facts, ("mesh", mesh or None), ("placement", manifest.get("placement"))]
