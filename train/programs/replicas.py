"""Data parallelism with all parameters on every data rank: the step for all methods of `sdc.aggregation`.

If aggregated gradients are wrong, lost or omitted, ranks no longer agree, so each rank needs its own parameters; the
ZeRO-1 step in `step` has only one copy of the parameters. This step runs per device with the axes `data` and `model`
bound, as `step.device_step` does, and does not depend on a mesh.
"""

import base64
import dataclasses
import functools
import math
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8

from sdc.aggregation import (
    Aggregation,
    Dropped,
    LossyLog,
    Mean,
    Own,
    Recorded,
    Shadowed,
    Stopwatch,
    Sum,
    accumulate,
    around,
    completed_before,
    drop_rate,
    from_workers,
    gradient_noise,
    gradient_sum,
    judge,
    masked,
    parse_aggregation,
    recorded,
    select_threshold,
    to_workers,
)
from sdc.multihost import everyone
from sdc.program import probe
from sdc.records import read_manifest, read_record
from sdc.settings import SettingError

from .config import TrainConfig
from .device import DeviceStep, Program, StepRows, scalar_row
from .model import DATA, MODEL, Params, cross_entropy, global_norm, init_params, logits, param_specs
from .placement import RANKS, Placement, fetch
from .step import adamw, learning_rate

GRADIENT = "gradient"  # name of the probe of the aggregated gradients, for faults: `fwd/gradient/...`


class ReplicaState(NamedTuple):
    step: Int[Array, ""]  # steps done
    params: Params  # master parameters of this rank, in full width, float32
    optimizer: Any  # state of the optimizer and its wrappers
    noise: Any  # state of the simulated noise
    roles: Any  # roles and counts of a shadow replica


class ReplicaMetrics(NamedTuple):
    loss: Float[Array, ""]  # mean over the computed sequences, in nats per token, float32
    # Euclidean norm of the aggregated gradient before clipping, averaged over the data ranks
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]  # learning rate of this step
    gradient: None  # None: ranks may have different gradients
    reports: Any  # reports of the methods, on this device; see `report`


class Given(NamedTuple):
    """The sums that a worker with a real clock accumulated outside the step."""

    total: Sum
    completed: Int32[Array, ""]


