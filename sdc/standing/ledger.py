"""The ledger of a host: what burn-ins, pairs and people have said about its devices, from which its standing follows.

The ledger is a SQLite file on the host's own disk. The table `entries` is the history; nothing in it is changed, and
only passes are folded. The table `states` holds what follows from the history for the host and for each device, so that
a health check reads a few rows, however long the history is. Both are written in one transaction, and each row carries
the SHA-256 of its content, so that a damaged row is never taken for another one.
"""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import itertools
import os
import re
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from sdc.burnin import (
    BURN_IN,
    PAIR,
    PAIR_FORMAT,
    POOL,
    RESULT,
    BurninResult,
    CheckedDevice,
    DeviceRequest,
    Pair,
    candidates,
    compare_names,
)  # fmt: skip
from sdc.records import AnyPath, Record, RecordError, identify, read_json, reason
from sdc.schema import Fields, Header, Host, about, now
from sdc.verdict import Verdict

Kind: TypeAlias = Literal["begun", "refused", "result", "acknowledged", "gone"]
VERSION = 1  # of the tables
PATIENCE = 10.0  # seconds to wait for another writer
KEPT_DAYS = 30  # days after which passes are folded: of each day, the last pass of each device remains
AHEAD = 300.0  # seconds by which a result may be dated in the future; clocks of hosts differ by less
HOST = "host"  # key of the host's state
SYSTEM = Path("/var/lib/sdc")  # folder of the ledger for root, in which burn-ins of other users look for failures too
NAMES = (RESULT, PAIR, POOL)
BEGUN = "a test has begun"
UNANNOUNCED = "the ledger does not contain the beginning of this test"
NO_DEVICE = "it was of devices of another host"
CLOCKS = f"the clocks of this host and of the first host of the test differ by more than {AHEAD / 60:g} minutes"
COMPARISONS = (Path(PAIR).stem, Path(POOL).stem)  # levels of tests that are no burn-ins
RESERVE = 128 << 10  # bytes kept for a failure, in case the disk becomes full

SCHEMA = """
CREATE TABLE entries (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    written TEXT NOT NULL,      -- UTC
    kind TEXT NOT NULL,         -- begun, refused, result, acknowledged, gone
    run TEXT,                   -- identifier of the burn-in or pair
    device TEXT,                -- the most reliable name of the device; NULL for the whole host
    verdict TEXT,               -- clean, corrupt or inconclusive; NULL unless a result
    simulated INTEGER NOT NULL, -- 1 for a rehearsal, which says nothing about the hardware
    content TEXT NOT NULL,      -- the entry as JSON
    seal TEXT NOT NULL          -- SHA-256 of number and content
);
CREATE INDEX by_device ON entries (device, number);
CREATE TABLE states (key TEXT PRIMARY KEY, content TEXT NOT NULL, seal TEXT NOT NULL) WITHOUT ROWID;
CREATE TRIGGER entries_stay BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END;
CREATE TRIGGER findings_stay BEFORE DELETE ON entries
    WHEN OLD.kind IN ('acknowledged', 'gone') OR (OLD.kind = 'result' AND OLD.verdict IS NOT 'clean')
    BEGIN SELECT RAISE(ABORT, 'findings and acknowledgements are never deleted'); END;
CREATE VIEW findings AS SELECT number, written, run, device, json_extract(content, '$.sentence') AS sentence
    FROM entries WHERE kind = 'result' AND verdict = 'corrupt' AND NOT simulated;
"""


class LedgerError(RecordError):
    """A ledger cannot be read or written, or is that of another host; the message names the file and the remedy."""


class Origin(Fields, kw_only=True):
    """The time and place at which an entry was written. The clock may be wrong, the time since the boot is not."""

    written: Annotated[str, about("time, UTC")]
    uptime: Annotated[float, about("seconds since the system was booted, including time asleep")]
    host: Annotated[Host, about("process and host")]
    chassis: Annotated[
        tuple[str, ...], about("hashes of the numbers of the mainboard and the network adapters, as far as readable")
    ] = ()
    uuids: Annotated[tuple[str, ...], about("UUIDs of the GPUs that the kernel lists, which are not asked")] = ()

    @classmethod
    def current(cls) -> "Origin":
        return cls(
            written=now(), uptime=time.clock_gettime(time.CLOCK_BOOTTIME), host=identify(), chassis=read_chassis(),
            uuids=read_uuids(),
        )  # fmt: skip


