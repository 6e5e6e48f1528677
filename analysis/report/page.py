"""Builds the page of one record, which answers a reader's questions in order: what happened, on which device, what to
do next, and how certain the finding is. Also represents the findings of a study as data, and builds the page that shows
them."""

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from sdc.records import Contents
from sdc.schema import PAGE, CampaignSummary, Ending, StudySummary
from sdc.verdict import Verdict

from .canvas import line_figure
from .sections import (
    Banner,
    Chart,
    Facts,
    Figure,
    Items,
    LeftOut,
    Part,
    Report,
    Section,
    Table,
    Text,
    flat,
    marked,
    moment,
)

REPRODUCE = (
    "To reproduce this run, execute the command below on a machine with the same environment. If the command has the "
    "option --run, pass another run folder. Equal digests of the program and the data confirm that the run is the same."
)

SIMULATED = "simulated errors, delays and losses"
SOURCES = {
    "paft": "Capturing and Mitigating Gradient Aggregation Errors for Fault-Tolerant Distributed Training.",
    "dropcompute": "Giladi et al., DropCompute (NeurIPS 2023, arXiv:2306.10598).",
    "lossy": "Weintraub, Banner, Orda, Distributed Training under Packet Loss (2025).",
    "scar": "Qiao, Aragam, Zhang, Xing, Fault Tolerance in Iterative-Convergent Machine Learning (ICML 2019).",
    "shadow": "Ma et al. 2025 (arXiv:2502.12340), section 7.2, which proposes a shadow replica.",
    "nodes": "Ma et al., Understanding Silent Data Corruption in LLM Training (2025, arXiv:2502.12340).",
}


class Action(NamedTuple):
    """The next action in a few words, and an explanation of how to take it and why."""

    what: str
    how: str


class Definition(NamedTuple):
    """A quantity, its formula, an explanation, and the number of its equation in the study."""

    name: str
    formula: str
    text: str
    equation: str = ""


@dataclasses.dataclass(frozen=True)
class Headline:
    """The text of the first screen: the finding, and the answers to a reader's first questions."""

    sentence: str
    device: str = ""  # this and the next two are empty if nothing was compared
    operation: str = ""
    since: str = ""
    real: str = ""
    actions: tuple[Action, ...] = ()
    # The data from which the advice after a finding is derived.
    course: str | None = None
    first: int | None = None  # step
    named: str = ""  # affected hardware
    hits: tuple[int, ...] = ()  # steps

    @property
    def answers(self) -> tuple[tuple[str, str], ...]:
        """The questions with their answers."""
        place = ("Which device", self.device), ("Which operation", self.operation), ("Since when", self.since)
        known = (each for each in place if each[1])
        return (*known, ("Real or simulated", self.real), ("What now", self.actions[0].what))


def record_page(
    *,
    command: Sequence[str] | None,
    title: str,
    kind: str,
    verdict: str | None,
    label: str,
    headline: Headline,
    facts: Iterable[tuple[str, Any]],
    measured: Iterable[Table | LeftOut | None],
    drawn: Iterable[Figure | LeftOut],
    settings: Iterable[tuple[str, Any]],
    definitions: Iterable[Definition],
    about: Iterable[str],
    mark: str = "",
    simulated: str = "",
    faults: Iterable[Any] = (),
    notes: Iterable[str] = (),
    brief: Iterable[Part] = (),
) -> Report:
    """Assembles the page of a record.

    Facts and settings without a value and tables without rows are omitted. The first figure that can be drawn appears
    on the first screen. `mark` states what is simulated and precedes the caption of every table and figure. `brief` is
    the terminal output.
    """
    found, figures = list(measured), list(drawn)
    pictures = [marked(part, mark) for part in figures if isinstance(part, Figure)]
    tables = [marked(part, mark) for part in found if isinstance(part, Table) and part.rows]
    left_out = [part for part in (*found, *figures) if isinstance(part, LeftOut)]
    todo = Section("What to do", (Items(tuple(headline.actions), numbered=True),))
    first = Section("", (Facts(headline.answers, "answers"), todo), "column")
    faults = tuple((str(fault),) for fault in faults)
    defined = tuple((f"{one.name} {one.equation}".strip(), one.formula, one.text) for one in definitions)
    sections = (
        Section("", (first, *pictures[:1]), "first"),
        Section("", tuple(Text(note, "note") for note in notes)),
        Section("Figures", tuple(pictures[1:]), "figures"),
        Section("Measured", tuple(tables)),
        Section("Left out", (Items(tuple((f"{one.title}: {one.reason}",) for one in left_out)),) * bool(left_out)),
        Section("How it was run", (
            Facts(tuple((name, str(value)) for name, value in facts if value is not None)),
            *(Section("Parameters of the simulated faults", (Items(faults),), "folded"),) * bool(faults),
        )),
        Section("How to reproduce", (
            *((Text(REPRODUCE), Text(shlex.join(command), "code")) if command else ()),
            *(Section(name, (table,), "folded") for name, value in settings if (table := flat(name, value))),
        )),
        Section("Definitions", (*(Text(text) for text in about if text), Facts(defined, "definitions"))),
    )  # fmt: skip
    banner = Banner(verdict, label, headline.sentence, simulated)
    return Report(title, kind, banner, tuple(one for one in sections if one.parts), tuple(brief))