@dataclasses.dataclass(frozen=True, eq=False)
class Replicas:
    """The step of a configuration with aggregation methods."""

    config: TrainConfig
    aggregation: Aggregation
    seed: int = 0  # seed of simulated noise, latencies and losses
    threshold: float = float("inf")  # threshold of DropCompute, if latencies are simulated
    # completed micro-batches by step and data rank, if a run of DropCompute is replayed
    completed: np.ndarray | None = None
    # channels of gradients and parameters, if a run with lost packets is replayed
    losses: tuple[Recorded, Recorded] | None = None

    @functools.cached_property
    def specs(self) -> Params:
        return jax.tree.map(lambda spec: P(*(None if axis == DATA else axis for axis in spec)), self._spread)

    @functools.cached_property
    def _spread(self) -> Params:
        return param_specs(self.config.model)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """AdamW with clipping and a learning-rate schedule, inside the wrappers of the aggregation methods."""
        config = self.config.optimizer
        # The optimizer of ZeRO-2 sees flat shards, one per data rank.
        norm = functools.partial(
            global_norm, specs=self._spread, axes=() if self.aggregation.lossy is None else (DATA,)
        )

        def clip(gradient: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            del params
            scale = config.clip / jnp.maximum(norm(gradient), config.clip)
            return jax.tree.map(lambda leaf: leaf * scale, gradient), state

        plain = optax.chain(
            optax.GradientTransformation(lambda params: optax.EmptyState(), clip),
            adamw(config, self._spread),
            optax.scale_by_schedule(lambda step: -learning_rate(config, step)),
        )
        return around(plain, self.aggregation, DATA, seed=self.seed, replica_axes=(MODEL,), channels=self.losses)

    @functools.cached_property
    def noise(self) -> optax.GradientTransformation | None:
        settings = self.aggregation.noise
        if settings is None:
            return None
        noise = functools.partial(gradient_noise, DATA, **vars(settings), seed=self.seed)
        # Arrays replicated over a worker's model ranks stay replicated.
        sharded = jax.tree.map(lambda spec: MODEL in spec, self._spread)
        common = jax.tree.map(lambda spec: MODEL not in spec, self._spread)
        return optax.chain(
            optax.masked(noise(shard_axes=(MODEL,)), sharded),
            optax.masked(noise(), common),
        )

    @property
    def micro_batches(self) -> int:
        return self.aggregation.micro_batches(self.config.microsteps)

    @functools.cached_property
    def combining(self) -> Any:
        if spares := self.aggregation.spares:
            return Shadowed(spares)
        return Mean() if self.aggregation.lossy is None else Own()

    @functools.cached_property
    def work(self) -> Callable[[Any, Any, Any], Any]:
        """Function that accumulates gradients over one micro-batch of sequences, with collectives over `model` only."""
        dtype = self.config.model.dtype

        def share(params: Params, tokens_BS: Int[Array, "batch length"]) -> Float[Array, ""]:
            narrow = jax.tree.map(lambda param: param.astype(dtype), params)
            nll_BS = cross_entropy(logits(self.config.model, narrow, tokens_BS[:, :-1]), tokens_BS[:, 1:])
            return jnp.mean(nll_BS) / lax.axis_size(MODEL)

        return accumulate(share)

    def cut(self, tokens: Int[Array, "microsteps batch length"]) -> Int[Array, "micro_batches batch length"]:
        return tokens.reshape(self.micro_batches, -1, tokens.shape[-1])

    def init(self, params: Params) -> ReplicaState:
        with jax.numpy_dtype_promotion("standard"):
            optimizer = self.optimizer.init(params)
        return ReplicaState(
            jnp.zeros((), jnp.int32),
            params,
            optimizer,
            () if self.noise is None else self.noise.init(params),
            self.combining.init(params, lax.axis_size(DATA)),
        )

    def step(
        self, state: ReplicaState, tokens: Int[Array, "microsteps batch length"], given: Given | None = None
    ) -> tuple[ReplicaState, ReplicaMetrics]:
        report: dict[str, Any] = {}
        settings = self.aggregation.dropcompute
        if settings is None:
            found = self.combining.combine(self.gradient, DATA, state.params, tokens, state.roles)
            if isinstance(self.combining, Shadowed):
                report["shadow"] = found.report.shadow
        else:
            total, report["completed"] = given or self._until_threshold(state, tokens)
            dropped = 0.0  # the mean drop rate, if known beforehand
            if settings.latency is not None:
                with jax.ensure_compile_time_eval():
                    latencies = settings.latency.sample(jax.random.key(self.seed), (4096, self.micro_batches))
                    dropped = drop_rate(np.asarray(latencies), self.threshold)
            found = Dropped(self.micro_batches, settings.correction, dropped).gather(
                self._over_model(total), DATA, report["completed"], state.params, own=self.aggregation.lossy is not None
            )
        gradient, noise = found.gradient, state.noise
        if self.noise is not None:
            gradient, noise = self.noise.update(gradient, noise)
        gradient = probe(gradient, GRADIENT, directions=("fwd",))

        rate = learning_rate(self.config.optimizer, state.step)
        with jax.numpy_dtype_promotion("standard"):  # optax raises Python floats to integer powers
            params, optimizer = found._replace(gradient=gradient).apply(self.optimizer, state.params, state.optimizer)
        if self.aggregation.lossy is not None:
            norm = global_norm(optimizer.previous, self._spread)
            report |= {"lossy": optimizer.report._asdict(), "log": optimizer.log._asdict()}
        else:
            norm = lax.pmean(global_norm(gradient, self._spread, axes=()), DATA)
        if hasattr(optimizer, "divergence"):
            last = optimizer.divergence
            report |= {"divergence": last.measured, "expected_divergence": last.expected}
            report |= {"synchronized": last.gap > 0}
            schedule = ("period", "next", "synchronizations")
            report |= {name: getattr(optimizer, name) for name in schedule if hasattr(optimizer, name)}
        return (
            ReplicaState(state.step + 1, params, optimizer, noise, found.state),
            ReplicaMetrics(found.report.loss, norm, rate, None, report),
        )

    def gradient(
        self, params: Params, tokens: Int[Array, "microsteps batch length"]
    ) -> tuple[Float32[Array, ""], Params]:
        """Returns this worker's mean loss and gradient over all its micro-batches."""
        total, _ = lax.scan(
            lambda total, batch: (self.work(total, batch, params), None), gradient_sum(params), self.cut(tokens)
        )
        total, count = self._over_model(total), jnp.float32(self.micro_batches)
        return total.loss / count, jax.tree.map(lambda leaf: leaf / count, total.gradient)

    def _until_threshold(self, state: ReplicaState, tokens: Int[Array, "microsteps batch length"]) -> Given:
        """Returns sums over the micro-batches that a simulated or recorded worker completes."""
        settings = self.aggregation.dropcompute
        if self.completed is not None:
            completed = jnp.asarray(self.completed, jnp.int32)[state.step, lax.axis_index(DATA)]
        else:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), state.step), lax.axis_index(DATA))
            assert settings is not None
            assert settings.latency is not None  # `ClockedProgram` runs if the clock is real
            latencies = settings.latency.sample(key, (self.micro_batches,))
            completed = completed_before(latencies, jnp.float32(self.threshold))
        return Given(
            masked(self.work, gradient_sum(state.params), self.cut(tokens), completed, state.params), completed
        )

    def _over_model(self, total: Sum) -> Sum:
        """Sums the model ranks' parts of the loss and of the gradients of replicated parameters."""
        gradient = jax.tree.map(
            lambda leaf, spec: leaf if MODEL in spec else lax.psum(leaf, MODEL), total.gradient, self._spread
        )
        return Sum(lax.psum(total.loss, MODEL), gradient)