class LedgerEntry(Fields, kw_only=True):
    """A line of a ledger."""

    number: Annotated[int, about("number of the entry, from 1; a later entry has a higher number")] = 0
    kind: Annotated[Kind, about("`begun`, `refused`, `result`, `acknowledged` or `gone`")]
    at: Annotated[Origin, about("when and where the entry was written")]
    run: Annotated[str | None, about("identifier of the burn-in or pair")] = None
    device: Annotated[str | None, about("the most reliable name of the device")] = None
    names: Annotated[tuple[str, ...], about("all names of the device, the most reliable first")] = ()
    verdict: Annotated[Verdict | None, about("verdict on the device; `null` unless a result")] = None
    simulated: Annotated[bool, about("whether faults were simulated")] = False
    level: Annotated[str | None, about("level of the burn-in, `pair` or `pool`")] = None
    only: Annotated[tuple[str, ...], about("families of workloads, if not all")] = ()
    sentence: Annotated[str, about("the finding, or the reason for the entry")] = ""
    file: Annotated[str | None, about("file of the result")] = None
    ended: Annotated[str | None, about("when that file was written, UTC")] = None
    asked: Annotated[DeviceRequest | None, about("platform and number of the requested devices, of a burn-in")] = None
    devices: Annotated[
        tuple[tuple[str, ...], ...], about("names of the devices under test, once known; empty unless `begun`")
    ] = ()
    by: Annotated[str | None, about("who acknowledged, as given, and the user of the process")] = None


class DeviceState(Fields, kw_only=True):
    """What follows from all entries on a device."""

    names: Annotated[tuple[str, ...], about("all names of the device, the most reliable first")]
    result: Annotated[LedgerEntry, about("the last result")]
    failed: Annotated[LedgerEntry | None, about("the last difference that nobody has acknowledged")] = None
    differed: Annotated[str | None, about("time of the last difference, UTC, acknowledged or not")] = None
    difference: Annotated[int, about("number of the entry of that difference; 0 if it is of another ledger")] = 0
    gone: Annotated[bool, about("whether a person said that the device has left the host for good")] = False
    unused: Annotated[bool, about("whether a person said that the device needs no test")] = False
    cleared: Annotated[
        bool,
        about("whether the device has passed all families of workloads, or a pair or pool, since it last differed"),
    ] = True
    elsewhere: Annotated[tuple[str, ...], about("failures that were taken over from other ledgers")] = ()

    def fail(self, entry: LedgerEntry) -> None:
        self.failed, self.differed, self.difference, self.cleared = entry, entry.at.written, entry.number, False

    def inherit(self, others: Iterable["DeviceState"], chassis: Sequence[str]) -> LedgerEntry | None:
        """Takes over the differences of this device that other ledgers contain, and returns the newest that nobody has
        acknowledged. A device without a serial number and UUID is recognized by its place in a machine with one of the
        numbers in `chassis`.
        """
        taken = []
        for other in others:
            moved = {*chassis} & {*other.result.at.chassis} and _place(self.names) == _place(other.names)
            known = compare_names(self.names, other.names)
            if known == "other" or (known == "unknown" and not moved):
                continue
            if not other.cleared and (other.differed or "") > self.result.at.written:
                self.cleared = False
            self.differed = max(self.differed or "", other.differed or "") or None
            if (failed := other.failed) is not None:
                key = f"{failed.run} {failed.number} {failed.at.written}"
                if key not in self.elsewhere:
                    taken.append(failed)
                    self.elsewhere = (*self.elsewhere, key)
                    self.failed = self.failed or failed
        return max(taken, key=lambda entry: entry.at.written, default=None)


class HostState(Fields, kw_only=True):
    """What follows from all entries on a host."""

    machine: Annotated[str | None, about("hash of the machine's identity")]
    devices: Annotated[list[str], about("names of the devices, which are keys of `states`")] = msgspec.field(
        default_factory=list
    )
    begun: Annotated[dict[str, LedgerEntry], about("tests that have begun and left no result, by identifier")] = (
        msgspec.field(default_factory=dict)
    )
    rows: Annotated[int, about("number of devices in `states`")] = 0
    entries: Annotated[int, about("number of entries so far, including folded ones")] = 0
    folded: Annotated[str, about("day on which old passes were last folded")] = ""
    written: Annotated[str, about("time of the last entry, UTC")] = ""
    turned: Annotated[int, about("number of the first entry after the clock was last set back; 0 if it never was")] = 0


def ledger_path() -> Path:
    """Returns the place of this host's ledger: the variable SDC_LEDGER, or a file in the folder SDC_STATE, which is by
    default `/var/lib/sdc` for root and the user's state folder for others. The name contains a hash of the machine's
    identity, because hosts may share a state folder."""
    if given := os.environ.get("SDC_LEDGER"):
        return Path(given)
    me = identify()
    if given := os.environ.get("SDC_STATE"):
        folder = Path(given)
    elif os.geteuid() == 0:
        folder = SYSTEM
    else:
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "sdc"
    return folder / f"ledger-{me.machine or me.name}.sqlite"


def read_uuids(root: AnyPath = "/") -> tuple[str, ...]:
    """Returns the UUIDs of GPUs according to files of the kernel, as `sdc.records.describe_devices` returns them."""
    found = []
    for pattern, what in (
        ("proc/driver/nvidia/gpus/*/information", r"GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$"),
        ("sys/bus/pci/drivers/amdgpu/*/unique_id", r"^(\w+)\s*$"),
    ):
        for path in sorted(Path(root).glob(pattern)):
            with contextlib.suppress(OSError):
                text = path.read_text(encoding="utf-8", errors="replace")
                found += re.findall(what, text, re.MULTILINE)
    return tuple(found)


