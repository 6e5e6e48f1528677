"""What `sdc fleet` prints for people."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from sdc.analysis.fleet import LABELS, facts, how_often, notes, operations, part_of, simulation_words

Part: TypeAlias = Table | Text | str
COLOURS = {"clean": "bold green", "corrupt": "bold red", "inconclusive": "bold yellow"}
MOST = 30
"""Rows of a table on a terminal."""


def fleet_parts(summary: Mapping[str, Any]) -> Iterator[Part]:
    """Parts of a summary: the verdict last, where a terminal stops."""
    if words := simulation_words(summary):
        yield Text(f"SIMULATED FAULTS: {words}", "bold magenta")
    yield from _suspects(summary["suspects"])
    for row in summary["ties"][:MOST]:
        groups = "; ".join(
            f"{each['digest']} on {each['devices']} devices of {', '.join(each['hosts'][:5])}"
            for each in row["groups"][:4]
        )
        yield f"no majority: {_marked(row)}{row['workload']}: {groups}"
    yield from _table("To watch", ("host", "device", "since", "reason"), (
        (_marked(row) + row["host"], _device(row), row["since"], row["reason"]) for row in summary["watch"]
    ))  # fmt: skip
    yield from _table("Outliers in throughput (slow is not corrupt)", ("host", "device", "", "of the median", "in"), (
        (
            _marked(row) + row["host"], _device(row), "slow" if row["slow"] else "fast", f"{row['ratio']:.0%}",
            f"{row['far']} of {row['judged']} workloads, farthest {row['workload']}",
        )
        for row in summary["outliers"]
    ))  # fmt: skip
    for row in summary["moved"][:MOST]:
        yield f"moved: {row['identity']}: {' -> '.join(row['hosts'])}"
    yield from _table("Refused", ("file", "reason"), ((row["file"], row["reason"]) for row in summary["refused"]))
    for row in summary["duplicates"][:MOST]:
        yield f"again: {row['file']} (as {row['of']})"
    for name, value in facts(summary):
        yield f"{name}: {value}"
    for note in notes(summary):
        yield Text(note, "yellow")
    for row in summary["suspects"][:3]:
        yield f"next, for {_marked(row)}{row['host']} device {row['device']}:"
        yield from (f"  {number}. {step}" for number, step in enumerate(row["next"], start=1))
    mark = {"all": "SIMULATION  ", "some": "PARTLY SIMULATED  ", "none": ""}[summary["simulated"]]
    label = (LABELS[summary["verdict"]], COLOURS[summary["verdict"]])
    yield Text.assemble((mark, "bold magenta"), label, f"  {summary['sentence']}")


def naming_parts(result: Mapping[str, Any]) -> Iterator[Part]:
    """Parts of a simulation of pairs."""
    header = ("rounds", "named exactly", "95 % interval", "named wrongly", "undecided")
    rows = (
        (
            str(row["rounds"]), f"{row['share']:.1%}", f"{row['low']:.1%} to {row['high']:.1%}",
            f"{row['wrong'] / row['trials']:.1%}", f"{row['undecided'] / row['trials']:.1%}",
        )
        for row in result["rounds"]
    )  # fmt: skip
    about = f"{result['bad']} bad among {result['hosts']} hosts, a pair differs with {result['probability']:g}"
    yield from _table(f"{about} (SIMULATED, {result['trials']:,} fleets)", header, rows, most=1000)
    yield "named: the only smallest set of hosts with a member in every pair that differed"


def _suspects(rows: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    header = ("host", "device", "part", "confidence", "operation", "how often", "since", "evidence")
    cells = (
        (
            _marked(row) + row["host"], str(row["device"]), part_of(row), row["confidence"], operations(row),
            how_often(row), row["first"], ", ".join(row["kinds"]),
        )
        for row in rows
    )  # fmt: skip
    yield from _table("Suspects, the surest first", header, cells)


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], most: int = MOST) -> Iterator[Part]:
    """A table of texts, if it has rows; of many the first."""
    every = list(rows)
    if not every:
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in header:
        table.add_column(name, no_wrap=True)
    for row in every[:most]:
        table.add_row(*map(Text, row))
    yield table
    if len(every) > most:
        yield f"  and {len(every) - most:,} more (--json or --output tells all)"


def _marked(row: Mapping[str, Any]) -> str:
    return "SIMULATED " if row["simulated"] else ""


def _device(row: Mapping[str, Any]) -> str:
    return "-" if row["device"] is None else str(row["device"])
