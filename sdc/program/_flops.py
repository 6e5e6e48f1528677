"""Floating-point operations of one operation, from its shapes alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

# What moves, makes or reinterprets data computes nothing.
FREE = frozenset({
    "argument", "result", "probe", "checked_product", "broadcast_in_dim", "reshape", "transpose", "squeeze",
    "expand_dims",
    "slice", "dynamic_slice", "rev", "pad", "concatenate", "dynamic_update_slice", "gather", "scatter", "iota",
    "copy", "copy_p", "convert_element_type", "bitcast_convert_type", "select_n", "optimization_barrier",
    "stop_gradient", "ppermute", "all_gather", "all_gather_invariant", "all_to_all", "pvary", "pbroadcast",
    "sharding_constraint", "reshard", "mesh_cast", "get", "swap", "freeze", "axis_index", "device_put", "split",
})  # fmt: skip


def flops(primitive: str, params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Floating-point operations of one evaluation.

    A multiplication and an addition count as two. Matrix products and convolutions are exact: 2 m n k. A reduction
    counts its inputs, any other arithmetic one per element of its output, however dear (`exp` as much as `add`);
    moving data counts nothing, and so do integers.

    Args:
        primitive: name of the JAX primitive.
        params: parameters of the equation.
        inputs, outputs: shapes and dtypes of its arrays.

    Example:
        >>> import jax
        >>> from sdc.program._flops import flops
        >>> x, y, z = (jax.ShapeDtypeStruct(shape, "float32") for shape in [(8, 16), (16, 4), (8, 4)])
        >>> flops("dot_general", {"dimension_numbers": (((1,), (0,)), ((), ()))}, [x, y], [z])
        1024
    """
    floating = [x for x in outputs if hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.inexact)]
    if not floating or primitive in FREE:
        return 0
    size = sum(math.prod(x.shape) for x in floating)
    if primitive == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * size * math.prod(inputs[0].shape[axis] for axis in contracted)
    if primitive == "conv_general_dilated":
        kernel = inputs[1].shape
        outermost = params["dimension_numbers"].rhs_spec[0]  # output features
        return 2 * size * math.prod(kernel) // max(kernel[outermost], 1)
    if primitive.startswith(("reduce_", "cum", "arg", "psum", "pm")):
        return sum(math.prod(x.shape) for x in inputs if hasattr(x, "shape"))
    return size
