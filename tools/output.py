"""What a command prints at its end: tables and a verdict for people, or JSON for programs."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sdc.analysis import COUNTS, number
from sdc.analysis.studies import size
from sdc.checksums import Profile, hardware
from sdc.records import stamp, to_json

from .fleet_tables import fleet_parts, naming_parts

WIDEST = 400
"""Columns of a table that no window has."""
COLOURS = {"clean": "bold green", "corrupt": "bold red", "inconclusive": "bold yellow"}
Part: TypeAlias = Table | Text | str


class Output(Console):
    """Standard output. A reader that has had enough, as `| head` has, does not change the exit code."""

    def __init__(self) -> None:
        # A table cut to the width of a pipe or a narrow window would hide figures.
        super().__init__(highlight=False, width=max(124, shutil.get_terminal_size().columns))

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(kind: str, summary: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints the summary of a record of some kind on standard output."""
    if as_json:
        write(json.dumps(to_json({**stamp(lasting=True), **summary}), allow_nan=False, indent=1))
        return
    print_parts(PARTS.get(kind, _run)(summary))
    if "report" in summary:
        print_parts([f"report: {summary['report']}"])


def print_parts(parts: Iterable[Part]) -> None:
    """Prints tables and texts on standard output."""
    console = Output()
    for part in parts:
        if isinstance(part, Table):  # no figure is cut, however many columns there are
            wanted = Measurement.get(console, console.options.update(width=WIDEST), part).maximum
            console.width = max(console.width, wanted)
        console.print(part, markup=False, soft_wrap=not isinstance(part, Table))


