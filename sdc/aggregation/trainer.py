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
from jaxtyping import Array, Float32, Int32

from ..program import is_array, manual_in_part
from .assignment import Tree, checked_optimizer
from .channels import Recorded
from .dropcompute import Correction, Sum, combine, gradient_sum, masked, skip_empty
from .lossy import LossyState, lossy_zero2
from .methods import Aggregation, Lossy, Paft, PaftSync
from .noise import NoiseState
from .shards import Shards
from .spares import ShadowReport, alone, init_shadow, shadow
from .synchronization import PaftState, PaftSyncState, paft, paft_sync
from .workers import at_least_float32, check_axis

# `(params, batch) -> (loss, gradient)` of one worker, such as `jax.value_and_grad(loss)`; or `((loss, aux), gradient)`.
Gradient: TypeAlias = Callable[[Tree, Tree], tuple[Any, Tree]]
# Sums a gradient over the workers: `psum`, or a reduce-scatter if parameters are sharded over the workers.
Reduce: TypeAlias = Callable[[Tree], Tree]


class WorkerGradient(NamedTuple):
    """The input of one worker's optimizer."""

    gradient: Tree  # the gradient
    state: Tree  # see `Combining`
    report: Any  # report of the step, the same on every worker; `report.loss` is the mean loss
    extra: Mapping[str, Any] = {}  # further arguments of the optimizer's `update`, such as the worker's own gradient
    aux: Tree = None  # what the worker computed beside its loss

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

    def combine(
        self, gradient: Gradient, axis_name: str, params: Tree, batch: Tree, state: Tree, reduce: Reduce | None = None
    ) -> WorkerGradient:
        """Runs one worker's part of a step, under its axis."""


def _mean(tree: Tree, axis_name: str, reduce: Reduce | None = None) -> Tree:
    """Averages in float32 or wider, since XLA's CPU backend cannot sum narrower types over a manual axis if other axes
    are automatic."""
    wide = jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), tree)
    total = lax.psum(wide, axis_name) if reduce is None else reduce(wide)
    return jax.tree.map(lambda total, x: (total / lax.axis_size(axis_name)).astype(x.dtype), total, tree)


def _split(value: Any) -> tuple[Array, Tree]:
    """Returns a worker's loss and what it computed beside it."""
    return value if isinstance(value, tuple) else (value, None)


@dataclasses.dataclass(frozen=True)
class Mean(Combining):
    """The mean over all workers, for plain training and for `gradient_noise`, `paft_sync` and `paft`.

    Attributes:
        noise: a `gradient_noise`, which disturbs each worker's mean, or its shard of it. If parameters are sharded
            over the workers, give it here and not in the optimizer, which then runs outside of their axis.
    """

    noise: optax.GradientTransformation | None = None

    def init(self, params: Tree, workers: int) -> Tree:
        if self.noise is None:
            return ()
        state = self.noise.init(params) if isinstance(self.noise, optax.GradientTransformation) else None
        if not isinstance(state, NoiseState):  # any other transform might need more than a shard
            raise ValueError(
                f"noise={self.noise!r}: expected gradient_noise(...); put other transforms in the optimizer"
            )
        return state

    def combine(
        self, gradient: Gradient, axis_name: str, params: Tree, batch: Tree, state: Tree, reduce: Reduce | None = None
    ) -> WorkerGradient:
        value, own = gradient(params, batch)
        loss, aux = _split(value)
        mean = _mean(own, axis_name, reduce)
        if self.noise is not None:
            mean, state = self.noise.update(mean, state)
        return WorkerGradient(mean, state, LossReport(_mean(loss, axis_name)), {"own_gradient": own}, aux)


