"""Soak: long runs with many checkpoints, and a burn-in that is resumed many times, with few descriptors and limited
memory.

Each process measures what it holds at each checkpoint (or round) and must hold the same amount in the end: a leak is a
slope whose confidence interval lies above a stated bound.
"""

import contextlib
import ctypes
import gc
import json
import math
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from .tally import Tally

EVERY = 20
"""Number of steps between checkpoints."""
SESSION = 50
"""Number of rounds of each session of the burn-in."""
DESCRIPTORS = 256
"""Maximum number of open descriptors of a process (`ulimit -n`)."""
MEMORY = 256 << 20
"""Maximum growth of the data of a process after the warm-up, in bytes; beyond it, an allocation fails."""
ARRAYS = 39
"""Number of arrays in each checkpoint of the foreign loops, as in those of the commands, position included."""
WARM, LEAST_WARM = 0.3, 60
"""Share and minimum number of the first samples, which are not evaluated: threads and caches are created that stay."""
LEAST = 100
"""Minimum number of samples."""
BATCHES = 20
"""Number of medians to which a line is fitted: successive samples depend on each other, and some are outliers."""
CONFIDENCE = 0.999
"""Confidence of each interval; a soak evaluates thirty."""
SETTLED = 700
"""Number of evaluated samples for which the bounds hold. In shorter runs, the bound of the memory is larger,
quadratically, since the caches of libraries still grow, and that of the threads linearly, since their pools do."""
LIMIT = 10.0
"""Maximum mean time of a sample in seconds; about a tenth of it is needed."""
CHILD = "import sys; from tests.storms.soak import child; child(*sys.argv[1:])"


class Held(NamedTuple):
    """What a process holds at one moment.

    Attributes:
        descriptors: number of open descriptors.
        threads: number of threads, including those of libraries.
        memory: resident bytes after a collection of garbage.
        disk: bytes of the files in a folder, except those with one line for each step or event.
        lines: bytes of these other files, which grow by design.
    """

    descriptors: float
    threads: float
    memory: float
    disk: float
    lines: float

    @classmethod
    def now(cls, folder: Path) -> Self:
        """Returns what this process holds."""
        gc.collect()
        with contextlib.suppress(AttributeError):  # only glibc has this function
            ctypes.CDLL(None).malloc_trim(0)
        disk = lines = 0
        for place, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # another process or thread has just deleted it
                    size = os.lstat(os.path.join(place, name)).st_size
                    disk, lines = (disk, lines + size) if name.endswith(".jsonl") else (disk + size, lines)
        return cls(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), _pages(1), disk, lines)


# Maximum growth per checkpoint (or round): in 20,000 steps, ten descriptors and threads, 4 MiB of memory, 0.5 MiB on
# disk, and 1 KiB of lines per step.
BOUNDS = Held(descriptors=0.01, threads=0.01, memory=4096, disk=512, lines=1024 * EVERY)


class Slope(NamedTuple):
    """Growth of a quantity per sample, with the standard error of its estimate."""

    value: float
    error: float

    @property
    def reach(self) -> float:
        """Half the width of the confidence interval."""
        from scipy import stats

        return float(stats.t.ppf((1 + CONFIDENCE) / 2, BATCHES - 2)) * self.error

    def __sub__(self, other: "Slope") -> "Slope":
        return Slope(self.value - other.value, math.hypot(self.error, other.error))


def slopes(samples: Sequence[Sequence[float]]) -> Held:
    """Returns the slope of each quantity after the warm-up, as the fields of a `Held`."""
    batches = np.array_split(np.arange(warm(len(samples)), len(samples)), BATCHES)
    x = np.array([batch.mean() for batch in batches])
    x -= x.mean()
    found = []
    for values in np.asarray(samples).T:
        y = np.array([np.median(values[batch]) for batch in batches])
        slope = x @ y / (x @ x)
        rest = y - y.mean() - slope * x
        found.append(Slope(float(slope), math.sqrt(rest @ rest / (BATCHES - 2) / (x @ x))))
    return Held(*found)


def warm(count: int) -> int:
    """Returns how many of some samples belong to the warm-up."""
    return max(LEAST_WARM, round(WARM * count))


