"""Where a host stands by its last result: asked every minute by health checks, so that nothing heavy is imported."""

import datetime
import os
from pathlib import Path
from typing import Annotated

from sdc.records import RecordError

from ..records import Fields, about, read_json
from .pair_report import PAIR, POOL, read_pair
from .report import EVENTS, RESULT, Word, read_report

NAMES = (RESULT, PAIR, POOL)
AHEAD = 300.0
"""Seconds that a result may come from the future: clocks of hosts differ by less."""


class Standing(Fields, kw_only=True):
    """What the last result says now."""

    word: Annotated[Word, about("`PASS`, `FAIL` or `INCONCLUSIVE`")]
    code: Annotated[int, about("exit code: 0, 1 or 3")]
    reason: Annotated[str, about("the first sentence of the verdict, or why there is none")]
    simulated: Annotated[bool, about("whether faults were simulated")] = False
    file: Annotated[str | None, about("the result")] = None
    ended: Annotated[str | None, about("when it was written, UTC")] = None


def standing_of(path: Path, max_age: float | None = None, *, now: datetime.datetime | None = None) -> Standing:
    """Reads the last result.

    Args:
        path: a result file, the folder of a burn-in, a pair or a pool, or one that holds such folders, of which the
            newest counts.
        max_age: seconds after which a result says nothing; None for any age.
        now: the time; by default that of the host.

    Returns:
        The verdict. What is missing, damaged, too old or of the future is INCONCLUSIVE: never a PASS. A simulation says
        nothing about the hardware, and is INCONCLUSIVE unless it is what was asked for by its own name.

    Example:
        >>> from pathlib import Path
        >>> from sdc.burnin.standing import standing_of
        >>> standing_of(Path("nowhere")).code
        3
    """
    try:
        place, named = _newest(path)
    except OSError as error:
        return _unknown(f"{path} cannot be read ({error.strerror})")
    if place is None:
        return _unknown(f"there is no result in {path}; run sdc burnin")
    try:
        report = read_report(place) if place.name not in (PAIR, POOL) else read_pair(place)
    except (RecordError, OSError) as error:
        return _unknown(str(error), place)
    verdict = report.verdict
    found = Standing(
        word=verdict.word, code=verdict.code, reason=next(iter(verdict.sentences), verdict.word),
        simulated=verdict.simulated, file=str(place), ended=report.ended,
    )  # fmt: skip
    return _aged(found, report.ended, max_age, now or datetime.datetime.now(datetime.UTC), named=named)


def _aged(found: Standing, ended: str, max_age: float | None, now: datetime.datetime, *, named: bool) -> Standing:
    if found.simulated and not named:
        return _unknown("the newest result is of a simulation, which says nothing about the hardware", found.file)
    try:
        age = (now - datetime.datetime.fromisoformat(ended)).total_seconds()
    except (ValueError, TypeError):
        return _unknown(f"{found.file} does not say when it was written ({ended!r})", found.file)
    if age < -AHEAD:
        return _unknown(f"{found.file} is of the future ({ended}): a clock was set; run sdc burnin again", found.file)
    if max_age is not None and age > max_age:
        return _unknown(f"the last result is {_span(age)} old ({found.word}); run sdc burnin again", found.file)
    return found


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _unknown(reason: str, place: object = None) -> Standing:
    return Standing(word="INCONCLUSIVE", code=3, reason=reason, file=None if place is None else str(place))


def _newest(path: Path) -> tuple[Path | None, bool]:
    """The result at a path, and whether the path is its own or that of its folder."""
    if not path.is_dir():
        return (path if os.path.lexists(path) else None), True
    own = [path / name for name in NAMES if os.path.lexists(path / name)]
    if own:
        return max(own, key=_written), True
    with os.scandir(path) as folders:
        there = [place for folder in folders if folder.is_dir() for place in _results(Path(folder.path))]
    return (max(there, key=_written) if there else None), False


def _results(folder: Path) -> list[Path]:
    """Results of a folder; of one with the log of a burn-in that has none, the place where it should be."""
    found = [folder / name for name in NAMES if os.path.lexists(folder / name)]
    return found or ([folder / RESULT] if (folder / EVENTS).exists() else [])


def _written(path: Path) -> float:
    """When a result says that it was written, Unix time. A file's own time may be that of a copy.

    What cannot be read counts as written when its file was changed: a damaged result must not bring an older one back.
    """
    try:
        return datetime.datetime.fromisoformat(str(read_json(path)["ended"])).timestamp()
    except (OSError, ValueError, KeyError):
        place = path if os.path.lexists(path) else path.with_name(EVENTS)
        return place.lstat().st_mtime
