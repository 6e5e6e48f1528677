"""The page of a burn-in: what differed on which device, what to do, the sensors, and what was checked."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from sdc.burnin import BURN_IN, BurninResult, Finding, candidates
from sdc.results import counted
from sdc.schema import PAGE
from sdc.verdict import Verdict, limit

from . import report
from .report import Action, Chart, Definition, Drawing, Figure, Headline, LeftOut, Line, Report, Table, moment, show

MOST = 20  # rows of a table of findings or elements; the result holds all of them
EACH = 3  # elements shown of a finding
NUMBERED = 16  # devices up to which the cells of the map have numbers
LEAST_CHANCE = 0.01  # of detecting a node, to be shown; the result holds all of them
OUTPUTS = ("--run", "--junit", "--prometheus", "--ledger")  # flags that are not part of a test
READINGS = {"temperature": "°C", "power": "W", "clock": "MHz"}
DEFINITIONS = (
    Definition("Transient, intermittent, persistent", "none, some, all", "How many of the reruns differed again."),
    Definition(
        "Rate excluded",
        "3.0 / n",
        "Independent mismatches at this rate per element would have been detected with 95 % probability in the family "
        "of workloads that was checked least, of which n elements were checked.",
    ),
    Definition(
        "Bursts excluded",
        "time at load / 3.0",
        "Bursts at random times, at this mean interval, would have been detected with 95 % probability.",
    ),
)


def burnin_report(result: BurninResult) -> Report:
    """Makes the page of a burn-in; its `brief` is what a terminal shows above the verdict."""
    mark = "SIMULATED" if result.simulated else ""
    checked = [_families(result), _devices(result)]
    tied = any(len(finding.devices) > 1 for finding in result.findings)
    return report.record_page(
        command=_command(result),
        title=f"Burn-in of {result.host.name}",
        kind=f"burn-in of level {result.settings.level}",
        verdict=result.verdict,
        label=result.headline,
        headline=_headline(result),
        mark=mark,
        simulated="elements were deliberately changed, which says nothing about the hardware" if mark else "",
        faults=result.settings.faults,
        facts=[
            ("host", result.host.name), ("began", moment(result.created)), ("ended", moment(result.ended)),
            ("rounds", f"{result.rounds:,}"), ("duration", f"{result.seconds:,.0f} s"),
            *_parts(result), ("golden digests", None if result.golden is None else f"{result.golden.used:,} compared"),
            ("nodes of the study", outlook(result) or None),
        ],
        measured=[
            _findings(result), _elements(result, tie=False), *([_elements(result, tie=True)] if tied else ()), *checked,
        ],
        drawn=[_map(result), *(_readings(result, name) for name in READINGS)],
        settings=[(name, msgspec.to_builtins(getattr(result, name))) for name in ("environment", "settings")],
        definitions=DEFINITIONS,
        about=(),
        notes=result.sentences[1:MOST],
        brief=checked if any(row.runs for row in result.workloads) else (),
    )  # fmt: skip


def write_burnin_report(result: BurninResult, folder: Path) -> Path:
    """Writes the page into the folder of a burn-in, and returns its path; see `write_page` for errors."""
    return report.write_page(burnin_report(result), folder / PAGE, markdown=False)


def outlook(result: BurninResult) -> str:
    """Returns the probabilities of detecting nodes of the study, those that are not tiny."""
    if result.verdict is Verdict.CORRUPT:
        return ""  # nothing is excluded
    seen = [one for one in result.outlooks if one.probability >= LEAST_CHANCE]
    each = ", ".join(f"{one.node} {one.probability:.0%} ({one.low:.0%} to {one.high:.0%})" for one in seen)
    rates = "if elements fail here at its published rates"
    return f"probability of detecting a node of the study (arXiv:2502.12340), {rates}: {each}" if seen else ""


def _headline(result: BurninResult) -> Headline:
    marks = {device.index: f"device {device.index}{device.mark and f' ({device.mark})'}" for device in result.devices}
    odd = sorted({finding.devices for finding in result.findings}, key=lambda devices: (len(devices), devices))
    odd += [(row.device,) for row in result.workloads if row.differences and not any(row.device in one for one in odd)]
    sure = [devices for devices in odd if len(devices) == 1]  # if other evidence names a device, ties do not count
    named = " and ".join(" or ".join(marks[index] for index in devices) for devices in dict.fromkeys(sure or odd))
    differing = [row for row in result.workloads if row.differences or row.confirmed]
    families = [
        f"{family} ({len({row.workload for row in differing if row.family == family})} of "
        f"{counted(len({row.workload for row in result.workloads if row.family == family}), 'workload')})"
        for family in dict.fromkeys(row.family for row in differing)
    ]
    since = f"round {1 + min(each.round for each in result.findings):,} of {result.rounds:,}" if result.findings else ""
    real = f"simulated: {', '.join(result.settings.faults)}" if result.simulated else "real: no fault was simulated"
    nothing = "none: nothing differed" if result.verdict is Verdict.CLEAN else "none is known"
    return Headline(
        result.sentences[0], named or nothing, ", ".join(families) or nothing, since or nothing, real,
        _actions(result, named, [devices[0] for devices in dict.fromkeys(sure)]),
    )  # fmt: skip


def _actions(result: BurninResult, named: str, sure: Sequence[int]) -> tuple[Action, ...]:
    again = "sdc burnin --level acceptance --run NEW_FOLDER, with the same --devices and --golden"
    if result.simulated:
        how = "The fault was simulated. To test the hardware, run the command without --fault and --suspect."
        return (Action("No action", how),)
    if result.verdict is Verdict.CLEAN:
        only = ", ".join(result.settings.selected)
        accepted = ", and repetition, the only evidence, misses faults that repeat themselves" * bool(
            result.settings.accept
        )
        if only or accepted:
            what = f"Only {only} was tested" if only else "All families were tested"
            return (Action("Test the rest before you rely on the host", f"{what}{accepted}. Run {again}."),)
        return (
            Action("Use the host", "This test excludes only what the table of devices says."),
            Action("Test again regularly", "sdc verdict --max-age 24h says whether the last test is recent."),
        )
    if result.verdict is Verdict.INCONCLUSIVE:
        return (
            Action(
                "Remove the reason, and test again",
                f"The reason: {result.sentences[0]}. A single device needs more than one round, and golden digests "
                f"(--golden) or --accept repeat. Then run {again}.",
            ),
            Action("Do not count this as a PASS", "Nothing is known about the hardware."),
        )
    blame = Action(
        "Send the bundle to the vendor",
        "Before that, unpack bundle.tar.gz, and run its reproduce.py --runs 100 on this host and on a good one: if "
        "both exit with 1, the hardware is not the cause. Keep this folder.",
    )
    if not sure:
        blame = Action(
            "Find out which device is wrong",
            "Compare with a healthy host of equal versions: sdc pair, or sdc golden record there and --golden here. "
            "Then send the bundle to the vendor.",
        )
    out = f"A later PASS does not clear {named or 'it'}: sdc verdict reports FAIL until somebody acknowledges it."
    device = next((one for one in result.devices if one.index in sure), None)
    name = "DEVICE" if device is None else f'"{candidates(result, device)[0]}"'
    return (
        Action("Take the host out of service", out),
        Action("Test again, longer", f"{again}: it shows whether the fault recurs, and where."),
        blame,
        Action("After the repair", f'Run the level soak, then sdc fleet acknowledge {name} --reason "..." --by NAME.'),
    )


def _parts(result: BurninResult) -> Iterator[tuple[str, str]]:
    """Yields what identifies each device that differed."""
    odd = {index for finding in result.findings for index in finding.devices}
    for device in result.devices:
        if device.index in odd:
            names = ("kind", "serial", "uuid", "bus", "coordinates", "driver", "firmware")
            known = ((name, getattr(device, name)) for name in names)
            yield f"device {device.index}", ", ".join(f"{name} {value}" for name, value in known if value is not None)


def _command(result: BurninResult) -> list[str] | None:
    """Returns a command that tests the same, with the same data, and writes into a new folder."""
    words, left = iter(result.command or ()), list[str]()
    for word in words:
        name, equals, _ = word.partition("=")
        if name in OUTPUTS:
            if not equals:
                next(words, None)
        elif word != "--resume":
            left.append(word)
    seed = [] if result.seed is None or result.settings.seed is not None else ["--seed", str(result.seed)]
    return [*left, *seed] or None


def _map(result: BurninResult) -> Figure | LeftOut:
    """Draws the share of workloads that differed, by family and device."""
    title = "Where it differed"
    ran = [row for row in result.workloads if row.runs or row.differences]
    if not ran:
        return LeftOut(title, "nothing was checked")
    names = list(dict.fromkeys(row.family for row in ran))
    devices = [device.index for device in result.devices]
    counts = np.zeros((2, len(names), len(devices)), int)
    for row in ran:
        place = names.index(row.family), devices.index(row.device)
        counts[0][place] += bool(row.differences or row.confirmed)
        counts[1][place] += 1
    odd, every = counts

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes
        axes.grid(visible=False)
        colours = np.where(every > 0, np.ceil(len(report.HEAT) * odd / np.maximum(every, 1)), -1).astype(int)
        for (row, column), level in np.ndenumerate(colours):
            if level < 0:
                continue
            face = report.HEAT[level - 1] if level else report.ZERO
            axes.barh(row + 0.5, 0.94, left=column + 0.03, height=0.92, color=face, linewidth=0)
            if len(devices) <= NUMBERED:
                ink = report.PAPER if level > len(report.HEAT) / 2 else report.INK
                text = f"{odd[row, column]}/{every[row, column]}"
                axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", size=9, color=ink)
        ticks = range(0, len(devices), 1 + len(devices) // 17)
        axes.set_xticks([place + 0.5 for place in ticks], [str(devices[place]) for place in ticks])
        axes.set_yticks(np.arange(len(names)) + 0.5, [report.short(name) for name in names])
        axes.set(xlabel="device", xlim=(0, len(devices)), ylim=(len(names), 0))
        axes.tick_params(length=0)

    caption = "Workloads that differed, of those that ran, for each family and device. Gray cells: nothing differed."
    return Figure(title, caption, draw, height=0.9 + 0.3 * len(names))


def _readings(result: BurninResult, name: str) -> Figure | LeftOut:
    """Draws readings of the sensors over time, a line for each device."""
    title, lines = f"{name.capitalize()} over time", list[Line]()
    for device in result.devices:
        readings = [] if device.sensors is None else device.sensors.readings
        known = [(one.seconds, getattr(one, name)) for one in readings if getattr(one, name) is not None]
        if known and len(lines) < 2 * len(report.COLOURS):
            seconds, values = zip(*known, strict=True)
            lines.append(Line(f"device {device.index}", seconds, values))
    if not lines:
        return LeftOut(title, "no source of readings knows the devices")
    more = "" if len(lines) <= len(report.COLOURS) else " At most twelve devices are drawn."
    caption = f"At most 240 readings of each device.{more}"
    return report.line_figure(Chart(title, caption, "seconds", READINGS[name], tuple(lines)))


def _findings(result: BurninResult) -> Table | LeftOut:
    def cells(finding: Finding) -> tuple[str, ...]:
        found = finding.elements
        return (
            finding.workload, " or ".join(map(str, finding.devices)), f"{finding.round + 1:,}",
            "–" if found is None else f"{found.differing:,} of {found.total:.3g}",
            "–" if found is None or len(finding.devices) > 1 or not found.relative else show(found.relative),
            finding.persistence or "–", "; ".join(filter(None, (", ".join(finding.kinds), finding.note))),
        )  # fmt: skip

    header = ("workload", "device", "round", "wrong elements", "largest relative error", "reruns", "found by")
    rows = tuple(map(cells, result.findings[:MOST]))
    more = len(result.findings) - len(rows)
    note = f"{BURN_IN.names[0]} has {more:,} more." if more else ""
    return report.filled(Table("Differences", header, rows, note, style="text"), "nothing differed")


def _elements(result: BurninResult, *, tie: bool) -> Table | LeftOut:
    findings = [finding for finding in result.findings if (len(finding.devices) > 1) is tie]
    rows = [
        (
            finding.workload, f"{one.output}[{one.index}]", one.old, one.new,
            str((int(one.old, 16) ^ int(one.new, 16)).bit_count()), one.expected, one.found,
        )
        for finding in findings
        for one in (finding.elements.first[:EACH] if finding.elements else ())
    ]  # fmt: skip
    one, other = ("one device's", "another's") if tie else ("right", "wrong")
    header = (
        "workload",
        "element",
        f"{one} bits",
        f"{other} bits",
        "bits that differ",
        f"{one} value",
        f"{other} value",
    )
    note = "The first elements of each finding, numbered in row-major order; the bits are hexadecimal."
    if tie:
        note += " It is unknown which of them are right."
    caption = "Elements on which devices disagree" if tie else "Wrong elements"
    table = Table(caption, header, tuple(rows[:MOST]), note, style="text")
    return report.filled(table, "nothing differed, or no right outputs were available")


def _families(result: BurninResult) -> Table:
    rows = []
    ran = [row for row in result.workloads if row.runs]
    for family in dict.fromkeys(row.family for row in ran):
        mine = [row for row in ran if row.family == family]
        shares = [row.share for row in mine if row.share is not None]
        rows.append(
            (
                family,
                f"{len({row.workload for row in mine})}",
                f"{sum(row.runs for row in mine):,}",
                f"{sum(row.elements for row in mine):.3g}",
                f"{sum(row.seconds for row in mine):.3g}",
                f"{min(shares):.0%}" if shares else "-",
                f"{sum(row.differences for row in mine):,}",
            )
        )
    title = f"Level {result.settings.level}: {counted(result.rounds, 'round')} in {result.seconds:.0f} s"
    header = ("family", "workloads", "runs", "elements", "s at load", "lowest throughput", "differences")
    return Table(title, header, tuple(rows))


def _devices(result: BurninResult) -> Table:
    rows = []
    odd = {row.device for row in result.workloads if row.differences or row.confirmed}
    odd |= {index for finding in result.findings for index in finding.devices}
    for device in result.devices:
        sensors, interval = device.sensors, None if device.index in odd else device.excluded_interval
        rows.append(
            (
                f"{device.index} {device.kind or 'device'}{device.mark and f', {device.mark}'}",
                f"{device.elements:.3g}",
                f"{device.seconds:.3g}",
                "differed" if device.index in odd else limit(device.excluded_rate, 2, up=True),
                f"{limit(interval, 3, up=False)} s" if interval is not None else "-",
                f"{sensors.hottest:.0f} °C" if sensors and sensors.hottest is not None else "-",
                f"{sensors.strongest:.0f} W" if sensors and sensors.strongest is not None else "-",
            )
        )
    header = ("device", "elements", "s at load", "rate excluded", "bursts excluded", "hottest", "power")
    title = "Devices: rates, and intervals of bursts in whatever runs, seen with 95 % probability"
    return Table(title, header, tuple(rows))