@dataclasses.dataclass(frozen=True)
class Check:
    """A claim of the paper, and whether the study reproduced it.

    Attributes:
        claim: the claim, in one sentence.
        holds: whether the claim was reproduced; None if the intervals of the figures leave it undecided.
        seen: the measured figures.
    """

    claim: str
    holds: bool | None
    seen: str


class _Answer(NamedTuple):
    label: str
    lead: str
    tone: str


ANSWERS = {
    True: _Answer("yes", "seen", "clean"),
    False: _Answer("NO", "not seen", "inconclusive"),
    None: _Answer("undecided", "undecided", "inconclusive"),
}


Finding: TypeAlias = Table | Chart | Check


@dataclasses.dataclass(frozen=True)
class Findings:
    """All findings of a study."""

    grids: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    checks: tuple[Check, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Finding]) -> "Findings":
        """Groups the parts that a study yields by their type."""
        found: dict[type, list[Any]] = {Table: [], Chart: [], Check: []}
        for part in parts:
            found[type(part)].append(part)
        return cls(*map(tuple, found.values()))

    def __add__(self, other: "Findings") -> "Findings":
        return Findings(self.grids + other.grids, self.charts + other.charts, self.checks + other.checks)


@dataclasses.dataclass(frozen=True)
class Conclusion:
    """A record, its summary, and its report."""

    record: Contents
    summary: Ending
    fields: dict[str, Any]  # of `summary.json`, including custom ones
    report: Report

    @property
    def verdict(self) -> Verdict | None:
        """The verdict; None if nothing is compared."""
        return self.summary.verdict

    @property
    def ended(self) -> bool:
        """Whether the record is complete: its summary was written, or covers everything that was planned."""
        summary = self.summary
        planned = isinstance(summary, CampaignSummary | StudySummary) and bool(summary.complete)
        return self.record.ended or planned

    @property
    def contents(self) -> dict[str, Any]:
        """The fields that `conclude` returns."""
        path = Path(self.record.path)
        return {**self.fields, "sentence": self.entry("").sentence, "run": str(path), "report": str(path / PAGE)}

    def entry(self, name: str) -> "IndexEntry":
        """Returns the record's entry in an index."""
        banner = self.report.banner
        return IndexEntry(name, self.verdict, banner.label if banner else "", banner.sentence if banner else "")


class IndexEntry(msgspec.Struct, frozen=True):
    """The entry of a run in an index or a comparison."""

    run: str
    verdict: Verdict | None
    label: str
    sentence: str


class StudyFindings(StudySummary, kw_only=True):
    """The contents of the `summary.json` of a study that has findings."""

    grids: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    checks: tuple[Check, ...] = ()


def summarize_findings(study: str, findings: Findings) -> StudyFindings:
    """Returns the contents of `summary.json`."""
    return StudyFindings(study=study, grids=findings.grids, charts=findings.charts, checks=findings.checks)


def study_page(record: Contents, findings: StudyFindings) -> Report:
    """Makes the page of a study, even if the study is incomplete."""
    manifest, checks = record.study, findings.checks
    study = str(findings.study or manifest.study)  # an incomplete study has no findings yet
    missing = [check.claim for check in checks if check.holds is False]
    undecided = [f"{check.claim} (undecided)" for check in checks if check.holds is None]
    tables = [marked(table, SIMULATED) for table in findings.grids]
    charts = [line_figure(chart) for chart in findings.charts]
    rows = tuple((check.claim, ANSWERS[check.holds].label, check.seen) for check in checks)
    seen = f"{len(checks) - len(missing) - len(undecided)} of {len(checks)} claims hold at this scale"
    if undecided:
        seen += f", {len(undecided)} undecided"
    # A study with parts may have been interrupted.
    seconds = round(sum(part.seconds or 0 for part in record.parts)) or manifest.seconds
    settings = {key: record.manifest.get(key) for key in ("workers", "steps", "seed", "settings", "workloads")}
    claims = (
        Text(f"{check.claim}: {check.seen}", "", ANSWERS[check.holds].lead, ANSWERS[check.holds].tone)
        for check in checks
    )
    return record_page(
        command=manifest.command,
        kind=f"study of {study}",
        title=record.path.resolve().name,
        verdict=None,
        label=f"STUDY: {study.upper()} ({SIMULATED})",
        headline=headline_of_study(
            seen if findings.study else "the study is incomplete", "; ".join((*missing, *undecided))
        ),
        simulated="gradients, delays, losses or faults were simulated on healthy hardware",
        facts=[
            *((name, getattr(manifest, name)) for name in ("workers", "steps", "seed", "parts")),
            ("started", moment(manifest.created)),
            ("seconds", seconds),
        ],
        measured=[Table("Claims", ("claim", "holds here", "figures"), rows), *tables],
        drawn=[chart if isinstance(chart, LeftOut) else marked(chart, SIMULATED) for chart in charts],
        settings=[("Environment", record.manifest.get("environment")), ("Study", settings)],
        definitions=(),
        about=[SOURCES.get(study, "")],
        brief=[*tables, *claims],
    )


def headline_of_study(sentence: str, missing: str = "") -> Headline:
    """Makes the headline of a study, which does not test a device."""
    actions = [
        Action(
            "Compare the results with your own training runs", "The study uses small workloads; the tables list them."
        )
    ]
    if missing:
        actions.insert(
            0,
            Action(
                "Look at the claims that were not reproduced or remain undecided",
                f"Reproducing these claims may require more steps, seeds, workers or trials: {missing}.",
            ),
        )
    return Headline(sentence, real="all errors, delays and losses are simulated", actions=tuple(actions))