@dataclasses.dataclass(frozen=True)
class Own(Combining):
    """Every worker's own gradient, for `lossy_zero2`, which reduces gradients itself."""

    def combine(
        self, gradient: Gradient, axis_name: str, params: Tree, batch: Tree, state: Tree, reduce: Reduce | None = None
    ) -> WorkerGradient:
        value, found = gradient(params, batch)
        loss, aux = _split(value)
        return WorkerGradient(found, state, LossReport(_mean(loss, axis_name)), aux=aux)


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

    def combine(
        self, gradient: Gradient, axis_name: str, params: Tree, batch: Tree, state: Tree, reduce: Reduce | None = None
    ) -> WorkerGradient:
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

        # Each micro-batch comes with its number, at which its aux is kept.
        batches = jnp.arange(self.micro_batches, dtype=jnp.int32), jax.tree.map(cut, rows)

        def work(carry: tuple[Sum, Tree], batch: tuple[Any, Tree], params: Tree) -> tuple[Sum, Tree]:
            total, kept = carry
            value, found = gradient(params, batch[1])
            loss, aux = _split(value)
            return total.plus(loss, found), jax.tree.map(lambda rows, row: rows.at[batch[0]].set(row), kept, aux)

        def computed_anyway(carry: tuple[Sum, Tree], batch: tuple[Any, Tree]) -> tuple[tuple[Sum, Tree], None]:
            new = work(carry, batch, params)
            return jax.tree.map(lambda a, b: jnp.where(batch[0] < completed, a, b), new, carry), None

        example = jax.tree.map(lambda leaf: leaf[0], batches[1])
        shapes = _split(jax.eval_shape(gradient, params, example)[0])[1]
        none = jax.tree.map(lambda x: jnp.zeros((self.micro_batches, *x.shape), x.dtype), shapes)
        # If XLA shards the model too, all workers compute everything, since the model's collectives wait for all
        # workers.
        if manual_in_part():
            total, aux = lax.scan(computed_anyway, (gradient_sum(params), none), batches)[0]
        else:
            total, aux = masked(work, (gradient_sum(params), none), batches, completed, params)
        return self.gather(total, axis_name, completed, params, reduce=reduce)._replace(aux=aux)

    def gather(
        self,
        total: Sum,
        axis_name: str,
        completed: Int32[Array, ""],
        params: Tree,
        *,
        own: bool = False,
        reduce: Reduce | None = None,
    ) -> WorkerGradient:
        """Completes one worker's part of a step from its accumulated sums; with `own`, returns the worker's own mean
        and weight, for `lossy_zero2`."""
        found = combine(
            total, axis_name, completed, self.micro_batches, correction=self.correction, drop_rate=self.drop_rate,
            reduce=reduce,
        )  # fmt: skip
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

    def combine(
        self, gradient: Gradient, axis_name: str, params: Tree, batch: Tree, state: Tree, reduce: Reduce | None = None
    ) -> WorkerGradient:
        def separate(params: Tree, batch: Tree) -> Any:
            value, found = gradient(params, batch)
            loss, aux = _split(value)
            return (loss, found), aux

        def reduced(given: tuple[Array, Tree]) -> tuple[Array, Tree]:
            return lax.psum(given[0], axis_name), reduce(given[1]) if reduce else lax.psum(given[1], axis_name)

        run = shadow(separate, axis_name, spares=self.spares, has_aux=True, reduce=reduced if reduce else None)
        ((loss, found), aux), state, report = run(state, params, batch)
        return WorkerGradient(found, state, LossReport(loss, report), aux=aux)


@dataclasses.dataclass(frozen=True)
class Workers:
    """The state of all workers. Every leaf has a leading axis of workers, sharded over the workers' axis, except in
    `params` and `optimizer` if parameters are sharded over that axis."""

    params: Tree  # replicas of the parameters, or the parameters
    optimizer: Tree  # optimizer states, or the optimizer's state
    combining: Tree  # states of the `Combining`
    specs: tuple[P, ...]  # partition of each leaf, static
    mesh: tuple[tuple[str, int], ...]  # axes of the mesh and their sizes, static
    shards: Shards | None = None  # division of the parameters among workers, static; None if each has a replica


jax.tree_util.register_dataclass(Workers, ["params", "optimizer", "combining"], ["specs", "mesh", "shards"])


