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
from sdc.checkpoints import CertificateError, RunningCheckpoint, certified_steps
from sdc.records import Contents, Lock, Record, identify, read_record
from sdc.schema import now
from sdc.standing import Ledger, standing_here
from sdc.tools import cli
from sdc.tools.launch import check_folder
from sdc.verdict import Verdict
from tests.analysis.fleet.test_majority import NEXT_DAY, reduced, wrong
from tests.reports import DAY, make_finding, make_report
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


def of_certificates(folder: Path) -> str:
    """Saves certified checkpoints, of which two are kept, and restores the newest."""
    from .bits import bits_of, quiet
    from .saves import opened, state

    with quiet(), opened(folder) as checkpointer:
        try:
            done = checkpointer.restore_verified(state(0))[1]
        except CertificateError:
            if certified_steps(folder):  # a checkpoint that no certificate follows was never complete
                raise
            done = 0
        for step in range(done + 1, STEPS + 1):
            checkpointer.save(step, state(step), overwrite=True)
        found, step = checkpointer.restore_verified(state(0))
        if checkpointer.rejected:
            raise Ended(f"step {step} instead of {checkpointer.rejected}")
        return _digest(bits_of(found))


def of_running(folder: Path) -> str:
    """Saves all blocks of a running checkpoint after each step, and restores them."""
    from .bits import bits_of, quiet
    from .saves import state

    with quiet(), RunningCheckpoint(folder, state(0), moving="params", rows=32, fraction=1.0) as running:
        done = max(0, int(running.steps.max()))
        for step in range(done + 1, STEPS + 1):
            running.save(state(step), step)
        if not running.wait():
            raise Ended("the last save failed")
        found = running.recover(list(range(len(running.partition.blocks))), state(0))
        if age := found.age(STEPS):
            raise Ended(f"blocks are {age} steps old: {found.older}")
        return _digest(bits_of(found.state))


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


def of_standing(folder: Path) -> str:
    """Announces burn-ins in the ledger of a host, and adds their results, the second of which is a failure."""
    path = folder / "ledger.sqlite"
    for number in range(3):
        with Ledger(path, write=True) as ledger:
            id = f"burn-in {number}"
            if not any(entry.run == id for entry in ledger.entries() if entry.kind == "result"):
                ledger.begin(f"begun {number}", simulated=False, level="quick")
                findings = [make_finding()] if number == 1 else []
                machine = identify().machine
                report = make_report(id=id, machine=machine, findings=findings, created=now(), ended=now())
                ledger.add(report, begun=f"begun {number}")
    found = standing_here(path)
    if found.verdict is not Verdict.CORRUPT:
        raise Ended(found.reason)
    with Ledger(path) as ledger:
        rows = {(entry.run, entry.device, entry.verdict) for entry in ledger.entries() if entry.kind == "result"}
    return _digest([found.reason, *map(repr, sorted(rows))])


def of_golden(folder: Path) -> str:
    """Merges a register of golden digests into a file, once per host."""
    path = folder / "fleet.golden"
    for host in "abc":
        mine = register(host, {"w": BAD} if host == "c" else None)
        GOLDEN.write(path, merge([GOLDEN.read(path), mine]) if path.exists() else mine)
    found = GOLDEN.read(path)
    return _digest(map(repr, (found.environments, found.recordings, found.entries, found.disputed)))


def of_burnin(folder: Path) -> str:
    """Runs the smallest burn-in of one family as the command, with `--resume` if there is a result."""
    from sdc.burnin import BURN_IN

    place = folder / "run"
    words = ["burnin", "--only", "transfers", "--dtypes", "float32", "--rounds", str(STEPS), "--devices", "2"]
    resume = ["--resume"] if (place / "result.json").exists() else []
    if resume and BURN_IN.read(place / "result.json").stopped is None:
        resume = []
    else:
        code = cli.run([*words, "--run", str(place), *resume])
        if code != 0:
            raise Ended(f"exit code {code}")
    result = BURN_IN.read(place / "result.json")
    rows = [[row.workload, row.device, row.runs, row.digest] for row in result.workloads]
    return _digest([json.dumps(rows), result.verdict.acceptance])


class Ended(Exception):
    """A run ended without its result, and stated the reason in one line."""


def _digest(parts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
    return digest.hexdigest()


STARTS: dict[str, Callable[[Path], Any]] = {
    "record": of_record,
    "lock": of_lock,
    "ledger": of_ledger,
    "standing": of_standing,
    "golden file": of_golden,
    "certificates": of_certificates,
    "running checkpoint": of_running,
    "burn-in": of_burnin,
}
"""The kinds of run, by name."""
