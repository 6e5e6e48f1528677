"""Aggregation for a step that leaves its sharding to `jax.jit`: one axis of the mesh is manual, all others automatic.

The methods of this package run under a bound axis of workers. A step whose model is sharded over axes such as `fsdp`
and `tensor`, with `NamedSharding`s, has no such axis. This module makes only the data axis manual (a partially manual
`shard_map`): each rank on the data axis is a worker with a replica of the model and of the optimizer's state. Within a
worker, XLA shards over the other axes as before.

A `Combining` defines how the workers' gradients are combined into the gradient that each worker passes to its
optimizer.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int32

from ..program import is_array, manual_in_part
from .assignment import Tree, checked_optimizer
from .channels import Recorded
from .dropcompute import Correction, Sum, combine, gradient_sum, masked, skip_empty, summing
from .lossy import LossyState, lossy_zero2
from .methods import Aggregation, Lossy, Paft, PaftSync
from .spares import ShadowReport, alone, init_shadow, shadow
from .synchronization import paft, paft_sync
from .workers import at_least_float32, check_axis

# `(params, batch) -> (loss, gradient)` of one worker, such as `jax.value_and_grad(loss)`.
Gradient: TypeAlias = Callable[[Tree, Tree], tuple[Float[Array, ""], Tree]]


class WorkerGradient(NamedTuple):
    """The input of one worker's optimizer."""

    gradient: Tree  # the gradient
    state: Tree  # see `Combining`
    report: Any  # report of the step, the same on every worker; `report.loss` is the mean loss
    extra: Mapping[str, Any] = {}  # further arguments of the optimizer's `update`, such as the worker's own gradient

    def apply(self, optimizer: optax.GradientTransformationExtraArgs, params: Tree, inner: Tree) -> tuple[Tree, Tree]:
        """Returns the worker's parameters and optimizer state after the step."""
        updates, inner = optimizer.update(self.gradient, inner, params, **self.extra)
        return optax.apply_updates(params, updates), inner


class LossReport(NamedTuple):
    """The report of a step."""

    loss: Float32[Array, ""]  # mean loss over the working ranks
    shadow: ShadowReport | None = None  # the comparison, if there are spare ranks


class Combining(Protocol):
    """A way to combine the workers' gradients."""

    def init(self, params: Tree, workers: int) -> Tree:
        """Returns a worker's state before the first step."""
        return ()

    def combine(self, gradient: Gradient, axis_name: str, params: Tree, batch: Tree, state: Tree) -> WorkerGradient:
        """Runs one worker's part of a step, under its axis."""


def _mean(x: Array, axis_name: str) -> Array:
    """Averages in float32 or wider, since XLA's CPU backend cannot sum narrower types over a manual axis if other axes
    are automatic."""
    return lax.pmean(x.astype(at_least_float32(x.dtype)), axis_name).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Mean(Combining):
    """The mean over all workers, for plain training and for `gradient_noise`, `paft_sync` and `paft`."""

    def combine(self, gradient: Gradient, axis_name: str, params: Tree, batch: Tree, state: Tree) -> WorkerGradient:
        loss, own = gradient(params, batch)
        loss, mean = jax.tree.map(lambda x: _mean(x, axis_name), (loss, own))
        return WorkerGradient(mean, state, LossReport(loss), {"own_gradient": own})


@dataclasses.dataclass(frozen=True)
class Own(Combining):
    """Every worker's own gradient, for `lossy_zero2`, which reduces gradients itself."""

    def combine(self, gradient: Gradient, axis_name: str, params: Tree, batch: Tree, state: Tree) -> WorkerGradient:
        loss, found = gradient(params, batch)
        return WorkerGradient(found, state, LossReport(_mean(loss, axis_name)))


