"""Runs that `calls` strikes: each starts in a folder, or goes on with what it finds there, and ends with a result.

A run decides as an automatic restarter would: it resumes if there is something to resume, and otherwise starts anew.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sdc.analysis.fleet import read_ledger, update_ledger, vote
from sdc.burnin import GOLDEN
from sdc.burnin.golden_register import merge
from sdc.records import Contents, Lock, Record, read_record
from sdc.tools.launch import check_folder
from tests.analysis.fleet.test_majority import NEXT_DAY, reduced, wrong
from tests.reports import DAY, make_report
from tests.sdc.burnin.registers import BAD, register

STEPS = 3


def of_record(folder: Path) -> str:
    """Writes the record of a twin run, with mismatches and a rollback."""
    place, resume = folder / "run", (folder / "run" / "manifest.json").exists()
    check_folder(place, resume, "twin")
    about = {"kind": "twin", "steps": STEPS}
    at = 0
    if resume:
        found = read_record(place)
        if found.summary is not None:
            return _record(place)
        at = len(found.lines) if _rolled_back(found) else min(len(found.lines), 1)
    with Record.resume(place, about, at=at, expected=at) if resume else Record.create(place, about) as record:
        record.file("sites.json", {"attn": 0})
        for step in range(at, STEPS):
            _line(record, step)
            if step == 1:
                record.rewind(step)
                _line(record, step)
            record.sync()
        record.finish({"steps": STEPS})
    return _record(place)


def _line(record: Record, step: int) -> None:
    mismatch = {"step": step, "site": "attn", "checked": 2, "mismatched": 1}
    record.line({"step": step, "loss": [1.0 / (step + 1)] * 2, "sites": {}}, [mismatch])


def _record(place: Path) -> str:
    found = read_record(place)
    parts = [{key: row[key] for key in row if key != "discarded"} for row in (*found.lines, *found.details)]
    ended = found.summary is not None
    return _digest([json.dumps([parts, _rolled_back(found), ended, (place / "sites.json").exists()])])


def _rolled_back(found: Contents) -> bool:
    """Returns whether the attempt at step 1 is kept, perhaps with further attempts that a crash interrupted."""
    return 1 in {row["step"] for row in found.discarded}


def of_lock(folder: Path) -> str:
    """Takes the lock of a folder and writes, twice."""
    for _ in range(2):
        lock = Lock(folder)
        (folder / "written").write_text("one")
        lock.release()
    return (folder / "written").read_text()


def of_ledger(folder: Path) -> str:
    """Enters burn-ins of a day in a ledger, and those of the next day, one of which has a mismatch."""
    path = folder / "ledger.json"
    for day in (DAY, NEXT_DAY):
        reports = [make_report(host, created=day, digests=wrong("b") if host == "b" else None) for host in "abc"]
        results = reduced(*reports)
        update_ledger(path, results, vote(results))
    ledger = read_ledger(path)
    assert ledger is not None
    return _digest([repr((ledger.burn_ins, ledger.devices))])


def of_golden(folder: Path) -> str:
    """Merges a register of golden digests into a file, once per host."""
    path = folder / "fleet.golden"
    for host in "abc":
        mine = register(host, {"w": BAD} if host == "c" else None)
        GOLDEN.write(path, merge([GOLDEN.read(path), mine]) if path.exists() else mine)
    found = GOLDEN.read(path)
    return _digest(map(repr, (found.environments, found.recordings, found.entries, found.disputed)))


def _digest(parts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
    return digest.hexdigest()


STARTS: dict[str, Callable[[Path], Any]] = {
    "record": of_record,
    "lock": of_lock,
    "ledger": of_ledger,
    "golden file": of_golden,
}
"""The kinds of run, by name."""
