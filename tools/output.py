"""Prints the result of a command: sections as text, or JSON."""

import dataclasses
import itertools
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Grid
from rich.text import Text as Styled

from sdc.analysis.report import Banner, Facts, Items, Part as SectionPart, Report, Section, Table, Text, cell
from sdc.checksums import Profile, hardware
from sdc.records import stamp, to_json

from .runtime import printing, silence, write

WIDEST = 400  # columns of a table; no terminal is wider
MOST = 30  # maximum rows of a text table on a terminal
COLOURS = {"clean": "bold green", "corrupt": "bold red", "inconclusive": "bold yellow", "simulated": "bold magenta",
           "note": "yellow", "quiet": "dim", "known": "cyan", "neutral": "bold", "": "bold"}  # fmt: skip
Part: TypeAlias = SectionPart | Grid | Styled | str


class Output(Console):
    """Standard output. A reader that closes the pipe, such as `| head`, does not change the exit code."""

    def __init__(self) -> None:
        width = shutil.get_terminal_size().columns
        super().__init__(highlight=False, width=width if sys.stdout.isatty() else max(124, width))

    def on_broken_pipe(self) -> None:
        silence()


def show(value: Mapping[str, Any], parts: Iterable[Part] | Report = (), *, as_json: bool) -> None:
    """Prints a result on standard output: as JSON, or as text with the path of its report."""
    if as_json:
        write_json({**stamp(lasting=True), **value})
        return
    if isinstance(parts, Report):
        parts = [*parts.brief, *([parts.banner] if parts.banner else ())]
    print_parts([*parts, *([f"report: {value['report']}"] if "report" in value else ())])


def print_parts(parts: Iterable[Part]) -> None:
    console = Output()
    fitting = (one for part in parts for one in (_fit(part, console.width) if isinstance(part, Table) else [part]))
    for part in itertools.chain.from_iterable(map(_shown, fitting)):
        if isinstance(part, Grid):  # no number is cut, however many columns the table has
            wanted = Measurement.get(console, console.options.update(width=WIDEST), part).maximum
            console.width = max(console.width, wanted)
        with printing():
            console.print(part, markup=False, soft_wrap=not isinstance(part, Grid))


def write_json(value: Any) -> None:
    write(json.dumps(to_json(value), allow_nan=False, indent=1))


def table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """Returns a table whose first column is text and whose other columns are numbers."""
    return Table(title, tuple(columns), tuple(map(tuple, rows)))


def _fit(part: Table, width: int) -> Iterator[Table]:
    """Yields tables that are no wider than a terminal; each has the first column, and some of the others."""
    if part.style != "" or not sys.stdout.isatty():
        yield part
        return
    columns = list(zip(part.header, *(map(cell, row) for row in part.rows), strict=True))
    widths = [max(map(len, column)) + 2 for column in columns]
    chosen: list[int] = []
    for place in range(1, len(columns)):
        if chosen and widths[0] + sum(widths[one] for one in chosen) + widths[place] > width:
            yield _part_of(part, chosen)
            chosen = []
        chosen.append(place)
    yield _part_of(part, chosen)


def _part_of(part: Table, places: Sequence[int]) -> Table:
    header, *rows = (tuple(row[place] for place in (0, *places)) for row in (part.header, *part.rows))
    return dataclasses.replace(part, header=header, rows=tuple(rows))


def _shown(part: Part) -> Iterator[Grid | Styled | str]:
    """Yields the lines printed on a terminal for a part of a report."""
    match part:
        case Table() if part.rows:
            words = part.style != ""
            found = Grid(title=Styled(part.caption), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
            for place, name in enumerate(part.header):
                found.add_column(Styled(name), justify="right" if place and not words else "left", no_wrap=True)
            for row in part.rows[: MOST if words else None]:
                found.add_row(*(Styled(cell(value)) for value in row))
            yield found
            if words and len(part.rows) > MOST:
                yield f"  and {len(part.rows) - MOST:,} more (--json or --output shows all)"
        case Section():
            yield from ([str(part.heading)] if part.heading else ())
            yield from (each for inner in part.parts for each in _shown(inner))
        case Facts():
            yield from (f"{name}: {value}" for name, value, *_ in part.entries)
        case Items():
            numbers = (f"{number}. " if part.numbered else "" for number in range(1, len(part.items) + 1))
            yield from (f"  {number}{': '.join(item)}" for number, item in zip(numbers, part.items, strict=True))
        case Banner():
            yield Styled.assemble((part.label, COLOURS[part.tone]), f"  {part.sentence}")
        case Text():
            lead = (part.lead + "  " * bool(part.lead and part.text), COLOURS[part.tone])
            yield Styled.assemble(lead, (part.text, COLOURS["note"] if part.style == "note" else ""))
        case str() | Styled() | Grid():
            yield part
        case _:  # an empty table, or a part that a terminal cannot draw
            return


def show_profile(profile: Profile, path: Path, *, as_json: bool) -> None:
    """Prints the measurements of a device profile."""
    if as_json:
        sys.stdout.write(path.read_text(encoding="utf-8"))
        return
    found: dict[str, Any] = to_json(profile.measurements)
    lines = [
        f"device: {hardware()['device_kind']}",
        f"kappa: {profile.rounding.kappa:g}; rounding of float32 inputs: {profile.rounding.inputs:g}",
    ]
    for dtype, errors in found["largest_error"].items():
        text = ", ".join(f"{error:.2g} (k={depth})" for depth, error in errors.items())
        lines.append(f"largest |r| / (q + |cs|), {dtype}: {text}")
    lines.append(
        f"{found['checked']:,} rows of {found['config']}, {found['steps']} steps: largest margin "
        f"{float(found['largest_margin']):.3g} of {found['examined']:,} examined rows, none flagged"
    )
    lines.append(f"products that start at the second tier: {', '.join(profile.second_tier) or 'none'}")
    if found["kernel_seconds"]:
        lines.append(f"fused kernel: {json.dumps(found['kernel_seconds'])}; {'used' if profile.fused else 'not used'}")
    print_parts([*lines, f"profile: {path}"])
