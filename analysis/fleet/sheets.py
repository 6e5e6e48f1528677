"""Tables for spreadsheets (RFC 4180). Names of hosts and parts are texts of others, and never become formulas."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FORMULAS = tuple("=+-@＝＋－＠\t\r\n|%")
"""What a cell begins with that some spreadsheet takes for a formula or a command."""
SUSPECTS = (
    "host", "device", "identity", "kind", "serial", "uuid", "bus", "driver", "simulated", "confidence", "points",
    "kinds", "workloads", "wrong_runs", "runs", "burn_ins", "first", "last", "persistence", "errors", "seen",
)  # fmt: skip
DEVICES = (
    "host", "device", "identity", "kind", "serial", "uuid", "bus", "driver", "simulated", "suspect",
    "agrees_with_other_hosts", "burn_ins", "elements", "seconds_at_load", "runs", "wrong_runs",
    "excluded_element_rate", "wrong_run_share_low", "wrong_run_share_high", "excluded_burst_interval_seconds",
    "mean_interval_low_seconds", "mean_interval_high_seconds", "first", "last", "hosts",
)  # fmt: skip


def cell(value: Any) -> str:
    """A value as a cell: texts that would be formulas are quoted with an apostrophe, numbers never.

    Example:
        >>> from sdc.analysis.fleet.sheets import cell
        >>> cell("=HYPERLINK(1)"), cell(-1.5), cell(None), cell(True), cell(["a", "b"])
        ("'=HYPERLINK(1)", '-1.5', '', 'yes', 'a; b')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return str(value)
    text = "; ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"'{text}" if text.lstrip(" ").startswith(FORMULAS) else text


def sheet(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A CSV file.

    Args:
        columns: names of the columns, each the key of a cell in the rows.
        rows: values.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows([cell(row[name]) for name in columns] for row in rows)
    return text.getvalue()