@dataclasses.dataclass(frozen=True)
class Dropped(Combining):
    """DropCompute: the sum of the micro-batches that workers completed. Batches are `(rows, completed)`.

    `completed`, int32[workers], is the number of micro-batches that each worker completes (`completed_before`); values
    are clipped to the valid range. The optimizer receives the flag `empty`, with which `skip_empty` skips steps without
    a completed micro-batch.

    On a mesh with further axes, no time is saved: all workers compute every micro-batch, and the sum omits those that
    were not completed.

    Attributes:
        micro_batches: number of micro-batches into which a worker's rows are divided.
        correction, drop_rate: see `combine`.
    """

    micro_batches: int
    correction: Correction = "none"
    drop_rate: float = 0.0

    def combine(self, gradient: Gradient, axis_name: str, params: Tree, batch: Tree, state: Tree) -> WorkerGradient:
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise ValueError("expected a batch (rows, completed), where completed is int32[workers]")
        rows, own = batch
        if not isinstance(own, jax.Array) or own.shape != (1,) or not jnp.issubdtype(own.dtype, jnp.integer):
            raise ValueError(
                "completed, the second element of the batch, is not int32[workers]; expected a batch (rows, "
                "completed), where rows may be a tuple"
            )
        completed = jnp.clip(own[0], 0, self.micro_batches)

        def cut(leaf: Array) -> Array:
            if leaf.shape[0] % self.micro_batches:
                raise ValueError(
                    f"the {leaf.shape[0]} rows of a worker are not divisible by micro_batches={self.micro_batches}"
                )
            return leaf.reshape(self.micro_batches, -1, *leaf.shape[1:])

        work, batches = summing(gradient), jax.tree.map(cut, rows)

        def computed_anyway(carry: Sum, indexed: tuple[Any, Tree]) -> tuple[Sum, None]:
            number, batch = indexed
            new = work(carry, batch, params)
            return jax.tree.map(lambda a, b: jnp.where(number < completed, a, b), new, carry), None

        # If XLA shards the model too, all workers compute everything, since the model's collectives wait for all
        # workers.
        if manual_in_part():
            numbers = jnp.arange(self.micro_batches, dtype=jnp.int32)
            total = lax.scan(computed_anyway, gradient_sum(params), (numbers, batches))[0]
        else:
            total = masked(work, gradient_sum(params), batches, completed, params)
        return self.gather(total, axis_name, completed, params)

    def gather(
        self, total: Sum, axis_name: str, completed: Int32[Array, ""], params: Tree, *, own: bool = False
    ) -> WorkerGradient:
        """Completes one worker's part of a step from its accumulated sums; with `own`, returns the worker's own mean
        and weight, for `lossy_zero2`."""
        found = combine(
            total, axis_name, completed, self.micro_batches, correction=self.correction, drop_rate=self.drop_rate
        )
        some = jnp.maximum(completed, 1).astype(jnp.float32)
        own_gradient = jax.tree.map(lambda leaf: leaf / some, total.gradient)
        gradient, extra = found.gradient, {"empty": found.empty, "own_gradient": own_gradient}
        if own:
            gradient = own_gradient
            extra["weight"] = completed.astype(jnp.float32)
        narrow = jax.tree.map(lambda x, like: x.astype(jnp.result_type(like)), gradient, params)
        return WorkerGradient(narrow, (), found._replace(gradient=None), extra)


@dataclasses.dataclass(frozen=True)
class Shadowed(Combining):
    """Spare ranks that recompute the gradients of others; the rows of spare ranks are ignored. See `shadow`."""

    spares: int = 1  # number of spare ranks

    def init(self, params: Tree, workers: int) -> Tree:
        return init_shadow(workers)

    def combine(self, gradient: Gradient, axis_name: str, params: Tree, batch: Tree, state: Tree) -> WorkerGradient:
        (loss, found), state, report = shadow(gradient, axis_name, spares=self.spares)(state, params, batch)
        return WorkerGradient(found, state, LossReport(loss, report))


@dataclasses.dataclass(frozen=True)
class Workers:
    """The state of all workers: every leaf has a leading axis of workers, sharded over the data axis."""

    params: Tree  # replicas of the parameters
    optimizer: Tree  # optimizer states
    combining: Tree  # states of the `Combining`
    specs: tuple[P, ...]  # partition of each leaf, static


jax.tree_util.register_dataclass(Workers, ["params", "optimizer", "combining"], ["specs"])


class DataParallel(NamedTuple):
    """The functions that train all workers.

    Attributes:
        init: `(params) -> Workers`: all workers start with the given parameters, sharded as given.
        step: `(workers, batch) -> (workers, report)`: apply `jax.jit` to it, and donate the first argument.
        place: `(batch) -> batch`: shards the rows of a batch over the workers; the first axis of each leaf holds the
            rows of all workers.
        mesh: the mesh of all arrays, with automatic axes.
    """

    init: Callable[[Tree], Workers]
    step: Callable[[Workers, Tree], tuple[Workers, Any]]
    place: Callable[[Tree], Tree]
    mesh: Mesh


