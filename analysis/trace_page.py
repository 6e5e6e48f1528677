"""The report of a comparison of two traces: the verdict, the first difference, how to narrow it down, and how far it
spreads."""

import dataclasses
import math
from os import PathLike
from pathlib import Path

import msgspec
import numpy as np

from sdc.program import as_selector
from sdc.schema import DifferencePlace, OperationPlace, Suspect, TraceManifest
from sdc.twins import Trace, TraceDifference, describe_place, guilty_scope
from sdc.verdict import Verdict

from . import report
from .headline import of_place
from .report import Action, Definition, Drawing, Facts, Figure, Headline, LeftOut, Report, Table
from .run_page import LABELS, SIMULATED

DEFINITIONS = (
    Definition("Digest", "64 bits", "Digest of every selected value at every step; equal values have equal digests."),
    Definition(
        "First difference",
        "in program order",
        "The first value that differs. If all operations are traced, the operation that computed this value had equal "
        "inputs in both runs.",
    ),
)


class TraceComparison(msgspec.Struct, kw_only=True):
    """A comparison of two traces."""

    verdict: Verdict
    reason: str
    runs: list[str]  # folders of both traces
    hosts: list[str]
    simulated: bool  # whether faults were simulated in one of them
    where: str | None  # selector of the traced values
    steps: int  # number of compared steps
    sites: int
    first: DifferencePlace | None = None  # the first difference


class PartedTraces(TraceComparison, kw_only=True):
    """A comparison of two traces that differ."""

    first: DifferencePlace
    agreeing: int  # number of equal digests before the difference
    before: list[OperationPlace]  # the last equal values before it
    narrow: str | None  # selector for another trace, to find the operation inside the affected scope


def describe_difference(a: Trace, b: Trace, found: TraceDifference) -> TraceComparison:
    """Describes a comparison of two traces; returns a `PartedTraces` if the traces differ."""
    first, manifests = found.first, (_manifest(a), _manifest(b))
    digests = sum(math.prod(shape[:-1]) for shape in a.shapes)
    steps = f"{len(found.steps):,} steps" if len(found.steps) > 1 else f"step {found.steps[0]}"
    uneven = len(a.lines) != len(b.lines)
    shorter = f"; the first trace has {len(a.lines):,} steps, the second {len(b.lines):,}" if uneven else ""
    result = TraceComparison(
        verdict=Verdict.CLEAN,
        reason=f"all {digests * len(found.steps):,} digests of {steps} agree{shorter}",
        runs=[str(a.path), str(b.path)],
        hosts=[manifest.host.name for manifest in manifests],
        simulated=any(bool(_suspect(manifest).simulated) for manifest in manifests),
        where=manifests[0].where,
        steps=len(found.steps),
        sites=len(a.sites),
    )
    if first is None or found.step is None:
        return result
    try:
        guilty = guilty_scope(as_selector(str(result.where)), first)
    except ValueError:  # a selector made in Python, for a trace of a user's own step
        guilty = None
    known = msgspec.structs.asdict(result)
    known.update(verdict=Verdict.CORRUPT, reason=f"the traces first differ at step {found.step}: {first}")
    known.update(first=first.describe(found.step))
    return PartedTraces(
        **known,
        agreeing=digests * (len(found.steps) - 1) + first.agreeing,
        before=[describe_place(site, iteration) for site, iteration in first.before],
        narrow=None if guilty is None else f'inside("{guilty[0]}")' if guilty[0] else "everything",
    )


def _manifest(trace: Trace) -> TraceManifest:
    return msgspec.convert(trace.manifest, TraceManifest)


def _suspect(manifest: TraceManifest) -> Suspect:
    return manifest.suspect or Suspect()


def write_difference(folder: str | PathLike[str], a: Trace, b: Trace, found: TraceDifference) -> Path:
    """Writes `diff.html` and `diff.md`, the report of a comparison of two traces.

    Args:
        folder: folder for both files; it is created if missing.
        a: one trace.
        b: the other trace.
        found: the result of `sdc.twins.diff`.

    Returns:
        Path of the HTML page.

    Raises:
        RecordError: the report cannot be written, or a trace is damaged.
    """
    return report.write_page(difference_page(a, b, found, describe_difference(a, b, found)), Path(folder) / "diff.html")


