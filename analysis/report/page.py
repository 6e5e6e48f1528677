"""The page of one record, in the order of what a reader asks: what happened, which device, what now, how sure."""

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .sections import Banner, Facts, Figure, Items, LeftOut, Part, Report, Section, Table, Text, flat, marked

REPRODUCE = (
    "Give this again, with another run folder (--run) where it takes one, on a machine with the same environment; the "
    "digests of program and data tell whether it is the same run."
)


class Action(NamedTuple):
    """Something to do, in a few words, and how and why."""

    what: str
    how: str


class Definition(NamedTuple):
    """A quantity, its formula, what to know about it, and the number of its equation in the study."""

    name: str
    formula: str
    text: str
    equation: str = ""


@dataclasses.dataclass(frozen=True)
class Headline:
    """The first screen in words: what happened, and what a reader asks first."""

    sentence: str
    device: str
    operation: str
    since: str
    real: str
    actions: tuple[Action, ...]

    @property
    def answers(self) -> tuple[tuple[str, str], ...]:
        """The five questions with their answers."""
        return (
            ("Which device", self.device),
            ("Which operation", self.operation),
            ("Since when", self.since),
            ("Real or simulated", self.real),
            ("What now", self.actions[0].what),
        )


def record_page(
    manifest: Mapping[str, Any],
    *,
    title: str,
    kind: str,
    verdict: str | None,
    label: str,
    headline: Headline,
    facts: Iterable[tuple[str, Any]],
    measured: Iterable[Table | LeftOut | None],
    drawn: Iterable[Figure | LeftOut],
    settings: Mapping[str, Any],
    definitions: Iterable[Definition],
    about: Iterable[str],
    mark: str = "",
    simulated: str = "",
    faults: Iterable[Any] = (),
    notes: Iterable[str] = (),
    brief: Iterable[Part] = (),
) -> Report:
    """Puts the page of a record together.

    Args:
        manifest: its manifest.
        title: its name.
        kind: what it is a record of.
        verdict: its verdict, None where nothing is compared.
        label: the verdict for reading.
        headline: the first screen.
        facts: the run in a few lines; those without a value are left out.
        measured: tables, those without a row left out, or why there is none.
        drawn: figures, or why there is none; the first that can be drawn leads.
        settings: settings by caption, besides the environment.
        definitions: what the numbers mean.
        about: paragraphs before them.
        mark: what is simulated; stands before the caption of every table and figure.
        simulated: that in a sentence.
        faults: the simulated faults.
        notes: what to know before reading on.
        brief: what a terminal shows.
    """
    found, figures = list(measured), list(drawn)
    pictures = [marked(part, mark) for part in figures if isinstance(part, Figure)]
    tables = [marked(part, mark) for part in found if isinstance(part, Table) and part.rows]
    left_out = [part for part in (*found, *figures) if isinstance(part, LeftOut)]
    todo = Section("What to do", (Items(tuple(headline.actions), numbered=True),))
    first = Section("", (Facts(headline.answers, "answers"), todo), "column")
    faults = tuple((str(fault),) for fault in faults)
    command = shlex.join(map(str, manifest.get("command") or ()))
    shown = [flat(name, value) for name, value in {"Environment": manifest.get("environment"), **settings}.items()]
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
            *((Text(REPRODUCE), Text(command, "code")) if command else ()),
            *(Section(table.caption, (table,), "folded") for table in shown if table),
        )),
        Section("Definitions", (*(Text(text) for text in about if text), Facts(defined, "definitions"))),
    )  # fmt: skip
    banner = Banner(verdict, label, headline.sentence, simulated)
    return Report(title, kind, banner, tuple(one for one in sections if one.parts), tuple(brief))
