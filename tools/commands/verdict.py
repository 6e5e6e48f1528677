"""`sdc verdict`: prints the latest verdict that is on record, without using a device."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sdc.burnin import Standing
from sdc.records import to_json
from sdc.settings import SettingError
from sdc.standing import ledger_path, standing_here, standing_of
from sdc.verdict import Exit

from .. import CommandError, ResultCommand, flag, write

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# State and exit code of Nagios for each exit code of this tool; 1 would be a warning.
NAGIOS = {Exit.CLEAN: ("OK", 0), Exit.CORRUPT: ("CRITICAL", 2), Exit.INCONCLUSIVE: ("UNKNOWN", 3)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerdictCommand(ResultCommand):
    """Prints the standing of this host, or the verdict of a result.

    Example: sdc verdict --max-age 24h
    Example: sdc verdict --any-host runs/gpu-17

    Without a result, prints the standing of this host by its ledger, in which a FAIL stays until it is acknowledged
    (sdc fleet acknowledge). Starts no device. Exit codes: 0 PASS, 1 FAIL, 2 bad usage, 3 INCONCLUSIVE (no result, one
    that is outdated, damaged or of another host, or the PASS of a rehearsal).
    """

    result: Annotated[Path | None, tyro.conf.Positional] = None
    """File of a result, or folder of a burn-in, pair or pool; by default, the ledger."""
    any_host: bool = False
    """Accept a result of other hosts."""
    ledger: Path | None = None
    """Ledger of this host (default: SDC_LEDGER, or in /var/lib/sdc for root, in ~/.local/state/sdc for others)."""
    max_age: str | None = None
    """Maximum age of a result, such as 90s, 30m, 24h or 7d; if the result is older, the verdict is INCONCLUSIVE."""
    format: Literal["text", "nagios"] = "text"
    """Print a line for people (text), or a line for Nagios (nagios), with the exit codes of Nagios (0 OK, 2 critical, 3
    unknown)."""


def run(options: VerdictCommand) -> int:
    try:
        age = None if options.max_age is None else seconds_of(options.max_age)
    except SettingError as error:  # exit code 2 is critical for Nagios
        raise CommandError(flag(error), Exit.INCONCLUSIVE if options.format == "nagios" else Exit.USAGE) from error
    if options.result is None:
        standing = standing_here(options.ledger or ledger_path(), age)
    else:
        standing = standing_of(options.result, age, any_host=options.any_host)
    word, code = NAGIOS[standing.verdict.code]
    if options.json:
        text = json.dumps(to_json(standing), allow_nan=False, indent=1)
    elif options.format == "nagios":
        # Nagios shows the first line only, and reads what follows a bar as performance data.
        text = f"SDC {word} - {_line(standing).replace('|', '/')}"
    else:
        text = _line(standing)
    write(text)
    return code if options.format == "nagios" else standing.verdict.code


def _line(standing: Standing) -> str:
    marked = "SIMULATION  " if standing.simulated else ""
    when = f"  ({', '.join(filter(None, [standing.ended, standing.file]))})" if standing.ended else ""
    return printable(f"{marked}{standing.verdict.acceptance}  {' '.join(standing.reason.split())}{when}")


def printable(line: str) -> str:
    """Replaces control characters in a line that contains text of others, such as names of hosts."""
    return "".join(c if c.isprintable() else "?" for c in line)


def seconds_of(text: str, setting: str = "max_age") -> float:
    """Returns the number of seconds in a duration such as `24h`.

    Raises:
        SettingError: `text` is not a time.

    Example:
        >>> from sdc.tools.commands.verdict import seconds_of
        >>> seconds_of("24h")
        86400.0
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])", text, re.ASCII)
    if found is None or not float(found[1]) > 0:
        raise SettingError(setting, text, "expected a time above 0 with a unit, such as 90s, 30m, 24h or 7d")
    return float(found[1]) * UNITS[found[2]]
