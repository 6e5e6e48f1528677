"""Results of burn-ins that never ran: valid `result.json` files for tests of what reads them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from sdc.burnin.judgement import BURN_IN, judge
from sdc.burnin.results import RESULT, BurninResult, BurninSettings, CheckedDevice, Ended, Evidence, Finding, Tally
from sdc.burnin.sensors.base import Course, Sensors
from sdc.schema import Environment, Host

MARK = "made for tests: no device was tested"
WORKLOADS = ("matrix/float32/64x64x64/normal", "ordering/float32/4096/normal", "memory/float32/4096/walking")
KIND = "Test Accelerator"
PACKAGES = {"jax": "0.10.2", "jaxlib": "0.10.2"}
DAY = "2026-01-05T00:00:00+00:00"


def digest_of(*parts: object) -> str:
    """16 hexadecimal digits that follow from what is given."""
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:16]


def key_of(workload: str, kind: str = KIND) -> str:
    """What decides the bits of a workload."""
    return f"{workload} | seed 0 | {digest_of('program', workload)} | murmur | gpu {kind}"


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
    """A difference."""
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
    """The result of a burn-in that never ran, which contradicts itself nowhere.

    The verdict follows: FAIL with findings, INCONCLUSIVE if something did not run to the end, else PASS.

    Args:
        host: name of the host; machine, serial numbers and `id` follow from it.
        devices: how many devices.
        workloads: names; each runs on each device.
        kind: of the devices.
        digests: those that are not the healthy one, by workload and device; None for a row without.
        rates: throughputs that are not 1e12, by workload and device.
        findings: as `make_finding` makes them. Rows count one difference for each.
        unfinished: what did not run to the end.
        events, uncorrected: what the driver told of a device, by its index.
        void: workloads and devices that were throttled.
        simulated: whether faults are.
        runs, elements, seconds: of each workload on each device.
        device: fields of every device that are not the usual ones; a callable value is called with the index.
        changes: fields of the report.

    Example:
        >>> from tests.reports import make_report
        >>> make_report("gpu-17", devices=4).verdict.acceptance
        'PASS'
    """
    machine = digest_of("machine", host) if machine is None else machine
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
                    key=key_of(name, kind), digest=(digests or {}).get((name, index), digest_of(name)),
                )
            )  # fmt: skip
    described = []
    for index in range(devices):
        told = (events or {}).get(index), (uncorrected or {}).get(index)
        sensors = None
        if any(each is not None for each in told):
            sensors = Course(
                source="nvml", before=Sensors(uncorrected=0), after=Sensors(uncorrected=told[1] or 0), samples=3,
                events=list(told[0] or ()),
            )  # fmt: skip
        fields: dict[str, Any] = {
            "index": index, "host": host, "machine": machine, "id": index, "process": 0, "kind": kind,
            "serial": f"SN-{host}-{index}", "uuid": f"GPU-{digest_of(host, index)}", "bus": f"0000:{index:02x}:00.0",
            "driver": "570.00", "sensors": sensors,
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
        environment=Environment(
            **({
                "python": "3.11.0", "packages": PACKAGES, "platform": "gpu", "platform_version": "tests",
                "device_kind": kind, "local_devices": devices, "machine": "x86_64", "xla_flags": "",
            } | dict(environment or {}))
        ),
        rounds=runs, stopped=stopped, devices=described, workloads=rows, findings=list(findings),
        unfinished=list(unfinished), notes=[MARK], command=["made", "for", "tests"],
    )  # fmt: skip
    judged = judge(report)
    judged.sentences = tuple(each.sentence for each in judged.findings) or (MARK,)
    return msgspec.structs.replace(judged, **changes)


def put_report(folder: Path, report: BurninResult, name: str | None = None) -> Path:
    """Writes a result below a folder, in one of its own; returns its path."""
    place = folder / (name or f"{report.host.name}-{report.id[:8]}") / RESULT
    place.parent.mkdir(parents=True)
    BURN_IN.write(place, report)
    return place
