"""The cost of lock-step if no bit differs: `sdc bench lockstep`, and `sdc bench delay` for a slow network.

For `sdc bench delay`, two processes train twins with each `--exchange`, in two network namespaces of one machine. A
simulated cable between the namespaces delays packets. Steps with and without the delay take turns in the same
processes. This benchmark needs Linux, root and `ip`.
"""

import contextlib
import fcntl
import math
import os
import select
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax

from sdc.costs import collective_calls
from sdc.records import prepare
from sdc.train import FullLoad, TrainConfig, Workload, get_config
from sdc.train.programs import TWIN, TwinProgram, place, sharded
from sdc.twins import Exchange
from sdc.verdict import Exit

from .. import CommandError
from .command import BenchOptions
from .harness import Benchmark, config_of, made_up_tokens, ratio

SYNCS = ("none", "compute")
DELAY = 1e-3  # seconds from one process to the other
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)
SAYS = "seconds of a step: "
COMMAND = f"from {__name__} import follow; follow()"
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # addresses of the hosts
LINKS = ("sdca", "sdcb")  # names of their network devices
# Linux constants that make a network device whose packets a process reads and writes.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
LARGEST = 65535  # bytes of a packet


def measure_lockstep(options: BenchOptions) -> dict[str, Any]:
    result: dict[str, Any] = {}
    # One device for each twin; a single accelerator runs both twins under vmap.
    devices = jax.devices()[:2]
    placement = place(twins=2, data=1, model=1, kind="mesh" if len(devices) == 2 else "vmap", devices=devices)
    for dtype in options.dtypes:
        work = sharded(config_of(options, dtype))
        result[dtype] = _lockstep({sync: TwinProgram(work, placement, sync=sync) for sync in SYNCS}, options.steps)
    return result


def _lockstep(programs: dict[str, TwinProgram], steps: int) -> dict[str, Any]:
    key, placement = jax.random.key(1), programs["none"].placement
    tokens = made_up_tokens(programs["none"].work.config, placement)
    compiled = {sync: program.compiled.lower(*program.inputs).compile() for sync, program in programs.items()}
    step: dict[str, list[float]] = {sync: [] for sync in programs}
    whole: dict[str, list[float]] = {sync: [] for sync in programs}
    states = {sync: program.init(0) for sync, program in programs.items()}
    for number in range(steps + 2):
        for sync, program in programs.items():
            started = time.perf_counter()
            state, metrics, reports = jax.block_until_ready(program.compiled(states[sync], (tokens, key)))
            stepped = time.perf_counter()
            states[sync], observed = jax.block_until_ready(program.compiled_observation(state, metrics.gradient))
            ended = time.perf_counter()
            if sync == "compute":  # the comparison must have compared something
                found = [mismatch.difference for mismatch in reports[0].values()]
                assert sum(int(each.checked.sum()) for each in found) > 0
                if wrong := sum(int(each.mismatched.sum()) for each in [*found, observed["state"].difference]):
                    raise RuntimeError(
                        f"{wrong} elements differ between the twins of this benchmark: this machine corrupts data"
                    )
            if number >= 2:
                step[sync].append(stepped - started)
                whole[sync].append(ended - started)
    memory: dict[str, int] = {}
    for sync, each in compiled.items():
        sizes: Any = each.memory_analysis()
        given = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        memory[sync] = int(sizes.temp_size_in_bytes + given)
    return {
        "step_seconds": {sync: statistics.median(values) for sync, values in step.items()},
        "step_ratio": ratio(step["none"], step["compute"]),
        "whole_step_seconds": {sync: statistics.median(values) for sync, values in whole.items()},
        "whole_step_ratio": ratio(whole["none"], whole["compute"]),
        "peak_bytes": memory,
        "peak_memory_ratio": memory["compute"] / memory["none"],
        "bytes_per_probe": _crossing(compiled["compute"], placement.mesh.size) / len(reports[0]),  # a device per twin
    }


def _crossing(compiled: Any, twins: int) -> int:
    """Returns the number of bytes in unconditional collectives between twins that have one device each."""
    calls = collective_calls(compiled.as_text() or "")
    return sum(sum(each.sizes) for each in calls if not each.conditional and each.crosses(range(twins)))


def pool_bytes(config: TrainConfig, *, twins: int = 3) -> int:
    """Returns the number of digest bytes that each rank of a host sends to the other hosts in a step without
    differences.

    Counts the arrays in the compiled programs' unconditional collectives between twins; all these collectives are
    outside the loop over microsteps. An array has a row for each host; how much of the array crosses the network
    depends on the collective, and is at most twice its size. Requires one device for each twin.

    Example:
        >>> from sdc.tools.bench._twins import pool_bytes
        >>> from sdc.train.programs.config import get_config
        >>> pool_bytes(get_config("tiny"), twins=2)
        32
    """
    placement = place(twins=twins, data=1, model=1, devices=jax.devices()[:twins])
    program = FullLoad(workload=Workload(config=config), twins=twins).program(config, placement, donate=True)
    assert isinstance(program, TwinProgram)
    assert placement.mesh.axis_names[0] == TWIN
    return math.ceil(sum(_crossing(each.compile(), twins) for each in program.lowered.values()) / twins)


