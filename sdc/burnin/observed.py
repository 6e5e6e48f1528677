"""What a burn-in saw: data alone, from which the verdict follows."""

import dataclasses
import socket
from collections.abc import Sequence

import jax

from .evidence import Finding
from .tally import Tally
from .workload import Workload

ACCEPTED = ("repeat",)
"""What may be accepted."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """What did not run to the end.

    Attributes:
        workload: its name; None for all of a device.
        device: index of the device; None for all devices.
        round: number of the round in which it ended.
        reason: what was thrown.
    """

    workload: str | None
    device: int | None
    round: int
    reason: str


@dataclasses.dataclass
class Result:
    """What a burn-in saw.

    Attributes:
        workloads: what was to run.
        devices: where.
        accept: what whoever asked accepts.
        simulated: texts of simulated faults; with any, nothing here is about the hardware.
        host: name of the host.
        rounds: rounds that were completed.
        seconds: all in all, compilation included.
        stopped: whether somebody stopped it.
        stopper: by whom, in words, where that is known.
        tallies: counts by workload and device.
        findings: differences that were run again, in order.
        ended: what did not run to the end.
        foreign: golden digests of other programs or devices, which were not compared.
        unneeded: golden digests of workloads that are not among these, which were not needed.
        keys: key of the golden digest, by workload and device.
        notes: what else there is to say.
        doubts: what stands against a PASS whatever was compared, such as an error that the driver reported.
        hung: whether a device never answered: a thread waits for it still.
    """

    workloads: Sequence[Workload]
    devices: Sequence[jax.Device]
    accept: tuple[str, ...] = ()
    simulated: tuple[str, ...] = ()
    host: str = dataclasses.field(default_factory=socket.gethostname)
    rounds: int = 0
    seconds: float = 0.0
    stopped: bool = False
    stopper: str | None = None
    tallies: dict[tuple[str, int], Tally] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    ended: list[Ended] = dataclasses.field(default_factory=list)
    foreign: tuple[str, ...] = ()
    unneeded: tuple[str, ...] = ()
    keys: dict[tuple[str, int], str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    doubts: list[str] = dataclasses.field(default_factory=list)
    hung: bool = False

    def devices_of(self, place: int | None) -> range:
        """Indices of a device, or of all."""
        return range(len(self.devices)) if place is None else range(place, place + 1)

    def has_ended(self, workload: str, place: int | None) -> bool:
        """Whether a workload runs no more on a device; one that spans all of them ends with any of these."""
        devices = self.devices_of(place)
        return any(
            (end.workload is None and end.device in devices)
            or (end.workload == workload and (end.device is None or end.device in devices))
            for end in self.ended
        )

    def learn(self, place: tuple[str, int], key: str) -> None:
        """Keeps the key of a workload on a device; what ran under another key before is nothing to compare with."""
        if self.keys.get(place, key) != key and place in self.tallies:
            self.tallies[place].baseline = None
            self.notes.append(f"{place[0]} on device {place[1]} is another program now, not compared with earlier runs")
        self.keys[place] = key

    def baselines(self, workload: str) -> dict[int, str]:
        """What each device gave before."""
        return {
            device: tally.baseline
            for (name, device), tally in self.tallies.items()
            if name == workload and tally.baseline is not None
        }

    def recorded(self) -> dict[str, str]:
        """Digests to record as golden, by key: those of workloads in which nothing differed and runs or devices agreed.

        None of a simulation.
        """
        if self.simulated:
            return {}
        bad = {name for (name, _), tally in self.tallies.items() if tally.differences}
        return {
            self.keys[place]: tally.baseline
            for place, tally in self.tallies.items()
            if place[0] not in bad and tally.baseline is not None and (tally.repeated or tally.voted)
        }
