"""How the gradients of the workers become the one that each of them gives its optimizer; see `data_parallel`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from ..program import manual_in_part
from ._shadow import ShadowReport, init_shadow, shadow
from .assignment import Tree
from .dropcompute import Correction, Work, combine, gradient_sum, masked, summing
from .workers import at_least_float32


class Gathered(NamedTuple):
    """What one worker gives its optimizer.

    Attributes:
        gradient: the gradient.
        state: see `Combining`.
        report: what the step tells, the same on every worker; `report.loss` is the mean loss.
        extra: further arguments of the optimizer's `update`.
    """

    gradient: Tree
    state: Tree
    report: Any
    extra: Mapping[str, Any] = {}


class Report(NamedTuple):
    """What a step tells.

    Attributes:
        loss: the mean of the workers' losses.
    """

    loss: Float32[Array, ""]


class Shadows(NamedTuple):
    """What a step with ranks to spare tells.

    Attributes:
        loss: the mean of the working ranks' losses.
        shadow: what was compared.
    """

    loss: Float32[Array, ""]
    shadow: ShadowReport


class Combining(Protocol):
    """How gradients are combined."""

    def init(self, params: Tree, workers: int) -> Tree:
        """A worker's state before the first step."""

    def combine(self, gradient: Callable[..., Any], axis_name: str, params: Tree, batch: Tree, state: Tree) -> Gathered:
        """One worker's part of a step, under its axis."""


def _mean(x: Array, axis_name: str) -> Array:
    """In float32 at least, in which XLA's CPU backend can sum over a manual axis beside automatic ones."""
    return lax.pmean(x.astype(at_least_float32(x.dtype)), axis_name).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean of all: for plain training, and `gradient_noise`, `paft_sync` and `paft`."""

    def init(self, params: Tree, workers: int) -> tuple[()]:
        return ()

    def combine(self, gradient: Callable[..., Any], axis_name: str, params: Tree, batch: Tree, state: Tree) -> Gathered:
        loss, found = jax.tree.map(lambda x: _mean(x, axis_name), gradient(params, batch))
        return Gathered(found, state, Report(loss))


@dataclasses.dataclass(frozen=True)
class Own:
    """Every worker's own: for `lossy_zero2`, which reduces gradients itself."""

    def init(self, params: Tree, workers: int) -> tuple[()]:
        return ()

    def combine(self, gradient: Callable[..., Any], axis_name: str, params: Tree, batch: Tree, state: Tree) -> Gathered:
        loss, found = gradient(params, batch)
        return Gathered(found, state, Report(_mean(loss, axis_name)))


@dataclasses.dataclass(frozen=True)
class Dropped:
    """DropCompute: the sum of the micro-batches that workers completed. Batches are `(rows, completed)`.

    `completed`, int32[workers], says how many micro-batches each worker completes (`completed_before`); what is below 0
    counts as none, and what is above as all. The optimizer is told of steps in which nobody completed one, which
    `skip_empty` leaves out.

    On a mesh with further axes no time is saved: all workers compute every micro-batch, and the sum leaves out what was
    not completed.

    Attributes:
        micro_batches: into how many a worker's rows are cut.
        correction, drop_rate: see `combine`.
    """

    micro_batches: int
    correction: Correction = "none"
    drop_rate: float = 0.0

    def init(self, params: Tree, workers: int) -> tuple[()]:
        return ()

    def combine(self, gradient: Callable[..., Any], axis_name: str, params: Tree, batch: Tree, state: Tree) -> Gathered:
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise ValueError("expected a batch (rows, completed), completed being int32[workers]")
        rows, own = batch
        if not isinstance(own, jax.Array) or own.shape != (1,) or not jnp.issubdtype(own.dtype, jnp.integer):
            raise ValueError(
                "completed, the second of the batch, is no int32[workers]; expected a batch (rows, completed), where "
                "rows may be a tuple"
            )
        completed = jnp.clip(own[0], 0, self.micro_batches)

        def cut(leaf: Array) -> Array:
            if leaf.shape[0] % self.micro_batches:
                raise ValueError(
                    f"the {leaf.shape[0]} rows of a worker do not fall into micro_batches={self.micro_batches}"
                )
            return leaf.reshape(self.micro_batches, -1, *leaf.shape[1:])

        # Where XLA shards the model too, all workers compute everything, for its collectives wait for all of them.
        run = _chosen if manual_in_part() else masked
        total = run(summing(gradient), gradient_sum(params), jax.tree.map(cut, rows), completed, params)
        found = combine(
            total, axis_name, completed, self.micro_batches, correction=self.correction, drop_rate=self.drop_rate
        )
        narrow = jax.tree.map(lambda x, like: x.astype(jnp.result_type(like)), found.gradient, params)
        return Gathered(narrow, state, found._replace(gradient=None), {"empty": found.empty})


def _chosen(work: Work, carry: Tree, batches: Tree, completed: Int32[Array, ""], context: Tree) -> Tree:
    """As `masked`, but what is passed over is computed too, and thrown away."""

    def one(carry: Tree, indexed: tuple[Any, Tree]) -> tuple[Tree, None]:
        number, batch = indexed
        new = work(carry, batch, context)
        return jax.tree.map(lambda a, b: jnp.where(number < completed, a, b), new, carry), None

    numbers = jnp.arange(jax.tree.leaves(batches)[0].shape[0], dtype=jnp.int32)
    return lax.scan(one, carry, (numbers, batches))[0]


@dataclasses.dataclass(frozen=True)
class Shadowed:
    """Ranks to spare recompute the gradients of others; their rows are ignored. See `shadow`.

    Attributes:
        spares: how many.
    """

    spares: int = 1

    def init(self, params: Tree, workers: int) -> Tree:
        return init_shadow(workers)

    def combine(self, gradient: Callable[..., Any], axis_name: str, params: Tree, batch: Tree, state: Tree) -> Gathered:
        (loss, found), state, report = shadow(gradient, axis_name, spares=self.spares)(state, params, batch)
        return Gathered(found, state, Shadows(loss, report))
