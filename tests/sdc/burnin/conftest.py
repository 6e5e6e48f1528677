"""Four devices, and programs that are compiled once for all tests of a process."""

import dataclasses
from typing import Any

import jax
import pytest

from sdc.burnin.programs import Programs
from sdc.burnin.workloads.workload import BUILT_IN, SMALLEST, BurninWorkload, workloads


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    return jax.devices()[:4]


@pytest.fixture(scope="session")
def programs(devices: list[jax.Device]) -> Programs:
    return Programs(devices)


@pytest.fixture(scope="session")
def every(devices: list[jax.Device]) -> list[BurninWorkload]:
    """All workloads of the smallest sizes; of the functions in bfloat16 one group, since they take long to compile."""
    found = workloads(SMALLEST, devices, only=tuple(BUILT_IN))  # other tests register more
    return [each for each in found if not each.name.startswith("functions/bfloat16") or "/roots/" in each.name]


@pytest.fixture(scope="session")
def few(every: list[BurninWorkload]) -> list[BurninWorkload]:
    """One of most families, which compile fast."""
    names = ("matrix/float32/8x8x8/normal", "functions/float32/roots/64/normal", "ordering/int32/64/random")
    names += ("memory/random/64", "transfers/host-device-host/64", "collectives/psum/4x16")
    return [workload for workload in every if workload.name in names]


def changed(workload: BurninWorkload, **changes: Any) -> BurninWorkload:
    """A workload with other fields, and other methods than those of its family."""
    methods = {name: staticmethod(value) for name, value in changes.items() if callable(value)}
    fields = {field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)}
    kind = type("Changed", (type(workload),), methods)
    return kind(**fields | {name: value for name, value in changes.items() if name not in methods})
