"""What `sdc burnin` prints at its end: the verdict first, then what it rests on."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.text import Text

from sdc.burnin import BUNDLE, RESULT, BurninResult
from sdc.records import to_json

from .output import COLOURS, Part, print_parts, table, write

SENTENCES = 12
"""Sentences that are printed; all of them are in the result."""


def show_result(result: BurninResult, folder: Path | None, *, as_json: bool) -> None:
    """Prints the result of a burn-in on standard output; its folder is None where it could not be written."""
    if as_json:
        write(json.dumps(to_json(msgspec.to_builtins(result)), allow_nan=False, indent=1))
        return
    print_parts([*_parts(result), *(_places(folder) if folder is not None else ())])


def headline(result: BurninResult) -> Text:
    """The verdict in a line: what it is, what it rests on, and whether it is a rehearsal."""
    return Text.assemble(
        ("SIMULATION  ", "bold magenta") if result.simulated else "",
        (result.verdict.acceptance, COLOURS[result.verdict]),
        f"  host {result.host.name}, evidence: {', '.join(result.evidence) or 'none'}",
    )


def _parts(result: BurninResult) -> Iterator[Part]:
    if any(row.runs for row in result.workloads):
        yield _families(result)
        yield _devices(result)
    for outlook in result.outlooks:
        yield (
            f"a burst like that of {outlook.node} (one in {outlook.interval:,} steps, observed once): "
            f"{outlook.steps:,} training steps would show one with {outlook.probability:.0%} "
            f"({outlook.low:.0%} to {outlook.high:.0%})"
        )
    yield headline(result)
    sentences = result.sentences
    yield from (f"  {sentence}" for sentence in sentences[:SENTENCES])
    if len(sentences) > SENTENCES:
        yield f"  and {len(sentences) - SENTENCES} more in {RESULT}"


def _families(result: BurninResult) -> Part:
    rows = []
    ran = [row for row in result.workloads if row.runs]
    for family in dict.fromkeys(row.family for row in ran):
        mine = [row for row in ran if row.family == family]
        shares = [row.share for row in mine if row.share is not None]
        rows.append(
            [
                family,
                f"{len({row.workload for row in mine})}",
                f"{sum(row.runs for row in mine):,}",
                f"{sum(row.elements for row in mine):.3g}",
                f"{sum(row.seconds for row in mine):.3g}",
                f"{min(shares):.0%}" if shares else "-",
                f"{sum(row.differences for row in mine):,}",
            ]
        )
    title = f"Level {result.settings.level}: {result.rounds} rounds in {result.seconds:.0f} s"
    columns = ["family", "workloads", "runs", "elements", "s at load", "lowest throughput", "differences"]
    return table(title, columns, rows)


def _devices(result: BurninResult) -> Part:
    rows = []
    for device in result.devices:
        sensors = device.sensors
        interval = device.excluded_interval
        rows.append(
            [
                f"{device.index} {device.kind or 'device'}{device.mark and f', {device.mark}'}",
                f"{device.elements:.3g}",
                f"{device.seconds:.3g}",
                f"{device.excluded_rate:.2g}",
                f"{interval:.3g} s" if interval is not None else "-",
                f"{sensors.hottest:.0f} °C" if sensors and sensors.hottest is not None else "-",
                f"{sensors.strongest:.0f} W" if sensors and sensors.strongest is not None else "-",
            ]
        )
    columns = ["device", "elements", "s at load", "rate excluded", "bursts excluded", "hottest", "power"]
    return table("Devices: what would have been seen with 95 %, independent or in bursts", columns, rows)


def _places(folder: Path) -> Iterator[Part]:
    yield f"result: {folder / RESULT}"
    if (folder / BUNDLE).exists():
        yield f"evidence for the vendor, with a reproducer: {folder / BUNDLE}"