def _pages(field: int) -> int:
    """Returns a field of `/proc/self/statm` in bytes: 1 is the resident memory, 5 is that of data and stacks."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


class Sampler:
    """Writes a line for each call into a file, and limits the memory of this process after the warm-up."""

    def __init__(self, folder: Path, file: Path, free: int) -> None:
        self._folder, self._file, self._left = folder, file, free

    def __call__(self) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(Held.now(self._folder)) + "\n")
        self._left -= 1
        if not self._left:
            resource.setrlimit(resource.RLIMIT_DATA, (_pages(5) + MEMORY,) * 2)


Go = Callable[[Path, int, Callable[[], None], Sequence[str]], None]


def command(*words: str) -> Go:
    """Returns a function that runs a command which saves checkpoints."""

    def go(folder: Path, steps: int, sample: Callable[[], None], several: Sequence[str]) -> None:
        import jax

        from sdc.tools import cli
        from sdc.train.checkpoints import Checkpoints
        from tests.train import runs  # noqa: F401 - adds the configuration

        save = Checkpoints.save

        def sampled(self: Checkpoints, step: int, state: Any, *given: Any, **options: Any) -> bool:
            if self.due(step):
                assert len(jax.tree.leaves(state)) + 1 == ARRAYS
                self.wait()
                sample()
            return save(self, step, state, *given, **options)

        Checkpoints.save = sampled  # type: ignore[method-assign]
        given = ("--config", "mini", "--steps", steps, "--checkpoint-every", EVERY, "--run", folder, *several)
        code = cli.run([*words, *map(str, given)])
        assert code == 0, code

    return go


def burnin(folder: Path, rounds: int, sample: Callable[[], None], _: Sequence[str]) -> None:
    """Runs the smallest burn-in in sessions."""
    from sdc.burnin import Session, host
    from sdc.tools import cli

    handle, locks = Session._handle, Path(tempfile.mkdtemp())

    def sampled(self: Session, event: Any) -> None:
        if event["event"] == "round":
            sample()
        handle(self, event)

    Session._handle = sampled  # type: ignore[method-assign]
    host.lock_folder = lambda: locks
    words = ["burnin", "--only", "transfers", "--devices", "2", "--run", str(folder)]
    for last in range(SESSION, rounds + 1, SESSION):
        code = cli.run([*words, "--rounds", str(last), *["--resume"][: last > SESSION]])
        assert code == 0, code


def foreign(steps: int, sample: Callable[[], None], keep: Callable[[int, Any, bool], None]) -> None:
    """Trains without this project; calls `keep` with the state at each checkpoint, and whether to restore it too."""
    import jax

    @jax.jit
    def step(state: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, state)

    state = initial()
    for number in range(1, steps + 1):
        state = step(state)
        if number % EVERY == 0:
            sample()
            keep(number, state, number % (10 * EVERY) == 0)


def initial() -> Any:
    """Returns the first state of the foreign loops, which all processes hold."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    everywhere = NamedSharding(Mesh(np.asarray(jax.devices()), ("device",)), PartitionSpec())
    zeros = np.zeros((32, 32), np.float32)
    return {
        f"layer{number}": jax.make_array_from_callback(zeros.shape, everywhere, lambda index: zeros[index])
        for number in range(ARRAYS)
    }


def certify(folder: Path, steps: int, sample: Callable[[], None], _: Sequence[str]) -> None:
    """Certifies the checkpoints of a foreign loop, and restores every tenth."""
    import sdc

    with sdc.certify(_checkpointer(folder)) as checkpointer:

        def keep(step: int, state: Any, restore: bool) -> None:
            checkpointer.save_async(step, state)
            checkpointer.wait()
            if restore:
                assert checkpointer.restore_verified(state)[1] == step

        foreign(steps, sample, keep)


def orbax(folder: Path, steps: int, sample: Callable[[], None], several: Sequence[str]) -> None:
    """Does the same with Orbax alone, in one process or in several, as a control.

    TensorStore 0.1.86 leaks the keys of each object that it converts to JSON, some kilobytes for each array that Orbax
    saves, and JAX's coordinator, in process 0, keeps what it knows of each barrier of Orbax. This project cannot change
    that, and must not leak more.
    """
    if several:
        import jax

        _, coordinator, _, processes, _, process = several
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, int(processes), int(process))
    with contextlib.closing(_checkpointer(folder)) as checkpointer:

        def keep(step: int, state: Any, restore: bool) -> None:
            checkpointer.save_async(step, state).result()
            if restore:
                checkpointer.load(step, state)

        foreign(steps, sample, keep)


def _checkpointer(folder: Path) -> Any:
    from orbax.checkpoint import v1 as ocp

    policy = ocp.training.preservation_policies.LatestN(2)
    return ocp.training.Checkpointer(folder, preservation_policy=policy)


def running(folder: Path, steps: int, sample: Callable[[], None], _: Sequence[str]) -> None:
    """Keeps a running checkpoint of a foreign loop, and recovers from every tenth save."""
    from sdc.checkpoints import RunningCheckpoint

    with RunningCheckpoint(folder, initial(), rows=8) as checkpoint:

        def keep(step: int, state: Any, restore: bool) -> None:
            checkpoint.save(state, step)
            assert checkpoint.wait()
            if restore:
                checkpoint.recover(["layer0"], state)

        foreign(steps, sample, keep)