class Cable:
    """Carries packets between two network devices."""

    def __init__(self) -> None:
        self.delay = 0.0  # seconds added to the transmission time of a packet
        self._ends = [os.open("/dev/net/tun", os.O_RDWR) for _ in LINKS]
        for end, name in zip(self._ends, LINKS, strict=True):
            fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> "Cable":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        waiting: deque[tuple[float, int, bytes]] = deque()
        while not self._stopped.is_set():
            due = waiting[0][0] - time.monotonic() if waiting else 0.1
            ready, _, _ = select.select(self._ends, [], [], max(due, 0.0))
            for end in ready:
                packet = os.read(end, LARGEST)
                waiting.append((time.monotonic() + self.delay, self._ends[1 - self._ends.index(end)], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, end, packet = waiting.popleft()
                with contextlib.suppress(OSError):  # a link that is down loses packets, as a network does
                    os.write(end, packet)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[tuple[str, str], Cable]]:
    """Yields the names of two namespaces, in each of which the host name resolves to the namespace's own address, and
    the cable between them."""
    if not (hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ip") and Path("/dev/net/tun").exists()):
        raise CommandError("network namespaces need Linux, root, the command ip and /dev/net/tun", Exit.USAGE)
    names = (f"sdc{os.getpid()}a", f"sdc{os.getpid()}b")
    try:
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("netns", "add", name)
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        with Cable() as cable:
            for name, address, link in zip(names, ADDRESSES, LINKS, strict=True):
                ip("link", "set", link, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", link)
                ip("-n", name, "link", "set", link, "mtu", LARGEST, "up")
                ip("-n", name, "link", "set", "lo", "up")
            yield names, cable
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            with contextlib.suppress(OSError):
                (Path("/etc/netns") / name / "hosts").unlink()
                (Path("/etc/netns") / name).rmdir()


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


def measure_delay(options: BenchOptions) -> dict[str, Any]:
    return {dtype: _delayed(str(options.config), dtype, options.steps) for dtype in options.dtypes}


def _delayed(config: str, dtype: str, steps: int) -> dict[str, Any]:
    with two_hosts() as (names, cable):
        inside, pipe = ("ip", "netns", "exec"), subprocess.PIPE
        workers = [
            subprocess.Popen(
                [*inside, name, sys.executable, "-c", COMMAND, config, dtype, str(number)],
                stdin=pipe,
                stdout=pipe,
                text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            for number, name in enumerate(names)
        ]
        try:
            seconds: dict[tuple[str, float], list[float]] = {}
            for number in range(steps + 2):
                for exchange in EXCHANGES:
                    for delay in (0.0, DELAY):
                        cable.delay = delay
                        took = _together(workers, exchange)
                        if number >= 2:
                            seconds.setdefault((exchange, delay), []).append(took)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    found: dict[str, Any] = {name: ratio(seconds[name, 0.0], seconds[name, DELAY]) for name in EXCHANGES}
    return found | {f"{name}_seconds": statistics.median(seconds[name, 0.0]) for name in EXCHANGES}


def _together(workers: Sequence[subprocess.Popen[str]], exchange: Exchange) -> float:
    """Executes one step in all processes; returns the seconds of the slowest process."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(exchange + "\n")
        worker.stdin.flush()
    found = []
    for worker in workers:
        # Collectives print lines of their own.
        times = (line.removeprefix(SAYS) for line in worker.stdout or () if line.startswith(SAYS))
        if (seconds := next(times, None)) is None:
            raise CommandError("a process of the benchmark has ended; see its output above", Exit.INCONCLUSIVE)
        found.append(float(seconds))
    return max(found)


def follow() -> None:
    """Runs one of the processes: executes a step for each line of standard input, and prints the step's time."""
    dtype: Any  # one of those that the benchmark's flag allows
    config, dtype, process = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{ADDRESSES[0]}:4321", 2, int(process))
    prepare(cpu_devices=1, cpu_threads=os.cpu_count(), only_cpu=True)
    placement = place(twins=2, data=1, model=1)
    work = sharded(get_config(config).of_type(dtype))
    tokens, key = made_up_tokens(work.config, placement), jax.random.key(1)
    programs: dict[str, TwinProgram] = {
        exchange: TwinProgram(work, placement, exchange=exchange, sync="compute") for exchange in EXCHANGES
    }
    states = {exchange: program.init(0) for exchange, program in programs.items()}
    for line in sys.stdin:
        exchange = line.strip()
        started = time.perf_counter()
        out = programs[exchange].compiled(states[exchange], (tokens, key))
        states[exchange], _, reports = jax.block_until_ready(out)
        sys.stdout.write(f"{SAYS}{time.perf_counter() - started}\n")
        sys.stdout.flush()
        found = [report.difference.mismatched for report in reports[0].values()]
        if any(int(part.data.sum()) for rows in found for part in rows.addressable_shards):
            raise RuntimeError("elements differ between the twins of this benchmark: this machine corrupts data")


BENCHMARKS = {
    "lockstep": Benchmark(
        measure_lockstep, {"step_ratio": 1.10, "peak_memory_ratio": 1.10, "bytes_per_probe": 64.0}, devices=2
    ),
    "delay": Benchmark(measure_delay, {"step": 1.05, "call": 1.05}),
}
