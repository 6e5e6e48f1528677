"""The cost of a burn-in, and the faults that it detects.

`sdc bench burnin`: the costs of digests and comparison in addition to the load, of checked matrix products, of a whole
level, and of the summary of a fleet. `sdc bench nodes`: which of the study's fifteen nodes are detected by a burn-in, a
pair and a pool if the nodes are simulated at the published rates.
"""

import dataclasses
import functools
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax

from sdc import burnin
from sdc.burnin.sensors import Course, Sensors
from sdc.burnin.workloads import LEVELS, SMALLEST, BurninWorkload, Level, workloads
from sdc.nodes import NODES
from sdc.records import Host, seal
from sdc.schema import Environment
from sdc.standing import Ledger
from sdc.train import get_config, register_training
from sdc.train.studies import find_node

from ._twins import pool_bytes
from .command import BenchOptions
from .harness import Benchmark, command_costs, seconds_of, take_turns

BURNIN_BARS = {
    "digests_share": 0.05,
    "matrix_checked": 1.05,
    "quick_seconds": 60.0,
    "quick_megabytes": 2000.0,
    "pool_bytes": 64.0,
    "summarize_seconds": 10.0,
    "verdict_seconds": 0.3,
    "false_alarms": 0,
}
DEVICES = 4
REPORTS, WORKLOADS, FLEET_DEVICES = 1000, 58, 8
ENTRIES = 100_000
# Repeats the first entry of a ledger, whose content a verdict does not read.
MORE = """
WITH RECURSIVE counted(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM counted WHERE number < ?)
INSERT INTO entries (written, kind, run, device, verdict, simulated, content, seal)
SELECT written, kind, run, device, verdict, simulated, content, seal FROM entries, counted WHERE entries.number = 1
"""
BAD = (3, 14, 15)  # hosts of the fleet with a bad device
# For simulated nodes: devices (faults strike the last one), maximum rounds, maximum steps, and trials.
SUSPECTS, ROUNDS, STEPS, TRIALS = 3, 20, 20, 3
STRUCK = ("matrix", "attention", "training")  # workload families that a node's faults strike


def measure_burnin(options: BenchOptions) -> dict[str, Any]:
    """Returns all figures, which BENCHMARKS.md explains."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["burnin", "--level", "quick", "--devices", DEVICES, "--run", Path(folder) / "run"]
        seconds, megabytes = command_costs(words)
    fleet = summarize_results()
    found: dict[str, Any] = {
        "quick_seconds": seconds,
        "quick_megabytes": megabytes,
        "pool_bytes": pool_bytes(get_config("tiny")),
        "summarize_seconds": fleet["seconds"],
        "summarize_megabytes": fleet["megabytes"],
        "verdict_seconds": statistics.median(read_ledger() for _ in range(options.steps)),
    }
    register_training()
    # Two cores take half a minute for matrices of 1,024 rows and buffers of 16 MB.
    for level in (LEVELS["quick"], dataclasses.replace(LEVELS["prejob"], buffer=2**24, retention=0.0)):
        found |= {f"{name}_{level.name}": value for name, value in _costs(level, options.steps).items()}
    products = dataclasses.replace(LEVELS["acceptance"], data=("normal",))
    found["matrix_checked_acceptance"] = _costs(products, 3, only=["matrix"])["matrix_checked"]
    devices = jax.local_devices()[:DEVICES]
    healthy = burnin.burn_in(workloads(SMALLEST, devices), devices, rounds=1000)
    false_alarms = len(healthy.findings) + len(healthy.unfinished)
    return {"all": found | {"false_alarms": false_alarms, "rounds": healthy.rounds}}


def _costs(level: Level, steps: int, *, only: Sequence[str] | None = None) -> dict[str, float]:
    devices = jax.local_devices()[:1]
    programs = burnin.Programs(devices)
    compared, loaded, checked, plain = 0.0, 0.0, 0.0, 0.0
    for workload in workloads(level, devices, only=only):
        if workload.multi:
            continue
        programs.prepare(workload, 0)
        programs.reference(workload, 0)
        programs.run(workload, 0)
        rounds = [_round(programs, workload) for _ in range(steps)]
        loaded += statistics.median(seconds for seconds, _ in rounds)
        compared += statistics.median(max(whole - seconds, 0.0) for seconds, whole in rounds)
        if workload.family == "matrix":  # the checked program and the product alone take turns
            ready = programs.prepare(workload, 0)
            calls: dict[str, Callable[..., Any]] = {"checked": ready.call, "plain": jax.jit(workload.run)}
            runs: dict[str, Callable[[], Any]] = {
                name: functools.partial(call, *ready.arguments) for name, call in calls.items()
            }
            seconds = take_turns(runs, steps)
            checked += statistics.median(seconds["checked"])
            plain += statistics.median(seconds["plain"])
    return {
        "digests_share": compared / (compared + loaded),
        "matrix_checked": checked / plain,
        "load_seconds": loaded,
    }


def _round(programs: burnin.Programs, workload: BurninWorkload) -> tuple[float, float]:
    """Returns the duration of a run in seconds: of the load alone, and including digest and comparison."""
    began = time.perf_counter()
    (outcome,) = programs.run(workload, 0, rest=lambda seconds: None)
    return outcome.seconds, time.perf_counter() - began


def summarize_results(reports: int = REPORTS) -> dict[str, float]:
    """Measures the time and memory for a summary of the results of many hosts, three of them bad; each host has 8
    devices and 58 workloads."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        started = time.perf_counter()
        size = write_results(place / "results", reports)
        writing = time.perf_counter() - started
        outputs = ["--output", place / "pages", "--ledger", place / "ledger.json"]
        seconds, megabytes = command_costs(["fleet", "summarize", place / "results", *outputs], code=1)
        return {
            "reports": reports,
            "seconds": seconds,
            "megabytes": megabytes,
            "result_megabytes": size / 1e6,
            "writing_seconds": writing,
        }


