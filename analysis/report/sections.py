"""The parts of a report: tables, figures and texts in sections. A report is built once for all renderers."""

import dataclasses
import datetime
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .canvas import Drawing

    Numbers: TypeAlias = Sequence[float] | NDArray[np.float64]
else:
    Numbers = Sequence[float]  # as stored in a file

NOT_MEASURED = "–"


@dataclasses.dataclass(frozen=True)
class Link:
    """Text that links to another page."""

    text: str
    target: str

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Table:
    """A table. The first cell of a row identifies the row.

    Attributes:
        caption: title of the table.
        header: names of the columns.
        rows: the cells of each row: text, links, numbers, or None for a value that was not measured.
        note: an explanation below the table.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""
    style: Literal["", "text", "settings", "settings folded", "runs"] = ""
    tones: tuple[str, ...] = ()  # verdicts that color the rows


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: label in the legend; empty for a line without a label.
        x: abscissae.
        y: ordinates, one for each abscissa; values that are not finite are omitted.
        dashed: whether the line is dashed, to set theory apart from measurements.
        points: whether only the points are drawn, without a line between them.
        error: half-widths of the 95 % intervals of `y`; empty if there are none.
        colour: index of the line's color (default: the position of the line in the chart).
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
    """Lines in one pair of axes, as data.

    Attributes:
        title: title of the chart.
        caption: an explanation below the chart.
        x: label of the abscissa, with its unit; the ticks are integers if the abscissa counts steps.
        y: label of the ordinate.
        lines: the lines, at most two dozen.
        log: names of the axes that are logarithmic.
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
    """A figure and the function that draws it; text renderers omit it."""

    title: str
    caption: str
    draw: Callable[["Drawing"], None]
    height: float = 2.9  # inches
    mark: str = ""  # text drawn into it, such as a note that faults are simulated


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A figure or table for which the record lacks data, and the reason."""

    title: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph, a note or code. `lead` precedes the text and is emphasized in the color of `tone`."""

    text: str
    style: Literal["", "note", "code"] = ""
    lead: str = ""
    tone: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Terms, each of which has an answer, a value, or a formula and an explanation."""

    entries: tuple[tuple[str, ...], ...]
    style: Literal["facts", "answers", "definitions"] = "facts"


@dataclasses.dataclass(frozen=True)
class Items:
    """A list; the first part of a two-part item is emphasized."""

    items: tuple[tuple[str, ...], ...]
    numbered: bool = False


@dataclasses.dataclass(frozen=True)
class Banner:
    """A verdict (None if nothing is compared), its label, and the finding in a sentence."""

    verdict: str | None
    label: str
    sentence: str
    simulated: str = ""

    @property
    def tone(self) -> str:
        """Name of the banner's color scheme."""
        return self.verdict or "neutral"


@dataclasses.dataclass(frozen=True)
class Section:
    """Parts under a heading. The parts of a section of style `row` or `first` appear side by side; a `folded` section
    is collapsed."""

    heading: str | Link
    parts: tuple["Part", ...]
    style: Literal["", "first", "column", "figures", "pair", "row", "folded", "open"] = ""


Part: TypeAlias = Table | Figure | Text | Facts | Items | Banner | Section
Marked = TypeVar("Marked", Table, Figure)


@dataclasses.dataclass(frozen=True)
class Report:
    """A page, the kind of its report, and the parts that a terminal shows before the verdict. With a script, the rows
    of an `interactive` page can be sorted and filtered."""

    title: str
    kind: str
    banner: Banner | None  # None on a page with several verdicts
    sections: tuple[Section, ...]
    brief: tuple[Part, ...] = ()
    interactive: bool = False


def marked(part: Marked, mark: str) -> Marked:
    """Returns a copy of a table or figure whose caption begins with `mark`, which states what is simulated; returns the
    part itself if `mark` is empty."""
    if not mark:
        return part
    caption = f"[{mark}] {part.caption}"
    if isinstance(part, Figure):
        return dataclasses.replace(part, caption=caption, mark=mark)
    return dataclasses.replace(part, caption=caption)


def filled(table: Table, lacking: str) -> Table | LeftOut:
    """Returns the table, or a `LeftOut` with the reason `lacking` if the table has no rows."""
    return table if table.rows else LeftOut(table.caption, lacking)


def show(value: Any, *, digits: int = 3) -> str:
    """Formats a value: a float with a few digits, a count in full with separators, and an unmeasured value as a
    dash."""
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


def moment(text: Any) -> str:
    """Formats a date and time of a record, `2026-01-05T07:30:00+00:00`, as `2026-01-05 07:30 UTC`; returns a dash
    for anything else."""
    try:
        found = datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return NOT_MEASURED
    if found.tzinfo is None:
        return f"{found:%Y-%m-%d\u00a0%H:%M}"
    return f"{found.astimezone(datetime.UTC):%Y-%m-%d\u00a0%H:%M}\u00a0UTC"


def cell(value: Any) -> str:
    """Formats a cell of a table; floats have four digits."""
    return str(value) if isinstance(value, str | Link) else show(value, digits=4)


def flat(caption: str, value: Any) -> Table | None:
    """Flattens a nested record into a table with one row for each leaf: its path, such as `a.b.c`, and its value.
    Returns None if the record has no leaves."""
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