def difference_page(a: Trace, b: Trace, found: TraceDifference, result: TraceComparison) -> Report:
    """Makes the page of a comparison of two traces from the result of `describe_difference`."""
    mark, before = SIMULATED if result.simulated else "", None
    if isinstance(result, PartedTraces):
        rows = [(one.site, ", ".join(map(str, one.iteration)) or "–", one.source) for one in result.before]
        note = f"The last of the {result.agreeing:,} digests that agree before the first difference."
        before = Table("Equal values before the first difference", ("value", "iteration", "source"), tuple(rows), note)
    return report.record_page(
        command=["sdc", "diff", *result.runs],
        mark=mark,
        kind="comparison of two traces",
        title=" and ".join(Path(trace.path).name for trace in (a, b)),
        verdict=result.verdict,
        label=LABELS[result.verdict] + (f" ({mark})" if mark else ""),
        headline=_headline(result),
        simulated="at least one of the runs was deliberately corrupted on healthy hardware" if mark else "",
        faults=[fault for trace in (a, b) for fault in _suspect(_manifest(trace)).faults],
        facts=[
            ("first trace", result.runs[0]), ("second trace", result.runs[1]), ("steps compared", result.steps),
            ("values at each step", result.sites), ("selector", result.where),
        ],
        measured=[before],
        drawn=[_spread(a, b, found)],
        settings=[("Environment", a.manifest.get("environment")), ("Configuration", a.manifest.get("config"))],
        definitions=DEFINITIONS,
        about=["Traces of one program are compared digest by digest."],
        brief=[Facts(_place(result)), before] if isinstance(result, PartedTraces) and before else [],
    )  # fmt: skip


def _place(result: PartedTraces) -> tuple[tuple[str, str], ...]:
    """Returns the place of the first difference, as lines for a terminal."""
    first = result.first
    iteration = ", ".join(map(str, first.iteration)) + (" (outermost loop first)" if first.iteration else "")
    devices = "; ".join(" ".join(f"{axis}={number}" for axis, number in device.items()) for device in first.devices)
    operation = f"{first.operation} ({first.direction})"
    found = {"step": str(first.step), "operation": operation, "scope": first.scope, "iteration": iteration,
             "devices": devices, "source": first.source, "agree before it": f"{result.agreeing:,} digests",
             "narrow down": f"trace both again with --where '{result.narrow}'" if result.narrow else ""}  # fmt: skip
    return tuple((name, value) for name, value in found.items() if value)


def _headline(result: TraceComparison) -> Headline:
    real = "simulated: a fault was injected deliberately" if result.simulated else "real: nothing was injected"
    if not isinstance(result, PartedTraces):
        nothing = "none: every digest agrees"
        keep = Action(
            "No action",
            "Both hosts computed the same values at all compared steps. Trace more steps for more evidence.",
        )
        return Headline(result.reason, nothing, nothing, "at none of the common steps", real, (keep,))
    found = of_place(result.first)
    places = [
        f"{Path(run).name} (host {host})" if host else Path(run).name
        for run, host in zip(result.runs, result.hosts, strict=True)
    ]
    device = f"{found.device}, in {' or in '.join(places)}: either of the two traces may be wrong"
    actions = [
        Action(
            "Trace again on a third host", "Either trace may be wrong; sdc diff with a third trace shows which one."
        ),
        Action("Reproduce it", "Trace the suspect again: a difference at the same place is persistent."),
    ]
    if result.narrow:
        actions.insert(0, Action("Narrow it down", f"Trace both again with --where '{result.narrow}'."))
    if result.simulated:
        actions = [Action("No action: detection works", "The fault was deliberate and was detected.")]
    return dataclasses.replace(found, device=device, real=real, actions=tuple(actions))


def _spread(a: Trace, b: Trace, found: TraceDifference) -> Figure | LeftOut:
    """Draws the share of digests that differ at the first differing step, for each value in program order."""
    title = "Spread of the difference within the step"
    if found.step is None or found.first is None:
        return LeftOut(title, "no digest differs")
    ours, theirs = a[found.step], b[found.step]
    shares = [
        float(np.any(np.asarray(ours[site.name]) != np.asarray(theirs[site.name]), axis=-1).mean()) for site in a.sites
    ]
    place = next(number for number, site in enumerate(a.sites) if site.name == found.first.site.name)

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes
        axes.plot(
            range(len(shares)), shares, color=report.COLOURS[0], drawstyle="steps-mid", linewidth=1.4, label="differ"
        )
        axes.plot([place], [shares[place]], "o", color=report.COLOURS[1], markersize=7, label="first difference")
        axes.set(xlabel="value, in program order", ylabel="share of digests", ylim=(-0.03, 1.05))
        report.whole_numbers(axes.xaxis)
        drawing.legend()

    caption = f"Step {found.step}: for each value, the share of its digests (one per iteration and device) that differ."
    return Figure(title, caption, draw)
