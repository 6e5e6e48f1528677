"""Lock-step twins: one step on a healthy and a suspect device, compared and repaired at every probe.

At each site the twins exchange 64-bit digests over the twin axis. Only where some digest differs, anywhere on the mesh,
do tensors move: the reference compares each twin's tensor with its own and all twins go on with the reference's, bit
for bit. What a suspect computes wrong is therefore counted where it arises and never spreads: computation
synchronization in the words of Ma et al. 2025 (arXiv:2502.12340, section 3.2).
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..program import (
    Place,
    Reports,
    Values,
    Where,
    axis_size,
    is_array,
    probes,
    rarely,
    rewrite,
    taking,
    traced_once,
    varying,
)
from ._agreement import Agreement, agreement, measure, nothing_found
from ._optimistic import Optimistic
from .compare import Difference, no_difference
from .mismatch import Mismatch, merge

Compare: TypeAlias = Literal["gated", "always"]
Exchange: TypeAlias = Literal["probe", "step", "call"]
Tree = TypeVar("Tree")


def lockstep(
    step: Callable[..., Any],
    axis_name: str,
    *,
    where: Where = probes,
    compare: Compare = "gated",
    exchange: Exchange = "probe",
) -> Callable[..., tuple[Any, Reports]]:
    """Transforms a step into lock-step twins along a mapped axis.

    Call the result where `axis_name` is bound: under `shard_map` (twins on several devices or hosts), `pmap`, or
    `vmap` (all twins on one device).

    Args:
        step: the step of one twin. It need not know of twins.
        axis_name: the twin axis. With two twins index 0 is the reference; with three or more the majority is.
        where: selects the sites to compare and repair; by default every probe.
        compare: `"gated"` moves tensors only where digests differ; `"always"` moves and compares them every time.
        exchange: `"probe"` exchanges digests at every site. `"step"` exchanges those of all sites once in a
            (micro)step, and repeats that from its start, with the gate at every site, only if any differs. Of a fault
            that does not come again it tells the place and not the size (`Mismatch.unrepeated`). `"call"` does so once
            in a call of the step, all microsteps of a loop together.

    Returns:
        A function that returns `(out, mismatches)`, `mismatches` a `Mismatch` for each site.

    Raises:
        ValueError: `axis_name` is not bound, has fewer than two twins, `compare` or `exchange` is unknown, or no site
            is selected (a probe whose value the step does not use is none); or `exchange` is not `"probe"` and the step
            cannot be repeated (arrays changed in place, ordered effects), or `compare="always"`.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> step = sdc.lockstep(lambda x: sdc.probe(2.0 * x, "double"), "twin")
        >>> out, mismatches = jax.vmap(step, axis_name="twin")(jnp.asarray([[1.0, 2.0], [1.0, 3.0]]))
        >>> out.tolist()
        [[2.0, 4.0], [2.0, 4.0]]
        >>> mismatches["fwd/double"].difference.mismatched[0].tolist()
        [0, 1]
    """
    _check_compare(compare)
    if exchange not in get_args(Exchange):
        raise ValueError(f"exchange={exchange!r} is unknown; expected 'probe', 'step' or 'call'")
    if exchange != "probe" and compare == "always":
        raise ValueError("compare='always' moves tensors at every probe; give exchange='probe', or compare='gated'")
    rule = _Lockstep(axis_name, compare)
    around = None if exchange == "probe" else Optimistic(axis_name, rule, whole=exchange == "call")
    twins = rewrite(step, where, rule, required=True, around=around)

    @taking(step)
    def stepped(*args: Any, **kwargs: Any) -> tuple[Any, Reports]:
        axis_size(axis_name, "twin")
        return twins(*args, **kwargs)

    return stepped


def synchronize(
    tree: Tree, axis_name: str, *, repair: bool = True, compare: Compare = "gated", agreed: Agreement | None = None
) -> tuple[Tree, Mismatch]:
    """Compares a pytree between twins and overwrites it with the reference's, bit for bit.

    Parameter synchronization is this, applied to the parameters and the optimizer's state after each step.

    Args:
        tree: arrays, for instance a training state. What is no array passes through.
        axis_name: the twin axis, bound.
        repair: whether to overwrite; otherwise the tree is only compared.
        compare: see `lockstep`.
        agreed: what `twins.agreement` says of the tree's leaves, where that is known already.

    Returns:
        The tree, and one `Mismatch` over all its leaves.

    Raises:
        ValueError: see `lockstep`.
    """
    _check_compare(compare)
    axis_size(axis_name, "twin")
    whole, structure = jax.tree.flatten(tree)
    arrays = [number for number, leaf in enumerate(whole) if is_array(leaf, numbers=True)]
    if not arrays:
        nothing = no_difference(jnp.zeros(lax.axis_size(axis_name), jnp.uint32))
        return tree, Mismatch(nothing, jnp.uint32(0))
    leaves = [jnp.asarray(whole[number]) for number in arrays]
    repaired, mismatch = _synchronize(leaves, agreed or agreement(leaves, axis_name), axis_name, compare)
    for number, leaf in zip(arrays, repaired, strict=True):
        whole[number] = leaf
    return jax.tree.unflatten(structure, whole) if repair else tree, mismatch


class _Lockstep:
    def __init__(self, axis_name: str, compare: Compare) -> None:
        self.axis_name, self.compare = axis_name, compare

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Mismatch]:
        return _synchronized(bind(*inputs), self.axis_name, self.compare)

    def merge(self, total: Mismatch, new: Mismatch) -> Mismatch:
        return merge(total, new)


@functools.partial(traced_once, static_argnums=(1, 2))
def _synchronized(outs: Values, axis_name: str, compare: Compare) -> tuple[Values, Mismatch]:
    # XLA may compute a value twice, once for each fusion that uses it: behind the barrier, what is compared is what is
    # consumed.
    outs = lax.optimization_barrier(outs)
    return _synchronize(outs, agreement(outs, axis_name), axis_name, compare)


def _synchronize(leaves: Values, agreed: Agreement, axis_name: str, compare: Compare) -> tuple[Values, Mismatch]:
    reference, undecided, differs = agreed

    def repair(state: tuple[Values, Difference], reference: Array) -> tuple[Values, Difference]:
        leaves, _ = state
        chosen, found = measure(leaves, axis_name, reference)
        return [varying(new, like=old) for new, old in zip(chosen, leaves, strict=True)], varying(found)

    kept = list(leaves), varying(nothing_found(leaves, axis_name, reference))
    leaves, found = repair(kept, reference) if compare == "always" else rarely(differs, repair, kept, reference)
    return leaves, Mismatch(found, undecided)


def _check_compare(compare: str) -> None:
    if compare not in ("gated", "always"):
        raise ValueError(f"compare={compare!r} is unknown; expected 'gated' or 'always'")
