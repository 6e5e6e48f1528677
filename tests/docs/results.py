"""Keeps records of studies in docs/results/, and writes docs/results.md from the measurements in them.

Usage: python -m tests.docs.results [RUN ...]

Copies the records of complete studies to docs/results/, without the names of the machine, and writes the page of all
studies that are there. `test_papers.py` compares the page with the records.
"""

import dataclasses
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sdc.analysis.report import (
    Findings,
    Report,
    Section,
    StudyFindings,
    Text,
    study_page,
    summarize_findings,
    to_markdown,
)
from sdc.analysis.studies import conclude_study, findings_of
from sdc.records import read_manifest, read_record, to_json
from sdc.records.format import write_sealed
from sdc.train.finetuning import FinetuneStudy
from sdc.train.studies import (
    DropComputeStudy,
    LossyStudy,
    NodesStudy,
    PaftStudy,
    RecordedParts,
    ShadowStudy,
    finish,
    linear,
)

DOCS = Path(__file__).parents[2] / "docs"
RECORDS, PAGE = DOCS / "results", DOCS / "results.md"
AGGREGATION = {kind.name: kind for kind in (PaftStudy, DropComputeStudy, LossyStudy, ShadowStudy)}
METRICS = {"convnet": "accuracy", "transformer": "perplexity"}
MOST_ROWS = 120  # of a table on the page
ABOUT = """# Results of the studies

`make results` computes this page from the measurements of each seed in `docs/results/`, one [record](run-record.md) for
each study; `sdc report docs/results/paft` draws its charts too. All errors, delays and losses are simulated and the
workloads are small, so compare the order of the values with that of the published ones. [The papers](papers.md) says
which table or figure of a paper belongs to which study.
"""


class Recorded(RecordedParts):
    """Parts on record, of which none is run."""

    def __call__(self, title: str, kind: Any, run: Any) -> Any:
        assert self.on_record, f"{title} is missing"
        return super().__call__(title, kind, run)


def findings(folder: Path) -> Findings:
    """Returns the findings of a recorded study, computed from its parts."""
    record = read_record(folder)
    if record.kind.name == "scar study":
        summary = conclude_study(record).summary
        return Findings(summary.grids, summary.charts, summary.checks)
    parts, settings = Recorded(None, record.parts), record.manifest["settings"]
    if record.kind.name == "nodes study":
        return findings_of(finish(msgspec.convert(settings, NodesStudy).run(parts)))
    if record.kind.name == "finetune study":
        return findings_of(finish(msgspec.convert(settings, FinetuneStudy).run(parts, given=object())))
    tasks = [
        dataclasses.replace(linear(), name=name, source=source, metric=METRICS[name])
        for name, source in record.manifest["workloads"].items()
    ]
    return findings_of(finish(msgspec.convert(settings, AGGREGATION[record.study.study]).run(tasks, parts)))


def conclusion(folder: Path) -> StudyFindings:
    """Returns the findings of a recorded study in the form of `summary.json`."""
    record = read_record(folder)
    summary = summarize_findings(str(record.study.study or "scar"), findings(folder))
    summary.complete = (record.summary or {}).get("complete")
    return summary


def section(folder: Path) -> str:
    """Returns the section of a study in Markdown: its command, and the tables of its report."""
    record = read_record(folder)
    machine, seconds = record.study.environment, sum(part.seconds for part in record.parts)
    platform = f"{machine.processors} cores of an {machine.processor}, jax {machine.packages['jax']}"
    [measured] = [part for part in study_page(record, conclusion(folder)).sections if part.heading == "Measured"]
    tables = (
        Text(f"{part.caption}: {len(part.rows)} rows, see the report.") if len(part.rows) > MOST_ROWS else part
        for part in measured.parts
    )
    about = Text(f"{platform}; {record.study.created:.10}, {seconds:.0f} s")
    command = Text(shlex.join(record.study.command), "code")
    report = Report("", "", None, (Section(folder.name.replace("-", " "), (command, about, *tables)),))
    return to_markdown(report).removeprefix("# \n\n")


def page() -> str:
    """Returns the page of all recorded studies."""
    return "\n".join((ABOUT, *map(section, sorted(RECORDS.iterdir()))))


def keep(run: Path) -> None:
    """Copies a record of a complete study, without the names of the machine."""
    record, place = read_record(run), RECORDS / run.resolve().name
    assert record.ended, f"{run} is incomplete; resume it"
    place.mkdir(parents=True, exist_ok=True)
    for name in ("parts.jsonl", "summary.json"):
        shutil.copy(run / name, place)
    manifest = {**read_manifest(run), "host": {"name": "not recorded"}}
    text = msgspec.json.encode(manifest).decode()
    write_sealed(place / "manifest.json", msgspec.json.decode(re.sub(r" \((?:/|\\\")[^()]*\)", "", text)))


def main(runs: Sequence[str]) -> None:
    for run in runs:
        keep(Path(run))
    for folder in RECORDS.iterdir():
        stored, found = read_record(folder).summary or {}, to_json(conclusion(folder))
        write_sealed(
            folder / "summary.json", {**stored, **{name: found[name] for name in ("grids", "charts", "checks")}}
        )
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
