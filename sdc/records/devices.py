"""The devices of a process, identified so that the physical parts can be located.

A verdict identifies ranks. To act on a verdict, one needs the host, the slot and the part, as reported by JAX, the
driver's libraries and the kernel's files. Unreported fields are omitted; the devices themselves are not queried. None
of these fields affects the computation, so the fields are not part of `environment` and never make two processes
incomparable.
"""

import ctypes
import dataclasses
import itertools
import re
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schema import identify

if TYPE_CHECKING:
    import jax

NVIDIA_DRIVER = r"Kernel Module\s+(?:for \S+\s+)?(\d[\w.]*)"
VIDEO_BIOS = r"^Video BIOS:\s*([\w.]+)\s*$"  # a board without a video BIOS shows question marks
MICROCODE = r"^microcode\s*:\s*(\S+)"
PATIENCE = 5.0  # time limit in seconds for a command that reports serial numbers, which takes long if a driver hangs


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
    """Sources of information about a host. Each of these functions returns None if it has no answer.

    Attributes:
        read: returns the text of a file, given its path.
        load: returns a C library, given its name.
        run: returns the output of a command.
    """

    read: Callable[[str], str | None] = text_of
    load: Callable[[str], Any] = _load
    run: Callable[[Sequence[str]], str | None] = _run


def describe_devices(
    devices: "Sequence[jax.Device] | None" = None, *, sources: Sources | None = None
) -> list[dict[str, Any]]:
    """Returns descriptions of the hardware behind this process's devices. Calling this function starts JAX's devices.

    Args:
        devices: the devices to describe; devices of other processes are skipped (default: all devices).
        sources: sources of information (default: the host's files, libraries and commands).

    Returns:
        One object for each device of this process, as `sdc.schema.Device` describes it. Fields that the platform does
        not report are absent.
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
    """Returns the devices of a mesh, each with its rank (its position on the mesh).

    Args:
        devices: results of `describe_devices` from one or several processes.
        mesh: the mesh of the run.

    Returns:
        The same objects, sorted by rank, each with a field `rank` that holds the index on each axis. Devices that are
        not on the mesh took no part in the run and are omitted.
    """
    known = {device["id"]: device for device in devices}
    return [
        {**known[device.id], "rank": dict(zip(mesh.axis_names, place, strict=True))}
        for place in itertools.product(*map(range, mesh.devices.shape))
        if (device := mesh.devices[place]).id in known
    ]


def version_in(text: str | None, pattern: str) -> str | None:
    """Returns the first group of a pattern in the text of one of the kernel's files."""
    found = re.search(pattern, text or "", re.MULTILINE)
    return found and found[1]


def serials_of_nvidia(printed: str) -> dict[str, str]:
    """Returns serial numbers by bus address, from the lines `BUS, SERIAL` of nvidia-smi; ignores text in brackets, and
    numbers of boards with several GPUs."""
    rows = (line.partition(",") for line in printed.splitlines())
    found = {pci_address(bus): serial.strip() for bus, _, serial in rows if re.fullmatch(r"\w+", serial.strip())}
    times = Counter(found.values())
    return {bus: serial for bus, serial in found.items() if times[serial] == 1}


def pci_address(text: str) -> str:
    """Returns a PCI address in Linux notation; drivers use capitals, and some write the domain with eight digits."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"


def _parts(devices: "Sequence[jax.Device]", sources: Sources) -> list[dict[str, Any]]:
    """Returns the platform's information about each device; all devices of a process are of the same platform."""
    if not devices:
        return []
    version = devices[0].client.platform_version
    match devices[0].platform:
        case "cpu":
            # Simulated devices of a process share one processor: a fault in it affects all of them.
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
    """Returns a TPU's position in its slice, and the driver version, which the platform version `version` contains."""
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
    """Returns the bus address and UUID for JAX's device number, which counts the devices in CUDA_VISIBLE_DEVICES.

    The UUID identifies the whole GPU, which can be replaced, even if only a part of the GPU is used (MIG).
    """
    number = ctypes.c_int()
    if library is None or library.cuInit(0) != 0 or library.cuDeviceGet(ctypes.byref(number), ordinal) != 0:
        return None, None
    octets = (ctypes.c_ubyte * 16)()
    identity = f"GPU-{uuid.UUID(bytes=bytes(octets))}" if library.cuDeviceGetUuid(octets, number) == 0 else None
    return _bus(library.cuDeviceGetPCIBusId, number), identity


def _of_amd(devices: "Sequence[jax.Device]", sources: Sources) -> list[dict[str, Any]]:
    # The library's name changes with each version, and a second library besides JAX's would start another runtime.
    loaded = re.search(r"\S*/libamdhip64\.so\S*", sources.read("/proc/self/maps") or "")
    hip = sources.load(loaded[0]) if loaded else None
    driver = (sources.read("/sys/module/amdgpu/version") or "").strip()
    found = []
    for device in devices:
        bus = None if hip is None else _bus(hip.hipDeviceGetPCIBusId, ctypes.c_int(device.local_hardware_id))
        files = {"serial": "serial_number", "uuid": "unique_id", "firmware": "vbios_version"}
        identity = {
            name: (sources.read(f"/sys/bus/pci/devices/{bus}/{file}") or "").strip() if bus else None
            for name, file in files.items()
        }
        found.append({**identity, "bus": bus, "driver": driver})
    times = Counter(each["serial"] for each in found)  # the two dies of a module have its serial number
    return [{**each, "serial": each["serial"] if times[each["serial"]] == 1 else None} for each in found]


def _bus(ask: Callable[..., int], number: ctypes.c_int) -> str | None:
    """Returns the bus address; CUDA and HIP use the same call."""
    text = ctypes.create_string_buffer(64)
    return pci_address(text.value.decode()) if ask(text, len(text), number) == 0 else None