SAMPLED = 100  # number of iterations whose sampled latencies determine a simulated threshold


def make_replicas(
    config: TrainConfig, aggregation: Aggregation, placement: Placement, *, seed: int, steps: int
) -> Replicas:
    """Returns the step of a configuration with aggregation methods, for a given placement.

    Args:
        config: the configuration.
        aggregation: the methods.
        placement: the layout over devices.
        seed: seed of the methods' simulations.
        steps: number of steps of the run; a replayed log must have at least this number.

    Raises:
        SettingError: the methods do not fit the mesh, or a replayed log does not fit the run.
    """
    data, model = (placement.mesh.shape[axis] for axis in (DATA, MODEL))
    settings, lossy, micro = aggregation.dropcompute, aggregation.lossy, aggregation.micro_batches(config.microsteps)
    threshold, completed, losses = math.inf, None, None
    try:
        aggregation.check(data=data, model=model, batch_size=config.batch_size, microsteps=config.microsteps)
        if settings is not None and settings.replay is not None:
            completed = completed_log(settings.replay, data, steps, micro)
        elif settings is not None:
            if not isinstance(settings.threshold, str):
                threshold = settings.threshold
            elif settings.latency is not None:
                sampled = settings.latency.sample(jax.random.key(seed), (SAMPLED, data, micro))
                threshold = select_threshold(np.asarray(sampled), settings.serial).threshold
        if lossy is not None and lossy.replay is not None:
            losses = losses_log(lossy.replay, config, lossy.packet, data, steps)
        replicas = Replicas(config, aggregation, seed, threshold, completed, losses)
        _ = replicas.optimizer, replicas.noise
    except SettingError:
        raise
    except ValueError as error:
        raise SettingError("aggregate", str(aggregation), str(error)) from error
    if aggregation.clocked and jax.process_count() != data:
        raise aggregation.no_clock(data)
    return replicas


