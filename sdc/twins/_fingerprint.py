"""`fingerprint`: the digest of every selected value of a step."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt32

from ..program import Place, Reports, Values, Where, probes, rewrite, traced_once
from .digests import digest, fmix32


def fingerprint(step: Callable[..., Any], where: Where = probes) -> Callable[..., tuple[Any, Reports]]:
    """Transforms a step: it returns the digest of every selected value too.

    Args:
        step: any function that JAX can trace.
        where: selects sites; by default the probes.

    Returns:
        A function that returns `(out, digests)`: for each site the digests of the equation's outputs,
        `uint32[..., n, 2]` behind the axes named in `site.dims`. Iterations of a `while` are mixed into one digest, in
        order.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> out, digests = sdc.fingerprint(lambda x: sdc.probe(x + 1.0, "p"))(jnp.ones(3))
        >>> digests["fwd/p"].shape
        (1, 2)
    """
    return rewrite(step, where, _Digest(), required=True)


class _Digest:
    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Any]:
        return _digested(bind(*inputs))

    def merge(self, total: UInt32[Array, "n 2"], new: UInt32[Array, "n 2"]) -> UInt32[Array, "n 2"]:
        return fmix32(total) + new


@traced_once
def _digested(outs: Values) -> tuple[Values, UInt32[Array, "n 2"]]:
    # XLA may compute a value twice, once for each fusion that uses it: behind the barrier, what is digested is what is
    # consumed.
    outs = lax.optimization_barrier(outs)
    return outs, jnp.stack([digest(out) for out in outs])
