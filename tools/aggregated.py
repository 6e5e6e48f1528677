"""The programs of a run with a way of aggregation: `sdc train --aggregate`."""

import base64
import dataclasses
import functools
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from sdc.aggregation import LossyLog, Recorded, Stopped, Stopwatch, from_workers, gradient_sum, recorded, to_workers
from sdc.aggregation._judge import judge
from sdc.aggregation.speedup import select_threshold
from sdc.record.determinism import program_fingerprint
from sdc.record.records import read_run
from sdc.train.config import TrainConfig
from sdc.train.methods import AUTO, Aggregation, DropCompute, Lossy, Shadow, parse_aggregation
from sdc.train.model import init_params
from sdc.train.parallel import DATA, MODEL
from sdc.train.placement import RANKS, Placement
from sdc.train.replicas import Given, ReplicaMetrics, Replicas, ReplicaState
from sdc.train.step import BATCH_SPEC

from .programs import Programs, fetch, scalar_row

SAMPLED = 100
"""Iterations whose sampled latencies choose a simulated threshold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AggregatedPrograms(Programs):
    """Programs of a run in which every data rank holds its own parameters.

    Attributes:
        aggregation: the methods.
        seed: of what they simulate.
        steps: of the run, for which a log that is replayed must be long enough.
    """

    aggregation: Aggregation
    seed: int
    steps: int

    def __post_init__(self) -> None:
        self.replicas.check(self.placement.mesh.shape[DATA], self.placement.mesh.shape[MODEL])
        try:
            _ = self.replicas.optimizer, self.replicas.noise
        except ValueError as error:
            raise ValueError(f"--aggregate {self.aggregation.text}: {error}") from error
        settings = self.aggregation.dropcompute
        if (
            settings is not None
            and settings.real
            and (self.placement.mesh.shape[MODEL] > 1 or jax.process_count() != self.placement.mesh.shape[DATA])
        ):
            raise ValueError(
                f"--aggregate {self.aggregation.text}: a real clock needs one process of one device for each of the "
                f"{self.placement.mesh.shape[DATA]} data ranks (--coordinator, --processes, --process); "
                "simulate with latency=..., as in latency=lognormal,mean=0.1,std=0.05"
            )

    @functools.cached_property
    def replicas(self) -> Replicas:
        """The step, with what it simulates or replays."""
        data, config = self.placement.mesh.shape[DATA], self.config
        settings, method = self.aggregation.dropcompute, self.aggregation.method
        completed = losses = None
        threshold = math.inf
        if settings is not None and settings.replay is not None:
            micro_batches = Replicas(config, self.aggregation).micro_batches
            completed = _completed_log(Path(settings.replay), data, self.steps, micro_batches)
        elif settings is not None:
            threshold = settings.threshold
            if threshold == AUTO and settings.latency is not None:
                micro_batches = Replicas(config, self.aggregation).micro_batches
                sampled = settings.latency.sample(jax.random.key(self.seed), (SAMPLED, data, micro_batches))
                threshold = select_threshold(np.asarray(sampled), settings.serial).threshold
            elif not threshold > 0 and threshold != AUTO:
                raise ValueError(
                    f"--aggregate {self.aggregation.text}: threshold={threshold}: expected seconds above 0"
                )
        if isinstance(method, Lossy) and method.replay is not None:
            losses = _losses_log(Path(method.replay), config, method.packet, self.steps)
            if losses[0].arrived.shape[1] != data:
                ranks = losses[0].arrived.shape[1]
                raise ValueError(f"replay={method.replay}: a log of {ranks} data ranks does not fit --data {data}")
        return Replicas(config, self.aggregation, self.seed, threshold, completed, losses)

    @functools.cached_property
    def state_specs(self) -> Any:
        """Parameters with an axis of data ranks in front, everything else with an axis for each axis of the mesh."""
        data, model = (self.placement.mesh.shape[axis] for axis in (DATA, MODEL))
        params = jax.eval_shape(lambda: init_params(self.config.model, jax.random.key(0)))

        def structure(params: Any) -> Any:
            one = jax.vmap(lambda _: self.replicas.init(params), axis_name=MODEL, axis_size=model)
            return jax.vmap(one, axis_name=DATA, axis_size=data)(jnp.zeros((data, model)))

        specs = jax.tree.map(lambda _: P(DATA, MODEL), jax.eval_shape(structure, params))
        return specs._replace(step=P(), params=jax.tree.map(lambda spec: P(DATA, *spec), self.replicas.specs))

    @property
    def metrics_specs(self) -> Any:
        whole: Any = P()
        return ReplicaMetrics(whole, whole, whole, None, RANKS)

    def _make(self, key: Any) -> Any:
        """The state before the first step."""
        init = jax.shard_map(
            lambda params: _stacked(self.replicas.init(params)),
            mesh=self.placement.mesh, in_specs=(self.replicas.specs,), out_specs=self.state_specs, check_vma=False,
        )  # fmt: skip
        return init(init_params(self.config.model, key))

    def initial_state(self, seed: int) -> Any:
        return jax.jit(self._make, out_shardings=self.state_shardings)(jax.random.key(seed))

    def abstract_state(self) -> Any:
        state = jax.eval_shape(self._make, jax.random.key(0))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, self.state_shardings
        )

    @property
    def device_step(self) -> Callable[..., Any]:
        def step(state: ReplicaState, tokens: Any, given: Given | None = None) -> tuple[ReplicaState, ReplicaMetrics]:
            state, metrics = self.replicas.step(_unstacked(state), tokens, given)
            return _stacked(state), metrics

        return step

    def describe(self, metrics: Any) -> Mapping[str, Any]:
        return {"aggregation": _row(jax.tree.map(lambda x: x[:, 0], metrics.reports))}

    def advance(
        self, state: Any, tokens: Any, key: Any, step: int
    ) -> tuple[Any, Mapping[str, Any], Sequence[Mapping[str, Any]]]:
        if self._clocked is None:
            return super().advance(state, tokens, key, step)
        started = time.perf_counter()
        given, stopped = self._clocked.run(state, tokens)
        state, metrics = self.join(state, (tokens, given))
        metrics = fetch(metrics)
        told = self._clocked.tell(stopped, time.perf_counter() - started - stopped.seconds)
        row = {**scalar_row(metrics, rate=float(metrics.learning_rate)), **self.describe(metrics)}
        row["aggregation"] |= told
        return state, row, []

    @functools.cached_property
    def join(self) -> jax.stages.Wrapped:
        """`(state, (tokens, given)) -> (state, metrics)`, jitted: the step after what real workers accumulated."""
        params = jax.eval_shape(lambda: init_params(self.config.model, jax.random.key(0)))
        given = jax.tree.map(lambda _: P(DATA), Given(jax.eval_shape(gradient_sum, params), jnp.int32(0)))

        def fn(state: Any, shared: tuple[Any, Given]) -> Any:
            tokens, mine = shared
            return self.device_step(state, tokens, jax.tree.map(lambda leaf: leaf[0], mine))

        mapped = self.placement.map(
            fn, stacked=self.state_specs, shared=(BATCH_SPEC, given), out=(self.state_specs, self.metrics_specs)
        )
        return jax.jit(mapped, donate_argnums=0)

    def fingerprint(self) -> dict[str, str]:
        if self._clocked is None:
            return super().fingerprint()
        data, mesh = self.placement.mesh.shape[DATA], self.placement.mesh
        params = jax.eval_shape(lambda: init_params(self.config.model, jax.random.key(0)))
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((data, *x.shape), x.dtype, sharding=NamedSharding(mesh, P(DATA))),
            jax.eval_shape(lambda params: Given(gradient_sum(params), jnp.int32(0)), params),
        )
        lowered = self.join.lower(self.abstract_state(), (self.abstract_batch(), given))
        return {"join": program_fingerprint(lowered)}

    @functools.cached_property
    def _clocked(self) -> "_Clocked | None":
        settings = self.aggregation.dropcompute
        return _Clocked(self.replicas, self.placement, settings) if settings is not None and settings.real else None

    def conclusion(self, state: Any) -> Mapping[str, Any]:
        """What a shadow replica says of the ranks."""
        if not isinstance(self.aggregation.method, Shadow):
            return {}
        found = judge(jax.tree.map(lambda leaf: leaf[0, 0], fetch(state.roles)))
        return {"verdict": found.verdict, "reason": found.reason, "shadow": found._asdict()}


class _Clocked:
    """One process of DropCompute on a real clock, and the choice of its threshold."""

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


def _stacked(state: ReplicaState) -> ReplicaState:
    """A device's state with the leading axes of its place on the mesh."""
    params = jax.tree.map(lambda leaf: leaf[None], state.params)
    rest = jax.tree.map(lambda leaf: leaf[None, None], (state.optimizer, state.noise, state.roles))
    return ReplicaState(state.step, params, *rest)