def read_chassis() -> tuple[str, ...]:
    """Returns hashes of the numbers of the mainboard, which only root can read, and of the network adapters. Machines
    that were installed from one disk image have none in common."""
    paths = [Path("/sys/class/dmi/id", name) for name in ("product_uuid", "board_serial")]
    # Virtual adapters have no device.
    paths += [device.parent / "address" for device in sorted(Path("/sys/class/net").glob("*/device"))]
    found: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError):
            number = path.read_text(encoding="utf-8", errors="replace").strip()
            found += [hashlib.sha256(f"jax-sdc {number}".encode()).hexdigest()[:16]] if number else []
    return tuple(found)


class Ledger:
    """A context manager that opens a ledger for reading or, with `write`, for writing; `create` makes a missing one.

    Raises LedgerError if the file cannot be opened, is damaged, is no ledger, or may have been planted by another user.
    """

    def __init__(
        self, path: AnyPath, *, write: bool = False, create: bool = True, origin: Callable[[], Origin] = Origin.current
    ) -> None:
        self.path, self._write, self._create, self._origin = Path(path), write, write and create, origin

    def __enter__(self) -> "Ledger":
        with self._errors():
            Record.check_owner(self.path)
            present = self.path.exists()
        if present and not self.path.is_file():
            raise LedgerError(
                f"{self.path} is no file, expected a ledger; move it away, or choose another with --ledger"
            )
        if not self._create and not present:
            raise LedgerError(f"there is no ledger {self.path}; run sdc burnin, which begins one")
        # Whoever may write also reads with write access, because SQLite undoes what a killed writer left.
        may_write = self._write or os.access(self.path, os.W_OK)
        with self._errors():
            if self._create and not os.path.lexists(self.path):
                self._make()
            if not self.path.stat().st_size:  # SQLite would take it for a new database
                raise LedgerError(f"{self.path} is damaged (it is empty); {REMEDY}")
            place = f"{self.path.absolute().as_uri()}?mode={'rw' if may_write else 'ro'}"
            self._base = sqlite3.connect(place, uri=True, timeout=PATIENCE, isolation_level=None)
        try:
            with self._errors():
                (version,) = self._base.execute("PRAGMA user_version").fetchone()
            if version != VERSION:
                raise LedgerError(
                    f"{self.path} has tables of version {version}, not {VERSION}; if it is a ledger, use the jax-sdc "
                    f"that wrote it; {REMEDY}"
                )
        except BaseException:
            self._base.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()

    def begin(
        self, run: str, *, simulated: bool, level: str, only: Sequence[str] = (), asked: DeviceRequest | None = None,
        file: AnyPath | None = None,
    ) -> None:  # fmt: skip
        """Announces a burn-in, pair or pool, with the file that will hold its result. Until the result is added, the
        host's standing is at best inconclusive."""
        entry = LedgerEntry(
            kind="begun", at=self._origin(), run=run, simulated=simulated, level=level, only=tuple(only),
            sentence=BEGUN, asked=asked, file=None if file is None else os.path.abspath(file),
        )  # fmt: skip
        with self._transaction():
            host = self._host_state(entry.at)
            self._recover(host, entry.at)
            self._append(host, entry)
            if not simulated:
                host.begun[run] = entry
            self._set(HOST, host)

    def refuse(self, run: str, reason: str) -> None:
        """Withdraws an announced test, because it was refused before anything ran."""
        with self._transaction():
            host = self._host_state(at := self._origin())
            self._recover(host, at)
            self._append(host, LedgerEntry(kind="refused", at=at, run=run, sentence=reason))
            host.begun.pop(run, None)
            self._set(HOST, host)

    def add(
        self, result: BurninResult | Pair, file: AnyPath | None = None, *, begun: str, ended: bool = True,
        process: int = 0,
    ) -> None:  # fmt: skip
        """Adds the verdict of a burn-in, pair or pool on each of this host's devices. While a burn-in is under way
        (`ended` is false), only the names of its devices and their differences are added, because these count however
        it ends.

        A burn-in that was resumed and ran nothing adds no PASS; a PASS does not count if the burn-in began before
        the device differed, or if the ledger does not contain its beginning. A burn-in that found no device stays in
        the list of those that left no result, and so does one that was killed, until a later one has results of all
        devices that it tested or, if these are unknown, of all known devices and of those that it requested.

        Args:
            result: the result so far.
            file: file of the result.
            begun: the identifier with which the test was announced.
            ended: whether it has ended.
            process: the process of a pair or pool whose devices belong to this host.

        Raises LedgerError if the ledger cannot be written, or if nothing ran and it does not contain the earlier PASS.
        """
        if not ended and result.simulated:
            return
        at, tested, others = self._origin(), list[LedgerEntry](), self.others(skip=True)
        devices = _names_here(result, at, process)
        dark = ended and not devices and isinstance(result, BurninResult)
        if not ended and result.verdict is not Verdict.CORRUPT and self._knows(begun, devices):
            return
        with self._transaction():
            host = self._host_state(at)
            self._recover(host, at, but=begun)
            announced = host.begun.get(begun) or self._announced(begun)
            if announced is not None:
                announced.devices = devices
            # A burn-in's times are of this host, but its clock may be set between burn-ins: a result from the future is
            # no evidence that anything has run since. A pair's times are of its first host, whose clock may differ.
            own = isinstance(result, BurninResult)
            until = at.written if own else result.ended
            begin = "" if announced is None else announced.at.written if own else _before(announced.at.written, AHEAD)
            stale = announced is not None and not begin <= result.ended <= until  # nothing has run since
            resumed = announced is not None and not begin <= result.created <= until
            since = (announced, result.created if resumed else None)
            for entry in _entries(result, at, process, file, ended=ended):
                if entry.verdict is Verdict.CLEAN and announced is None and not result.simulated:
                    entry.verdict, entry.sentence = Verdict.INCONCLUSIVE, UNANNOUNCED
                if stale and entry.verdict is Verdict.CLEAN:
                    if not own:
                        entry.verdict, entry.sentence = Verdict.INCONCLUSIVE, CLOCKS
                    elif self._contains(entry):
                        continue
                    else:
                        said = f"nothing has run since {result.ended}; run sdc burnin in a new folder"
                        raise LedgerError(f"{self.path} does not contain what ran earlier, and {said}")
                self._add(host, entry, others, since=since, once=not ended)
                tested.append(entry)
            if begun in host.begun and dark:
                host.begun[begun].sentence = next(iter(result.sentences), NO_DEVICE)
            elif ended and not result.simulated:
                runs = list(host.begun)
                platform = result.environment.platform if result.environment is not None else None
                for run in runs[: runs.index(begun)] if begun in runs else ():
                    done = self._replaces(host, host.begun[run], tested, platform)
                    if done and under_way(self.path, run) is False:
                        host.begun.pop(run)
                host.begun.pop(begun, None)
            if host.folded != (today := at.written[:10]):
                host.folded = today
                self._fold(at)
            self._set(HOST, host)

    def acknowledge(self, devices: Sequence[str], reason: str, by: str, *, gone: bool = False) -> None:
        """Records that a person has dealt with the failures of devices, or that the devices have left the host, or that
        a test that left no result is of no importance. The host passes if the devices have passed a test since their
        last failures. A GPU that the kernel lists and that no test can use needs no result from then on. Raises
        LedgerError, and records nothing, if a device or test is unknown."""
        by_user = f"{by} (user {os.getuid()})"
        with self._transaction():
            at = self._origin()
            host = self._host_state(at)
            self._recover(host, at)
            states, others = self.devices(), self.others(skip=True)
            listed = {f"uuid {uuid}" for uuid in at.uuids}
            for given in dict.fromkeys(devices):
                known = [given] if given in states else [key for key, state in states.items() if given in state.names]
                device = known[0] if len(known) == 1 else given
                state = states.get(device)
                if state is None and (lost := [run for run in host.begun if name_of_test(run) == device]):
                    if under_way(self.path, lost[0]) is not False:
                        raise LedgerError(f"{device} is under way, or its user must acknowledge it; wait for its end")
                    entry = LedgerEntry(kind="acknowledged", at=at, run=lost[0], sentence=reason, by=by_user)
                    self._append(host, entry)
                    host.begun.pop(lost[0])
                    continue
                if state is None and device in listed and not gone:
                    entry = LedgerEntry(
                        kind="acknowledged", at=at, device=device, names=(device,), sentence=reason, by=by_user
                    )
                    self._append(host, entry)
                    host.rows += 1
                    self._set(device, DeviceState(names=entry.names, result=entry, unused=True))
                    continue
                if state is None:
                    listing = ", ".join([*states, *map(name_of_test, host.begun)]) or "none"
                    raise LedgerError(f"{self.path} contains no device or test {device!r}; it contains: {listing}")
                entry = LedgerEntry(
                    kind="gone" if gone else "acknowledged", at=at, device=device, names=state.names, sentence=reason,
                    by=by_user,
                )  # fmt: skip
                self._append(host, entry)
                if gone:
                    host.devices = [name for name in host.devices if name != device]
                    for test in host.begun.values():  # no later test can have this device
                        test.devices = tuple(each for each in test.devices if not _same(each, state.names))
                    state.gone, state.unused = True, False
                else:
                    taken = state.inherit(others, at.chassis)
                    # There is nothing else to acknowledge of a device that is listed and was in no later test.
                    untested = device not in host.devices and bool(listed & {*state.names})
                    state.unused = untested and state.failed is None and state.cleared
                    if taken is not None and taken.at.written > state.result.at.written:
                        state.result = msgspec.structs.replace(taken, number=0)  # its number is of another ledger
                    state.failed = None
                self._set(device, state)
            self._set(HOST, host)

    def host(self) -> HostState | None:
        """Returns the state of the host; None if the ledger is empty. Raises LedgerError if rows are missing."""
        with self._errors():
            content, seal, rows, last = self._base.execute(
                "SELECT content, seal, (SELECT count(*) FROM states), (SELECT coalesce(max(number), 0) FROM entries) "
                "FROM (SELECT 1) LEFT JOIN states ON key = ?",
                (HOST,),
            ).fetchone()
        host = None if content is None else self._decoded(HOST, content, seal, HostState)
        if rows < (0 if host is None else host.rows + 1) or last > (0 if host is None else host.entries):
            raise LedgerError(f"{self.path} is damaged (a row of `states` is missing or old); {REMEDY}")
        return host

    def devices(self) -> dict[str, DeviceState]:
        """Returns the states of all devices that the host has ever had, by name."""
        with self._errors():
            rows = self._base.execute("SELECT key, content, seal FROM states WHERE key != ?", (HOST,)).fetchall()
        return {key: self._decoded(key, content, seal, DeviceState) for key, content, seal in rows}

    def others(self, *, skip: bool = False) -> list[DeviceState]:
        """Returns the devices that have differed by the other ledgers of this folder and of `SYSTEM`: the identity of
        this machine may have changed, a device may have come from another host that shares the folder, or root may have
        tested it. Raises RecordError if one of them cannot be read, unless `skip`."""
        pattern, found, paths = "ledger-*.sqlite", list[DeviceState](), set[Path]()
        for folder in {SYSTEM, *([self.path.parent] if self.path.match(pattern) else [])}:
            missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
            with contextlib.suppress(*[RecordError] * skip), self._errors(), missing:
                paths |= {folder / name for name in os.listdir(folder) if Path(name).match(pattern)}
        for path in sorted(paths - {self.path.absolute(), self.path}):
            with contextlib.suppress(*[RecordError] * skip), Ledger(path) as other:
                found += [state for state in other.devices().values() if state.differed is not None]
                for _, entry in other.unlisted():
                    found.append(DeviceState(names=entry.names, result=entry))
                    found[-1].fail(entry)
        return found

    def unlisted(self, at: Origin | None = None, but: str | None = None) -> list[tuple[LedgerEntry, LedgerEntry]]:
        """Returns the differences of this host's devices that tests other than `but` have written to their folders, but
        not to the ledger, because they were killed or the ledger was in use; each with the entry of its test."""
        host, found = self.host(), []
        for run, test in () if host is None else host.begun.items():
            result = None if run == but else failure_of(test)
            if result is None:
                continue
            with self._errors():
                rows = self._base.execute(
                    "SELECT number, content, seal FROM entries WHERE kind = 'result' AND verdict = 'corrupt' "
                    "AND run = ?",
                    (result.id,),
                ).fetchall()
            listed = [self._decoded(str(number), content, seal, LedgerEntry) for number, content, seal in rows]
            for entry in _entries(result, at or test.at, test.at.host.process or 0, test.file, ended=False):
                if not any((entry.names, entry.ended) == (each.names, each.ended) for each in listed):
                    found.append((test, entry))
        return found

    def entries(self) -> Iterator[LedgerEntry]:
        """Yields all entries, in the order in which they were written."""
        with self._errors():
            for number, content, seal in self._base.execute(
                "SELECT number, content, seal FROM entries ORDER BY number"
            ):
                yield self._decoded(str(number), content, seal, LedgerEntry)

    def _contains(self, entry: LedgerEntry) -> bool:
        """Returns whether the ledger contains the same PASS."""
        rows = self._base.execute(
            "SELECT number, content, seal FROM entries WHERE kind = 'result' AND verdict = 'clean' AND run = ?",
            (entry.run,),
        )
        passes = (self._decoded(str(number), content, seal, LedgerEntry) for number, content, seal in rows)
        return any(each.ended == entry.ended and _same(each.names, entry.names) for each in passes)

    def _announced(self, begun: str) -> LedgerEntry | None:
        """Returns the entry that announced a test, also if results of another test have replaced it."""
        rows = self._base.execute(
            "SELECT number, content, seal FROM entries WHERE kind = 'begun' AND run = ? ORDER BY number DESC", (begun,)
        )
        found = rows.fetchone()
        return None if found is None else self._decoded(str(found[0]), found[1], found[2], LedgerEntry)

    def _knows(self, begun: str, devices: tuple[tuple[str, ...], ...]) -> bool:
        """Returns whether the list of tests without a result already states these devices for a test, or does not
        contain the test."""
        host = self.host()
        return host is None or begun not in host.begun or host.begun[begun].devices == devices

    def _recover(self, host: HostState, at: Origin, but: str | None = None) -> None:
        """Adds the differences that only the folders of tests contain."""
        for test, entry in self.unlisted(at, but):
            self._add(host, entry, (), since=(None, None), once=True)
            if under_way(self.path, test.run or "") is False:
                host.begun[test.run or ""].file = None  # nothing more will be written there

    def _replaces(
        self, host: HostState, test: LedgerEntry, results: Sequence[LedgerEntry], platform: str | None
    ) -> bool:
        """Returns whether results are of the same devices and families as those that a test did not leave. If the test
        started no device: of all known devices, and of those that it requested; a host that has never tested an
        accelerator may have none."""
        if not results or is_unreadable(test):
            return False
        only, weaker = {*results[0].only}, results[0].level in COMPARISONS and test.level not in COMPARISONS
        if weaker or (only and not only >= {*test.only} > set[str]()):
            return False
        if test.devices:
            return all(any(_same(names, result.names) for result in results) for names in test.devices)
        if not {result.device for result in results} >= {*host.devices}:
            return False
        if test.asked is None:
            return True
        if test.asked.platform is None:
            return platform != "cpu" or all(" cpu device " in state.names[-1] for state in self.devices().values())
        return platform == test.asked.platform and len(results) >= (test.asked.number or 0)

    def _add(
        self, host: HostState, entry: LedgerEntry, others: Iterable[DeviceState], *,
        since: tuple[LedgerEntry | None, str | None], once: bool,
    ) -> None:  # fmt: skip
        """Adds a result to the state of its device, which is recognized by any of its names, and sets `entry.device`;
        with `once`, only if no failure of the same run counts already. `since` is the entry that announced the test and
        the time when a resumed burn-in began."""
        states = self.devices()
        present = [name for name in states if name in host.devices]
        gone = [name for name in states if name not in host.devices]
        known = (name for name in (*present, *gone) if _same(states[name].names, entry.names, place=False))
        placed = (name for name in present if _same(states[name].names, entry.names))
        # The dies of a board may share its serial number.
        new = (name for name in (*entry.names, " ".join(entry.names)) if name not in states)
        entry.device = name = next(itertools.chain(known, placed, new))
        state = states.get(name) or DeviceState(names=entry.names, result=entry)
        counts = state.failed is not None and state.failed.run == entry.run and name in host.devices
        if once and counts:
            return
        state.inherit(others, entry.at.chassis)
        announced, resumed = since
        # Only this ledger numbers its entries; a difference that another ledger contains has a time.
        earlier = announced is not None and (
            announced.number < state.difference or announced.at.written < (state.differed or "") <= entry.at.written
        )
        if resumed is not None and state.differed is not None:  # a time from the future proves nothing
            earlier = earlier or not state.differed <= resumed <= entry.at.written
        if entry.verdict is Verdict.CLEAN and not entry.simulated and earlier:
            entry.verdict = Verdict.INCONCLUSIVE
            entry.sentence = "the test began before the device differed"
        self._append(host, entry)
        if entry.simulated:
            return
        # Whatever had this place has left it; its state remains, in case it returns.
        host.devices = [
            other for other in present if other != name and not _exchanged(entry.names, states[other], entry.at)
        ]
        host.devices.append(name)
        host.rows = len({*states, name})
        if entry.verdict is Verdict.CORRUPT:
            state.fail(entry)
        elif entry.verdict is Verdict.CLEAN and not entry.only:
            state.cleared = True
        state.names, state.result = _merged(state.names, entry.names), entry
        state.gone = state.unused = False
        self._set(name, state)

    def _append(self, host: HostState, entry: LedgerEntry) -> None:
        host.entries += 1
        entry.number = host.entries
        if host.written and (time_of(host.written) - time_of(entry.at.written)).total_seconds() > AHEAD:
            host.turned = entry.number
        host.written = entry.at.written
        content = msgspec.json.encode(entry).decode()
        row = (
            host.entries,
            entry.at.written,
            entry.kind,
            entry.run,
            entry.device,
            entry.verdict,
            entry.simulated,
            content,
        )
        self._base.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, _seal(str(host.entries), content))
        )

    def _fold(self, at: Origin) -> None:
        """Deletes old passes, except each device's last pass of a day."""
        limit = time_of(at.written) - datetime.timedelta(days=KEPT_DAYS)
        self._base.execute(
            "DELETE FROM entries WHERE kind = 'result' AND verdict = 'clean' AND written < ? AND number NOT IN "
            "(SELECT max(number) FROM entries WHERE kind = 'result' AND verdict = 'clean' "
            "GROUP BY device, simulated, substr(written, 1, 10))",
            (limit.isoformat(timespec="seconds"),),
        )

    def _host_state(self, at: Origin) -> HostState:
        host = self.host() or HostState(machine=at.host.machine)
        if host.machine != at.host.machine:
            raise LedgerError(f"{self.path} {FOREIGN}")
        return host

    def _set(self, key: str, state: Any) -> None:
        content = msgspec.json.encode(state).decode()
        self._base.execute("INSERT OR REPLACE INTO states VALUES (?, ?, ?)", (key, content, _seal(key, content)))

    def _decoded(self, key: str, content: str, seal: str, type: Any) -> Any:
        try:
            if _seal(key, content) != seal:
                raise ValueError("a checksum is wrong")
            return msgspec.json.decode(content, type=type)
        except (ValueError, TypeError, AttributeError) as error:
            raise LedgerError(f"{self.path} is damaged ({error}); {REMEDY}") from error

    def _make(self) -> None:
        """Makes an empty ledger, which appears at once with its tables."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        made = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        try:
            with contextlib.closing(sqlite3.connect(made)) as base:
                base.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            with contextlib.suppress(FileExistsError):  # another process has made it
                os.link(made, self.path)
        finally:
            made.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors():
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # some errors roll back
                    self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeError) as error:
            code = getattr(error, "sqlite_errorcode", None)
            remedy = ERRORS.get(getattr(error, "errno", None)) if code is None else REMEDIES.get(code & 0xFF)
            why = reason(error) if isinstance(error, OSError) else error
            raise LedgerError(f"{self.path} cannot be used as a ledger ({why}); {remedy or REMEDY}") from error


# A new ledger knows none of the failures of an old one.
REMEDY = (
    "keep the host drained if it may contain a FAIL (sdc fleet ledger --ledger FILE lists what can be read); otherwise "
    "move it to another folder and run sdc burnin"
)
FOREIGN = f"is the ledger of another machine; {REMEDY}"
ROOM, RIGHTS = "free some space", "make it readable and writable for this user"
REMEDIES = {
    sqlite3.SQLITE_BUSY: "another process is using it; try again", sqlite3.SQLITE_FULL: ROOM,
    sqlite3.SQLITE_IOERR: "examine the disk", sqlite3.SQLITE_READONLY: RIGHTS, sqlite3.SQLITE_PERM: RIGHTS,
    sqlite3.SQLITE_CANTOPEN: f"{RIGHTS}, and its folder too, and {ROOM}",
}  # fmt: skip
ERRORS: dict[int | None, str] = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EFBIG: ROOM,
    errno.EACCES: RIGHTS,
    errno.EROFS: RIGHTS,
}


class Announcement:
    """Marks a test as under way until its process ends, by a lock on a file beside the ledger that also reserves space
    for the entries of a failure. The kernel releases the lock, also across containers. The marks of tests that were
    killed are deleted by the next one."""

    def __init__(self, path: Path, run: str) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            for mark in path.parent.iterdir():
                name, *other = mark.name.removesuffix(".running").rsplit(".", 1)
                if mark.suffix == ".running" and name == path.name:
                    under_way(path, other[0], delete=True)
        self._mark = _mark(path, run)
        with contextlib.suppress(OSError):  # without the mark, the test counts as one that left no result
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            while True:
                self._descriptor = os.open(self._mark, flags, 0o600)  # others could hold the lock
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                if os.path.exists(self._mark):
                    break
                os.close(self._descriptor)  # another test deleted the mark before it was locked
            os.posix_fallocate(self._descriptor, 0, RESERVE)

    def free(self) -> None:
        """Frees the reserved space."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)

    def end(self) -> None:
        """Deletes the mark of a test whose result is in the ledger."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._mark.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def under_way(path: Path, run: str, *, delete: bool = False) -> bool | None:
    """Returns whether a process of this system marks a test as under way; None if another user's process might. With
    `delete`, deletes the mark of a test that is not."""
    try:
        descriptor = os.open(_mark(path, run), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        return None
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several readers may ask at the same time
        if delete:  # while it is locked: its process may be about to lock it
            os.unlink(_mark(path, run))
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def time_of(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def _before(text: str, seconds: float) -> str:
    """Returns the time that is some seconds earlier, in the same form."""
    return (time_of(text) - datetime.timedelta(seconds=seconds)).isoformat(timespec="seconds")


def _mark(path: Path, run: str) -> Path:
    return path.with_name(f"{path.name}.{run}.running")


def name_of_test(run: str) -> str:
    """Returns the name by which a person acknowledges a test that left no result."""
    return f"test {run[:8]}"


def read_result(place: Path) -> BurninResult | Pair:
    """Reads the result of a burn-in, pair or pool, which is recognized by the name of its file or, if it was renamed,
    by its format. Raises RecordError if it cannot be read, or may have been planted by another user."""
    Record.check_owner(place)
    compared = place.name in NAMES and place.name != RESULT
    if place.name not in NAMES:
        with contextlib.suppress(OSError, ValueError):
            compared = read_json(place).get("format") == Pair.__struct_config__.tag
    return (PAIR_FORMAT if compared else BURN_IN).read(place)


def failure_of(test: LedgerEntry) -> BurninResult | Pair | None:
    """Returns the result of a test that has begun, if it has written one, and found a difference."""
    results = _results_of(test)
    return next((each for each in results if each and each.verdict is Verdict.CORRUPT and not each.simulated), None)


def is_unreadable(test: LedgerEntry) -> bool:
    """Returns whether a test that has begun has written a result, which cannot be read now."""
    return None in _results_of(test)


def _results_of(test: LedgerEntry) -> list[BurninResult | Pair | None]:
    """Returns what a test that has begun has written, None for a file that cannot be read now. A burn-in announces its
    devices after its first result. A pair makes its folder first, in which each process writes a file before the common
    one."""
    if test.file is None:
        return []
    file, found = Path(test.file), list[BurninResult | Pair | None]()
    compared = test.level in COMPARISONS
    try:
        names = os.listdir(file.parent)
    except FileNotFoundError:
        return [None] * (compared or bool(test.devices))
    except OSError:
        return [None]
    places = [file] * (file.name in names or bool(test.devices))
    if compared:
        places += [file.with_name(name) for name in sorted(names) if Path(name).match(f"{file.stem}-*.json")]
    for place in places:
        try:
            found.append(read_result(place))
        except (RecordError, OSError, ValueError):
            found.append(None)
    return found


def _seal(key: str, content: str) -> str:
    return hashlib.sha256(f"{key} {content}".encode()).hexdigest()


def _names_here(result: BurninResult | Pair, at: Origin, process: int) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the devices that a test has tested on this host."""
    return tuple(names for names, _, _ in _outcomes(result, at, process, ended=True))