def replicated(replicas: Replicas, placement: Placement) -> DeviceStep:
    """Returns the step in the form that programs use: parameters have a leading axis of data ranks, and all other
    arrays have one leading axis for each mesh axis.

    Args:
        replicas: see `make_replicas`.
        placement: the layout over devices.
    """
    data, model = (placement.mesh.shape[axis] for axis in (DATA, MODEL))

    def structure() -> Any:
        params = init_params(replicas.config.model, jax.random.key(0))
        one = jax.vmap(lambda _: replicas.init(params), axis_name=MODEL, axis_size=model)
        return jax.vmap(one, axis_name=DATA, axis_size=data)(jnp.zeros((data, model)))

    specs = jax.tree.map(lambda _: P(DATA, MODEL), jax.eval_shape(structure))
    specs = specs._replace(step=P(), params=jax.tree.map(lambda spec: P(DATA, *spec), replicas.specs))
    whole: Any = P()

    def init(key: Any) -> Any:
        start = jax.shard_map(
            lambda params: _placed(replicas.init(params), lambda leaf, axes: leaf[(None,) * axes]),
            mesh=placement.mesh, in_specs=(replicas.specs,), out_specs=specs, check_vma=False,
        )  # fmt: skip
        return start(init_params(replicas.config.model, key))

    def describe(metrics: ReplicaMetrics) -> Mapping[str, Any]:
        return {"aggregation": aggregation_row(jax.tree.map(lambda x: x[:, 0], metrics.reports))}

    def conclude(state: ReplicaState) -> Mapping[str, Any]:
        """Returns the findings of a shadow replica about the ranks."""
        if not isinstance(replicas.combining, Shadowed):
            return {}
        found = judge(jax.tree.map(lambda leaf: leaf[0, 0], fetch(state.roles)))
        return {"verdict": found.verdict, "reason": found.reason, "shadow": found._asdict()}

    def fn(state: ReplicaState, tokens: Any, given: Given | None = None) -> tuple[ReplicaState, ReplicaMetrics]:
        mine = _placed(state, lambda leaf, axes: leaf[(0,) * axes])
        state, metrics = replicas.step(mine, tokens, given)
        return _placed(state, lambda leaf, axes: leaf[(None,) * axes]), metrics

    metrics_specs = ReplicaMetrics(whole, whole, whole, None, RANKS)
    return DeviceStep(replicas.config, fn, specs, metrics_specs, init, describe, conclude)


def _placed(state: ReplicaState, change: Callable[[Any, int], Any]) -> ReplicaState:
    """Adds or removes the leading mesh axes of a device's state: one axis for parameters, two for everything else
    except the step."""
    params = jax.tree.map(lambda leaf: change(leaf, 1), state.params)
    rest = jax.tree.map(lambda leaf: change(leaf, 2), (state.optimizer, state.noise, state.roles))
    return ReplicaState(state.step, params, *rest)


@dataclasses.dataclass(frozen=True, eq=False)
class ClockedProgram(Program):
    """A program that trains one copy on several processes, each of which stops when its own clock reaches the
    threshold.

    Attributes:
        work: the step, made from `replicas`.
        placement: one device for each process.
        replicas: the parts of the step.
        donate: whether a step reuses the memory of its input state.
    """

    replicas: Replicas

    @functools.cached_property
    def compiled(self) -> jax.stages.Wrapped:
        """Jitted function `(state, (tokens, given)) -> (state, metrics)`: computes the step from the sums that real
        workers accumulated."""
        fn: Any = self.work.fn

        def join(state: Any, shared: tuple[Any, Given]) -> Any:
            tokens, mine = shared
            return fn(state, tokens, jax.tree.map(lambda leaf: leaf[0], mine))

        return self.jitted(join, jax.tree.map(lambda _: P(DATA), self._given))

    @functools.cached_property
    def _given(self) -> Any:
        """Shapes and types of one worker's inputs to a step."""
        model = self.work.config.model
        return jax.eval_shape(lambda: Given(gradient_sum(init_params(model, jax.random.key(0))), jnp.int32(0)))

    @functools.cached_property
    def _clock(self) -> "_Clock":
        return _Clock(self.replicas, self.placement)

    def step(self, state: Any, batch: Any, number: int) -> tuple[Any, Any]:
        del number
        started = time.perf_counter()
        given, stopped = self._clock.run(state, batch)
        state, metrics = self.executables["step"](state, (batch, given))
        metrics = fetch(metrics)
        return state, (metrics, self._clock.row(stopped, time.perf_counter() - started - stopped.seconds))

    def rows(self, number: int, out: Any, seen: Any) -> StepRows:
        metrics, clock = out
        row = {**scalar_row(metrics), **self.work.describe(metrics)}
        return StepRows({**row, "aggregation": {**row["aggregation"], **clock}})

    def beside(self) -> Any:
        sharding = NamedSharding(mesh := self.placement.mesh, P(DATA))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((mesh.shape[DATA], *x.shape), x.dtype, sharding=sharding), self._given
        )

    def fingerprint(self) -> dict[str, str]:
        return {"join": super().fingerprint()["step"]}


