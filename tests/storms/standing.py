"""Standing: random histories of results against a simple model of what must be answered.

Two hosts, whose machines may share an identity, have devices that are swapped, moved and reported with or without
serial numbers. Burn-ins end, are killed (also between writing their result and adding it to the ledger), run some
families only, are resumed or are rehearsals; clocks are set, hosts restart; ledgers are copied, damaged and deleted;
people acknowledge. After each event: no host passes that must not, and no failure is lost.
"""

import dataclasses
import datetime
import itertools
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from sdc.burnin import BURN_IN, BurninResult
from sdc.schema import Host
from sdc.standing.assessment import standing_here
from sdc.standing.ledger import AHEAD, Ledger, LedgerError, Origin
from sdc.verdict import Verdict
from tests.reports import make_finding, make_report

from .tally import Tally

EVENTS = 25
MAX_AGE = 7 * 86_400.0
START = datetime.datetime(2026, 1, 5, tzinfo=datetime.UTC)


@dataclasses.dataclass(eq=False)
class Part:
    """A device; without a serial number and UUID, it is known by its slot only and is never moved."""

    number: int
    marked: bool

    def names(self, draw: random.Random) -> dict[str, Any]:
        """Returns what a driver reports, which sometimes lacks the serial number."""
        if not self.marked:
            return {"serial": None, "uuid": None}
        serial = f"S{self.number}" if draw.random() < 0.8 else None
        return {"serial": serial, "uuid": f"GPU-{self.number}"}


@dataclasses.dataclass
class Known:
    """What a ledger must know, in the model."""

    failed: set[Part] = dataclasses.field(default_factory=set)  # not acknowledged
    last: dict[tuple[str, Part], tuple[Verdict, float]] = dataclasses.field(default_factory=dict)  # with the true time
    differed: dict[Part, float] = dataclasses.field(default_factory=dict)  # the true time, acknowledged or not
    uncleared: set[Part] = dataclasses.field(default_factory=set)  # have not passed all families since they differed
    tested: set[Part] = dataclasses.field(default_factory=set)  # by the last burn-in
    killed: bool = False  # a burn-in began after the last one that ended, and was killed
    sound: bool = True
    own: bool = True  # written on this host only


@dataclasses.dataclass
class Machine:
    """A host with its slots, clock and ledger."""

    name: str
    identity: str
    slots: list[Part]
    path: Path
    boot: int = 0
    booted: float = 0.0
    shift: float = 0.0  # seconds by which the clock is wrong
    known: Known = dataclasses.field(default_factory=Known)
    # Result of the last burn-in, if it passed and can be resumed, and the true time at which it began
    resumable: tuple[BurninResult, float] | None = None

    def moment(self, now: float) -> Origin:
        written = (START + datetime.timedelta(seconds=now + self.shift)).isoformat(timespec="seconds")
        host = Host(name=self.name, machine=self.identity, boot=f"{self.name}-{self.boot}", pid=1, process=0)
        uuids = tuple(f"GPU-{part.number}" for part in self.slots if part.marked)
        return Origin(
            written=written, uptime=now - self.booted, host=host, chassis=(f"chassis of {self.name}",), uuids=uuids
        )


