"""The page of a fleet, and its tables for spreadsheets."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdc.records import write_text
from sdc.settings import SettingError

from .. import Table, render, show
from .sheets import DEVICES, SUSPECTS, sheet

PAGE, SUSPECTS_SHEET, DEVICES_SHEET = "index.html", "suspects.csv", "devices.csv"
LABELS = {"corrupt": "DIFFERENCES FOUND", "clean": "NO SUSPECT", "inconclusive": "INCONCLUSIVE"}
MOST = 200
"""Rows of a table of the page; the sheets have all."""
DEFINITIONS = (
    ("Confirmed", "Two independent kinds of evidence name this device alone, or two burn-ins do."),
    ("Probable", "One kind of evidence in one burn-in names this device alone."),
    (
        "Possible",
        "Devices differ and nothing says which of them is wrong; or the digest is one that other hosts have too, which "
        "a setting, a firmware or a fault in common explains better than faults that know nothing of each other.",
    ),
    ("Points", "They order devices within a class, and are no probability."),
    (
        "Majority",
        "The digest with more than half of the hosts (one vote each, shared by its devices) and more than half of the "
        "devices, on two hosts at least. Without one nobody is outvoted.",
    ),
    (
        "Outlier",
        "A device whose throughput is five robust deviations or more from the median of its kind, and a tenth.",
    ),
)


def prepare_folder(folder: Path) -> None:
    """Makes the folder of a page, or finds that it may be written anew.

    Raises:
        SettingError: something else is in it.
        OSError: it cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise SettingError("output", folder, "is no folder; name another")
    folder.mkdir(parents=True, exist_ok=True)
    names = {PAGE, SUSPECTS_SHEET, DEVICES_SHEET}
    if strange := sorted(path.name for path in folder.iterdir() if path.name not in names):
        raise SettingError(
            "output", folder, f"holds {strange[0]}, which no summary of a fleet has; name another folder"
        )