def _unstacked(state: ReplicaState) -> ReplicaState:
    params = jax.tree.map(lambda leaf: leaf[0], state.params)
    rest = jax.tree.map(lambda leaf: leaf[0, 0], (state.optimizer, state.noise, state.roles))
    return ReplicaState(state.step, params, *rest)


def _row(reports: Mapping[str, Any]) -> dict[str, Any]:
    """Reports of all data ranks as the line of a step has them; what all ranks say alike, once."""
    row: dict[str, Any] = {}
    for name, value in reports.items():
        if name == "lossy":
            row |= {key: float(leaf[0]) for key, leaf in value.items()}
        elif name == "log":
            row["lost"] = {key: _packed(leaf) for key, leaf in value.items()}
        elif name == "shadow":
            one = jax.tree.map(lambda leaf: leaf[0], value)
            row |= {
                "watched": int(one.watched), "spares": one.spares, "differed": bool(one.differed),
                "repeats": bool(one.repeats), "blamed": np.flatnonzero(one.blamed),
                "mismatched": one.difference.mismatched, "checked": one.difference.checked,
            }  # fmt: skip
        elif name in ("period", "next", "synchronizations"):
            row[name] = int(value[0])
        else:
            row[name] = value
    return row


def _packed(arrived: Any) -> str:
    """A log of arrivals as text: shape, and bytes, compressed."""
    shape = "x".join(map(str, arrived.shape))
    return f"{shape}:{base64.b64encode(zlib.compress(np.ascontiguousarray(arrived).tobytes(), 9)).decode()}"