def data_parallel(
    gradient: Gradient,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: str = "data",
    *,
    combining: Combining | None = None,
) -> DataParallel:
    """Returns the functions for data-parallel training of a model that XLA shards, by any method of this package.

    Args:
        gradient: see `Gradient`; the function receives the rows of one worker, and must not depend on the worker's
            index.
        optimizer: any optax optimizer, including those of this package (`paft`, `lossy_zero2`, `gradient_noise` in a
            chain) with `axis_name` as their axis.
        mesh: the mesh; axes of type Explicit are treated as automatic here.
        axis_name: the axis of the workers in the mesh.
        combining: way to combine the workers' gradients: `Mean()` (default), `Own()` for `lossy_zero2`, `Dropped(...)`
            for DropCompute, `Shadowed(...)` for spare ranks.

    Returns:
        See `DataParallel`. States are sharded arrays, which Orbax saves and restores.

    Raises:
        ValueError: the mesh has no such axis, or fewer than two ranks on it; in `init` and `step`: parameters or rows
            do not fit the mesh, or the method raises ValueError.
    """
    check_axis("axis_name", axis_name)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh={mesh!r}: expected a jax.sharding.Mesh, as from jax.make_mesh")
    if axis_name not in mesh.axis_names or mesh.shape[axis_name] < 2:
        raise ValueError(
            f"axis_name={axis_name!r}: expected an axis of the mesh {dict(mesh.shape)} with at least two ranks"
        )
    size = mesh.shape[axis_name]
    # Explicit axes would require every operation of the methods to state the sharding of its result.
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    others = tuple(axis for axis in mesh.axis_names if axis != axis_name and mesh.shape[axis] > 1)
    combining = Mean() if combining is None else combining
    if isinstance(combining, type) or not callable(getattr(combining, "combine", None)):
        raise ValueError(f"combining={combining!r}: expected an object such as Mean() or Dropped(4)")
    whole = checked_optimizer(optimizer)

    def one_worker(params: Tree, batch: Tree) -> Any:
        found: Any = alone(gradient, axis_name)(params, batch)
        expected: Any = jax.tree.structure(params)
        if not isinstance(found, tuple) or len(found) != 2 or jax.tree.structure(found[1]) != expected:
            raise ValueError(
                "gradient must return (loss, gradient), where the gradient has the structure of the parameters; give "
                "jax.value_and_grad(loss)"
            )
        loss = found[0]
        if not isinstance(loss, jax.Array) or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(
                f"gradient returns {loss} as its loss; expected a single number, without has_aux; compute other "
                "values outside the step"
            )
        return found

    def mapped(work: Callable[..., Any], given: Any, returned: Any) -> Callable[..., Any]:
        # Outside of jit, JAX has no partially manual shard_map.
        return jax.jit(
            jax.shard_map(work, mesh=mesh, in_specs=given, out_specs=returned, axis_names={axis_name}, check_vma=False)
        )

    def init(params: Tree) -> Workers:
        for path, leaf in jax.tree.leaves_with_path(params):
            if not is_array(leaf, numbers=True):
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} is {type(leaf).__name__}, not an array; give only the arrays, "
                    "such as the first result of eqx.partition(model, eqx.is_array), and recombine the model in the "
                    "gradient function"
                )
            if axis_name in jax.tree.leaves(tuple(_spec(leaf, mesh))):
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} is sharded over {axis_name!r}, the axis of the workers, each "
                    "of which has a whole replica; shard it over the other axes"
                )
        shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, _spec(leaf, mesh)), params)

        def start(params: Tree) -> tuple[Tree, Tree, Tree]:
            given = params, whole.init(params), combining.init(params, size)
            return jax.tree.map(lambda x: jnp.asarray(x)[None], given)

        begin = mapped(start, P(), P(axis_name))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            shapes = jax.eval_shape(begin, params)
        reducing = jax.tree.leaves(shapes[1], is_leaf=lambda x: isinstance(x, LossyState))
        lossy = any(isinstance(leaf, LossyState) for leaf in reducing)
        if lossy != isinstance(combining, Own):
            raise ValueError(
                "lossy_zero2 reduces the workers' gradients itself; give combining=Own()"
                if lossy
                else "combining=Own() leaves gradients unreduced, which only lossy_zero2 expects; omit combining"
            )
        specs = tuple(P(axis_name, *spec) for spec in _specs(shapes, params, mesh, others))
        placed = jax.tree.unflatten(jax.tree.structure(shapes), [NamedSharding(mesh, spec) for spec in specs])
        with jax.set_mesh(mesh):
            held = jax.jit(begin, out_shardings=placed)(jax.device_put(params, shardings))
            return Workers(held[0], held[1], held[2], specs)

    def step(workers: Workers, batch: Tree) -> tuple[Workers, Any]:
        if not isinstance(workers, Workers):
            raise ValueError(f"the state has type {type(workers).__name__}; start with the result of init(params)")
        _check_rows(batch, size, axis_name)
        state = workers.params, workers.optimizer, workers.combining

        def one(state: Any, batch: Tree) -> Any:
            params, inner, combined = jax.tree.map(lambda x: x[0], state)
            found = combining.combine(one_worker, axis_name, params, batch, combined)
            new = *found.apply(whole, params, inner), found.state
            return jax.tree.map(lambda x: jnp.asarray(x)[None], new), found.report

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # a different mesh may be set
            new, report = mapped(one, (P(axis_name), P(axis_name)), (P(axis_name), P()))(state, batch)
            leaves, structure = jax.tree.flatten(new)
            placed = [
                jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))
                for leaf, spec in zip(leaves, workers.specs, strict=True)
            ]
        params, inner, combined = jax.tree.unflatten(structure, placed)
        return Workers(params, inner, combined, workers.specs), report

    def place(batch: Tree) -> Tree:
        _check_rows(batch, size, axis_name)
        return jax.device_put(batch, NamedSharding(mesh, P(axis_name)))

    return DataParallel(init, step, place, mesh)


