"""Keeps records of studies in docs/results/, and writes docs/results.md from the measurements in them.

Usage: python -m tests.docs.results [RUN ...]

Copies the records of complete studies to docs/results/, without the names of the machine, and writes the page of all
studies that are there. `test_papers.py` compares the page with the records.
"""

import dataclasses
import json
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
from sdc.records import RecordError, read_record, to_json
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
KINDS = ("aggregation study", "scar study", "nodes study", "finetune study")
HOST = {"name": "not recorded"}
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
        if not self.on_record:
            raise RecordError(f"part {title!r} is missing; run the study again")
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


def folders() -> list[Path]:
    """Returns the recorded studies."""
    return sorted(path.parent for path in RECORDS.glob("*/manifest.json"))


def page() -> str:
    """Returns the page of all recorded studies."""
    checks = [(folder.name, to_json(check.holds)) for folder in folders() for check in conclusion(folder).checks]
    counts = {answer: [name for name, holds in checks if holds is answer] for answer in (True, False, None)}
    not_here = ", ".join(f"{name} ({counts[False].count(name)})" for name in dict.fromkeys(counts[False]))
    total = (
        f"Of {len(checks)} claims of the papers and criteria of this project, {len(counts[True])} hold here, "
        f"{len(counts[False])} do not ({not_here}), and {len(counts[None])} are undecided.\n"
    )
    return "\n".join((ABOUT, total, *map(section, folders())))


def keep(run: Path) -> None:
    """Copies a record of a complete study, without the names and paths of the machine.

    Raises:
        RecordError: it is no complete study, or it holds paths of the machine.
    """
    record, place = read_record(run, *KINDS), RECORDS / run.resolve().name
    if not record.ended:
        raise RecordError(f"{run} is incomplete; resume it")
    conclusion(run)  # raises an error before anything is written
    command = [*record.study.command]
    if "--run" in command:
        command[command.index("--run") + 1] = str(place.relative_to(DOCS.parent))
    sources = {
        name: re.sub(r" \([/\"][^()]*\)", "", text) for name, text in record.manifest.get("workloads", {}).items()
    }
    manifest = {**record.manifest, "command": command, **({"workloads": sources} if sources else {}), "host": HOST}
    if paths := re.findall(r"(?:^|[ =\"])(/[^ \"]+)", json.dumps(manifest)):
        raise RecordError(f"{run} holds paths of the machine: {', '.join(paths)}; run the study with relative paths")
    place.mkdir(parents=True, exist_ok=True)
    write_sealed(place / "summary.json", {**(record.summary or {}), "host": HOST})
    if place.resolve() != run.resolve():
        shutil.copy(run / "parts.jsonl", place)
    write_sealed(place / "manifest.json", manifest)


def main(runs: Sequence[str]) -> None:
    for run in runs:
        keep(Path(run))
    found = {folder: to_json(conclusion(folder)) for folder in folders()}
    text = page()
    for folder, summary in found.items():
        renewed = {name: summary[name] for name in ("grids", "charts", "checks")}
        write_sealed(folder / "summary.json", {**(read_record(folder).summary or {}), **renewed})
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RecordError as error:
        sys.exit(f"make results: {error}")