def _unpacked(text: str) -> np.ndarray:
    shape, _, data = text.partition(":")
    return np.frombuffer(zlib.decompress(base64.b64decode(data)), np.uint8).reshape([int(n) for n in shape.split("x")])


def _lines(folder: Path, what: str, steps: int) -> list[Mapping[str, Any]]:
    """What the lines of a recorded run say of its aggregation."""
    rows = [row.get("aggregation", {}) for row in read_run(folder).steps]
    if len(rows) < steps:
        raise ValueError(
            f"replay={folder}: a log of {len(rows)} steps, fewer than --steps {steps}; give --steps {len(rows)}"
        )
    if not rows or any(what not in row for row in rows):
        raise ValueError(f"replay={folder}: this run has no log of {what!r} to replay; name a run with that method")
    return rows


def _completed_log(folder: Path, data: int, steps: int, micro_batches: int) -> np.ndarray:
    manifest = read_run(folder).manifest
    settings = parse_aggregation(str(manifest.get("aggregate", ""))).dropcompute if "aggregate" in manifest else None
    if settings is None:
        raise ValueError(f"replay={folder}: this run was no run of dropcompute; name one that was")
    recorded_cut = settings.micro_batches or manifest["config"]["microsteps"]
    if recorded_cut != micro_batches:
        raise ValueError(
            f"replay={folder}: a log of {recorded_cut} micro-batches does not fit {micro_batches}; "
            f"give micro_batches={recorded_cut}"
        )
    counts = np.asarray([row["completed"] for row in _lines(folder, "completed", steps)], np.int32)
    if counts.ndim != 2 or counts.shape[1] != data:
        raise ValueError(f"replay={folder}: a log of {counts.shape[-1]} data ranks does not fit --data {data}")
    if counts.min() < 0 or counts.max() > micro_batches:
        raise ValueError(
            f"replay={folder}: its log has ranks that completed {counts.min()} to {counts.max()} of {micro_batches} "
            "micro-batches; it is damaged"
        )
    return counts


def _losses_log(folder: Path, config: TrainConfig, packet: int | None, steps: int) -> tuple[Recorded, Recorded]:
    logs = [
        LossyLog(*(jnp.asarray(_unpacked(row["lost"][name])) for name in LossyLog._fields))
        for row in _lines(folder, "lost", steps)
    ]
    params = jax.eval_shape(lambda: init_params(config.model, jax.random.key(0)))
    try:
        return recorded(logs, params, packet=packet)
    except ValueError as error:
        raise ValueError(f"replay={folder}: {error}") from error