class _Clock:
    """The clock of one process, which also chooses the threshold of DropCompute."""

    def __init__(self, replicas: Replicas, placement: Placement) -> None:
        self.replicas, self.mesh = replicas, placement.mesh
        assert replicas.aggregation.dropcompute is not None
        self.settings = replicas.aggregation.dropcompute
        threshold = self.settings.threshold
        self.measuring = isinstance(threshold, str)
        # The model's collectives need their axis, even if that axis has only one rank.
        here = Mesh(np.asarray(jax.local_devices()[:1]), (MODEL,))
        work = jax.shard_map(replicas.work, mesh=here, in_specs=P(), out_specs=P(), check_vma=False)
        self.watch = Stopwatch(work, math.inf if isinstance(threshold, str) else threshold)
        self.compiled = self.joined = False
        self.latencies: list[Any] = []
        self.serial: list[float] = []

    def run(self, state: Any, tokens: Any) -> tuple[Given, Any]:
        """Accumulates micro-batches until the clock reaches the threshold; returns the sums of all processes, and the
        outcome in this process."""
        params = from_workers(state.params)
        batches = list(self.replicas.cut(tokens.addressable_data(0)))
        if not self.compiled:  # compilation must not count as the time of a micro-batch
            self.watch.run(gradient_sum(params), batches, params, completed=1)
            self.compiled = True
            everyone("compiled", at="while compiling a micro-batch")  # see `Program.executables`
        stopped = self.watch.run(gradient_sum(params), batches, params)
        return to_workers(Given(stopped.carry, jnp.int32(stopped.completed)), DATA, self.mesh), stopped

    def row(self, stopped: Any, rest: float) -> dict[str, Any]:
        """Returns the fields that the clock adds to a step's line. After enough steps, this method also chooses the
        threshold, which is the same in all processes."""
        row: dict[str, Any] = {"threshold": self.watch.threshold}
        if self.measuring:
            mine = np.asarray([*stopped.latencies, rest])
            of_all = multihost_utils.process_allgather(mine)
            row |= {"latencies": of_all[:, :-1], "serial": float(of_all[:, -1].min())}
            if self.joined:  # the first all-reduce includes compilation
                self.latencies.append(of_all[:, :-1])
                self.serial.append(row["serial"])
            self.joined = True
            if len(self.latencies) >= self.settings.measure:
                choice = select_threshold(np.stack(self.latencies), np.asarray(self.serial))
                self.watch = self.watch.at(choice.threshold)
                self.measuring = False
                row["chosen"] = choice._asdict()
        return row