def _entries(
    result: BurninResult | Pair, at: Origin, process: int, file: AnyPath | None, *, ended: bool
) -> Iterator[LedgerEntry]:
    """Yields an entry for each device of this host or, until the test has ended, for each that differed."""
    level, only = (result.kind, ()) if isinstance(result, Pair) else (result.settings.level, result.settings.selected)
    for names, verdict, sentence in _outcomes(result, at, process, ended=ended):
        yield LedgerEntry(
            kind="result", at=at, run=result.id, names=names, verdict=verdict, simulated=result.simulated,
            level=level, only=only, sentence=sentence or next(iter(result.sentences), result.verdict.acceptance),
            file=None if file is None else os.fspath(file), ended=result.ended,
        )  # fmt: skip


def _outcomes(
    result: BurninResult | Pair, at: Origin, process: int, *, ended: bool
) -> Iterator[tuple[tuple[str, ...], Verdict, str]]:
    """Yields names, verdict and finding of each device. The folder of a burn-in that was to be resumed may have come
    from another machine, whose devices are not of this host unless the kernel lists them."""
    if isinstance(result, BurninResult):
        listed = {f"uuid {uuid}" for uuid in at.uuids}
        for device, verdict, sentence in _tested(result, ended=ended):
            names = names_of(result, device)
            if (device.machine or result.host.machine) == at.host.machine or listed & {*names}:
                yield names, verdict, sentence
    else:
        for device, verdict, sentence in _compared(result, process):
            if ended or verdict is Verdict.CORRUPT:
                yield names_of(result, device), verdict, sentence


