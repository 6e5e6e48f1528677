"""The report page of a fleet, and its tables for spreadsheets (CSV, RFC 4180)."""

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sdc.records import Record, write_text
from sdc.results import counted
from sdc.settings import SettingError
from sdc.verdict import Verdict

from ..report import (
    HEAT,
    INK,
    NOT_MEASURED,
    PAPER,
    ZERO,
    Banner,
    Drawing,
    Facts,
    Figure,
    Items,
    Part,
    Report,
    Section,
    Table,
    Text,
    marked,
    moment,
    short,
    show,
    write_page,
)
from .fleet_summary import DeviceSheetRow, FleetSummary
from .pair_schedule import Named
from .suspects import SuspectRow

PAGE, SUSPECTS_SHEET, DEVICES_SHEET = "index.html", "suspects.csv", "devices.csv"
LABELS = {Verdict.CORRUPT: "DIFFERENCES FOUND", Verdict.CLEAN: "NO SUSPECT", Verdict.INCONCLUSIVE: "INCONCLUSIVE"}
MARKS = {"all": "SIMULATION: ", "some": "PARTLY SIMULATED: ", "none": ""}
DRAWN = 40  # maximum number of hosts in the map
# The state of a device in the map: its letter and color, the worst first.
STATES = {
    "confirmed": ("C", HEAT[-1]), "probable": ("P", HEAT[6]), "possible": ("?", HEAT[2]), "to watch": ("W", HEAT[0]),
    "agrees": ("·", ZERO), "not compared": ("–", PAPER),
}  # fmt: skip
MOST = 200  # maximum number of rows in a table on the page; the sheets have every row
FORMULAS = tuple("=+-@＝＋－＠\t\r\n|%")  # prefixes that make a spreadsheet read a string as a formula or command
DEFINITIONS = (
    ("Confirmed", "Two independent kinds of evidence, or the evidence of two burn-ins, point to this device alone."),
    ("Probable", "One kind of evidence in one burn-in points to this device alone."),
    (
        "Possible",
        "Devices differ and no majority shows which is wrong; or other hosts have the same wrong digest, which a "
        "shared setting, firmware or fault explains better than independent faults do.",
    ),
    ("Points", "Points rank devices within a class; they are not a probability."),
    (
        "Majority",
        "The digest with more than half of the votes (one for each host, shared by its devices) and more than half of "
        "the devices, on at least two hosts. Without a majority, no device is outvoted.",
    ),
    (
        "Outlier",
        "A device whose throughput differs from the median of its kind by at least five robust deviations and by at "
        "least a tenth of the median.",
    ),
)


def prepare_folder(folder: Path) -> None:
    Record.check_owner(folder)
    if folder.exists() and not folder.is_dir():
        raise SettingError("output", folder, "is not a folder; pass the path of a folder")
    folder.mkdir(parents=True, exist_ok=True)
    names = {PAGE, SUSPECTS_SHEET, DEVICES_SHEET}
    if strange := sorted(path.name for path in folder.iterdir() if path.name not in names):
        raise SettingError(
            "output", folder, f"contains {strange[0]}, which is not part of a fleet summary; pass another folder"
        )


def write_pages(folder: Path, summary: FleetSummary, devices: Sequence[DeviceSheetRow]) -> Path:
    """Writes the page and the sheets into an existing folder; returns the path of the page."""
    write_text(folder / SUSPECTS_SHEET, sheet(SuspectRow, summary.suspects, without=("machine", "not_shown", "next")))
    write_text(folder / DEVICES_SHEET, sheet(DeviceSheetRow, devices))
    return write_page(fleet_page(summary, devices), folder / PAGE, markdown=False)