def aggregation_row(reports: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the reports of all data ranks to fields of a step's line; values that are equal on all ranks appear
    once."""
    row: dict[str, Any] = {}
    for name, value in reports.items():
        if name == "lossy":
            row |= {key: float(leaf[0]) for key, leaf in value.items()}
        elif name == "log":
            row["lost"] = {key: packed(leaf) for key, leaf in value.items()}
        elif name == "shadow":
            one = jax.tree.map(lambda leaf: leaf[0], value)
            row |= {
                "watched": int(one.watched), "spares": one.spares, "differed": bool(one.differed),
                "repeats": bool(one.repeats), "blamed": np.flatnonzero(one.blamed),
                "mismatched": one.difference.mismatched, "checked": one.difference.checked,
            }  # fmt: skip
        elif name == "synchronized":
            if not value.all():  # a divergence that was not measured is not zero
                row |= {"divergence": None, "expected_divergence": None}
        elif name in ("period", "next", "synchronizations"):
            row[name] = int(value[0])
        else:
            row[name] = value
    return row


def packed(arrived: UInt8[np.ndarray, "..."]) -> str:
    """Encodes a log of arrivals as text: the shape and the compressed bytes."""
    shape = "x".join(map(str, arrived.shape))
    return f"{shape}:{base64.b64encode(zlib.compress(np.ascontiguousarray(arrived).tobytes(), 9)).decode()}"


def unpacked(text: str) -> UInt8[np.ndarray, "..."]:
    shape, _, data = text.partition(":")
    return np.frombuffer(zlib.decompress(base64.b64decode(data)), np.uint8).reshape([int(n) for n in shape.split("x")])


def completed_log(folder: str, data: int, steps: int, micro_batches: int) -> Int32[np.ndarray, "steps data"]:
    """Returns the number of micro-batches that each data rank of a recorded run completed."""
    manifest = read_manifest(folder)
    settings = parse_aggregation(str(manifest.get("aggregate", ""))).dropcompute if "aggregate" in manifest else None
    if settings is None:
        raise ValueError(f"replay={folder}: the recorded run did not use dropcompute; give a run that did")
    recorded_cut = settings.micro_batches or manifest["config"]["microsteps"]
    if recorded_cut != micro_batches:
        raise ValueError(
            f"replay={folder}: its log has {recorded_cut} micro-batches per step, but this run has {micro_batches}; "
            f"give micro_batches={recorded_cut}"
        )
    counts = np.asarray([row["completed"] for row in _lines(folder, "completed", steps)], np.int32)
    if counts.ndim != 2 or counts.shape[1] != data:
        raise ValueError(f"replay={folder}: its log has {counts.shape[-1]} data ranks, but this run has {data}")
    if counts.min() < 0 or counts.max() > micro_batches:
        raise ValueError(
            f"replay={folder}: its log is damaged: according to the log, ranks completed {counts.min()} to "
            f"{counts.max()} of {micro_batches} micro-batches; give another run"
        )
    return counts


def losses_log(
    folder: str, config: TrainConfig, packet: int | None, data: int, steps: int
) -> tuple[Recorded, Recorded]:
    """Returns channels of gradients and parameters that lose the same packets as a recorded run."""
    logs = [
        LossyLog(*(jnp.asarray(unpacked(row["lost"][name])) for name in LossyLog._fields))
        for row in _lines(folder, "lost", steps)
    ]
    params = jax.eval_shape(lambda: init_params(config.model, jax.random.key(0)))
    try:
        channels = recorded(logs, params, packet=packet)
    except ValueError as error:
        raise ValueError(f"replay={folder}: {error}") from error
    ranks = channels[0].arrived.shape[1]
    if ranks != data:
        raise ValueError(f"replay={folder}: its log has {ranks} data ranks, but this run has {data}")
    return channels


def _lines(folder: str, what: str, steps: int) -> list[Mapping[str, Any]]:
    """Returns the aggregation fields of a recorded run's lines."""
    rows = [row.get("aggregation", {}) for row in read_record(folder).lines]
    if len(rows) < steps:
        raise ValueError(
            f"replay={folder}: its log of {len(rows)} steps is too short for the {steps} steps of this run; give at "
            f"most {len(rows)} steps"
        )
    if not rows or any(what not in row for row in rows):
        raise ValueError(f"replay={folder}: the recorded run has no log of {what!r}; give a run with that method")
    return rows
