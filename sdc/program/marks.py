"""Marks that keep a step's sites recognizable through its transformations.

A rule computes much beside the equation that it stands in for. All of that is bound below the scope `HIDDEN`, where no
transformation looks for sites, and what comes out of the rule is bound to `mark_p`, which stands for the equation from
then on: its primitive, parameters and inputs. An outer transformation that selects the equation sees the values with
which the step goes on, for instance the corrupted ones.

`port_p` is the site of an array that goes into the step or comes out of it. Both lower to nothing.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

HIDDEN = "sdc.hidden"

mark_p = Primitive("mark")
mark_p.multiple_results = True
port_p = Primitive("port")


def mark(outs: Sequence[Any], inputs: Sequence[Any], primitive: Any, params: Any) -> list[Any]:
    """The outputs of a rule, as the outputs of the equation that it stood in for."""
    return list(mark_p.bind(*outs, *inputs, outputs=len(outs), of=primitive, params=tuple(params.items())))


def _mark_jvp(primals: Any, tangents: Any, *, outputs: int, **params: Any) -> Any:
    outs = mark_p.bind(*primals, outputs=outputs, **params)
    return outs, [ad.instantiate_zeros(tangent) for tangent in tangents[:outputs]]


def _mark_batch(args: Any, dims: Any, *, outputs: int, **params: Any) -> Any:
    return mark_p.bind(*args, outputs=outputs, **params), dims[:outputs]


mark_p.def_impl(lambda *args, outputs, **_: list(args[:outputs]))
mark_p.def_abstract_eval(lambda *args, outputs, **_: list(args[:outputs]))
mlir.register_lowering(mark_p, lambda ctx, *args, outputs, **_: args[:outputs])
ad.primitive_jvps[mark_p] = _mark_jvp
batching.primitive_batchers[mark_p] = _mark_batch

port_p.def_impl(lambda x, **_: x)
port_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(port_p, lambda ctx, x, **_: [x])
ad.deflinear2(port_p, lambda cotangent, x, **_: [cotangent])
batching.defvectorized(port_p)
KERNEL, PRODUCT = "sdc_kernel", "sdc_product"
"""What programs call this library's kernels for TPUs, all alike since the compiler writes the instructions of one name
only; and the mark of those that compute a product, which tells the contracted axis of each factor.
"""
