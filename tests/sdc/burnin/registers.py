"""Registers of golden digests for tests, of hosts that are told apart by a letter."""

from collections.abc import Mapping

from sdc.burnin.golden_register import GoldenEntry, GoldenSubject, Recording, Register, Seen, mark_of
from sdc.schema import Device, Host

ENVIRONMENT = {"platform": "gpu", "driver": "550.1", "jax": "0.10.2", "jaxlib": "0.10.2", "xla_flags": "--a=1"}
GOOD, BAD = "0123456789abcdef", "fedcba9876543210"


def subject(workload: str = "w", environment: Mapping[str, str] = ENVIRONMENT, **differs: object) -> GoldenSubject:
    parts = {"shard": None, "seed": 0, "program": "5feb", "algorithm": "one", "kind": "gpu H100", **differs}
    return GoldenSubject(workload=workload, environment=mark_of(environment), **parts)  # type: ignore[arg-type]


def register(
    host: str = "a", digests: Mapping[str, str] | None = None, environment: Mapping[str, str] = ENVIRONMENT
) -> Register:
    """What two GPUs of a host computed, by workload."""
    devices = [Device(host=host, machine=host, kind="H100", uuid=f"GPU-{host}{index}") for index in range(2)]
    recording = Recording(
        host=Host(name=f"host-{host}", machine=host),
        devices=devices,
        created="2026-01-01T00:00:00+00:00",
        version="0.1.0",
        level="quick",
        dtypes=["float32"],
        rounds=2,
    )
    seen = (Seen(recording=host, devices=(0, 1), runs=4, agreed=("repeat", "vote")),)
    entries = [
        GoldenEntry(subject=subject(workload, environment), digest=digest, seen=seen)
        for workload, digest in sorted((digests or {"w": GOOD}).items())
    ]
    return Register(
        environments={mark_of(environment): dict(environment)}, recordings={host: recording}, entries=entries
    )