def write(text: str) -> None:
    """Writes a text for programs on standard output, and a new line after it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        Output().on_broken_pipe()


def _loss(value: Any) -> str:
    loss = number(value)
    return "none" if loss is None else f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.4g}"


def _run(summary: Mapping[str, Any]) -> Iterator[Part]:
    if summary["sync"] is not None:
        yield _submodules(summary)
    if summary.get("abft"):
        yield _products(summary)
        yield from _skipped(summary["abft"])
    losses = ", ".join(map(_loss, summary["final_loss"]))
    yield f"{summary['steps']} steps, last loss {losses or 'none'}"
    for key, label in (
        ("worst_noise_to_signal", "worst noise-to-signal of the gradient (equation 5)"),
        ("parameter_difference", "parameter difference"),
    ):
        if summary.get(key) is not None and summary.get("sync") in ("params", "none"):
            yield f"{label}: {summary[key]:.3g}"
    if summary["verdict"] is not None:
        yield _verdict(summary)


def _verdict(summary: Mapping[str, Any], simulated: str = "(simulated faults)") -> Text:
    marked = f"  {simulated}" if summary.get("simulated") else ""
    return Text.assemble(
        (summary["verdict"].upper(), COLOURS[summary["verdict"]]),
        f"{marked}  {summary.get('sentence') or summary['reason']}",
    )


def table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]], **style: Any) -> Table:
    """A table whose first column is text and whose other columns are numbers."""
    style = {"padding": (0, 1, 0, 0), **style}
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, **style)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _submodules(summary: Mapping[str, Any]) -> Table:
    published, expected = summary.get("published") or {}, summary.get("expected") or {}
    beside = ["published"] if published else []
    columns = ["submodule", "checked", "mismatched", "injected", "frequency"]
    columns += [*(["expected"] if expected else []), *beside, "severity", *beside]
    rows = []
    for site, row in {**summary["submodules"], **summary["other_sites"]}.items():
        known = published.get(site, {})
        compared = [f"{row[name]:,}" for name in ("checked", "mismatched")] if row["checked"] else ["not compared", "-"]
        cells = [site, *compared, f"{row['injected']:,}", _number(row["frequency"])]
        cells += [_number(expected.get(site))] if expected else []
        cells += [_number(known.get("frequency"))] if published else []
        cells += [_number(row["severity"]), *([_number(known.get("severity"))] if published else [])]
        rows.append(cells)
    return table(_titled("Mismatches by submodule", summary), columns, rows)


def _products(summary: Mapping[str, Any]) -> Table:
    """Rows of matrix products by pass."""
    rows = []
    for way in ("fwd", "remat", "bwd"):
        sites = [site for name, site in summary["abft"]["sites"].items() if name.startswith(f"{way}/")]
        if sites:
            counts = (f"{sum(site[name] for site in sites):,}" for name in COUNTS)
            rows.append([way, *counts, _number(max(float(site["margin"]) for site in sites))])
    return table(_titled("Checked rows of matrix products", summary), ["pass", *COUNTS, "worst margin"], rows)


def _skipped(found: Mapping[str, Any]) -> Iterator[str]:
    """What was not checked."""
    if found.get("skipped"):
        covered = found.get("coverage")
        yield f"not checked (coverage {'unknown' if covered is None else f'{covered:.1%}'} of the products' work):"
    for one in found.get("skipped") or ():
        share = "an unknown share" if one["share"] is None else f"{one['share']:.1%}"
        yield f"  {one['site']}  {share} of the step  {one['reason']}  {one['source']}"


def _titled(title: str, summary: Mapping[str, Any]) -> str:
    return title + (" (simulated faults)" if summary.get("simulated") else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{float(value):.3g}"


def _campaign(summary: Mapping[str, Any]) -> Iterator[Part]:
    outcomes = []
    for name, entry in summary["outcomes"].items():
        interval = "-" if entry["share"] is None else f"{entry['low']:.3f} to {entry['high']:.3f}"
        outcomes.append([name.replace("_", " "), f"{entry['count']:,}", _number(entry["share"]), interval])
    yield table("Outcomes (simulated faults)", ["outcome", "injections", "share", "95 % interval"], outcomes)
    detectors = []
    for name, entry in summary["detectors"].items():
        found = (f"{part['count']:,} of {part['of']:,}" for part in (entry["of_unmasked"], entry["of_harmful"]))
        detectors.append([name.replace("_", " "), *found, _number(entry["median_latency"])])
    yield table("Detectors", ["detector", "changed training", "harmed it", "median latency"], detectors)
    yield f"{summary['reason'][:1].upper()}{summary['reason'][1:]}."


def _products_study(summary: Mapping[str, Any]) -> Iterator[Part]:
    columns = ["products", "scheme", "rows", "false alarms", "half found", "99 % found", "flips", "sign, exponent"]
    rows = []
    for variant, schemes in summary.get("variants", {}).items():
        for scheme, found in schemes.items():
            shares = (found[key] for key in ("half", "almost_all", "flips", "sign_exponent"))
            cells = ("never" if value is None else _number(value) for value in shares)
            rows.append([variant, scheme, f"{found['checked']:,}", f"{found['flagged']:,}", *cells])
    yield table("Checked products (simulated errors)", columns, rows, padding=(0, 1))
    yield "half and 99 % found: the smallest error, in root mean squares of its row, of which so many are found"


def _estimate(summary: Mapping[str, Any]) -> Iterator[Part]:
    columns = ["target", "program", "ratio", "cycles", "kernels", "moved", "memory", "of", "collectives", "compiled in"]
    rows = []
    for row in summary["programs"]:
        if "does_not_fit" in row:
            continue
        count = sum(each["count"] for each in row["collectives"])
        cells = [row["target"], row["tool"], "-" if row["ratio"] is None else f"{row['ratio']:.3f}"]
        cells += [
            "-" if row["cycles"] is None else f"{row['cycles']:,}",
            "-" if row["kernels"] is None else f"{row['kernels']:,}",
        ]
        cells += [size(row["moved"] or None), size(row["memory"]), size(row["capacity"]), f"{count:,}"]
        rows.append([*cells, f"{row['compile_seconds']:.1f} s"])
    yield table("Cost on each device (compiler's estimate, nothing was run)", columns, rows, padding=(0, 1))
    for row in summary["programs"]:
        if "does_not_fit" in row:
            yield Text.assemble(
                ("DOES NOT FIT", "bold red"), f"  {row['target']}, {row['tool']}: {row['does_not_fit']}"
            )
            continue
        for each in row["collectives"]:
            over = f"over {each['axes'] or 'no axis'}{', crossing ' + each['crosses'] if each['crosses'] else ''}"
            yield f"{row['target']}, {row['tool']}: {each['count']:,} {each['kind']} {over}, {size(each['sent'])}"


def _findings(summary: Mapping[str, Any]) -> Iterator[Part]:
    for grid in summary.get("grids", []):
        rows = [[cell if isinstance(cell, str) else _number(cell) for cell in row] for row in grid["rows"]]
        yield table(f"{grid['caption']} (simulated)", grid["header"], rows, padding=(0, 1))
    for check in summary.get("checks", []):
        seen = ("seen", "bold green") if check["holds"] else ("not seen", "bold yellow")
        yield Text.assemble(seen, f"  {check['claim']}: {check['seen']}")


def _checkpoints(result: Mapping[str, Any]) -> Iterator[Part]:
    """Certified checkpoints, a line each."""
    rows = []
    for row in result["checkpoints"]:
        status = row["status"] or {"state": "-", "reasons": [], "history": True}
        by = ", ".join(status["reasons"]) + ("" if status["history"] else " (history not verified)")
        found = (
            "not compared"
            if not row["compared"]
            else "differs"
            if row["wrong"]
            else "-"
            if row["problem"]
            else "as saved"
        )
        rows.append([str(row["step"]), status["state"], by or "-", f"{row['covered']:,}", size(row["bytes"]), found])
    yield table("Checkpoints", ["step", "state", "by", "arrays", "size", "restored"], rows, padding=(0, 1))
    for row in result["checkpoints"]:
        if row["problem"]:
            yield f"step {row['step']}: {row['problem']}"
        if row["uncovered"]:
            yield f"step {row['step']}: not certified: {', '.join(row['uncovered'])}"
    if result["verdict"] is not None:
        yield Text(result["verdict"].upper(), COLOURS[result["verdict"]])


def _doctor(result: Mapping[str, Any]) -> Iterator[Part]:
    """Checks that say something, the rest in a line, what to set, and the verdict."""
    to_set: dict[str, str] = {}  # by variable: what makes this host like another one comes last
    for check in result["checks"]:
        style = {"differs": "bold red", "ok": "green", "not applicable": "dim", "information": "cyan"}
        yield Text.assemble(
            (f"{check['outcome']:<16}", style.get(check["outcome"], "bold yellow")),
            f"{check['name']}: {check['sentence']}",
        )
        if check["outcome"] not in ("ok", "not applicable"):
            to_set |= {line.partition("=")[0].split()[-1]: line for line in check["lines"]}
    if to_set:
        yield "to make bits comparable, set"
        yield from (f"  {line}" for line in to_set.values())
    verdict = result["verdict"]
    colour = {"FIT": "clean", "NOT FIT": "corrupt"}.get(verdict["word"], "inconclusive")
    yield Text.assemble((verdict["word"], COLOURS[colour]), f"  {verdict['sentence']}")


def _difference(result: Mapping[str, Any]) -> Iterator[Part]:
    yield _verdict(result, "(simulated fault)")
    if (first := result["first"]) is None:
        return
    iteration = ", ".join(map(str, first["iteration"])) + (" (outermost loop first)" if first["iteration"] else "")
    for label, value in (
        ("step", first["step"]),
        ("operation", f"{first['operation']} ({first['direction']})"),
        ("scope", first["scope"]),
        ("iteration", iteration),
        ("devices", "; ".join(" ".join(f"{k}={v}" for k, v in device.items()) for device in first["devices"])),
        ("source", first["source"]),
    ):
        if value != "":
            yield f"  {label:<10} {value}"
    yield f"agree before it: {result['agreeing']:,} digests, the last of them"
    for place in result["before"]:
        at = f"  iteration {', '.join(map(str, place['iteration']))}" if place["iteration"] else ""
        yield f"  {place['site']}{at}  {place['source']}"
    if result["narrow"]:
        yield f"narrow down: trace both again with --where '{result['narrow']}'"


def _several(result: Mapping[str, Any]) -> Iterator[Part]:
    """Several runs, a line for each, and which settings differ."""
    for one in result["runs"]:
        verdict = one["verdict"] or "no verdict"
        yield Text.assemble((one["label"], COLOURS.get(verdict, "bold")), f"  {one['run']}  {one['sentence']}")
    for name, values in result.get("settings", {}).items():
        yield f"  {name}: {' | '.join(values)}"


def show_profile(profile: Profile, path: Path, *, as_json: bool) -> None:
    """Prints what was measured of a device's products."""
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
    lines.append(f"products that begin with the second tier: {', '.join(profile.second_tier) or 'none'}")
    if found["kernel_seconds"]:
        lines.append(f"fused kernel: {json.dumps(found['kernel_seconds'])}; {'used' if profile.fused else 'not used'}")
    console = Output()
    for line in [*lines, f"profile: {path}"]:
        console.print(line, soft_wrap=True, markup=False)


PARTS: dict[str, Callable[[Mapping[str, Any]], Iterator[Part]]] = {
    "campaign": _campaign,
    "checkpoint": _checkpoints,
    "abft study": _products_study,
    "aggregation study": _findings,
    "scar study": _findings,
    "nodes study": _findings,
    "diff": _difference,
    "doctor": _doctor,
    "estimate": _estimate,
    "fleet": fleet_parts,
    "fleet simulation": naming_parts,
    "several": _several,
}
"""What is shown of each kind of record; of all others what is shown of a run."""