def _tested(result: BurninResult, *, ended: bool) -> Iterator[tuple[CheckedDevice, Verdict, str]]:
    """Yields the devices of a burn-in, or, until it has ended, those that differed, with verdicts and findings."""
    guilty = {device for finding in result.findings for device in finding.devices}
    guilty |= {tally.device for tally in result.workloads if tally.differences or tally.confirmed}
    for device in result.devices:
        if ended or device.index in guilty:
            sentence = next((each.sentence for each in result.findings if device.index in each.devices), "")
            if not sentence and device.index in guilty:  # the first sentence of the result is about another device
                sentence = "its results differed, which has not been examined yet"
            yield (device, *_verdict_on(device.index in guilty, result.verdict, sentence, "device", "burn-in"))


def _compared(result: Pair, process: int) -> Iterator[tuple[CheckedDevice, Verdict, str]]:
    """Yields the devices of a process of a pair or pool, unless nothing ran. A difference that no majority decides
    counts against all hosts that it may be due to."""
    for row in result.hosts if result.stages else ():
        guilty = row.host in {*result.suspects, *result.undecided}
        mine = [device for device in row.devices if device.process == process]
        for index, device in enumerate(mine):
            known = CheckedDevice(**msgspec.structs.asdict(device), index=index)
            yield (known, *_verdict_on(guilty, result.verdict, "", "host", result.kind))