def fleet_page(summary: FleetSummary, devices: Sequence[DeviceSheetRow] = ()) -> Report:
    """Makes the page of a fleet, with a map of its devices if there are any."""
    simulated = ""
    if summary.simulated == "all":
        simulated = "All results contain simulated faults, so this is a rehearsal, not a test of the hardware."
    elif summary.simulated == "some":
        simulated = (
            f"{summary.simulated_results:,} of {summary.results:,} results contain simulated faults. These results do "
            "not test the hardware, are marked SIMULATED, and do not vote if the other results have a majority."
        )
    banner = Banner(summary.verdict, MARKS[summary.simulated] + LABELS[summary.verdict], summary.sentence, simulated)
    notes = tuple(Text(note, "note") for note in _notes(summary))
    suspects = _suspects(summary.suspects)
    tables = tuple(_tables(summary))
    facts = Facts(tuple(_facts(summary)))
    todo = [
        Section(f"next, for {_place(row)}:", (Items(tuple((step,) for step in row.next), numbered=True),))
        for row in summary.suspects[:MOST]
    ]
    seen = []  # the sightings of each suspect, and the next actions
    for place, (row, steps) in enumerate(zip(summary.suspects, todo, strict=False)):
        texts = [*row.seen, *([f"and {row.not_shown} more"] if row.not_shown else ())]
        parts = (Items(tuple((text,) for text in texts)), *steps.parts)
        seen.append(Section(f"{_place(row)}: {row.confidence}", parts, "folded" if place else "open"))
    sections = (
        Section("", notes),
        Section("Suspects, from most to least certain", (suspects, *seen) if summary.suspects else ()),
        Section("Map", _map(summary, devices)),
        *(Section(heading, (table,)) for heading, table in tables),
        Section("What was checked", (facts,)),
        Section("Definitions", (Facts(DEFINITIONS, "definitions"),)),
    )
    warned = [Text(simulated, lead="SIMULATED FAULTS:", tone="simulated")] if simulated else []
    brief: list[Part] = [*warned, suspects, *(table for _, table in tables), facts, *notes, *todo[:3]]
    shown = tuple(one for one in sections if one.parts)
    return Report("Fleet", "burn-ins of a fleet", banner, shown, tuple(brief), interactive=True)


