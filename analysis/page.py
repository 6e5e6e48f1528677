"""The parts of a report, whatever it is of, before they become HTML or Markdown."""

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from .canvas import LeftOut, Picture
from .definitions import BURSTS, DEFINITIONS, SOURCE, Definition
from .headline import Headline
from .series import Row, sequence
from .tables import Table, flat


@dataclasses.dataclass(frozen=True)
class Report:
    """All text of a report, before it becomes HTML or Markdown.

    Attributes:
        kind: what it is a report of.
        title: name of the run.
        verdict: `corrupt`, `clean`, `inconclusive`, or `neutral` where nothing is compared.
        label: the verdict for reading.
        headline: the first screen in words.
        simulated: what was simulated; empty where the run injected nothing.
        faults: the simulated faults, with their parameters.
        notes: what to know before reading on.
        facts: the run in a few lines.
        measured: tables of what was measured.
        lead: the figure that shows what the headline says.
        pictures: the other figures.
        left_out: what the record cannot show, and why.
        settings: tables of configuration and environment.
        command: the command line that made the run.
    """

    kind: str
    title: str
    verdict: str
    label: str
    headline: Headline
    simulated: str
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    measured: tuple[Table, ...]
    lead: Picture | None
    pictures: tuple[Picture, ...]
    left_out: tuple[LeftOut, ...]
    settings: tuple[Table, ...]
    command: str
    definitions: tuple[Definition, ...] = DEFINITIONS
    definitions_source: str = SOURCE
    bursts: str = BURSTS

    @property
    def sentence(self) -> str:
        """The headline's sentence, as one."""
        return sentence(self.headline.sentence)


def make_report(
    manifest: Row,
    *,
    mark: str = "",
    facts: Iterable[tuple[str, Any]],
    measured: Iterable[Table | None],
    drawn: Iterable[Picture | LeftOut],
    left_out: Iterable[LeftOut] = (),
    settings: Mapping[str, Any],
    notes: Iterable[str] = (),
    faults: Iterable[Any] = (),
    **said: Any,
) -> Report:
    """Puts a report together.

    Args:
        manifest: manifest of the record.
        mark: put before the caption of every table and figure, such as that faults are simulated; may be empty.
        facts: those without a value are left out.
        measured: tables; those that are empty are left out.
        drawn: figures, or why they cannot be drawn; the first that can be drawn leads.
        left_out: tables that the record cannot give, and why.
        settings: settings by caption, besides the environment.
        notes: what to know before reading on.
        faults: the simulated faults.
        said: further parts by their name in `Report`.
    """

    def marked(part: Any) -> Any:
        return dataclasses.replace(part, caption=f"[{mark}] {part.caption}") if mark else part

    parts = list(drawn)
    pictures = [marked(part) for part in parts if isinstance(part, Picture)]
    shown = {"Environment": manifest.get("environment"), **settings}
    tables = [flat(caption, value) for caption, value in shown.items()]
    return Report(
        notes=tuple(notes),
        faults=tuple(map(str, faults)),
        facts=tuple((name, str(value)) for name, value in facts if value is not None),
        measured=tuple(marked(table) for table in measured if table and table.rows),
        lead=pictures[0] if pictures else None,
        pictures=tuple(pictures[1:]),
        left_out=(*left_out, *(part for part in parts if isinstance(part, LeftOut))),
        settings=tuple(table for table in tables if table),
        command=shlex.join(map(str, sequence(manifest.get("command")))),
        **said,
    )


def sentence(reason: str) -> str:
    """A reason as a sentence."""
    return f"{reason[:1].upper()}{reason[1:]}{'' if reason.endswith('.') else '.'}"
