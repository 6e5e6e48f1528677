"""The report of a run: `report.html`, one page that needs no network, and `report.md` with the same tables."""

from pathlib import Path
from typing import Any

from sdc.records import Contents, RecordError, read_record, write_text

from . import (
    campaign_report,
    campaigns,
    figures,
    findings,
    outlooks,
    places,
    product_tables,
    recoveries,
    replicas,
    tables,
)
from .advice import excluded
from .campaign_report import SIMULATED
from .canvas import LeftOut
from .headline import LOSSES, headline
from .page import Report, make_report
from .rendering import to_html, to_markdown
from .series import count, mapping, sequence
from .studies import _nodes as nodes, _scar as scar, estimates, products
from .summary import summary_of
from .tables import Table, show

STUDIES = {
    products.STUDY: products.build, findings.STUDY: findings.build, estimates.STUDY: estimates.build,
    scar.STUDY: findings.build, nodes.STUDY: findings.build,
}  # fmt: skip
LABELS = {"corrupt": "✖ CORRUPT", "clean": "✔ CLEAN", "inconclusive": "? INCONCLUSIVE"}
KINDS = {"twin": "twin run", "train": "training run", "trace": "trace"}
RUNS = tuple(KINDS)
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
    return write_pages(path, report_of(record, summary_of_record(record)))


def summary_of_record(record: Contents) -> dict[str, Any]:
    """The summary of a record of any kind, ended or not."""
    if record.kind.name == "campaign":
        return campaigns.summary_of(record)
    if record.kind.name == scar.STUDY:
        return scar.summary_of(record)
    return summary_of(record) if record.kind.name in RUNS else record.summary or {}


def report_of(record: Contents, summary: dict[str, Any]) -> Report:
    """The report of a record of any kind, with its summary."""
    kind = record.kind.name
    if kind == "campaign":
        return campaign_report.build(record, summary)
    if kind in STUDIES:
        return STUDIES[kind](Path(record.path).resolve().name, record.manifest, summary)
    return build(record, summary)


def write_pages(folder: Path, report: Report, *, name: str = "report") -> Path:
    """Writes a report as `name`.html and `name`.md into a folder, each whole or not at all.

    Returns:
        Path of the HTML page.

    Raises:
        RecordError: they cannot be written.
    """
    page = folder / f"{name}.html"
    write_page(folder / f"{name}.md", to_markdown(report))
    write_page(page, to_html(report))
    return page


def write_page(path: Path, text: str) -> None:
    """Writes a page whole or not at all.

    Raises:
        RecordError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise RecordError(
            f"cannot write a report into {path.parent}: {error.strerror}; make room or make it writable"
        ) from error


def build(run: Contents, summary: dict[str, Any]) -> Report:
    """Collects the text, tables and figures of the report of a twin, a training run or a trace."""
    manifest = run.manifest
    every = run.attempts
    details = [] if run.kind.name == "trace" else every.details
    suspect = mapping(manifest.get("suspect"))
    simulated = _simulated(suspect) if summary["simulated"] or suspect.get("simulated") else ""
    kind = KINDS[run.kind.name]
    # Where nothing is compared there is no verdict.
    label = LABELS.get(summary["verdict"], kind.upper())
    if simulated and summary["verdict"] == "corrupt":
        label += f" ({SIMULATED})"
    if run.summary is None:
        label += ", RUN NOT ENDED"
    mark = SIMULATED if simulated else ""
    twin = manifest.get("kind") == "twin"

    drawn = [figures.losses(run.lines, mark=mark), figures.gradients(run.lines, mark=mark)]
    measured: list[tuple[Table | None, str, str]] = []
    if twin:
        drawn = [
            places.where_and_when(every.lines, details, count(manifest.get("layers")) or 0, mark=mark),
            figures.frequency_over_time(summary, run.lines, mark=mark),
            figures.layers_heat_map(summary, mark=mark),
            drawn[1],
            figures.parameter_difference(run.lines, mark=mark),
            drawn[0],
        ]
        nothing = "no submodule was compared (that needs --sync compute)"
        measured = [
            (tables.submodules(summary, run.lines), "Mismatch frequency and severity by submodule", nothing),
            (tables.counts(summary), "Elements by submodule", nothing),
            (
                tables.whole_step(summary, run.lines),
                "Whole-step comparison",
                "no gradient and no parameter was compared",
            ),
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
    if summary["verdict"] == "clean" and twin:  # lines that cover each other are what clean looks like
        drawn.insert(0, drawn.pop())
    if manifest.get("aggregate"):
        drawn = [*replicas.pictures(run.lines, mark=mark), *drawn]
        measured += [(table, table.caption, "") for table in replicas.summarize_aggregation(run.lines, summary)]
    if mapping(manifest.get("running")):
        drawn.append(outlooks.picture(run.lines, mark=mark))
        measured += [
            (recoveries.table(run.lines), recoveries.CAPTION, "nothing was lost"),
            (outlooks.table(run.lines), outlooks.CAPTION, outlooks.UNKNOWN),
            (outlooks.advised(manifest, summary, run.lines), outlooks.ADVICE, outlooks.UNKNOWN),
        ]
    measured.append((tables.training(summary), "Training", "no step was done"))
    left_out = [LeftOut(title, why) for table, title, why in measured if table is None or not table.rows]
    return make_report(
        manifest,
        mark=mark,
        kind=kind,
        title=run.path.resolve().name,
        verdict=summary["verdict"] or "neutral",
        label=label,
        headline=headline(run, summary),
        simulated=simulated,
        faults=sequence(suspect.get("faults")) if simulated else (),
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


def _simulated(suspect: Any) -> str:
    name = suspect.get("name")
    if name == LOSSES:
        return "parts of the state were thrown away on purpose, on sound hardware"
    return f"{f'suspect {name}' if name else 'the suspect'} ran on sound hardware and was corrupted on purpose"


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
    if run.discarded:
        notes.append(
            f"Run again: {_steps(len(run.discarded))}. What that showed the time before counts for the verdict, and is "
            "in the sentence, the figure of where and when and the tables of ranks and first mismatches; all else is "
            "of the steps on record."
        )
    if departs := sequence(mapping(run.manifest.get("abft")).get("departs")):
        notes.append(f"The profile of the products was measured elsewhere: {'; '.join(map(str, departs))}.")
    if summary["verdict"] == "clean":
        notes.append(
            "The bound takes elements to fail independently. Corruption is bursty: what speaks for itself is only that "
            f"{_steps(summary['steps'])} without one exclude {excluded(summary['steps'])}."
        )
    return notes


def _steps(number: int) -> str:
    return f"{number:,} step{'' if number == 1 else 's'}"


def _facts(manifest: Any, summary: dict[str, Any], suspect: Any) -> list[tuple[str, Any]]:
    mesh = " × ".join(f"{axis} {size}" for axis, size in mapping(manifest.get("mesh")).items())
    steps = f"{summary['steps']} of {show(manifest.get('steps'))} planned"
    facts = [("verdict", summary["reason"]), ("steps", steps), ("started", manifest.get("created"))]
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
            ("exchange of digests", manifest.get("exchange")),
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