def _spec(leaf: Any, mesh: Mesh) -> P:
    """Returns the partition of a leaf; a leaf that is not on a mesh is replicated."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return P()
    if sharding.mesh.axis_names != mesh.axis_names or sharding.mesh.shape != mesh.shape:
        raise ValueError(
            f"parameters are on a mesh {dict(sharding.mesh.shape)}, but the given mesh is {dict(mesh.shape)}; give the "
            "same mesh"
        )
    # In XLA's normal form: without axes of one device, and without trailing unsharded dimensions.
    sizes = [
        tuple(axis for axis in (part if isinstance(part, tuple) else (part,)) if axis and mesh.shape[axis] > 1)
        for part in sharding.spec
    ]
    while sizes and not sizes[-1]:
        sizes.pop()
    return P(*(part[0] if len(part) == 1 else part or None for part in sizes))


def _specs(shapes: Any, params: Tree, mesh: Mesh, others: Sequence[str]) -> list[P]:
    """Returns the partition of a worker's state: each leaf is sharded like the parameter with the same shape whose path
    is a suffix of the leaf's path.

    Flat leaves, such as the shards of ZeRO, are sharded over all axes but the workers' if their size is divisible by
    the number of ranks on these axes.
    """
    known = [
        (tuple(map(str, path)), jnp.shape(leaf), _spec(leaf, mesh)) for path, leaf in jax.tree.leaves_with_path(params)
    ]
    parts = math.prod(mesh.shape[axis] for axis in others)
    flat = P(others[0] if len(others) == 1 else tuple(others))
    found = []
    for path, leaf in jax.tree.leaves_with_path(shapes):
        names, shape = tuple(map(str, path)), leaf.shape[1:]
        of_parameter = (spec for tail, like, spec in known if shape == like and names[len(names) - len(tail) :] == tail)
        divides = len(shape) == 1 and shape[0] and parts > 1 and shape[0] % parts == 0
        found.append(next(of_parameter, flat if divides else P()))
    return found


def _check_rows(batch: Tree, size: int, axis_name: str) -> None:
    for path, leaf in jax.tree.leaves_with_path(batch):
        shape = jnp.shape(leaf)
        if not shape or shape[0] % size:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {shape}; expected a first axis whose size is divisible "
                f"by the {size} workers of {axis_name!r}"
            )


def around(
    optimizer: optax.GradientTransformation,
    aggregation: Aggregation,
    axis_name: str,
    *,
    seed: int,
    replica_axes: Sequence[str] = (),
    channels: tuple[Recorded, Recorded] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer as a specification requires; `channels`, if given, replay the losses of a run."""
    inner = checked_optimizer(optimizer) if aggregation.dropcompute is None else skip_empty(optimizer)
    method = aggregation.method
    if isinstance(method, PaftSync):
        return paft_sync(inner, axis_name, **vars(method), replica_axes=replica_axes)
    if isinstance(method, Paft):
        return paft(inner, axis_name, **vars(method), replica_axes=replica_axes)
    if isinstance(method, Lossy):
        tighten = 0.0 if channels else method.tighten  # the log already includes it
        gradient, parameter = channels or method.channels()
        return lossy_zero2(
            inner, axis_name, gradient, parameter, packet=method.packet, seed=seed, reliable=method.reliable,
            parity=method.parity, tighten=tighten, stale=method.stale,
        )  # fmt: skip
    return inner
