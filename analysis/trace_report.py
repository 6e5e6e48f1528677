"""The page of `sdc diff`: where two traces part, and how the difference spreads from there."""

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from sdc.twins import Trace, TraceDifference

from .advice import Action
from .campaign_report import SIMULATED
from .canvas import COLOURS, LeftOut, Picture, canvas, whole_numbers
from .definitions import Definition
from .headline import Headline, of_place
from .page import Report, make_report
from .report import LABELS, write_pages
from .series import Row, mapping
from .tables import Table
from .traces import describe_difference

NAME = "diff"
DEFINITIONS = (
    Definition("Digest", "64 bits", "Of every selected value at every step; equal values have equal digests."),
    Definition(
        "First difference",
        "in program order",
        "The first value that differs. If all operations are traced, its operation had the same inputs in both runs.",
    ),
)


def write_difference(folder: str | PathLike[str], a: Trace, b: Trace, found: TraceDifference) -> Path:
    """Writes `diff.html` and `diff.md`, the report of a comparison of two traces.

    Args:
        folder: where to write them; it is made if it is not there.
        a: one trace.
        b: the other.
        found: what `sdc.twins.diff` returned.

    Returns:
        Path of the HTML page.

    Raises:
        RecordError: they cannot be written, or a trace is damaged.
    """
    return write_pages(Path(folder), build(a, b, found, describe_difference(a, b, found)), name=NAME)


def build(a: Trace, b: Trace, found: TraceDifference, told: dict[str, Any]) -> Report:
    """The report of a comparison of two traces.

    Args:
        a: one trace.
        b: the other.
        found: what `sdc.twins.diff` returned.
        told: what `describe_difference` says of it.
    """
    mark = SIMULATED if told["simulated"] else ""
    first, names = told["first"], [Path(trace.path).name for trace in (a, b)]
    return make_report(
        {**a.manifest, "command": ["sdc", "diff", *told["runs"]]},
        mark=mark,
        kind="comparison of two traces",
        title=" and ".join(names),
        verdict=told["verdict"],
        label=LABELS[told["verdict"]] + (f" ({mark})" if mark else ""),
        headline=_headline(told),
        simulated="at least one of the runs was corrupted on purpose, on sound hardware" if mark else "",
        faults=[fault for trace in (a, b) for fault in mapping(trace.manifest.get("suspect")).get("faults") or ()],
        facts=[
            ("first trace", told["runs"][0]), ("second trace", told["runs"][1]), ("steps compared", told["steps"]),
            ("values at each step", told["sites"]), ("selector", told["where"]),
        ],
        measured=[_before(told)] if first else [],
        drawn=[_spread(a, b, found, mark)],
        settings={"Configuration": a.manifest.get("config")},
        definitions=DEFINITIONS,
        definitions_source="Traces of one program are compared digest by digest.",
        bursts="",
    )  # fmt: skip


def _headline(told: Row) -> Headline:
    real = "simulated: a fault was made on purpose" if told["simulated"] else "real: nothing was injected"
    if told["first"] is None:
        nothing = "none: every digest agrees"
        keep = Action("Nothing to mend", "Up to here both machines computed the same. Trace more steps to know more.")
        return Headline(told["reason"], nothing, nothing, "at no step that both have", real, (keep,))
    found = of_place(told["first"])
    places = [
        f"{Path(run).name} (host {host})" if host else Path(run).name
        for run, host in zip(told["runs"], told["hosts"], strict=True)
    ]
    device = f"{found.device}, in {' or in '.join(places)}: of two traces the comparison cannot say which is wrong"
    actions = [
        Action("Trace again on a third machine", "Of two traces one is wrong; sdc diff with a third tells which."),
        Action("Reproduce it", "Trace the suspect again: a difference at the same place is persistent."),
    ]
    if told["narrow"]:
        actions.insert(0, Action("Narrow it down", f"Trace both again with --where '{told['narrow']}'."))
    if told["simulated"]:
        actions = [Action("Nothing to mend: the detection works", "The fault was made on purpose, and it was found.")]
    return Headline(found.sentence, device, found.operation, found.since, real, tuple(actions))


def _before(told: Row) -> Table:
    rows = [
        (place["site"], ", ".join(map(str, place["iteration"])) or "–", place["source"]) for place in told["before"]
    ]
    note = f"The last of {told['agreeing']:,} digests that agree before the first difference."
    return Table("What agrees before it", ("value", "iteration", "source"), tuple(rows), note)


def _spread(a: Trace, b: Trace, found: TraceDifference, mark: str) -> Picture | LeftOut:
    """Share of the digests of each value that differ at the step where the traces part, in program order."""
    title = "How it spreads within the step"
    if found.step is None or found.first is None:
        return LeftOut(title, "no digest differs")
    ours, theirs = a[found.step], b[found.step]
    shares = [
        float(np.any(np.asarray(ours[site.name]) != np.asarray(theirs[site.name]), axis=-1).mean()) for site in a.sites
    ]
    place = next(number for number, site in enumerate(a.sites) if site.name == found.first.site.name)
    with canvas("spread", mark) as drawing:
        axes = drawing.figure.subplots()
        axes.plot(range(len(shares)), shares, color=COLOURS[0], drawstyle="steps-mid", linewidth=1.4, label="differ")
        axes.plot([place], [shares[place]], "o", color=COLOURS[1], markersize=7, label="first difference")
        axes.set(xlabel="value, in program order", ylabel="share of digests", ylim=(-0.03, 1.05))
        whole_numbers(axes.xaxis)
        drawing.legend(axes)
    return drawing.picture(
        title, f"Step {found.step}: of each value, the share of its digests (iterations, devices) that differ."
    )
