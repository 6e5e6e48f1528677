"""What a command prints at its end: a table and a verdict for people, or JSON for programs."""

import json
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sdc.analysis.products import COUNTS
from sdc.record.files import to_json

from .errors import VERDICTS
from .options import RunOptions

COLOURS = {"clean": "bold green", "corrupt": "bold red", "inconclusive": "bold yellow"}


def finish(options: RunOptions, summary: Mapping[str, Any]) -> int:
    """Prints a summary and returns the exit code of its verdict."""
    if "submodules" in summary:  # process 0; the others have nothing to say
        show(summary, as_json=options.json)
    return int(VERDICTS[summary["verdict"]])


def show(summary: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints a summary on standard output."""
    if as_json:
        sys.stdout.write(json.dumps(to_json(summary), allow_nan=False, indent=1) + "\n")
        return
    # A table cut to the width of a pipe or a narrow window would hide figures.
    console = Console(highlight=False, width=max(100, shutil.get_terminal_size().columns))
    if summary["sync"] is not None:
        console.print(_submodules(summary))
    if summary.get("abft"):
        console.print(_products(summary))
    losses = ", ".join(f"{float(loss):.4f}" for loss in summary["final_loss"])
    console.print(f"{summary['steps']} steps, last loss {losses or 'none'}")
    for key, label in (
        ("worst_noise_to_signal", "worst noise-to-signal of the gradient (equation 5)"),
        ("parameter_difference", "parameter difference"),
    ):
        if summary.get(key) is not None and summary.get("sync") in ("params", "none"):
            console.print(f"{label}: {summary[key]:.3g}")
    if summary["verdict"] is not None:
        simulated = "  (simulated faults)" if summary.get("simulated") else ""
        console.print(f"[{COLOURS[summary['verdict']]}]{summary['verdict'].upper()}[/]{simulated}", end="  ")
        console.print(summary["reason"], markup=False)
    if "report" in summary:
        console.print(f"report: {summary['report']}", soft_wrap=True, markup=False)


def _submodules(summary: Mapping[str, Any]) -> Table:
    published = summary.get("published") or {}
    expected = summary.get("expected") or {}
    title = "Mismatches by submodule" + (" (simulated faults)" if summary.get("simulated") else "")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("submodule", no_wrap=True)
    for name in ("checked", "mismatched", "injected", "frequency"):
        table.add_column(name, justify="right", no_wrap=True)
    if expected:
        table.add_column("expected", justify="right", no_wrap=True)
    if published:
        table.add_column("published", justify="right", no_wrap=True)
    table.add_column("severity", justify="right", no_wrap=True)
    if published:
        table.add_column("published", justify="right", no_wrap=True)
    for site, row in {**summary["submodules"], **summary["other_sites"]}.items():
        figures = published.get(site, {})
        table.add_row(
            site,
            *(f"{row[name]:,}" for name in ("checked", "mismatched", "injected")),
            _number(row["frequency"]),
            *([_number(expected.get(site))] if expected else []),
            *([_number(figures.get("frequency"))] if published else []),
            _number(row["severity"]),
            *([_number(figures.get("severity"))] if published else []),
        )
    return table


def _products(summary: Mapping[str, Any]) -> Table:
    """Rows of matrix products by pass."""
    title = "Checked rows of matrix products" + (" (simulated faults)" if summary.get("simulated") else "")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("pass", no_wrap=True)
    for name in (*COUNTS, "worst margin"):
        table.add_column(name, justify="right", no_wrap=True)
    for way in ("fwd", "remat", "bwd"):
        sites = [site for name, site in summary["abft"]["sites"].items() if name.startswith(f"{way}/")]
        if sites:
            counts = (f"{sum(site[name] for site in sites):,}" for name in COUNTS)
            table.add_row(way, *counts, _number(max(float(site["margin"]) for site in sites)))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{float(value):.3g}"


def show_campaign(summary: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints the summary of a campaign on standard output."""
    if as_json:
        sys.stdout.write(json.dumps(to_json(summary), allow_nan=False, indent=1) + "\n")
        return
    console = Console(highlight=False, width=max(100, shutil.get_terminal_size().columns))
    outcomes = Table(title="Outcomes (simulated faults)", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("outcome", "injections", "share", "95 % interval"):
        outcomes.add_column(name, justify="left" if name == "outcome" else "right", no_wrap=True)
    for name, entry in summary["outcomes"].items():
        interval = "-" if entry["share"] is None else f"{entry['low']:.3f} to {entry['high']:.3f}"
        outcomes.add_row(name.replace("_", " "), f"{entry['count']:,}", _number(entry["share"]), interval)
    console.print(outcomes)
    detectors = Table(title="Detectors", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("detector", "changed training", "harmed it", "median latency"):
        detectors.add_column(name, justify="left" if name == "detector" else "right", no_wrap=True)
    for name, entry in summary["detectors"].items():
        found = (f"{part['count']:,} of {part['of']:,}" for part in (entry["of_unmasked"], entry["of_harmful"]))
        detectors.add_row(name.replace("_", " "), *found, _number(entry["median_latency"]))
    console.print(detectors)
    console.print(f"{summary['reason'][:1].upper()}{summary['reason'][1:]}.", markup=False)
    console.print(f"report: {summary['report']}", soft_wrap=True, markup=False)


def show_study(summary: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints the summary of a study of checksummed products on standard output."""
    if as_json:
        _write_json(summary)
        return
    console = Console(highlight=False, width=max(124, shutil.get_terminal_size().columns))
    table = Table(title="Checked products (simulated errors)", title_justify="left", box=SIMPLE_HEAD)
    for name in ("products", "scheme", "rows", "false alarms", "half found", "99 % found", "flips", "sign, exponent"):
        table.add_column(name, justify="left" if name in ("products", "scheme") else "right", no_wrap=True)
    for variant, schemes in summary["variants"].items():
        for scheme, found in schemes.items():
            shares = (found[key] for key in ("half", "almost_all", "flips", "sign_exponent"))
            counts = f"{found['checked']:,}", f"{found['flagged']:,}"
            table.add_row(variant, scheme, *counts, *("never" if value is None else _number(value) for value in shares))
    console.print(table)
    console.print(
        "half and 99 % found: the smallest error, in root mean squares of its row, of which so many are found"
    )
    console.print(f"report: {summary['report']}", soft_wrap=True, markup=False)


def show_findings(summary: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints the summary of a study of robust aggregation on standard output."""
    if as_json:
        _write_json(summary)
        return
    console = Console(highlight=False, width=max(124, shutil.get_terminal_size().columns))
    for grid in summary["grids"]:
        table = Table(title=f"{grid['caption']} (simulated)", title_justify="left", box=SIMPLE_HEAD)
        for place, name in enumerate(grid["header"]):
            table.add_column(name, justify="right" if place else "left")
        for row in grid["rows"]:
            table.add_row(*(cell if isinstance(cell, str) else _number(cell) for cell in row))
        console.print(table)
    for check in summary["checks"]:
        seen = "[bold green]seen[/]" if check["holds"] else "[bold yellow]not seen[/]"
        console.print(seen, end="  ")
        console.print(f"{check['claim']}: {check['seen']}", markup=False)
    console.print(f"report: {summary['report']}", soft_wrap=True, markup=False)


def _write_json(summary: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(to_json(summary), allow_nan=False, indent=1) + "\n")
