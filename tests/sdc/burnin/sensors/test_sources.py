"""What drivers and the kernel tell is read rightly."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdc.burnin.sensors.base import SensorEvent, Sensors, Silent
from sdc.burnin.sensors.kernel import open_hwmon, open_kernel_log, parse_message
from sdc.burnin.sensors.libraries import open_amd_smi, open_nvml, open_tpu_metrics

GPUS = [
    {"kind": "NVIDIA H100", "uuid": "GPU-0", "bus": "0000:3b:00.0"},
    {"kind": "NVIDIA H100", "uuid": "GPU-1", "bus": "0000:86:00.0"},
]
AMD = [{"kind": "AMD Instinct MI300X", "uuid": "7a5f", "bus": "0000:03:00.0"}]
CPUS = [{"kind": "cpu"}, {"kind": "cpu"}]


class Nvml(SimpleNamespace):
    """Stands in the place of the module pynvml, with the names of its functions and constants."""

    def __init__(self, **differs: Any) -> None:
        import pynvml

        self.xids: dict[str, list[int]] = {"GPU-0": [], "GPU-1": []}
        self.reasons, self.uncorrected, self.freed = 0x4, 0, 0
        constants = {name: value for name, value in vars(pynvml).items() if isinstance(value, int)}
        super().__init__(**constants, **differs)

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.freed += 100

    def nvmlDeviceGetHandleByUUID(self, identity: str) -> str:
        if identity not in self.xids:
            raise RuntimeError("Not Found")
        return identity

    def nvmlEventSetCreate(self) -> list[str]:
        return []

    def nvmlDeviceRegisterEvents(self, handle: str, kind: int, events: list[str]) -> None:
        assert kind == self.nvmlEventTypeXidCriticalError
        events.append(handle)

    def nvmlEventSetWait(self, events: list[str], milliseconds: int) -> Any:
        assert milliseconds == 0
        return SimpleNamespace(eventData=self.xids[events[0]].pop(0))  # an IndexError where there is none

    def nvmlEventSetFree(self, events: list[str]) -> None:
        self.freed += 1

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61 if handle == "GPU-0" else 44

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 687_250  # milliwatts

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 2619}[clock]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        assert counter == self.NVML_VOLATILE_ECC
        return {self.NVML_MEMORY_ERROR_TYPE_CORRECTED: 7, self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED: self.uncorrected}[
            kind
        ]

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        return (1, 2, 0, 0)


def test_nvml_tells_what_it_has() -> None:
    nvml = Nvml()
    source = open_nvml(GPUS, nvml)
    assert source is not None
    assert source.read(0, between=False) == Sensors(
        temperature=61.0,
        power=687.25,
        clock=1980.0,
        memory_clock=2619.0,
        corrected=7,
        uncorrected=0,
        retired=3,
        slowed=["software power cap"],
    )
    nvml.reasons = 0x1
    between = source.read(1, between=True)
    assert between == Sensors(temperature=44.0, power=687.25, memory_clock=2619.0, slowed=[])
    nvml.xids["GPU-1"] += [48, 63]
    assert source.events() == [SensorEvent(1, "Xid 48"), SensorEvent(1, "Xid 63")]
    assert source.events() == []
    source.close()
    assert nvml.freed == 102


def test_nvml_of_an_old_device_tells_what_is_left() -> None:
    def unsupported(*_: object) -> Any:
        raise RuntimeError("Not Supported")

    nvml = Nvml(
        nvmlDeviceGetRemappedRows=unsupported,
        nvmlDeviceGetTotalEccErrors=unsupported,
        nvmlDeviceGetPowerUsage=unsupported,
        nvmlDeviceRegisterEvents=unsupported,
        nvmlDeviceGetCurrentClocksEventReasons=None,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x48,
        nvmlDeviceGetRetiredPages=lambda handle, cause: [1, 2] if cause == 1 else [],
    )
    source = open_nvml([GPUS[0], {"uuid": "GPU-unknown"}], nvml)
    assert source is not None
    told = source.read(0, between=False)
    assert told == Sensors(
        temperature=61.0,
        clock=1980.0,
        memory_clock=2619.0,
        retired=2,
        slowed=["hardware slowdown", "hardware thermal slowdown"],
    )
    assert source.read(1, between=False) is None
    assert source.events() == []


def test_names_of_nvml_are_those_of_the_library() -> None:
    import pynvml

    assert [name for name in vars(Nvml) if name.startswith("nvml") and not hasattr(pynvml, name)] == []


def test_only_devices_of_nvidia_ask_for_nvml() -> None:
    assert open_nvml([*CPUS, *AMD], Nvml()) is None

    def no_driver() -> None:
        raise RuntimeError("NVML Shared Library Not Found")

    with pytest.raises(Silent, match="Shared Library Not Found"):
        open_nvml(GPUS, Nvml(nvmlInit=no_driver))


def test_amd_smi() -> None:
    kinds = SimpleNamespace(HOTSPOT="hot", EDGE="edge")
    smi = SimpleNamespace(
        AmdSmiTemperatureType=kinds,
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
        AmdSmiClkType=SimpleNamespace(GFX="gfx", MEM="mem"),
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handle_from_bdf=lambda bus: {"0000:03:00.0": "it"}[bus],
        amdsmi_get_temp_metric=lambda handle, kind, metric: {"hot": "N/A", "edge": 55}[kind],
        amdsmi_get_power_info=lambda handle: {"current_socket_power": "N/A", "average_socket_power": 600},
        amdsmi_get_clock_info=lambda handle, kind: {"clk": {"gfx": 2100, "mem": 1300}[kind]},
        amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": 0},
        amdsmi_get_gpu_total_ecc_count=lambda handle: {"correctable_count": 3, "uncorrectable_count": 1},
        amdsmi_get_gpu_bad_page_info=lambda handle: "No bad pages found.",
    )
    source = open_amd_smi([*GPUS, *AMD], smi)
    assert source is not None
    told = source.read(2, between=False)
    assert told == Sensors(temperature=55.0, power=600.0, clock=2100.0, memory_clock=1300.0, corrected=3, uncorrected=1)
    assert source.read(2, between=True) == Sensors(temperature=55.0, power=600.0, memory_clock=1300.0)
    assert source.read(0, between=False) is None
    assert open_amd_smi(GPUS, smi) is None


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def test_files_of_an_amd_gpu(tmp_path: Path) -> None:
    card = "sys/bus/pci/devices/0000:03:00.0"
    put(
        tmp_path,
        **{
            f"{card}/hwmon/hwmon4/temp1_input": "51000\n",
            f"{card}/hwmon/hwmon4/temp2_input": "63500\n",
            f"{card}/hwmon/hwmon4/power1_average": "312000000\n",
            f"{card}/hwmon/hwmon4/freq1_input": "2100000000\n",
            f"{card}/hwmon/hwmon4/freq2_input": "\n",
            f"{card}/gpu_busy_percent": "0\n",
            f"{card}/ras/umc_err_count": "ue: 2\nce: 5\nde: 0\n",
            f"{card}/ras/gfx_err_count": "ue: 1\nce: 0\n",
            f"{card}/ras/gpu_vram_bad_pages": "0x0001 : 0x1000 : R\n0x0002 : 0x1000 : R\n",
        },
    )
    source = open_hwmon(AMD, str(tmp_path))
    assert source is not None
    told = source.read(0, between=False)
    assert told == Sensors(temperature=63.5, power=312.0, clock=2100.0, corrected=5, uncorrected=3, retired=2)
    assert source.read(0, between=True) == Sensors(temperature=63.5, power=312.0)


def test_files_of_a_processor(tmp_path: Path) -> None:
    cpu, memory = "sys/devices/system/cpu", "sys/devices/system/edac/mc"
    put(
        tmp_path,
        **{
            "sys/class/hwmon/hwmon0/name": "nvme\n",
            "sys/class/hwmon/hwmon0/temp1_input": "99000\n",
            "sys/class/hwmon/hwmon1/name": "coretemp\n",
            "sys/class/hwmon/hwmon1/temp1_input": "45000\n",
            "sys/class/hwmon/hwmon1/temp2_input": "47000\n",
            f"{cpu}/cpu0/cpufreq/scaling_cur_freq": "3000000\n",
            f"{cpu}/cpu1/cpufreq/scaling_cur_freq": "2000000\n",
            f"{cpu}/cpu0/thermal_throttle/core_throttle_count": "5\n",
            f"{memory}/mc0/ce_count": "1\n",
            f"{memory}/mc1/ce_count": "2\n",
            f"{memory}/mc0/ue_count": "0\n",
            "proc/interrupts": "      CPU0 CPU1\n MCE:  0  0  Machine check exceptions\n",
        },
    )
    source = open_hwmon(CPUS, str(tmp_path))
    assert source is not None
    expected = Sensors(temperature=47.0, clock=2500.0, corrected=3, uncorrected=0, slowed=[])
    assert source.read(1, between=False) == expected
    assert source.events() == []
    put(
        tmp_path,
        **{
            "proc/interrupts": "      CPU0 CPU1\n MCE:  0  2  Machine check exceptions\n",
            f"{cpu}/cpu0/thermal_throttle/core_throttle_count": "6\n",
        },
    )
    assert source.events() == [SensorEvent(None, "machine check: 2 exceptions")]
    assert source.events() == []
    told = source.read(0, between=True)
    assert told is not None
    assert told.slowed == ["too hot"]


def test_a_processor_without_files_tells_nothing(tmp_path: Path) -> None:
    source = open_hwmon(CPUS, str(tmp_path))
    assert source is not None
    assert source.read(0, between=False) is None
    assert open_hwmon(GPUS, str(tmp_path)) is None
    put(tmp_path, **{"sys/class/thermal/thermal_zone0/type": "acpitz", "sys/class/thermal/thermal_zone0/temp": "9000"})
    put(tmp_path, **{"sys/class/thermal/thermal_zone1/type": "cpu-thermal"})
    put(tmp_path, **{"sys/class/thermal/thermal_zone1/temp": "41000"})
    assert source.read(0, between=False) == Sensors(temperature=41.0)


def test_metrics_of_tpus() -> None:
    values = {"tpu_throttle_score": ["0", "3"], "ici_link_health": ["tray1.chip0.ici0.int: 0", "tray1.chip1.ici2: 10"]}
    library = SimpleNamespace(
        list_supported_metrics=lambda: list(values),
        get_metric=lambda name: SimpleNamespace(data=lambda: values[name]),
    )
    tpus = [{"kind": "TPU v4", "coordinates": [x, 0, 0], "core": core} for x in range(2) for core in range(2)]
    source = open_tpu_metrics(tpus, library)
    assert source is not None
    read = [source.read(index, between=True) for index in range(4)]
    assert read == [Sensors(slowed=[])] * 2 + [Sensors(slowed=["throttle score 3"])] * 2
    assert source.events() == [SensorEvent(None, "link tray1.chip1.ici2: health 10 of 10 (0 is healthy)")]
    assert open_tpu_metrics(CPUS, library) is None


@pytest.mark.parametrize(
    ("line", "bus", "text"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "0000:3b:00", "Xid 79: GPU has fallen off"),
        ("NVRM: Xid (PCI:0000:3B:00.0): 63", "0000:3b:00", "Xid 63"),
        (
            "amdgpu 0000:03:00.0: amdgpu: {12} socket: 0, die: 1, 4 new uncorrectable hardware errors detected in umc "
            "block",
            "0000:03:00",
            "4 new uncorrectable hardware errors detected in umc block",
        ),
        ("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400", None, "machine check: CPU 3: "),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0", None, "EDAC: 1 UE memory read error"),
    ],
)
def test_errors_in_the_log(line: str, bus: str | None, text: str) -> None:
    found = parse_message(line)
    assert found is not None
    assert found[0] == bus
    assert found[1].startswith(text)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
        "amdgpu 0000:03:00.0: amdgpu: no uncorrectable hardware errors detected in umc block",
        "amdgpu 0000:03:00.0: amdgpu: 0 new uncorrectable hardware errors detected in umc block",
        "amdgpu 0000:03:00.0: amdgpu: 12 uncorrectable hardware errors detected in umc block",  # those of old
        "EDAC MC0: 12 CE memory read error on CPU_SrcID#0",
        "",
    ],
)
def test_what_is_no_error_in_the_log(line: str) -> None:
    assert parse_message(line) is None


def test_the_log_is_read_from_now_on(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("3,1,5,-;NVRM: Xid (PCI:0000:3b:00): 31, of before\n")
    source = open_kernel_log(GPUS, str(log))
    assert source is not None
    with log.open("a") as file:
        file.write("3,2,6,-;NVRM: Xid (PCI:0000:86:00): 48, pid=1\n SUBSYSTEM=pci\n")
        file.write("3,3,7,-;NVRM: Xid (PCI:0000:ff:00): 48, of another\n4,4,8,-;EDAC MC0: 1 UE here\n")
    assert source.events() == [SensorEvent(1, "Xid 48: pid=1"), SensorEvent(None, "EDAC: 1 UE here")]
    assert source.events() == []
    source.close()
    assert source.events() == []  # nothing is raised
    with pytest.raises(Silent, match="cannot be read"):
        open_kernel_log(GPUS, str(tmp_path / "nothing"))
    assert open_kernel_log(CPUS, str(tmp_path / "nothing")) is None