def _verdict_on(guilty: bool, verdict: Verdict, sentence: str, other: str, test: str) -> tuple[Verdict, str]:
    if verdict is Verdict.CORRUPT and not guilty:
        return Verdict.INCONCLUSIVE, f"another {other} differed in its last {test}"
    return verdict, sentence


def names_of(result: Header, device: CheckedDevice) -> tuple[str, ...]:
    """Returns the names of a device, the most reliable first; the last is its place in the machine, which does not
    depend on the name of the host."""
    *names, _ = candidates(result, device)
    machine = device.machine or result.host.machine
    return (
        tuple(names)
        if names and names[-1].startswith("machine ")
        else (*names, f"machine {machine} {device.kind} device {device.index}")  # such as `cpu`
    )


def _by_kind(names: Sequence[str]) -> dict[str, str]:
    return {name.partition(" ")[0]: name for name in names}


def _same(names: Sequence[str], others: Sequence[str], *, place: bool = True) -> bool:
    """Returns whether two descriptions are of the same device; without serial numbers and UUIDs by the place, if it
    counts."""
    known = compare_names(names, others)
    return known == "same" or (known == "unknown" and place and names[-1] == others[-1])


def _exchanged(names: Sequence[str], other: DeviceState, at: Origin) -> bool:
    """Returns whether a device is in the place of another one. The index of a device depends on which are visible, and
    a device that failed is not exchanged before the host restarts."""
    then = (other.failed or other.result).at.host.boot
    differed = other.failed is not None or not other.cleared
    stays = " device " in names[-1] or (differed and (None in (then, at.host.boot) or then == at.host.boot))
    return names[-1] == other.names[-1] and not (stays and compare_names(names, other.names) == "other")


def _place(names: Sequence[str]) -> str:
    """Returns the place of a device in its machine, whose identity may have changed."""
    return names[-1].split(" ", 2)[-1]


def _merged(names: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    found = {**_by_kind(names), **_by_kind(others)}
    return tuple(found[kind] for kind in ("serial", "uuid", "machine") if kind in found)
