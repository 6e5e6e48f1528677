"""Devices are described by what their platform tells, and shown with their ranks."""

import ctypes
import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import msgspec
import numpy as np
import pytest

from sdc.records import describe_devices, identify, on_mesh
from sdc.records.devices import (
    MICROCODE,
    NVIDIA_DRIVER,
    VIDEO_BIOS,
    Sources,
    pci_address,
    serials_of_nvidia,
    version_in,
)
from sdc.records.format import misfit
from sdc.schema import Device, RunManifest

INFORMATION = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 185
GPU UUID: \t GPU-82523fd8-3897-f599-d088-ccd04ae45ec1
Video BIOS: \t 96.00.74.00.01
Bus Type: \t PCIe
Bus Location: \t 0000:3b:00.0
GPU Firmware: \t 535.129.03
"""
VERSION = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023
GCC version:  gcc version 12.2.0 (GCC)
"""
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  555.42.06  Release Build  (root@host)\n"


@dataclasses.dataclass
class Fake:
    """A device of JAX."""

    id: int
    platform: str
    version: str
    local_hardware_id: int = 0
    process_index: int = 0
    device_kind: str = "a kind"

    @property
    def client(self) -> Any:
        return SimpleNamespace(platform_version=self.version)


@dataclasses.dataclass
class Chip(Fake):
    """A TPU core."""

    coords: Sequence[int] = (1, 0, 0)
    core_on_chip: int = 1
    slice_index: int = 0


class Cuda:
    """The calls of libcuda and of HIP, for two GPUs."""

    buses: ClassVar = {0: b"00000000:1A:00.0", 1: b"0000:3B:00.0"}

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, number: Any, ordinal: int) -> int:
        ctypes.cast(number, ctypes.POINTER(ctypes.c_int))[0] = ordinal
        return 0 if ordinal in self.buses else 101

    def cuDeviceGetUuid(self, octets: Any, number: ctypes.c_int) -> int:
        octets[15] = number.value + 1
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, size: int, number: ctypes.c_int) -> int:
        text.value = self.buses[number.value]
        return 0

    hipDeviceGetPCIBusId = cuDeviceGetPCIBusId


def sources(files: dict[str, str], library: Any = None, printed: str | None = None) -> Sources:
    return Sources(read=files.get, load=lambda name: library, run=lambda command: printed)


def described(devices: Sequence[Any], where: Sources) -> list[dict[str, Any]]:
    """Without what every device has."""
    found = describe_devices(devices, sources=where)
    common = {"process": 0, "host": identify().name, "machine": identify().machine, "kind": "a kind"}
    for device, each in zip(devices, found, strict=True):
        assert misfit(each, Device) is None
        assert each == {**each, **{name: value for name, value in common.items() if value}, "id": device.id}
    return [{name: value for name, value in each.items() if name not in (*common, "id")} for each in found]


NVIDIA = {
    "/proc/driver/nvidia/version": VERSION,
    "/proc/driver/nvidia/gpus/0000:3b:00.0/information": INFORMATION,
    "/proc/driver/nvidia/gpus/0000:1a:00.0/information": INFORMATION.replace("96.00.74.00.01", "??.??.??.??.??"),
}
GPUS = [Fake(4, "gpu", "PJRT C API\ncuda 12090", 1), Fake(5, "gpu", "PJRT C API\ncuda 12090", 0)]
UUIDS = ["GPU-00000000-0000-0000-0000-000000000002", "GPU-00000000-0000-0000-0000-000000000001"]
AMD = {
    "/proc/self/maps": "7f00 r-xp 0000 08:01 7 /opt/rocm/lib/libamdhip64.so.7.0.1\n",
    "/sys/module/amdgpu/version": "6.12.12\n",
    "/sys/bus/pci/devices/0000:3b:00.0/unique_id": "1f2e3d4c5b6a7988\n",
    "/sys/bus/pci/devices/0000:3b:00.0/vbios_version": "113-M3000100-102\n",
}


