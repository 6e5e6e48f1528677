"""Guards what stood in a call with a derivative of its own, and stands in the place of that call now.

A step is rewritten after it was differentiated, and then the call is only its body. Whoever differentiates the
rewritten step would differentiate the body instead, and have another gradient, without a word; this is refused.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .marks import HIDDEN

guard_p = Primitive("inlined")
REMEDY = "transform the function that differentiates, as in sdc.abft(jax.grad(loss)), and not jax.grad(sdc.abft(loss))"


def guard(outs: Sequence[Any], call: str, source: str) -> list[Any]:
    """Arrays that cannot be differentiated.

    Args:
        outs: what the body returns.
        call: name of the primitive that had a derivative of its own.
        source: line of the user's that calls it.
    """
    return underived(
        outs,
        f"{call} has a derivative of its own{source and f' ({source})'}, which a transformed function does not have "
        f"any more: {REMEDY}; or select nothing inside it",
    )


def underived(arrays: Sequence[Any], why: str) -> list[Any]:
    """Arrays that are refused, for a reason, where anybody differentiates by them."""
    with jax.named_scope(HIDDEN):
        return [guard_p.bind(x, why=why) for x in arrays]


def _refuse(primals: Any, tangents: Any, *, why: str) -> NoReturn:
    raise ValueError(why)


guard_p.def_impl(lambda x, **_: x)
guard_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(guard_p, lambda ctx, x, **_: [x])
batching.defvectorized(guard_p)
ad.primitive_jvps[guard_p] = _refuse