class DataParallel(NamedTuple):
    """The functions that train all workers.

    Attributes:
        init: `(params) -> Workers`: all workers start with the given parameters, sharded as given. From shapes
            (`jax.ShapeDtypeStruct`), it returns shapes, for `sdc.costs.estimate`.
        step: `(workers, batch) -> (workers, report)`: apply `jax.jit` to it, and donate the first argument. With
            `has_aux`, `(workers, (report, aux))`, where each leaf of aux has a leading axis of workers; `Dropped`
            stacks the aux of micro-batches on a second axis, with zeros for those that were dropped.
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
    has_aux: bool = False,
) -> DataParallel:
    """Returns the functions for data-parallel training of a model that XLA shards, by any method of this package.

    Parameters may be sharded over the workers' axis too (FSDP, ZeRO-3). The step then gathers them, reduces and
    scatters the gradients, and runs the optimizer on the sharded parameters, outside of the workers' axis. Methods that
    need a copy of the parameters for each worker differ: `paft` and `paft_sync` are refused, since nothing can diverge,
    and for `lossy_zero2`, every worker receives a replica.

    Args:
        gradient: see `Gradient`; the function receives the rows of one worker, and must not depend on the worker's
            index.
        optimizer: any optax optimizer, including those of this package (`paft`, `lossy_zero2`, `gradient_noise` in a
            chain) with `axis_name` as their axis. If parameters are sharded over that axis, give `gradient_noise` to
            `Mean` instead.
        mesh: the mesh; axes of type Explicit are treated as automatic here.
        axis_name: the axis of the workers in the mesh.
        combining: way to combine the workers' gradients: `Mean()` (default), `Own()` for `lossy_zero2`, `Dropped(...)`
            for DropCompute, `Shadowed(...)` for spare ranks.
        has_aux: whether `gradient` returns `((loss, aux), gradient)`.

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
        try:
            found: Any = alone(gradient, axis_name)(params, batch)
        except ValueError as error:
            if "Auto" in str(error) and repr(axis_name) in str(error):  # of with_sharding_constraint
                raise ValueError(
                    f"a sharding constraint in the gradient function names {axis_name!r}, the axis of the workers, "
                    f"each of which computes on its own rows; leave that axis out of the constraint ({error})"
                ) from error
            raise
        expected: Any = jax.tree.structure(params)
        if not isinstance(found, tuple) or len(found) != 2 or jax.tree.structure(found[1]) != expected:
            raise ValueError(
                "gradient must return (loss, gradient), where the gradient has the structure of the parameters; give "
                "jax.value_and_grad(loss)"
            )
        for (path, own), leaf in zip(jax.tree.leaves_with_path(found[1]), jax.tree.leaves(params), strict=True):
            name = jax.tree_util.keystr(path)
            if own.dtype == jax.dtypes.float0:
                raise ValueError(f"params{name} is {leaf.dtype}, which has no gradient; exclude it from the parameters")
            if own.shape != leaf.shape:
                raise ValueError(f"the gradient of params{name} has shape {own.shape}; expected {leaf.shape}")
        value = found[0]
        if has_aux and (not isinstance(value, tuple) or len(value) != 2):
            raise ValueError("with has_aux, gradient must return ((loss, aux), gradient); omit has_aux")
        loss = value[0] if has_aux else value
        if not isinstance(loss, jax.Array) or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ValueError(
                f"gradient returns {loss} as its loss; expected a single number; if it returns ((loss, aux), "
                "gradient), give has_aux=True"
            )
        return found

    def mapped(work: Callable[..., Any], given: Any, returned: Any) -> Callable[..., Any]:
        # Outside of jit, JAX has no partially manual shard_map.
        return jax.jit(
            jax.shard_map(work, mesh=mesh, in_specs=given, out_specs=returned, axis_names={axis_name}, check_vma=False)
        )

    def init(params: Tree) -> Workers:
        for path, leaf in jax.tree.leaves_with_path(params):
            if not is_array(leaf, numbers=True) and not isinstance(leaf, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} is {type(leaf).__name__}, not an array; give only the arrays, "
                    "such as the first result of eqx.partition(model, eqx.is_array), and recombine the model in the "
                    "gradient function"
                )
        partition = jax.tree.map(lambda leaf: _spec(leaf, mesh), params)
        shards = _shards(jax.tree.leaves(partition), axis_name)
        # Without the mesh on which they are, whose axes may be explicit.
        bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params)

        def start(params: Tree) -> tuple[Tree, Tree, Tree]:
            given = params, whole.init(params), combining.init(params, size)
            return jax.tree.map(lambda x: jnp.asarray(x)[None], given)

        begin = mapped(start, P(), P(axis_name))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            shapes = jax.eval_shape(begin, bare)
        lossy = _holds(shapes[1], LossyState)
        if lossy != isinstance(combining, Own):
            raise ValueError(
                "lossy_zero2 reduces the workers' gradients itself; give combining=Own()"
                if lossy
                else "combining=Own() leaves gradients unreduced, which only lossy_zero2 expects; omit combining"
            )
        if shards is None or lossy:  # a worker that misses packets needs its own copy of the parameters
            shards, of_parameters = None, jax.tree.map(lambda spec: _without(spec, axis_name), partition)
            lead: tuple[Any, ...] = ((axis_name,),) * 3
        else:
            if _holds(shapes[1], (PaftState, PaftSyncState)):
                raise ValueError(
                    f"paft synchronizes replicas, but the parameters are sharded over {axis_name!r}, the axis of the "
                    "workers, which leaves no replicas to diverge; shard the parameters over the other axes"
                )
            if _holds(shapes[1], NoiseState):
                raise ValueError(
                    f"the parameters are sharded over {axis_name!r}, the axis of the workers, so the optimizer runs "
                    "outside of that axis; give gradient_noise as combining=Mean(gradient_noise(...))"
                )
            of_parameters, lead = partition, ((), (), (axis_name,))

            def started(params: Tree) -> Tree:
                return jax.tree.map(lambda x: jnp.asarray(x)[None], combining.init(params, size))

            def scattered(params: Tree) -> tuple[Tree, Tree, Tree]:
                return params, whole.init(params), mapped(started, (shards.specs(params),), P(axis_name))(params)

            begin = scattered
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                shapes = jax.eval_shape(begin, bare)
        specs = tuple(
            P(*first, *spec)
            for first, part in zip(lead, shapes, strict=True)
            for spec in _specs(part, params, of_parameters, mesh, others, skip=len(first))
        )
        placed = jax.tree.unflatten(jax.tree.structure(shapes), [NamedSharding(mesh, spec) for spec in specs])
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            held = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, placed)
            return Workers(held[0], held[1], held[2], specs, tuple(mesh.shape.items()), shards)
        given = jax.tree.map(lambda spec: NamedSharding(mesh, spec), of_parameters)
        with jax.set_mesh(mesh):
            held = jax.jit(begin, out_shardings=placed)(jax.device_put(params, given))
            return Workers(held[0], held[1], held[2], specs, tuple(mesh.shape.items()), shards)

    def step(workers: Workers, batch: Tree) -> tuple[Workers, Any]:
        if not isinstance(workers, Workers):
            raise ValueError(f"the state has type {type(workers).__name__}; start with the result of init(params)")
        if workers.mesh != tuple(mesh.shape.items()):
            raise ValueError(
                f"the state is of a mesh {dict(workers.mesh)}, this step of {dict(mesh.shape)}; start with init"
            )
        _check_rows(batch, size, axis_name)
        shards, own = workers.shards, P(axis_name)

        def stacked(tree: Tree) -> Tree:
            return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)

        def one(state: Any, batch: Tree) -> Any:
            params, inner, combined = jax.tree.map(lambda x: x[0], state)
            found = combining.combine(one_worker, axis_name, params, batch, combined)
            return stacked((*found.apply(whole, params, inner), found.state)), found.report, stacked(found.aux)

        def scattered(params: Tree, combined: Tree, batch: Tree) -> Any:
            assert shards is not None
            combined = jax.tree.map(lambda x: x[0], combined)
            gathered = shards.gather(params)
            found = combining.combine(one_worker, axis_name, gathered, batch, combined, shards.sum)
            extra = {name: value for name, value in found.extra.items() if name != "own_gradient"}
            return shards.agree(found.gradient), extra, stacked(found.state), found.report, stacked(found.aux)

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # a different mesh may be set
            if shards is None:
                state = workers.params, workers.optimizer, workers.combining
                new, report, aux = mapped(one, (own, own), (own, P(), own))(state, batch)
            else:
                parts = shards.specs(workers.params)
                gradient, extra, combined, report, aux = mapped(
                    scattered, (parts, own, own), (parts, P(), own, P(), own)
                )(workers.params, workers.combining, batch)
                found = WorkerGradient(gradient, combined, report, extra)
                new = *found.apply(whole, workers.params, workers.optimizer), combined
            leaves, structure = jax.tree.flatten(new)
            placed = [
                jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))
                for leaf, spec in zip(leaves, workers.specs, strict=True)
            ]
        params, inner, combined = jax.tree.unflatten(structure, placed)
        after = Workers(params, inner, combined, workers.specs, workers.mesh, shards)
        return after, (report, aux) if has_aux else report

    def place(batch: Tree) -> Tree:
        _check_rows(batch, size, axis_name)
        return jax.device_put(batch, NamedSharding(mesh, P(axis_name)))

    return DataParallel(init, step, place, mesh)