@pytest.mark.parametrize(
    ("devices", "where", "expected"),
    [
        pytest.param(
            GPUS,
            sources(NVIDIA, Cuda(), "00000000:1A:00.0, [N/A]\n00000000:3B:00.0, 1324220012345\n"),
            [
                {
                    "serial": "1324220012345",
                    "uuid": UUIDS[0],
                    "bus": "0000:3b:00.0",
                    "driver": "535.129.03",
                    "firmware": "96.00.74.00.01",
                },
                {"uuid": UUIDS[1], "bus": "0000:1a:00.0", "driver": "535.129.03"},
            ],
            id="nvidia",
        ),
        pytest.param(GPUS, sources({}), [{}, {}], id="nvidia in a container"),
        pytest.param(
            [Fake(0, "gpu", "cuda 12090", 3)], sources(NVIDIA, Cuda()), [{"driver": "535.129.03"}], id="fails"
        ),
        pytest.param(
            [Fake(0, "gpu", "PJRT C API\nrocm 70000", 1)],
            sources(AMD, Cuda()),
            [
                {
                    "uuid": "1f2e3d4c5b6a7988",
                    "bus": "0000:3b:00.0",
                    "driver": "6.12.12",
                    "firmware": "113-M3000100-102",
                }
            ],
            id="amd",
        ),
        pytest.param(
            [Fake(index, "gpu", "PJRT C API\nrocm 70000", index) for index in range(2)],
            sources(
                {**AMD, **{f"/sys/bus/pci/devices/0000:{bus}:00.0/serial_number": "7" for bus in ("1a", "3b")}}, Cuda()
            ),
            [
                {"bus": "0000:1a:00.0", "driver": "6.12.12"},
                {
                    "uuid": "1f2e3d4c5b6a7988",
                    "bus": "0000:3b:00.0",
                    "driver": "6.12.12",
                    "firmware": "113-M3000100-102",
                },
            ],
            id="two dies of a module of amd",
        ),
        pytest.param([Fake(0, "gpu", "rocm 70000")], sources({}, Cuda()), [{}], id="amd in a container"),
        pytest.param(
            [Chip(0, "tpu", "PJRT C API\nTFRT TPU v6 lite\nBuilt on Mar 4 2026 11:32:08 (1772652728) cl/878335365")],
            sources({}),
            [
                {
                    "coordinates": [1, 0, 0],
                    "core": 1,
                    "slice": 0,
                    "driver": "TFRT TPU v6 lite, Built on Mar 4 2026 11:32:08 (1772652728) cl/878335365",
                }
            ],
            id="tpu",
        ),
        pytest.param(
            [Fake(0, "cpu", "cpu"), Fake(1, "cpu", "cpu")],
            sources({"/proc/cpuinfo": "processor\t: 0\nmicrocode\t: 0xd0003d1\n\nprocessor\t: 1\n"}),
            2 * [{"firmware": "0xd0003d1", "simulated": True}],
            id="one processor as two devices",
        ),
        pytest.param([Fake(0, "cpu", "cpu")], sources({}), [{}], id="one processor"),
        pytest.param([Fake(0, "another", "1.0")], sources({}), [{}], id="another platform"),
    ],
)
def test_what_the_platform_tells_is_described(devices: Any, where: Sources, expected: Any) -> None:
    assert described(devices, where) == expected


def test_devices_of_other_processes_describe_themselves() -> None:
    assert describe_devices([Fake(9, "cpu", "cpu", process_index=1)]) == []  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (NVIDIA_DRIVER, VERSION, "535.129.03"),
        (NVIDIA_DRIVER, OPEN, "555.42.06"),
        (NVIDIA_DRIVER, "", None),
        (VIDEO_BIOS, INFORMATION, "96.00.74.00.01"),
        (VIDEO_BIOS, "Video BIOS: \t ??.??.??.??.??\n", None),
        (serials_of_nvidia, "00000000:07:00.0, 1560\n\n0001:07:00.0, [Unknown Error]\n", {"0000:07:00.0": "1560"}),
        (serials_of_nvidia, "NVIDIA-SMI has failed\n", {}),
        (serials_of_nvidia, "0:07:00.0, 1560\n0:08:00.0, 1560\n0:09:00.0, 7\n", {"0000:09:00.0": "7"}),
        (pci_address, "00010000:AF:00.0", "10000:af:00.0"),
        (MICROCODE, "model name\t: a\n", None),
    ],
)
def test_what_drivers_write_is_read(read: Any, text: str, expected: Any) -> None:
    assert (version_in(text, read) if isinstance(read, str) else read(text)) == expected


def test_a_host_that_does_not_answer_says_nothing() -> None:
    host = Sources()
    assert host.read("/nowhere/at/all") is None
    assert host.load("libnowhere.so.1") is None
    assert host.run(["/nowhere/at/all"]) is None
    assert host.run([sys.executable, "-c", "raise SystemExit(1)"]) is None


def test_a_command_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert Sources().run(["nvidia-smi"]) is None


def test_devices_are_shown_with_their_ranks() -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]).reshape(2, 1, 2)[::-1], ("twin", "data", "model"))
    found = on_mesh(describe_devices(), mesh)
    assert [(device["id"], device["rank"]) for device in found] == [
        (2, {"twin": 0, "data": 0, "model": 0}),
        (3, {"twin": 0, "data": 0, "model": 1}),
        (0, {"twin": 1, "data": 0, "model": 0}),
        (1, {"twin": 1, "data": 0, "model": 1}),
    ]
    assert all(device["simulated"] for device in found)
    assert msgspec.convert({"schema": 2, "kind": "twin", "devices": found}, RunManifest).devices[2].rank == {
        "twin": 1,
        "data": 0,
        "model": 0,
    }
