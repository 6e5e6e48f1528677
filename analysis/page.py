"""The parts of a report, whatever it is of, before they become HTML or Markdown."""

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from .canvas import LeftOut, Picture
from .definitions import BURSTS, DEFINITIONS, SOURCE, Definition
from .series import Row, sequence
from .tables import Table, flat


@dataclasses.dataclass(frozen=True)
class Report:
    """All text of a report, before it becomes HTML or Markdown.

    Attributes:
        title: name of the run.
        verdict: `corrupt`, `clean`, `inconclusive`, or `training` for a run that compares nothing.
        label: the verdict for reading.
        reason: why.
        simulated: what the simulated faults are; empty where the run injected none.
        notes: what to know before reading on.
        facts: the run in a few lines.
        measured: tables of what was measured.
        pictures: figures.
        left_out: what the record cannot show, and why.
        settings: tables of configuration and environment.
        command: the command line that made the run.
    """

    title: str
    verdict: str
    label: str
    reason: str
    simulated: str
    notes: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    measured: tuple[Table, ...]
    pictures: tuple[Picture, ...]
    left_out: tuple[LeftOut, ...]
    settings: tuple[Table, ...]
    command: str
    definitions: tuple[Definition, ...] = DEFINITIONS
    definitions_source: str = SOURCE
    bursts: str = BURSTS


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
    **said: Any,
) -> Report:
    """Puts a report together.

    Args:
        manifest: manifest of the record.
        mark: put before the caption of every table and figure, such as that faults are simulated; may be empty.
        facts: those without a value are left out.
        measured: tables; those that are empty are left out.
        drawn: figures, or why they cannot be drawn.
        left_out: tables that the record cannot give, and why.
        settings: settings by caption, besides the environment.
        notes: what to know before reading on.
        said: further parts by their name in `Report`.
    """

    def marked(part: Any) -> Any:
        return dataclasses.replace(part, caption=f"[{mark}] {part.caption}") if mark else part

    pictures = list(drawn)
    shown = {"Environment": manifest.get("environment"), **settings}
    tables = [flat(caption, value) for caption, value in shown.items()]
    return Report(
        notes=tuple(notes),
        facts=tuple((name, str(value)) for name, value in facts if value is not None),
        measured=tuple(marked(table) for table in measured if table and table.rows),
        pictures=tuple(marked(picture) for picture in pictures if isinstance(picture, Picture)),
        left_out=(*left_out, *(picture for picture in pictures if isinstance(picture, LeftOut))),
        settings=tuple(table for table in tables if table),
        command=shlex.join(map(str, sequence(manifest.get("command")))),
        **said,
    )


def sentence(reason: str) -> str:
    """A reason as a sentence."""
    return f"{reason[:1].upper()}{reason[1:]}."