class Subject(NamedTuple):
    """What is soaked.

    Attributes:
        go: runs one process, given a new folder, the number of steps or rounds, the sampler, and the flags of a run
            with several processes.
        processes: number of processes.
        every: number of steps or rounds between samples.
        part: number of rounds for each step of the other subjects.
        control: subject with as many processes, whose growth of memory is subtracted, process by process.
    """

    go: Go
    processes: int = 1
    every: int = EVERY
    part: float = 1.0
    control: str | None = None


SUBJECTS = {
    "orbax": Subject(orbax),
    "orbax pair": Subject(orbax, processes=2),
    "certify": Subject(certify, control="orbax"),
    "running": Subject(running),
    "train": Subject(command("train"), control="orbax"),
    "twin": Subject(command("twin", "--sync", "none"), processes=2, control="orbax pair"),
    "burnin": Subject(burnin, every=1, part=0.1),
}


def child(name: str, folder: str, file: str, count: str, *several: str) -> None:
    """Runs one process of a subject."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    subject = SUBJECTS[name]
    sample = Sampler(Path(folder), Path(file), warm(int(count) // subject.every))
    subject.go(Path(folder) / "run", int(count), sample, several)


def run(count: int, seed: int, names: Sequence[str] = tuple(SUBJECTS)) -> Tally:
    """Runs subjects for `count` steps, and the burn-in for a tenth of as many rounds; nothing depends on the seed."""
    tally = Tally("soak")
    measured: dict[str, list[Held]] = {}
    counts: dict[str, int] = {}
    for name in names:
        subject = SUBJECTS[name]
        started = time.monotonic()
        size = max(round(count * subject.part), LEAST * subject.every)
        samples = _samples(tally, name, size)
        measured[name] = [slopes(one) for one in samples if len(one) >= LEAST]
        counts[name] = min((len(one) - warm(len(one)) for one in samples), default=0)
        tally.trials += 1
        print(f"  soak: {name}, {size} {'rounds' if subject.part < 1 else 'steps'}", end="")
        print(f" in {time.monotonic() - started:.0f} s", flush=True)
    print(f"  {'growth per checkpoint or round':32}{'slope':>12}{'interval':>26}{'bound':>10}")
    for name, processes in measured.items():
        for process, found in enumerate(processes):
            _judge(tally, name, process, found, measured, counts[name])
    return tally


def _samples(tally: Tally, name: str, size: int) -> list[list[list[float]]]:
    """Runs a subject; returns the samples of each process."""
    processes = SUBJECTS[name].processes
    with socket.socket() as free, tempfile.TemporaryDirectory() as made:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        inside = Path(made) / "inside"
        (inside / "tmp").mkdir(parents=True)
        environment = os.environ | {"TMPDIR": str(inside / "tmp")}  # temporary files count
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", f"{made}/cache")
        files, children = [], []
        for process in range(processes):
            several = ("--coordinator", f"127.0.0.1:{port}", "--processes", processes, "--process", process)
            files.append(Path(made) / f"samples-{process}")
            given = (name, inside, files[-1], size, *several[: 6 * (processes > 1)])
            with (Path(made) / f"output-{process}").open("wb") as output:
                words = [sys.executable, "-c", CHILD, *map(str, given)]
                children.append(subprocess.Popen(words, env=environment, stdout=output, stderr=output))
        deadline = time.monotonic() + LIMIT * (LEAST + size / SUBJECTS[name].every)
        for process, started in enumerate(children):
            where = f"{name}, process {process}"
            try:
                code = started.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                tally.fail("hang", where)
                started.kill()
                code = started.wait()
            said = (Path(made) / f"output-{process}").read_text()
            tally.read(said, where)
            if code:
                tally.fail("odd exit code", f"{code} of {where}: {said[-2000:]}")
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files if file.exists()]


def _judge(tally: Tally, name: str, process: int, found: Held, measured: dict[str, list[Held]], count: int) -> None:
    """Prints and judges the slopes of a process, from `count` samples."""
    subject = SUBJECTS[name]
    for what, slope in found._asdict().items():
        against, bound = "", getattr(BOUNDS, what)
        if what == "memory" and subject.control is not None and measured.get(subject.control):
            slope -= measured[subject.control][process].memory
            against = f" - {subject.control}"
        shorter = max(1.0, SETTLED / count)
        if what == "memory":
            bound = math.inf if name.startswith("orbax") else bound * shorter**2
        elif what == "threads":
            bound *= shorter
        where = f"{name}{f' {process}' if subject.processes > 1 else ''}: {what}{against}"
        low, high = slope.value - slope.reach, slope.value + slope.reach
        print(f"  {where:32}{slope.value:12,.4g}{f'{low:,.4g} to {high:,.4g}':>26}{bound:10,g}", flush=True)
        if low > bound:
            tally.fail("leak", f"{where} grows by {low:,.4g} to {high:,.4g}; expected at most {bound:,g}")
        else:
            tally.note("flat" if high <= bound else "undecided")
