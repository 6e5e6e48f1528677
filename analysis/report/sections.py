"""The parts of a report: tables, figures and texts in sections, built once and shown by any renderer."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .canvas import Drawing

    Numbers: TypeAlias = Sequence[float] | NDArray[np.float64]
else:
    Numbers = Sequence[float]  # as a file has them

NOT_MEASURED = "–"


@dataclasses.dataclass(frozen=True)
class Link:
    """A text that leads to another page."""

    text: str
    target: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Table:
    """A table. The first cell names the row.

    Attributes:
        caption: what it shows.
        header: names of the columns.
        rows: cells: text, links, numbers, or None where nothing was measured.
        note: what to know when reading it.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""
    style: Literal["", "text", "settings", "settings folded", "runs"] = ""
    tones: tuple[str, ...] = ()  # of the rows, the verdicts that colour them


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: label for the legend; empty for none.
        x: abscissae.
        y: ordinates, as many; what is not finite is left out.
        dashed: whether the line is dashed, for theory beside what was measured.
        points: points without a line between them.
        error: half-lengths of the 95 % intervals of `y`, or none.
        colour: number of its colour; by default its place.
    """

    label: str
    x: "Numbers"
    y: "Numbers"
    dashed: bool = False
    points: bool = False
    error: "Numbers" = ()
    colour: int | None = None


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines over a pair of axes, as data.

    Attributes:
        title: what it shows.
        caption: what to know when looking at it.
        x: what the abscissa shows, with its unit; steps are whole numbers.
        y: what the ordinate shows.
        lines: the lines, at most two dozen.
        log: which axes are logarithmic.
    """

    title: str
    caption: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log: Literal["", "x", "y", "xy"] = ""


@final
@dataclasses.dataclass(frozen=True)
class Figure:
    """Something to draw, and how; a renderer that draws nothing leaves it out."""

    title: str
    caption: str
    draw: Callable[["Drawing"], None]
    height: float = 2.9  # inches
    mark: str = ""  # drawn into it, such as that faults are simulated


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A figure or a table that the record cannot give, and why."""

    title: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph, a note or code; `lead` stands out before it, in the colour of `tone`."""

    text: str
    style: Literal["", "note", "code"] = ""
    lead: str = ""
    tone: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Terms, each with what is said of it: an answer, a value, or a formula and a text."""

    entries: tuple[tuple[str, ...], ...]
    style: Literal["facts", "answers", "definitions"] = "facts"


@dataclasses.dataclass(frozen=True)
class Items:
    """A list; of an item in two parts the first stands out."""

    items: tuple[tuple[str, ...], ...]
    numbered: bool = False


@dataclasses.dataclass(frozen=True)
class Banner:
    """A verdict (None where nothing is compared), its label for reading, and what happened in a sentence."""

    verdict: str | None
    label: str
    sentence: str
    simulated: str = ""

    @property
    def tone(self) -> str:
        """The name of its colours."""
        return self.verdict or "neutral"


@dataclasses.dataclass(frozen=True)
class Section:
    """Parts under a heading. Those of a row or of the first screen stand beside each other; `folded` ones open."""

    heading: str | Link
    parts: tuple["Part", ...]
    style: Literal["", "first", "column", "figures", "pair", "row", "folded", "open"] = ""


Part: TypeAlias = Table | Figure | Text | Facts | Items | Banner | Section
Marked = TypeVar("Marked", Table, Figure)


@dataclasses.dataclass(frozen=True)
class Report:
    """A page of a run, of what kind it is a report, and what a terminal shows of it before the verdict."""

    title: str
    kind: str
    banner: Banner | None  # None on a page that has several
    sections: tuple[Section, ...]
    brief: tuple[Part, ...] = ()


def marked(part: Marked, mark: str) -> Marked:
    """A table or figure that says what is simulated in it; itself without a mark."""
    if not mark:
        return part
    caption = f"[{mark}] {part.caption}"
    if isinstance(part, Figure):
        return dataclasses.replace(part, caption=caption, mark=mark)
    return dataclasses.replace(part, caption=caption)


def filled(table: Table, lacking: str) -> Table | LeftOut:
    """A table, or why it has no rows."""
    return table if table.rows else LeftOut(table.caption, lacking)


def show(value: Any, *, digits: int = 3) -> str:
    """A number for reading: some digits; counts in full with separators; a dash for what was not measured."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NOT_MEASURED
    try:
        found = float(value)
    except OverflowError:
        return NOT_MEASURED
    if math.isnan(found):
        return "NaN"
    if math.isinf(found):
        return "∞" if found > 0 else "-∞"
    return f"{value:,}" if isinstance(value, int) else f"{found:.{digits}g}"


def cell(value: Any) -> str:
    """A cell of a table as text: numbers with four digits."""
    return str(value) if isinstance(value, str | Link) else show(value, digits=4)


def flat(caption: str, value: Any) -> Table | None:
    """A nested record as one row per leaf, `a.b.c` beside its value; None if it has none."""
    rows = tuple(_leaves("", value))
    return Table(caption, ("setting", "value"), rows, style="settings folded") if rows else None


def _leaves(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [
            leaf for key, item in value.items() for leaf in _leaves(f"{prefix}.{key}" if prefix else str(key), item)
        ]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return _leaves(prefix, {str(place): item for place, item in enumerate(value)})
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return [] if value is None else [(prefix, str(value))]