def read_ledger(entries: int = ENTRIES) -> float:
    """Measures the time for the standing of a host whose ledger has many entries, of 8 devices."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ledger.sqlite"
        with Ledger(file, write=True) as ledger:
            for run in ("over", "under way"):  # so that the verdict is INCONCLUSIVE on any host
                ledger.begin(run, simulated=False, level="quick")
            ledger.add(_result(), begun="over")
        with closing(sqlite3.connect(file)) as base, base:
            base.execute(MORE, (entries,))
        return command_costs(["verdict", "--ledger", file], code=3)[0]


def write_results(folder: Path, reports: int) -> int:
    """Writes results of hosts that agree except for one device of each bad host; returns their size in bytes."""
    total = 0
    text = burnin.BURN_IN.encode(_result()).rpartition(b',\n "checksum"')[0] + b"\n}\n"  # as before sealing
    for host in range(reports):
        mine = text.replace(b"host-name", f"host-{host:04}".encode())
        if host in BAD:
            mine = mine.replace(b'"digest": "5000000000000003"', f'"digest": "bad{host:013x}"'.encode(), 1)
        place = folder / f"host-{host:04}" / burnin.RESULT
        place.parent.mkdir(parents=True)
        total += place.write_bytes(seal(mine))
    return total


def _result() -> burnin.BurninResult:
    """Returns the result of a host called `host-name`, as `sdc burnin` writes it."""
    names = [f"family{number % 8}/float32/{number}x256x32/normal" for number in range(WORKLOADS)]
    rows = [
        burnin.Tally(
            workload=name, device=device, family=name.partition("/")[0], runs=3, elements=2_000_000, seconds=1.5,
            repeated=2, voted=3, checked=100, work=4.55e13 + device, median=0.5, fastest=0.49,
            digest=f"{5 * 10**15 + number:016}",
            key=f"{name} | seed 0 | {number:064x} | murmur3 finalizer of sums, 64 bits | gpu NVIDIA H100 80GB HBM3",
        )
        for number, name in enumerate(names)
        for device in range(FLEET_DEVICES)
    ]  # fmt: skip
    sensor = Sensors(temperature=61.0, power=512.5, clock=1755.0, corrected=0, uncorrected=0, slowed=[])
    devices = [
        burnin.CheckedDevice(
            host="host-name", machine="host-name", process=0, kind="NVIDIA H100 80GB HBM3", index=device, id=device,
            serial=f"host-name/{device}", uuid=f"GPU-host-name-{device}", bus=f"0000:{device:02x}:00.0",
            driver="570.86", sensors=Course(source="nvml", before=sensor, after=sensor, samples=40),
        )
        for device in range(FLEET_DEVICES)
    ]  # fmt: skip
    return burnin.judge(
        burnin.BurninResult(
            version="0.1.0", id="host-name" * 2,
            host=Host(name="host-name", machine="host-name", boot="host-name", pid=1, process=0),
            created="2026-01-05T00:00:00+00:00", ended="2026-01-05T00:05:00+00:00", seconds=300.0,
            settings=burnin.BurninSettings(level="quick", rounds=3, dtypes=("float32",)),
            environment=Environment(
                python="3.11.2", packages={"jax": "0.10.2", "jaxlib": "0.10.2"}, platform="gpu"
            ),
            rounds=3, devices=devices, workloads=rows, notes=["made for a benchmark: no device was tested"],
        )
    )  # fmt: skip


def measure_nodes(options: BenchOptions) -> dict[str, Any]:
    """Returns figures with a row for each node and the following columns.

    `quick chance`: predicted probability that a round of level quick detects the node; `quick 95 %`: predicted number
    of rounds for detection with 95 % probability; `quick found`: number of the round that detects the node, as the
    median of three simulations of at most 20 rounds; `quick missed`: number of simulations that do not detect the node.
    `prejob 95 %`, `acceptance 95 %`: the numbers of rounds predicted in the same way for these levels. `pair found`,
    `pool found`: step at which a pair or a pool of three detects the node, or -1 if it is not detected within 20 steps.
    `pair expected`: number of wrong elements that the node's model predicts in these steps.
    """
    register_training()
    devices = jax.local_devices()[:SUSPECTS]
    programs = burnin.Programs(devices)
    sizes = {name: workloads(name, devices, only=STRUCK) for name in ("quick", "prejob", "acceptance")}
    columns: dict[str, dict[str, float]] = {}
    for number, node in enumerate(NODES):
        print(f"{node} ({number + 1} of {len(NODES)})", file=sys.stderr, flush=True)
        faults = burnin.rehearsed(node, (), SUSPECTS - 1)
        chances = {name: burnin.chance_of_round(faults, found) for name, found in sizes.items()}
        row: dict[str, float] = {"quick chance": chances["quick"]}
        row |= {f"{name} 95 %": float(burnin.rounds_for(chance)) for name, chance in chances.items()}
        row |= _simulated(sizes["quick"], faults, programs)
        for name, twins in (("pair", 2), ("pool", 3)):
            seen = find_node(node, STEPS, twins=twins)
            row[f"{name} found"] = -1.0 if seen.first is None else float(seen.first)
            row[f"{name} expected"] = seen.expected
        for name, value in row.items():
            columns.setdefault(name, {})[node] = value
        jax.clear_caches()  # each node has its own program
    return columns


def _simulated(found: Sequence[BurninWorkload], faults: Any, programs: burnin.Programs) -> dict[str, float]:
    rounds, seconds = [], []
    for trial in range(TRIALS):
        result = burnin.planned_result(found, programs.devices)
        run = functools.partial(
            burnin.burn_in, found, programs.devices, rounds=ROUNDS, inject=faults, programs=programs, seed=trial,
            result=result, stop=functools.partial(bool, result.findings),
        )  # fmt: skip
        seconds.append(seconds_of(run) / (result.rounds + 1))
        if result.findings:
            assert all(finding.devices == (SUSPECTS - 1,) for finding in result.findings)
            rounds.append(result.findings[0].round + 1)
    return {
        "quick found": statistics.median(rounds) if rounds else -1.0,
        "quick missed": float(TRIALS - len(rounds)),
        "quick s/round": statistics.median(seconds),
    }


BENCHMARKS = {
    "burnin": Benchmark(measure_burnin, BURNIN_BARS, devices=DEVICES),
    "nodes": Benchmark(measure_nodes, {}, devices=SUSPECTS),
}
