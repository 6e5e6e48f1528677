"""Levels, families, and what is refused."""

import dataclasses

import jax
import pytest

from sdc.burnin.workloads.workload import (
    BUILT_IN,
    LEVELS,
    SMALLEST,
    BurninWorkload,
    FamilyRequest,
    Level,
    families,
    find_level,
    register,
    unregister,
    workloads,
)
from sdc.settings import SettingError


def test_a_level_has_every_family_and_grows(devices: list[jax.Device]) -> None:
    work = []
    for name in ("quick", "prejob", "acceptance"):
        found = workloads(name, devices)
        assert list(dict.fromkeys(workload.family for workload in found)) == list(BUILT_IN)
        assert {workload.dtype for workload in found if workload.family == "matrix"} == {"float32", "bfloat16"}
        assert {workload.data for workload in found if workload.family == "matrix"} == set(LEVELS[name].data)
        work.append(sum(workload.work for workload in found))
    assert work[0] * 10 < work[1]
    assert work[1] * 10 < work[2]


def test_one_device_has_no_collectives_and_copies_to_no_other(devices: list[jax.Device]) -> None:
    names = {workload.name for workload in workloads(SMALLEST, devices[:1])}
    missing = {workload.name for workload in workloads(SMALLEST, devices)} - names
    assert {name.split("/")[0] for name in missing} == {"collectives", "transfers"}
    assert "transfers/device-device/64" in missing


def test_a_family_from_outside(devices: list[jax.Device], few: list[BurninWorkload]) -> None:
    made: list[BurninWorkload] = []

    def build(request: FamilyRequest) -> list[BurninWorkload]:
        assert request.dtypes == ("float32",)
        made[:] = [dataclasses.replace(few[0], family="mine")]
        return [*made, few[1]]

    with pytest.raises(SettingError, match="family=mine"):
        dataclasses.replace(few[0], family="mine")
    register("mine", build)
    try:
        assert families()[-1] == "mine"
        found = workloads(SMALLEST, devices, ["float32"], only=["mine"])
        assert (found[0].family, found) == ("mine", [*made, few[1]])
        with pytest.raises(SettingError, match="name=mine: is already a family"):
            register("mine", build)
        with pytest.raises(SettingError, match="two workloads have this name"):
            workloads(SMALLEST, devices, ["float32"])
    finally:
        unregister("mine")
    with pytest.raises(SettingError, match="name=mine: was not registered"):
        unregister("mine")


def test_what_is_refused(devices: list[jax.Device]) -> None:
    with pytest.raises(SettingError, match="level=slow: expected one of quick, prejob, acceptance, soak"):
        find_level("slow")
    with pytest.raises(SettingError, match="dtypes=int8"):
        workloads(SMALLEST, devices, ["int8"])
    with pytest.raises(SettingError, match="only=nothing"):
        workloads(SMALLEST, devices, only=["nothing"])
    with pytest.raises(SettingError, match="devices: expected at least one device"):
        workloads(SMALLEST, [])
    with pytest.raises(SettingError, match="side=2"):
        Level("mine", 2, 8, 64, 256, (0.0,), 0.0, ("normal",))
    with pytest.raises(SettingError, match="pauses"):
        Level("mine", 8, 8, 64, 256, (), 0.0, ("normal",))
    with pytest.raises(SettingError, match="retention=-1"):
        Level("mine", 8, 8, 64, 256, (0.0,), -1.0, ("normal",))
