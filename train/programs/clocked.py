"""DropCompute on a real clock: every process watches its own, and the step takes what it has completed."""

import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from sdc.aggregation import Stopped, Stopwatch, from_workers, gradient_sum, select_threshold, to_workers
from sdc.records import program_fingerprint

from .. import AUTO, DATA, MODEL, DropCompute, Given, Placement, Replicas, fetch, init_params
from .device import Placed, described, scalar_row
from .protocol import Rows


@dataclasses.dataclass(frozen=True, eq=False)
class ClockedProgram(Placed):
    """Trains one copy on several processes, each of which stops at the threshold by its own clock.

    Attributes:
        work: the step, made of `replicas`.
        placement: one device for each process.
        replicas: the step's parts.
        donate: whether a step takes the memory of the state that it is given.
    """

    replicas: Replicas
    donate: bool = True

    @functools.cached_property
    def compiled(self) -> jax.stages.Wrapped:
        """`(state, (tokens, given)) -> (state, metrics)`, jitted: the step after what real workers accumulated."""
        given = jax.tree.map(lambda _: P(DATA), Given(jax.eval_shape(gradient_sum, self._params), jnp.int32(0)))
        fn: Any = self.work.fn

        def join(state: Any, shared: tuple[Any, Given]) -> Any:
            tokens, mine = shared
            return fn(state, tokens, jax.tree.map(lambda leaf: leaf[0], mine))

        return self.jitted(join, given, donate=self.donate)

    @property
    def _params(self) -> Any:
        return jax.eval_shape(lambda: init_params(self.work.config.model, jax.random.key(0)))

    @functools.cached_property
    def _clock(self) -> "_Clock":
        settings = self.replicas.aggregation.dropcompute
        assert settings is not None
        return _Clock(self.replicas, self.placement, settings)

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        del number
        started = time.perf_counter()
        given, stopped = self._clock.run(state, batch)
        state, metrics = self.compiled(state, (batch, given))
        metrics = fetch(metrics)
        return state, (metrics, self._clock.tell(stopped, time.perf_counter() - started - stopped.seconds))

    def rows(self, number: int, out: Any, seen: Any) -> Rows:
        metrics, told = out
        row = {**scalar_row(metrics, rate=float(metrics.learning_rate)), **self.work.describe(metrics)}
        return Rows({**row, "aggregation": {**row["aggregation"], **told}})

    def fingerprint(self) -> dict[str, str]:
        data, mesh = self.placement.mesh.shape[DATA], self.placement.mesh
        one = jax.eval_shape(lambda params: Given(gradient_sum(params), jnp.int32(0)), self._params)
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((data, *x.shape), x.dtype), one)
        given = described(stacked, jax.tree.map(lambda _: NamedSharding(mesh, P(DATA)), stacked))
        return {"join": program_fingerprint(self.compiled.lower(self.abstract(), (self.batch, given)))}


class _Clock:
    """The clock of one process, and the choice of its threshold."""

    def __init__(self, replicas: Replicas, placement: Placement, settings: DropCompute) -> None:
        self.replicas, self.placement, self.settings = replicas, placement, settings
        self.measuring = settings.threshold == AUTO
        # The model's collectives need their axis, also where it has one rank.
        here = Mesh(np.asarray(jax.local_devices()[:1]), (MODEL,))
        work = jax.shard_map(replicas.work, mesh=here, in_specs=P(), out_specs=P(), check_vma=False)
        self.watch = Stopwatch(work, math.inf if self.measuring else settings.threshold)
        self.compiled = self.joined = False
        self.latencies: list[Any] = []
        self.serial: list[float] = []

    def run(self, state: Any, tokens: Any) -> tuple[Given, Stopped]:
        """What this process completes, for all of them, and for itself."""
        params = from_workers(state.params)
        batches = list(self.replicas.cut(tokens.addressable_data(0)))
        if not self.compiled:  # the time that this takes is not the micro-batch's
            self.watch.run(gradient_sum(params), batches, params, completed=1)
            self.compiled = True
        stopped = self.watch.run(gradient_sum(params), batches, params)
        given = Given(stopped.carry, jnp.int32(stopped.completed))
        return to_workers(given, DATA, self.placement.mesh), stopped

    def tell(self, stopped: Stopped, rest: float) -> dict[str, Any]:
        """The clock's part of the line of a step; after enough steps it chooses the threshold, alike everywhere."""
        told: dict[str, Any] = {"threshold": self.watch.threshold}
        if self.measuring:
            mine = np.asarray([*stopped.latencies, rest])
            everyone = multihost_utils.process_allgather(mine)
            told |= {"latencies": everyone[:, :-1], "serial": float(everyone[:, -1].min())}
            if self.joined:  # the first all-reduce compiles
                self.latencies.append(everyone[:, :-1])
                self.serial.append(told["serial"])
            self.joined = True
            if len(self.latencies) >= self.settings.measure:
                choice = select_threshold(np.stack(self.latencies), np.asarray(self.serial))
                self.watch = self.watch.at(choice.threshold)
                self.measuring = False
                told["chosen"] = choice._asdict()
        return told
