"""DropCompute on a real clock: a process runs micro-batches on its own devices until the threshold has passed.

Giladi et al. (arXiv:2306.10598), algorithm 1. What it can do for a step:

    watch = Stopwatch(accumulate(loss), threshold)
    mine = watch.run(gradient_sum(params), micro_batches, params)        # on this process's devices, no collective
    total, completed = to_workers((mine.carry, jnp.int32(mine.completed)), "data", mesh)
    params, state = join(total, completed, params, state)                 # jit(shard_map(...)): combine and optimizer

`mine.completed` of every process and step is all that a replay needs (`dropcompute.masked`).
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .assignment import Tree
from .dropcompute import Work, work_if


class Stopped(NamedTuple):
    """What a worker got done.

    Attributes:
        carry: the carry after the last completed micro-batch.
        completed: how many micro-batches are in it.
        latencies: seconds of each of them, from the end of the one before.
        seconds: time from the start to the end of the last one.
    """

    carry: Tree
    completed: int
    latencies: tuple[float, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """Runs micro-batches until a threshold has passed.

    As long as a micro-batch in flight is expected to end before the threshold (by the mean of those that have ended),
    the next one is dispatched behind it, so that the device never waits for the clock. Close to the threshold its end
    is awaited. At most one micro-batch is therefore in flight when the threshold passes. A device cannot be stopped
    within a program: that micro-batch is counted as completed, since its sum is there when the all-reduce can begin.

    Attributes:
        work: what one micro-batch does, without collectives; compiled once for each shape.
        threshold: seconds; infinity for none.

    Raises:
        ValueError: the threshold is not above 0.
    """

    work: Work
    threshold: float

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ValueError(f"threshold={self.threshold}: expected seconds above 0, or infinity")

    @functools.cached_property
    def _run(self) -> Callable[..., Tree]:
        return jax.jit(functools.partial(work_if, self.work))

    def at(self, threshold: float) -> "Stopwatch":
        """The same with another threshold, without compiling anew."""
        other = dataclasses.replace(self, threshold=threshold)
        other.__dict__["_run"] = self._run
        return other

    def run(
        self,
        carry: Tree,
        batches: Iterable[Tree],
        context: Tree = None,
        *,
        delays: Sequence[float] | None = None,
        completed: int | None = None,
    ) -> Stopped:
        """One step of this worker.

        Args:
            carry, context: see `masked`.
            batches: micro-batches, in order.
            delays: simulated seconds that the worker stands still before each micro-batch; the threshold cuts them
                short. None for real hardware.
            completed: ignore the clock and complete so many, as a log says; None to decide by the clock.

        Raises:
            ValueError: a number is negative or not finite, or there are fewer delays, or fewer micro-batches than
                `completed`, than needed.
        """
        if completed is not None and completed < 0:
            raise ValueError(f"completed={completed}: expected a number of micro-batches of at least 0")
        if delays is not None and not all(0 <= delay < math.inf for delay in delays):
            raise ValueError(f"delays={list(delays)}: expected finite seconds of at least 0")
        started = time.perf_counter()
        deadline = started + (self.threshold if completed is None else math.inf)
        ends: list[float] = []
        flying: list[Any] = []

        def land() -> None:
            """Waits for the oldest micro-batch in flight."""
            jax.block_until_ready(flying.pop(0))
            ends.append(time.perf_counter())

        done = 0
        for number, batch in enumerate(batches):
            if done == completed:
                break
            if delays is not None and completed is None:
                if number >= len(delays):
                    raise ValueError(f"{len(delays)} delays for {number + 1} micro-batches or more; give one for each")
                while flying:  # whoever stands still has nothing in flight
                    land()
                time.sleep(max(0.0, min(delays[number], deadline - time.perf_counter())))
            while flying and self._late(started, deadline, ends, len(flying)):
                land()
            if time.perf_counter() >= deadline:
                break
            carry = self._run(True, carry, batch, context)
            flying.append(carry)
            done += 1
            if len(flying) > 1:
                land()
        if completed is not None and done < completed:
            raise ValueError(f"{done} micro-batches, where the log says that {completed} were completed; give the same")
        while flying:
            land()
        latencies = tuple(end - start for start, end in zip([started, *ends], ends, strict=False))
        return Stopped(carry, done, latencies, time.perf_counter() - started)

    @staticmethod
    def _late(started: float, deadline: float, ends: Sequence[float], flying: int) -> bool:
        """Whether what is in flight may not end before the deadline; unknown before anything has ended."""
        if deadline == math.inf:
            return False
        if not ends:
            return True
        mean = (ends[-1] - started) / len(ends)
        return ends[-1] + flying * mean >= deadline


def to_workers(tree: Tree, axis_name: str, mesh: Mesh) -> Tree:
    """Global arrays with a leading axis of workers, from what each process has: its own arrays, one worker a process.

    Args:
        tree: arrays of this process, whose shapes are the same in all processes.
        axis_name: the axis of the workers.
        mesh: a mesh whose `axis_name` runs over the processes, one device each.
    """
    sharding = NamedSharding(mesh, P(axis_name))
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf[None]), tree)


def from_workers(tree: Tree) -> Tree:
    """This process's arrays of global ones with a leading axis of workers."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0)[0], tree)
