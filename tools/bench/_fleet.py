"""What it takes to summarize the results of a fleet: seconds and memory, of `sdc fleet summarize` as a process."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sdc.burnin import BURN_IN, RESULT, BurninResult, BurninSettings, CheckedDevice, Tally, judge
from sdc.burnin.sensors import Course, Sensors
from sdc.records import Host, seal
from sdc.schema import Environment

REPORTS, WORKLOADS, DEVICES = 1000, 58, 8
BARS = {"seconds": 10.0}
SUMMARIZE = (
    "import resource, sys\n"
    "from sdc.tools.cli import run\n"
    "code = run(['fleet', 'summarize', *sys.argv[1:]])\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, file=sys.stderr)\n"
    "raise SystemExit(code)\n"
)


def summarize_results(reports: int = REPORTS, *, pages: bool = True) -> dict[str, float]:
    """Writes results of hosts of 8 devices and 58 workloads, three of them bad, and summarizes them once."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        started = time.perf_counter()
        size = write_results(place / "results", reports)
        written = time.perf_counter()
        more = ["--output", str(place / "pages"), "--ledger", str(place / "ledger.json")] if pages else []
        words = [sys.executable, "-c", SUMMARIZE, str(place / "results"), *more]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        ended = time.perf_counter()
        assert done.returncode == 1, done.stderr
        return {
            "reports": reports,
            "seconds": ended - written,
            "megabytes": float(done.stderr.splitlines()[-1]),
            "result_megabytes": size / 1e6,
            "writing_seconds": written - started,
        }


def write_results(folder: Path, reports: int, *, bad: tuple[int, ...] = (3, 14, 15)) -> int:
    """Results of hosts that agree with each other but for a device each of the bad ones; returns their size."""
    total = 0
    text = BURN_IN.encode(_result()).rpartition(b',\n "checksum"')[0] + b"\n}\n"  # as it was sealed
    for host in range(reports):
        mine = text.replace(b"host-name", f"host-{host:04}".encode())
        if host in bad:
            mine = mine.replace(b'"digest": "5000000000000003"', f'"digest": "bad{host:013x}"'.encode(), 1)
        place = folder / f"host-{host:04}" / RESULT
        place.parent.mkdir(parents=True)
        total += place.write_bytes(seal(mine))
    return total


def _result() -> BurninResult:
    """The result of a host called `host-name`, as `sdc burnin` writes it."""
    names = [f"family{number % 8}/float32/{number}x256x32/normal" for number in range(WORKLOADS)]
    rows = [
        Tally(
            workload=name, device=device, family=name.partition("/")[0], runs=3, elements=2_000_000, seconds=1.5,
            repeated=2, voted=3, checked=100, work=4.55e13 + device, median=0.5, fastest=0.49,
            digest=f"{5 * 10**15 + number:016}",
            key=f"{name} | seed 0 | {number:064x} | murmur3 finalizer of sums, 64 bits | gpu NVIDIA H100 80GB HBM3",
        )
        for number, name in enumerate(names)
        for device in range(DEVICES)
    ]  # fmt: skip
    sensor = Sensors(temperature=61.0, power=512.5, clock=1755.0, corrected=0, uncorrected=0, slowed=[])
    devices = [
        CheckedDevice(
            host="host-name", machine="host-name", process=0, kind="NVIDIA H100 80GB HBM3", index=device, id=device,
            serial=f"host-name/{device}", uuid=f"GPU-host-name-{device}", bus=f"0000:{device:02x}:00.0",
            driver="570.86", sensors=Course(source="nvml", before=sensor, after=sensor, samples=40),
        )
        for device in range(DEVICES)
    ]  # fmt: skip
    return judge(
        BurninResult(
            version="0.1.0", id="host-name" * 2,
            host=Host(name="host-name", machine="host-name", boot="host-name", pid=1, process=0),
            created="2026-01-05T00:00:00+00:00", ended="2026-01-05T00:05:00+00:00", seconds=300.0,
            settings=BurninSettings(level="quick", rounds=3, dtypes=("float32",)),
            environment=Environment(
                python="3.11.2", packages={"jax": "0.10.2", "jaxlib": "0.10.2"}, platform="gpu"
            ),
            rounds=3, devices=devices, workloads=rows, notes=["made for a benchmark: no device was tested"],
        )
    )  # fmt: skip
