"""Makes results of burn-ins that never ran: valid `result.json` files for tests of their readers."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from sdc.burnin.golden_register import mark_of
from sdc.burnin.host import flat_surroundings
from sdc.burnin.judgement import BURN_IN, judge
from sdc.burnin.pair import PAIR, PAIR_FORMAT, Pair, PairDifference, StageRow, TwinRow
from sdc.burnin.results import RESULT, BurninResult, BurninSettings, CheckedDevice, Ended, Evidence, Finding, Tally
from sdc.burnin.sensors.base import Course, Sensors
from sdc.schema import Device, Environment, Host
from sdc.verdict import Verdict

MARK = "made for tests: no device was tested"
WORKLOADS = ("matrix/float32/64x64x64/normal", "ordering/float32/4096/normal", "memory/float32/4096/walking")
KIND = "Test Accelerator"
PACKAGES = {"jax": "0.10.2", "jaxlib": "0.10.2"}
DRIVER = "570.00"
DAY = "2026-01-05T00:00:00+00:00"


def digest_of(*parts: object) -> str:
    """Returns 16 hexadecimal digits that are a hash of the arguments."""
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:16]


def key_of(workload: str, kind: str, environment: str) -> str:
    """Returns the key of a workload, which determines its bits."""
    return f"{workload} | seed 0 | {digest_of('program', workload)} | murmur | gpu {kind} | {environment}"


def make_finding(
    workload: str = WORKLOADS[0],
    devices: Sequence[int] = (0,),
    *,
    kinds: Sequence[Evidence] = ("repeat", "vote"),
    persistence: Literal["transient", "intermittent", "persistent"] | None = "transient",
    round: int = 0,
    host: str = "host-0",
    **changes: Any,
) -> Finding:
    """Returns a finding of a difference."""
    fields: dict[str, Any] = {
        "workload": workload, "devices": tuple(devices), "round": round, "kinds": tuple(kinds),
        "digest": digest_of("wrong", host, workload), "expected": digest_of(workload), "persistence": persistence,
    }  # fmt: skip
    return Finding(**(fields | changes))


def make_report(
    host: str = "host-0",
    *,
    devices: int = 2,
    workloads: Sequence[str] = WORKLOADS,
    kind: str = KIND,
    digests: Mapping[tuple[str, int], str | None] | None = None,
    rates: Mapping[tuple[str, int], float] | None = None,
    findings: Sequence[Finding] = (),
    unfinished: Sequence[Ended] = (),
    events: Mapping[int, Sequence[str]] | None = None,
    uncorrected: Mapping[int, int] | None = None,
    void: Iterable[tuple[str, int]] = (),
    simulated: bool = False,
    stopped: str | None = None,
    accept: Sequence[str] = (),
    level: str = "quick",
    created: str = DAY,
    ended: str | None = None,
    id: str | None = None,
    runs: int = 3,
    elements: int = 1000,
    seconds: float = 2.0,
    machine: str | None = None,
    environment: Mapping[str, Any] | None = None,
    device: Mapping[str, Any] | None = None,
    **changes: Any,
) -> BurninResult:
    """Returns a consistent result of a burn-in that never ran.

    The verdict is FAIL with findings, INCONCLUSIVE with unfinished workloads, and otherwise PASS.

    Args:
        host: name of the host; its machine, serial numbers and `id` are derived from it.
        devices: number of devices.
        workloads: names of workloads; each runs on each device.
        kind: kind of the devices.
        digests: digests that differ from the healthy one, by workload and device; None for a row without a digest.
        rates: throughputs other than 1e12, by workload and device.
        findings: findings from `make_finding`; rows count one difference for each.
        unfinished: workloads that did not finish.
        events, uncorrected: events and uncorrected errors that the driver reported, by device index.
        void: pairs of a workload and a device that was throttled.
        simulated: whether faults are simulated.
        runs, elements, seconds: those of each workload on each device.
        device: fields of every device to change; a callable value is called with the device's index.
        changes: fields of the report to change.

    Example:
        >>> from tests.reports import make_report
        >>> make_report("gpu-17", devices=4).verdict.acceptance
        'PASS'
    """
    machine = digest_of("machine", host) if machine is None else machine
    surroundings = {
        "python": "3.11.0", "packages": PACKAGES, "platform": "gpu", "platform_version": "tests",
        "device_kind": kind, "local_devices": devices, "machine": "x86_64", "xla_flags": "", "options": {},
    } | dict(environment or {})  # fmt: skip
    mark = mark_of(flat_surroundings(surroundings, (device or {}).get("driver", DRIVER), {}))
    throttled = set(void)
    rows = []
    for name in workloads:
        for index in range(devices):
            differing = sum(each.workload == name and index in each.devices for each in findings)
            gone = (name, index) in throttled
            rows.append(
                Tally(
                    workload=name, device=index, family=name.partition("/")[0], runs=runs, elements=elements,
                    seconds=seconds, differences=differing, repeated=runs - 1, voted=runs if devices > 1 else 0,
                    work=(rates or {}).get((name, index), 1e12), median=1.0, fastest=0.3 if gone else 0.95,
                    key=key_of(name, kind, mark), digest=(digests or {}).get((name, index), digest_of(name)),
                )
            )  # fmt: skip
    described = []
    for index in range(devices):
        reported = (events or {}).get(index), (uncorrected or {}).get(index)
        sensors = None
        if any(each is not None for each in reported):
            sensors = Course(
                source="nvml", before=Sensors(uncorrected=0), after=Sensors(uncorrected=reported[1] or 0), samples=3,
                events=list(reported[0] or ()),
            )  # fmt: skip
        fields: dict[str, Any] = {
            "index": index, "host": host, "machine": machine, "id": index, "process": 0, "kind": kind,
            "serial": f"SN-{host}-{index}", "uuid": f"GPU-{digest_of(host, index)}", "bus": f"0000:{index:02x}:00.0",
            "driver": DRIVER, "sensors": sensors,
        }  # fmt: skip
        given = {name: value(index) if callable(value) else value for name, value in (device or {}).items()}
        described.append(CheckedDevice(**(fields | given)))
    report = BurninResult(
        version="tests", id=id or digest_of("id", host, created) * 2,
        host=Host(name=host, machine=machine, boot=digest_of("boot", host), pid=1, process=0),
        created=created, ended=ended or created.replace("T00:00", "T00:05"), seconds=300.0,
        settings=BurninSettings(
            level=level, rounds=runs, accept=tuple(accept), faults=("bitflip in tests",) if simulated else ()
        ),
        environment=Environment(**surroundings),
        rounds=runs, stopped=stopped, devices=described, workloads=rows, findings=list(findings),
        unfinished=list(unfinished), notes=[MARK], command=["made", "for", "tests"],
    )  # fmt: skip
    judged = judge(report)
    judged.sentences = tuple(each.sentence for each in judged.findings) or (MARK,)
    return msgspec.structs.replace(judged, **changes)


def put_report(folder: Path, report: BurninResult, name: str | None = None) -> Path:
    """Writes a result into a new folder below `folder`, and returns its path."""
    place = folder / (name or f"{report.host.name}-{report.id[:8]}") / RESULT
    place.parent.mkdir(parents=True)
    BURN_IN.write(place, report)
    return place


def make_pair(
    verdict: Verdict, hosts: Sequence[str] = ("a", "b"), *, simulated: bool = False, created: str = DAY
) -> Pair:
    """Returns a consistent result of two hosts that were never compared."""
    differ = verdict is Verdict.CORRUPT
    stage = StageRow(
        name="step", folder="1-step", verdict=verdict, sentence=MARK, steps=3, planned=3,
        ended=verdict is not Verdict.INCONCLUSIVE, checked=1000, mismatched=5 * differ, hits=int(differ),
        first=1 if differ else None,
    )  # fmt: skip
    found = PairDifference(ranks=[], sites=[], layers=[], mismatched=5, checked=1000) if differ else None
    rows = [
        TwinRow(
            twin=twin, host=host, processes=[twin],
            devices=[Device(host=host, machine=digest_of("machine", host), id=0, process=twin, serial=f"SN-{host}-0")],
        )
        for twin, host in enumerate(hosts)
    ]  # fmt: skip
    return Pair(
        version="tests", kind="pair", id=digest_of("pair", *hosts, created) * 2,
        host=Host(name=hosts[0], machine=digest_of("machine", hosts[0]), boot=None, pid=1, process=0),
        created=created, ended=created.replace("T00:00", "T00:05"), seconds=300.0, verdict=verdict,
        evidence=["twins"], sentences=[MARK], hosts=rows, suspects=[], undecided=list(hosts) if differ else [],
        stages=[stage], difference=found, faults=["bitflip in tests"] if simulated else [],
    )  # fmt: skip


def put_pair(folder: Path, pair: Pair) -> Path:
    """Writes the result of a pair into a folder, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    PAIR_FORMAT.write(folder / PAIR, pair)
    return folder / PAIR