def _spec(leaf: Any, mesh: Mesh) -> P:
    """Returns the partition of a leaf; a leaf that is not on a mesh is replicated."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or 0 in jnp.shape(leaf):
        return P()
    if sharding.mesh.axis_names != mesh.axis_names or sharding.mesh.shape != mesh.shape:
        raise ValueError(
            f"parameters are on a mesh {dict(sharding.mesh.shape)}, but the given mesh is {dict(mesh.shape)}; give the "
            "same mesh"
        )
    return _normal([tuple(axis for axis in _parts(part) if mesh.shape[axis] > 1) for part in sharding.spec])


def _normal(parts: list[tuple[str, ...]]) -> P:
    """Returns a partition as XLA states it: without trailing unsharded dimensions."""
    while parts and not parts[-1]:
        parts.pop()
    return P(*(part[0] if len(part) == 1 else part or None for part in parts))


def _parts(entry: Any) -> tuple[str, ...]:
    """Returns the axes of one dimension of a partition."""
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def _shards(specs: Sequence[P], axis_name: str) -> Shards | None:
    """Returns the division of parameters over an axis; None if no parameter is sharded over it."""
    dims = tuple(next((dim for dim, part in enumerate(spec) if axis_name in _parts(part)), None) for spec in specs)
    within = tuple(
        _normal([() if which == dim else _parts(part) for which, part in enumerate(spec)])
        for spec, dim in zip(specs, dims, strict=True)
    )
    return Shards(axis_name, dims, within) if set(dims) != {None} and dims else None


def _without(spec: P, axis_name: str) -> P:
    """Returns a partition without one of its axes."""
    return _normal([tuple(axis for axis in _parts(part) if axis != axis_name) for part in spec])


def _holds(tree: Tree, kinds: Any) -> bool:
    """Returns whether a tree of optimizer states contains a state of one of these types."""
    return any(isinstance(x, kinds) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)))


def _specs(shapes: Any, params: Tree, partition: Tree, mesh: Mesh, others: Sequence[str], *, skip: int) -> list[P]:
    """Returns the partition of a state, whose first `skip` dimensions are omitted: each leaf is sharded like the
    parameter with the same shape whose path is a suffix of the leaf's path.

    Flat leaves, such as the shards of ZeRO, are sharded over all axes but the workers' if their size is divisible by
    the number of ranks on these axes.
    """
    known = [
        (tuple(map(str, path)), jnp.shape(leaf), spec)
        for (path, leaf), spec in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(partition), strict=True)
    ]
    parts = math.prod(mesh.shape[axis] for axis in others)
    flat = P(others[0] if len(others) == 1 else tuple(others))
    found = []
    for path, leaf in jax.tree.leaves_with_path(shapes):
        names, shape = tuple(map(str, path)), leaf.shape[skip:]
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