def _map(summary: FleetSummary, devices: Sequence[DeviceSheetRow]) -> tuple[Figure, ...]:
    """Draws hosts by devices, the hosts with suspects first."""
    watched = {(row.host, row.device) for row in summary.watch}
    order = list(STATES)
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for row in devices:
        state = row.suspect or ("to watch" if (row.host, row.device) in watched else "")
        state = state or ("agrees" if row.agrees_with_other_hosts else order[-1])
        states = cells[f"{_mark(row)}{row.host}"]
        states[row.device] = min(state, states.get(row.device, order[-1]), key=order.index)
    worst = {host: min(map(order.index, states.values())) for host, states in cells.items()}
    hosts = sorted(worst, key=lambda host: (worst[host], host))[:DRAWN]
    if not hosts:
        return ()
    width = 1 + max(max(cells[host]) for host in hosts)

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes
        axes.grid(visible=False)
        for row, host in enumerate(hosts):
            for device, state in cells[host].items():
                letter, face = STATES[state]
                axes.barh(row + 0.5, 0.94, left=device + 0.03, height=0.88, color=face, linewidth=0)
                ink = PAPER if state in ("confirmed", "probable") else INK
                axes.text(device + 0.5, row + 0.5, letter, ha="center", va="center", size=9, color=ink)
        ticks = range(0, width, 1 + width // 17)
        axes.set_xticks([place + 0.5 for place in ticks], list(map(str, ticks)))
        axes.set_yticks(np.arange(len(hosts)) + 0.5, [short(host) for host in hosts])
        axes.set(xlabel="device", xlim=(0, width), ylim=(len(hosts), 0))
        axes.tick_params(length=0)

    left = len(worst) - len(hosts)
    more = f" {left:,} more hosts, none of them worse, are not drawn." if left else ""
    letters = ", ".join(f"{letter} {state}" for state, (letter, _) in STATES.items())
    figure = Figure("Hosts and devices", f"{letters}.{more}", draw, height=0.9 + 0.2 * len(hosts))
    return (marked(figure, MARKS[summary.simulated].rstrip(": ")),)


def _notes(summary: FleetSummary) -> Iterator[str]:
    if summary.refused:
        yield f"{len(summary.refused):,} files or folders could not be read or contradict others, and are not counted."
    if left := summary.compared.hosts_not_compared:
        names = ", ".join(left[:10]) + (" and others" if len(left) > 10 else "")
        yield f"These hosts were not compared with any other, so only their own evidence counts: {names}."
    if split := summary.compared.workloads_of_several_versions:
        yield (
            f"{split:,} workloads ran with different programs, versions, drivers or kinds of devices; results are "
            "compared only if all of these are equal."
        )
    if doubtful := summary.doubtful_identities:
        yield (
            f"Two hosts claimed the same identity at the same time: {doubtful[0]}"
            f"{' (and others)' if len(doubtful) > 1 else ''}. Such identities are not used to recognize devices."
        )
    if (ledger := summary.ledger) is not None:
        if ledger.foreign:
            what = "not simulated" if ledger.simulated else "simulated"
            yield f"{ledger.foreign:,} results are {what} and were not entered in the ledger."
        if ledger.changed:
            yield (
                f"{len(ledger.changed):,} burn-ins continued after their results were entered in the ledger, which "
                f"keeps the earlier results; the first is {ledger.changed[0]}."
            )


def _facts(summary: FleetSummary) -> Iterator[tuple[str, str]]:
    compared = summary.compared
    found = f"{counted(summary.hosts, 'host')} and {counted(summary.devices, 'device')}"
    yield "Results", f"{summary.results:,}, from {found}"
    yield "Numbers checked", show(float(summary.elements))
    yield "Time at load", f"{summary.seconds / 3600:,.3g} device hours"
    yield "Programs that several hosts ran", f"{compared.programs:,}"
    yield "Programs on one host only", f"{compared.programs_on_one_host:,}, not comparable"
    yield "Devices that agree with other hosts", f"{compared.devices_that_agree:,}"
    yield "Repeated files or results", f"{len(summary.duplicates):,}, counted once"
    if (ledger := summary.ledger) is not None:
        rehearsed = "SIMULATED, " if ledger.simulated else ""
        yield (
            "Ledger",
            f"{rehearsed}{ledger.burn_ins:,} burn-ins of {ledger.devices:,} devices, {ledger.added:,} new",
        )
        yield "Time at load in the ledger", f"{ledger.seconds / 3600:,.3g} device hours"


def _suspects(rows: Sequence[SuspectRow]) -> Table:
    header = ("host", "device", "part", "confidence", "points", "operation", "how often", "since", "evidence")
    cells = []
    for row in rows[:MOST]:
        more = f" and {len(row.workloads) - 1} more" if len(row.workloads) > 1 else ""
        times = f"{row.burn_ins} burn-in{'s' if row.burn_ins > 1 else ''}"
        came = f", {row.persistence}" if row.persistence else ""
        cells.append(
            (
                f"{_mark(row)}{row.host}", str(row.device), row.serial or row.uuid or row.bus or NOT_MEASURED,
                row.confidence, f"{row.points:g}", row.workloads[0] + more,
                f"{row.wrong_runs:,} of {row.runs:,} runs, {times}{came}", moment(row.first), ", ".join(row.kinds),
            )
        )  # fmt: skip
    return Table("Devices that differ", header, tuple(cells), _more(rows, SUSPECTS_SHEET), style="text")


def _place(row: SuspectRow) -> str:
    return f"{_mark(row)}{row.host} device {row.device}"


def _tables(summary: FleetSummary) -> Iterator[tuple[str, Table]]:

    def table(heading: str, caption: str, header: tuple[str, ...], every: Sequence[Any], cells: Callable[[Any], Any],
              note: str = "") -> Iterator[tuple[str, Table]]:  # fmt: skip
        if every:
            rows = tuple(tuple(cells(row)) for row in every[:MOST])
            yield heading, Table(caption, header, rows, note or _more(every), style="text")

    yield from table(
        "No majority", "Hosts that differ", ("workload", "digests"), summary.ties,
        lambda row: (
            f"{_mark(row)}{row.workload}",
            "; ".join(
                f"{each.digest} on {each.devices} devices of {', '.join(each.hosts[:5])}" for each in row.groups[:4]
            ),
        ),
        "Either may be wrong.",
    )  # fmt: skip
    yield from table(
        "Pairs and pools", "Pairs and pools that did not pass", ("hosts", "verdict", "ended", "finding", "file"),
        summary.pairs,
        lambda row: (
            f"{_mark(row)}{', '.join(row.hosts)}", row.verdict.acceptance, moment(row.ended), row.sentence, row.file
        ),
    )  # fmt: skip
    yield from table(
        "To watch", "Devices that are neither suspect nor clean", ("host", "device", "since", "reason"), summary.watch,
        lambda row: (f"{_mark(row)}{row.host}", show(row.device), moment(row.since), row.reason),
    )  # fmt: skip
    yield from table(
        "Outliers in throughput", "Devices whose throughput is far from that of others of their kind",
        ("host", "device", "", "of the median", "workloads", "farthest in"), summary.outliers,
        lambda row: (
            f"{_mark(row)}{row.host}", show(row.device), "slow" if row.slow else "fast", f"{row.ratio:.0%}",
            f"{row.far} of {row.judged}", row.workload,
        ),
        "A slow device is not necessarily corrupt; check its temperature, its power and the neighboring devices.",
    )  # fmt: skip
    yield from table(
        "Moved", "Devices that were installed in several hosts", ("device", "hosts"), summary.moved,
        lambda row: (row.identity, " → ".join(row.hosts)),
    )  # fmt: skip
    yield from table(
        "Refused",
        "Files and folders that are not counted",
        ("file", "reason"),
        summary.refused,
        lambda row: (row.file, row.reason),
    )


def _mark(row: Any) -> str:
    return "SIMULATED " if row.simulated else ""


def _more(rows: Sequence[Any], file: str = "") -> str:
    if len(rows) <= MOST:
        return ""
    return f"{len(rows) - MOST:,} more rows are not shown{f'; {file} contains all of them' if file else ''}."


def simulation_table(rounds: Sequence[Named], hosts: int, bad: int, probability: float) -> list[Part]:
    """Returns the terminal output of a pair simulation."""
    header = ("rounds", "named exactly", "95 % interval", "named wrongly", "undecided")
    rows = tuple(
        (
            str(row.rounds), f"{row.share:.1%}", f"{row.low:.1%} to {row.high:.1%}", f"{row.wrong / row.trials:.1%}",
            f"{row.undecided / row.trials:.1%}",
        )
        for row in rounds
    )  # fmt: skip
    about = (
        f"{counted(hosts, 'host')}, {bad} of them bad; a pair with a bad host differs with probability {probability:g}"
    )
    rule = "The named hosts are the smallest set with a member in every pair that differed, if that set is unique."
    return [Table(f"{about} (SIMULATED, {rounds[0].trials:,} fleets)", header, rows), Text(rule)]


def cell(value: Any) -> str:
    """Formats a value as a cell of a sheet. A string that a spreadsheet would interpret as a formula is prefixed with
    an apostrophe; numbers are unchanged."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return str(value)
    text = "; ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"'{text}" if text.lstrip(" ").startswith(FORMULAS) else text


def sheet(row: type[msgspec.Struct], rows: Sequence[msgspec.Struct], without: Sequence[str] = ()) -> str:
    columns = [name for name in row.__struct_fields__ if name not in without]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows([cell(getattr(each, name)) for name in columns] for each in rows)
    return text.getvalue()
