"""Which devices a process computes on: what says which part to take out of which machine.

A verdict names ranks. Whoever acts on it needs the host, the slot and the part: what JAX, the driver's libraries and
the kernel's files tell of each device. What none of them tells is left out; nothing here is asked of a device itself.
None of this decides what is computed, so it is no part of `environment` and never makes two processes incomparable.
"""

import ctypes
import dataclasses
import itertools
import re
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schema import identify

if TYPE_CHECKING:
    import jax

NVIDIA_DRIVER = r"Kernel Module\s+(?:for \S+\s+)?(\d[\w.]*)"
VIDEO_BIOS = r"^Video BIOS:\s*([\w.]+)\s*$"  # a board without one has question marks there
MICROCODE = r"^microcode\s*:\s*(\S+)"
PATIENCE = 5.0  # seconds for a command that tells serial numbers; it takes long where a driver is stuck


def text_of(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _load(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _run(command: Sequence[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where a host is asked. Each of them returns None where it has nothing to say.

    Attributes:
        read: the text of a file, by its path.
        load: a C library, by its name.
        run: what a command prints.
    """

    read: Callable[[str], str | None] = text_of
    load: Callable[[str], Any] = _load
    run: Callable[[Sequence[str]], str | None] = _run


def describe_devices(
    devices: "Sequence[jax.Device] | None" = None, *, sources: Sources | None = None
) -> list[dict[str, Any]]:
    """What is known of the hardware behind the devices of this process. Asking starts JAX's devices.

    Args:
        devices: those to describe, of which the ones of other processes are passed over; by default all.
        sources: where the host is asked; by default its files, libraries and commands.

    Returns:
        One object for each device of this process, as `sdc.schema.Device` describes it. A field that the
        platform does not tell is absent.
    """
    import jax

    devices = jax.devices() if devices is None else devices
    own = [device for device in devices if device.process_index == jax.process_index()]
    host = identify()
    every = [
        {
            "process": device.process_index,
            "host": host.name,
            "machine": host.machine,
            "id": device.id,
            "kind": device.device_kind,
            **part,
        }
        for device, part in zip(own, _parts(own, sources or Sources()), strict=True)
    ]
    return [{name: value for name, value in each.items() if value not in (None, "")} for each in every]


def on_mesh(devices: Sequence[Mapping[str, Any]], mesh: "jax.sharding.Mesh") -> list[dict[str, Any]]:
    """Adds to each device its rank: its place on a mesh.

    Args:
        devices: what `describe_devices` returned, of one process or of several.
        mesh: the mesh of the run.

    Returns:
        The same objects with `rank`, the index on each axis, in the order of their ranks. A device that is not on the
        mesh took no part in the run, and is left out.
    """
    known = {device["id"]: device for device in devices}
    return [
        {**known[device.id], "rank": dict(zip(mesh.axis_names, place, strict=True))}
        for place in itertools.product(*map(range, mesh.devices.shape))
        if (device := mesh.devices[place]).id in known
    ]


def version_in(text: str | None, pattern: str) -> str | None:
    """The first group of a pattern in the text of one of the kernel's files."""
    found = re.search(pattern, text or "", re.MULTILINE)
    return found and found[1]


def serials_of_nvidia(printed: str) -> dict[str, str]:
    """Serial numbers by bus address, from the lines `BUS, SERIAL` of nvidia-smi; a board without one says so in []."""
    rows = (line.partition(",") for line in printed.splitlines())
    return {pci_address(bus): serial.strip() for bus, _, serial in rows if re.fullmatch(r"\w+", serial.strip())}


def pci_address(text: str) -> str:
    """A PCI address as Linux writes it: drivers write capitals, and some eight digits of a domain that has four."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"


def _parts(devices: "Sequence[jax.Device]", sources: Sources) -> list[dict[str, Any]]:
    """What the platform tells of each device; the devices of a process are of one platform."""
    if not devices:
        return []
    version = devices[0].client.platform_version
    match devices[0].platform:
        case "cpu":
            # Several devices of one process are one processor: a fault of it would be a fault of all of them.
            firmware = version_in(sources.read("/proc/cpuinfo"), MICROCODE)
            return [{"firmware": firmware, "simulated": True if len(devices) > 1 else None} for _ in devices]
        case "tpu":
            return [_of_tpu(device, version) for device in devices]
        case "gpu" if "rocm" in version:
            return _of_amd(devices, sources)
        case "gpu":
            return _of_nvidia(devices, sources)
    return [{} for _ in devices]


def _of_tpu(device: Any, version: str) -> dict[str, Any]:
    """What a TPU's runtime tells is its place in the slice; the library, which brings the driver, has a few lines."""
    lines = [line.strip() for line in version.splitlines() if line.strip() not in ("", "PJRT C API")]
    return {
        "coordinates": None if (place := getattr(device, "coords", None)) is None else [int(each) for each in place],
        "core": getattr(device, "core_on_chip", None),
        "slice": getattr(device, "slice_index", None),
        "driver": ", ".join(lines) or None,
    }


def _of_nvidia(devices: "Sequence[jax.Device]", sources: Sources) -> list[dict[str, Any]]:
    cuda = sources.load("libcuda.so.1")
    driver = version_in(sources.read("/proc/driver/nvidia/version"), NVIDIA_DRIVER)
    serials = serials_of_nvidia(
        sources.run(["nvidia-smi", "--query-gpu=pci.bus_id,serial", "--format=csv,noheader"]) or ""
    )
    found = []
    for device in devices:
        bus, identity = _asked_of_cuda(cuda, device.local_hardware_id)
        information = sources.read(f"/proc/driver/nvidia/gpus/{bus}/information") if bus else None
        found.append(
            {
                "serial": serials.get(bus or ""),
                "uuid": identity,
                "bus": bus,
                "driver": driver,
                "firmware": version_in(information, VIDEO_BIOS),
            }
        )
    return found


def _asked_of_cuda(library: Any, ordinal: int) -> tuple[str | None, str | None]:
    """Bus address and UUID by the number that JAX has, which counts the devices that CUDA_VISIBLE_DEVICES leaves.

    It is the UUID of the whole GPU also where a part of it is used (MIG): that is what can be replaced.
    """
    number = ctypes.c_int()
    if library is None or library.cuInit(0) != 0 or library.cuDeviceGet(ctypes.byref(number), ordinal) != 0:
        return None, None
    octets = (ctypes.c_ubyte * 16)()
    identity = f"GPU-{uuid.UUID(bytes=bytes(octets))}" if library.cuDeviceGetUuid(octets, number) == 0 else None
    return _bus(library.cuDeviceGetPCIBusId, number), identity


def _of_amd(devices: "Sequence[jax.Device]", sources: Sources) -> list[dict[str, Any]]:
    # Its name changes with each version, and a second one besides that of JAX would be another runtime.
    loaded = re.search(r"\S*/libamdhip64\.so\S*", sources.read("/proc/self/maps") or "")
    hip = sources.load(loaded[0]) if loaded else None
    driver = (sources.read("/sys/module/amdgpu/version") or "").strip()
    found = []
    for device in devices:
        bus = None if hip is None else _bus(hip.hipDeviceGetPCIBusId, ctypes.c_int(device.local_hardware_id))
        files = {"serial": "serial_number", "uuid": "unique_id", "firmware": "vbios_version"}
        told = {
            name: (sources.read(f"/sys/bus/pci/devices/{bus}/{file}") or "").strip() if bus else None
            for name, file in files.items()
        }
        found.append({**told, "bus": bus, "driver": driver})
    return found


def _bus(ask: Callable[..., int], number: ctypes.c_int) -> str | None:
    """CUDA and HIP have the same call for the bus address."""
    text = ctypes.create_string_buffer(64)
    return pci_address(text.value.decode()) if ask(text, len(text), number) == 0 else None
