"""What `sdc golden` prints: tables for people, or JSON for programs."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .output import COLOURS, Output, Part, show

SHORT = ("platform_version", "driver", "jax", "jaxlib", "machine", "processor", "cpu_threads")
"""What stands of an environment in a line; flags and options follow below."""


def show_golden(summary: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints what became of a register, or what is in registers."""
    if as_json:
        show(summary, as_json=True)
        return
    console = Output()
    for part in _parts(summary):
        console.print(part, markup=False, soft_wrap=not isinstance(part, Table))


def _parts(summary: Mapping[str, Any]) -> Iterator[Part]:
    if "entries" in summary:
        yield from _listed(summary)
    yield from summary.get("sentences", [])
    if "verdict" in summary:
        yield Text.assemble((summary["verdict"].upper(), COLOURS[summary["verdict"]]), f"  {summary['sentence']}")
    elif "sentence" in summary:
        yield summary["sentence"]


def _listed(summary: Mapping[str, Any]) -> Iterator[Part]:
    for mark, environment in summary["environments"].items():
        yield f"environment {mark}: " + ", ".join(
            f"{name} {environment[name]}" for name in SHORT if name in environment
        )
        rest = {name: value for name, value in environment.items() if name not in (*SHORT, "platform")}
        yield "  " + ", ".join(f"{name}={value}" for name, value in rest.items() if value != "")
    for name, recording in summary["recordings"].items():
        yield (
            f"burn-in {name[:8]}: host {recording['host']['name']}, {len(recording['devices'])} devices, "
            f"{recording['created']}, level {recording['level']}, {recording['rounds']} rounds"
        )
    table = Table(title="Golden digests", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("workload", "device", "environment", "digest", "devices", "runs", "agreed"):
        table.add_column(column, justify="right" if column in ("devices", "runs") else "left", no_wrap=True)
    for row in summary["entries"]:
        subject, seen = row["subject"], row["seen"]
        shard = "" if subject["shard"] is None else f" device {subject['shard']}"
        agreed = dict.fromkeys(kind for each in seen for kind in each["agreed"])
        counts = (sum(len(each["devices"]) for each in seen), sum(each["runs"] for each in seen))
        table.add_row(
            f"{subject['workload']}{shard}", subject["kind"], subject["environment"], row["digest"],
            *map(str, counts), ", ".join(agreed),
        )  # fmt: skip
    yield table