class History:
    """One random history."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.now, self.log = random.Random(seed), 1e6, [f"history {seed}"]
        numbers, self.runs = itertools.count(), itertools.count()
        identities = ("m0", "m0") if self.draw.random() < 0.3 else ("m0", "m1")  # installed from one image, or not
        marked = self.draw.random() < 0.7
        self.spare = [Part(next(numbers), marked=True) for _ in range(2)]
        self.hosts = [
            Machine(
                f"h{index}", identities[index], [Part(next(numbers), marked) for _ in range(2)], folder / f"{index}"
            )
            for index in range(2)
        ]

    def run(self, tally: Tally) -> None:
        """Plays all events, and checks the standing of both hosts after each."""
        for _ in range(EVENTS):
            host = self.draw.choice(self.hosts)
            event = self.draw.choice(
                [self.burn_in] * 6 + [self.rehearse, self.killed, self.resume, self.resume, self.restart]
                + [self.acknowledge] * 2
                + [self.set_clock, self.wait, self.swap, self.copy, self.damage, self.delete]
            )  # fmt: skip
            self.now += self.draw.uniform(60, 7200)
            must_pass = event(host)
            for each in self.hosts:
                self.check(each, tally, must_pass=bool(must_pass) and each is host)

    def check(self, host: Machine, tally: Tally, *, must_pass: bool) -> None:
        found, known = standing_here(host.path, MAX_AGE, origin=lambda: host.moment(self.now)), host.known
        tally.note(found.verdict.acceptance)
        present = {part for part in host.slots if (host.name, part) in known.last}
        failed = {part for part in host.slots if part in known.failed}
        expected = failed & known.tested
        where = f"{host.name} is {found.verdict.acceptance} ({found.reason}): " + "; ".join(self.log)
        if found.verdict is Verdict.CLEAN:
            last = [known.last[host.name, part] for part in present]
            late = any(self.now - time > MAX_AGE + AHEAD for _, time in last)
            doubtful = known.killed or not last or present & known.uncleared
            if failed or doubtful or any(verdict is not Verdict.CLEAN for verdict, _ in last):
                tally.fail("false clean", where)
            elif late and not host.shift:
                tally.fail("false clean", f"too old: {where}")
        elif found.verdict is Verdict.CORRUPT and not known.failed:
            tally.fail("false corrupt", where)
        if expected and known.sound and known.own and found.verdict is not Verdict.CORRUPT:
            tally.fail("false clean", f"a failure is lost: {where}")
        if must_pass and found.verdict is not Verdict.CLEAN:
            tally.fail("false corrupt", f"a healthy host does not pass: {where}")

    def _open(self, host: Machine) -> Ledger:
        return Ledger(host.path, write=True, origin=lambda: host.moment(self.now))

    def _burn_in(
        self, host: Machine, *, simulated: bool, ends: bool, broken: list[int], only: tuple[str, ...] = ()
    ) -> bool | None:
        run = f"run-{next(self.runs)}"
        self.log.append(f"{host.name}: {'rehearsal' if simulated else 'burn-in'} {broken} {'ends' if ends else 'dies'}")
        names = [part.names(self.draw) for part in host.slots]
        at = host.moment(self.now).written
        report = make_report(
            host.name, machine=host.identity, id=run, simulated=simulated, created=at, ended=at,
            findings=[make_finding(devices=(index,), host=host.name) for index in broken],
            device={name: lambda index, name=name: names[index][name] for name in ("serial", "uuid")},
        )  # fmt: skip
        report.settings = dataclasses.replace(report.settings, only=only or None)
        file = host.path.with_name(f"{run}.json")
        if listed := ends or self.draw.random() < 0.5:
            self.log[-1] += f" {' '.join(only)}"
        else:
            self.log[-1] += " before it could add its result to the ledger"
        if not ends:
            BURN_IN.write(file, report)
        try:
            with self._open(host) as ledger:
                ledger.begin(run, simulated=simulated, level="quick", file=file)
                if listed and (ends or broken):
                    ledger.add(report, file, begun=run, ended=ends)
        except LedgerError:
            return None  # damaged: nothing was written
        if simulated:
            return None
        if ends and not broken:
            host.resumable = report, self.now
        known = host.known
        known.killed = not ends or (known.killed and bool(only))
        if ends or broken:
            known.tested = {*host.slots}
            known.uncleared -= {*host.slots} if ends and not broken and not only else set()
            known.uncleared |= {host.slots[index] for index in broken}
            for index, part in enumerate(host.slots):
                verdict = Verdict.CLEAN if not broken else Verdict.CORRUPT if index in broken else Verdict.INCONCLUSIVE
                known.last[host.name, part] = verdict, self.now
                known.failed |= {part} if index in broken else set()
                known.differed |= {part: self.now} if index in broken else {}
        clear = not known.failed and not known.uncleared & {*host.slots} and not known.killed
        return ends and not broken and known.sound and known.own and clear

    def burn_in(self, host: Machine) -> bool | None:
        broken = [index for index in range(2) if self.draw.random() < 0.15]
        only = ("matrix",) if self.draw.random() < 0.2 else ()
        return self._burn_in(host, simulated=False, ends=True, broken=broken, only=only)

    def rehearse(self, host: Machine) -> None:
        self._burn_in(host, simulated=True, ends=self.draw.random() < 0.5, broken=self.draw.choice([[], [0], [1]]))

    def killed(self, host: Machine) -> None:
        self._burn_in(host, simulated=False, ends=False, broken=self.draw.choice([[], [], [0], [1]]))

    def resume(self, host: Machine) -> None:
        """Resumes a burn-in that passed, which runs some more rounds or, because its time is used up, nothing."""
        if host.resumable is None:
            return
        report, began = host.resumable
        runs = self.draw.random() < 0.5
        self.log.append(
            f"{host.name}: resumes the burn-in of {began:.0f} and runs {'some rounds' if runs else 'nothing'}"
        )
        if runs:
            report = msgspec.structs.replace(report, ended=host.moment(self.now).written)
        try:
            with self._open(host) as ledger:
                ledger.begin("resumed", simulated=False, level="quick")
                ledger.add(report, "result.json", begun="resumed")
        except LedgerError:
            return
        if not runs:
            return
        known = host.known
        known.killed, known.tested = False, {*host.slots}
        for part in host.slots:
            verdict = Verdict.CLEAN if known.differed.get(part, 0.0) < began else Verdict.INCONCLUSIVE
            known.last[host.name, part] = verdict, self.now
            known.uncleared -= {part} if verdict is Verdict.CLEAN and not report.settings.only else set()

    def acknowledge(self, host: Machine) -> None:
        self.log.append(f"{host.name}: acknowledge")
        try:
            with self._open(host) as ledger:
                ledger.begin("look", simulated=True, level="quick")  # enters what killed burn-ins have left
                for name, state in ledger.devices().items():
                    if state.failed is not None:
                        ledger.acknowledge([name], "looked at it", "me")
        except LedgerError:
            return
        host.known.failed.clear()

    def restart(self, host: Machine) -> None:
        self.log.append(f"{host.name}: restart")
        host.boot, host.booted, host.resumable = host.boot + 1, self.now, None

    def set_clock(self, host: Machine) -> None:
        host.shift, host.resumable = self.draw.choice([0.0, -3e5, -3600.0, 1e6]), None
        self.log.append(f"{host.name}: clock {host.shift:+.0f}")

    def wait(self, host: Machine) -> None:
        self.now += self.draw.choice([3600.0, 2 * MAX_AGE])
        self.log.append(f"waited until {self.now:.0f}")

    def swap(self, host: Machine) -> None:
        """Exchanges a device for a spare one, or two devices for each other."""
        self.restart(host)
        slot = self.draw.randrange(2)
        if not host.slots[slot].marked:
            return
        if self.draw.random() < 0.3:
            host.slots.reverse()
        else:
            spare = self.draw.randrange(2)
            host.slots[slot], self.spare[spare] = self.spare[spare], host.slots[slot]
        self.log.append(f"{host.name}: now has {[part.number for part in host.slots]}")

    def copy(self, host: Machine) -> None:
        """Copies the other host's ledger, as a shared folder or a disk image does."""
        (other,) = (each for each in self.hosts if each is not host)
        if self.draw.random() < 0.5 and other.path.exists():
            self.log.append(f"{host.name}: gets the ledger of {other.name}")
            shutil.copyfile(other.path, host.path)
            theirs = other.known
            host.known = dataclasses.replace(
                theirs,
                failed={*theirs.failed},
                last={**theirs.last},
                differed={**theirs.differed},
                own=False,
                uncleared={*theirs.uncleared},
            )

    def damage(self, host: Machine) -> None:
        if host.path.exists() and self.draw.random() < 0.5:
            self.log.append(f"{host.name}: damaged")
            content = bytearray(host.path.read_bytes())
            for _ in range(self.draw.choice([1, 1, 30])):
                content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
            host.path.write_bytes(content[: self.draw.choice([len(content), len(content), len(content) // 2])])
            host.known.sound = False

    def delete(self, host: Machine) -> None:
        if self.draw.random() < 0.3:
            self.log.append(f"{host.name}: deleted")
            host.path.unlink(missing_ok=True)
            host.known = Known()


def run(count: int, seed: int) -> Tally:
    """Plays `count` histories."""
    tally = Tally("standing")
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            History(seed * 1_000_003 + number, Path(folder)).run(tally)
        tally.trials += 1
    return tally