def write_pages(folder: Path, summary: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> Path:
    """Writes the page and the sheets; returns where the page is.

    Args:
        folder: exists.
        summary: as `summarize_results` makes it.
        devices: as `device_rows` makes them.
    """
    write_text(folder / SUSPECTS_SHEET, sheet(SUSPECTS, summary["suspects"]))
    write_text(folder / DEVICES_SHEET, sheet(DEVICES, devices))
    write_text(folder / PAGE, to_page(summary))
    return folder / PAGE


def to_page(summary: Mapping[str, Any]) -> str:
    """The page as HTML, which needs nothing else."""
    marked = {"all": "SIMULATION: ", "some": "PARTLY SIMULATED: ", "none": ""}[summary["simulated"]]
    return render(
        "fleet.html.jinja",
        title="Fleet",
        label=marked + LABELS[summary["verdict"]],
        summary=summary,
        simulated=simulation_words(summary),
        notes=list(notes(summary)),
        suspects=_suspects(summary["suspects"]),
        tables=list(_tables(summary)),
        facts=list(facts(summary)),
        definitions=DEFINITIONS,
        most=MOST,
    )


def simulation_words(summary: Mapping[str, Any]) -> str:
    """What is simulated, in words; empty where nothing is."""
    if summary["simulated"] == "all":
        return "All results are of simulated faults: this is a rehearsal, and says nothing about the hardware."
    if summary["simulated"] == "some":
        count, total = summary["simulated_results"], summary["results"]
        return (
            f"{count:,} of {total:,} results are of simulated faults. They say nothing about the hardware, are marked "
            "SIMULATED, and have no vote where others have a majority."
        )
    return ""


def notes(summary: Mapping[str, Any]) -> Iterator[str]:
    """What to know before reading on."""
    if summary["refused"]:
        files = summary["results"] + len(summary["refused"]) + len(summary["duplicates"])
        yield f"{len(summary['refused']):,} of {files:,} files are refused, and count for nothing."
    if left := summary["compared"]["hosts_not_compared"]:
        names = ", ".join(left[:10]) + (" and others" if len(left) > 10 else "")
        yield f"Not compared with any other host: {names}. They rest on their own evidence."
    if split := summary["compared"]["workloads_of_several_versions"]:
        yield (
            f"{split:,} workloads ran as different programs, versions, drivers or kinds of devices, which are not "
            "comparable with each other."
        )
    if doubtful := summary["doubtful_identities"]:
        yield (
            f"Two hosts claimed {doubtful[0]} at the same time{' (and others)' if len(doubtful) > 1 else ''}: such "
            "numbers are those of no part, and are not used."
        )
    if (ledger := summary["ledger"]) is not None:
        if ledger["foreign"]:
            what = "not simulated" if ledger["simulated"] else "simulated"
            yield f"{ledger['foreign']:,} results are {what}, and not in the ledger."
        if ledger["changed"]:
            yield (
                f"{len(ledger['changed']):,} burn-ins have gone on since they were entered in the ledger, which keeps "
                f"what they were: {ledger['changed'][0]}."
            )


def facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How much was checked and compared."""
    compared = summary["compared"]
    yield "Results", f"{summary['results']:,}, of {summary['hosts']:,} hosts and {summary['devices']:,} devices"
    yield "Numbers checked", show(float(summary["elements"]))
    yield "Time at load", f"{summary['seconds'] / 3600:,.3g} device hours"
    yield "Programs that several hosts ran", f"{compared['programs']:,}"
    yield "Programs on one host only", f"{compared['programs_on_one_host']:,}, not comparable"
    yield "Devices that agree with other hosts", f"{compared['devices_that_agree']:,}"
    yield "The same file or result again", f"{len(summary['duplicates']):,}, counted once"
    if (ledger := summary["ledger"]) is not None:
        marked = "SIMULATED, " if ledger["simulated"] else ""
        yield (
            "Ledger",
            f"{marked}{ledger['burn_ins']:,} burn-ins of {ledger['devices']:,} devices, {ledger['added']:,} new",
        )
        yield "Time at load in the ledger", f"{ledger['seconds'] / 3600:,.3g} device hours"


def part_of(row: Mapping[str, Any]) -> str:
    """What is written on a part, or where it is."""
    return str(row["serial"] or row["uuid"] or row["bus"] or "–")


def how_often(row: Mapping[str, Any]) -> str:
    """How often a suspect differed."""
    times = f"{row['burn_ins']} burn-in{'s' if row['burn_ins'] > 1 else ''}"
    came = f", {row['persistence']}" if row["persistence"] else ""
    return f"{row['wrong_runs']:,} of {row['runs']:,} runs, {times}{came}"


def operations(row: Mapping[str, Any]) -> str:
    """In which workloads."""
    names = row["workloads"]
    return str(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _suspects(rows: Sequence[Mapping[str, Any]]) -> Table:
    header = ("host", "device", "part", "confidence", "points", "operation", "how often", "since", "evidence")
    cells = [
        (
            f"{'SIMULATED ' if row['simulated'] else ''}{row['host']}", str(row["device"]), part_of(row),
            row["confidence"], f"{row['points']:g}", operations(row), how_often(row), row["first"],
            ", ".join(row["kinds"]),
        )
        for row in rows[:MOST]
    ]  # fmt: skip
    return Table("Devices that differ", header, tuple(cells), _more(rows, SUSPECTS_SHEET))


def _tables(summary: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    cells: tuple[tuple[str, ...], ...]
    header: tuple[str, ...]
    if rows := summary["ties"]:
        cells = tuple(
            (
                f"{'SIMULATED ' if row['simulated'] else ''}{row['workload']}",
                "; ".join(
                    f"{each['digest']} on {each['devices']} devices of {', '.join(each['hosts'][:5])}"
                    for each in row["groups"][:4]
                ),
            )
            for row in rows[:MOST]
        )
        yield "No majority", Table("Hosts that differ", ("workload", "digests"), cells, "Nothing says which is wrong.")
    if rows := summary["watch"]:
        cells = tuple(
            (f"{'SIMULATED ' if row['simulated'] else ''}{row['host']}", _device(row), row["since"], row["reason"])
            for row in rows[:MOST]
        )
        header = ("host", "device", "since", "reason")
        yield "To watch", Table("No suspects, and not clean", header, cells, _more(rows))
    if rows := summary["outliers"]:
        cells = tuple(
            (
                f"{'SIMULATED ' if row['simulated'] else ''}{row['host']}", _device(row),
                "slow" if row["slow"] else "fast", f"{row['ratio']:.0%}", f"{row['far']} of {row['judged']}",
                row["workload"],
            )
            for row in rows[:MOST]
        )  # fmt: skip
        header = ("host", "device", "", "of the median", "workloads", "farthest in")
        note = "Slow is not corrupt: look for heat, power and neighbours."
        yield "Outliers in throughput", Table("Far from others of their kind", header, cells, note)
    if rows := summary["moved"]:
        cells = tuple((row["identity"], " → ".join(row["hosts"])) for row in rows[:MOST])
        yield "Moved", Table("Devices that were in several hosts", ("device", "hosts"), cells, _more(rows))
    if rows := summary["refused"]:
        cells = tuple((row["file"], row["reason"]) for row in rows[:MOST])
        yield "Refused", Table("Files that do not count", ("file", "reason"), cells, _more(rows))


def _device(row: Mapping[str, Any]) -> str:
    return "–" if row["device"] is None else str(row["device"])


def _more(rows: Sequence[Any], file: str = "") -> str:
    """What is left out of a table."""
    if len(rows) <= MOST:
        return ""
    return f"{len(rows) - MOST:,} more are left out{f'; {file} has all' if file else ''}."
