"""Counts of the floating-point operations of an equation and of its matrix products, from shapes alone."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core
from jax.extend.core import primitives

# Primitives that move, create or reinterpret data perform no arithmetic.
FREE = frozenset({
    "argument", "result", "probe", "checked_product", "broadcast_in_dim", "reshape", "transpose", "squeeze",
    "expand_dims",
    "slice", "dynamic_slice", "rev", "pad", "concatenate", "dynamic_update_slice", "gather", "scatter", "iota",
    "copy", "copy_p", "convert_element_type", "bitcast_convert_type", "select_n", "optimization_barrier",
    "stop_gradient", "ppermute", "all_gather", "all_gather_invariant", "all_to_all", "pvary", "pbroadcast",
    "sharding_constraint", "reshard", "mesh_cast", "get", "swap", "freeze", "axis_index", "device_put", "split",
})  # fmt: skip
# Name prefixes of JAX's primitives that may compute matrix products of unknown cost.
OPAQUE = (
    "ffi_call", "custom_call", "pure_callback", "io_callback", "tpu_custom_call", "triton_kernel_call", "rnn",
    "dot_product_attention",
)  # fmt: skip
LIBRARIES = ("jax.", "jaxlib.", "sdc.")


def flops(primitive: str, params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Returns the number of floating-point operations in one evaluation of an equation.

    A multiplication and an addition count as two operations. Counts of matrix products and convolutions are exact:
    2 m n k. A reduction counts as one operation for each input element; any other arithmetic counts as one for each
    output element, regardless of its cost (`exp` counts as much as `add`). Data movement and integer arithmetic count
    as zero.
    """
    floating = [x for x in outputs if hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.inexact)]
    if not floating or primitive in FREE:
        return 0
    if primitive in _FORMULAS:
        return _FORMULAS[primitive](params, inputs, outputs)
    if primitive.startswith(("reduce_", "cum", "arg", "psum", "pm")):
        return sum(math.prod(x.shape) for x in inputs if hasattr(x, "shape"))
    return sum(math.prod(x.shape) for x in floating)


def product_flops(
    primitive: Any, params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]
) -> int | None:
    """Returns the number of operations in an equation's matrix products, including integer products; None if unknown.

    Products inside a kernel (`pallas_call`) or another primitive that holds a program are counted. The number is
    unknown for a primitive of another library, or a call of foreign code, that returns numbers other than integers.
    """
    name = primitive.name
    if name in FREE:
        return 0
    if name in _FORMULAS:
        return _FORMULAS[name](params, inputs, outputs)
    if name == "call_exported":
        text = params["exported"].mlir_module()
        return None if any(word in text for word in ("dot_general", "convolution", "custom_call")) else 0
    if primitive in _leaves:
        return 0
    if not any(hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact) for x in outputs):
        return 0
    if name.startswith(OPAQUE) or name in _SPARSE:
        return None
    bodies = list(core.jaxprs_in_params(params))
    inside = _inside(bodies)
    if name == "pallas_call":
        if (estimate := params["cost_estimate"]) is not None and inside != 0:
            return int(estimate.flops)
        grid = params["grid_mapping"].grid
        known = all(isinstance(size, int) for size in grid)
        return inside and (inside * math.prod(grid) if known else None)
    if bodies:  # it is unknown how often they run, except for a custom_partitioning, whose body runs once
        return inside if name == "custom_partitioning" else None if inside != 0 else 0
    if primitive not in _registry:
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(LIBRARIES):
                _registry.update(value for value in vars(module).values() if isinstance(value, core.Primitive))
    if primitive in _registry:
        return 0
    try:  # another library implements the primitive by a function, which may be traceable
        program = jax.make_jaxpr(lambda *args: primitive.impl(*args, **params))(*inputs).jaxpr
    except Exception:  # foreign code may raise anything; its cost is then unknown
        return None
    return None if any(eqn.primitive is primitive for eqn in program.eqns) else _inside([program])


def _inside(jaxprs: Sequence[Any]) -> int | None:
    """Returns the number of operations in the matrix products of programs that run once; None if unknown."""
    total = 0
    for jaxpr in jaxprs:
        for eqn in (jaxpr.jaxpr if hasattr(jaxpr, "consts") else jaxpr).eqns:
            found = _of_equation(eqn)
            if found is None:
                return None
            total += found
    return total


def _of_equation(eqn: Any) -> int | None:
    bodies = list(core.jaxprs_in_params(eqn.params))
    if eqn.primitive is primitives.scan_p:
        found = _inside(bodies)
        return found and found * int(eqn.params["length"])
    if eqn.primitive is primitives.while_p:
        return None if _inside(bodies) != 0 else 0
    if eqn.primitive is primitives.cond_p:
        branches = [_inside([body]) for body in bodies]
        return None if None in branches else max(found for found in branches if found is not None)
    if eqn.primitive in (primitives.jit_p, primitives.remat_p, primitives.custom_jvp_call_p):
        return _inside(bodies)
    avals = [getattr(var.aval, "inner_aval", var.aval) for var in eqn.invars]
    return product_flops(eqn.primitive, eqn.params, avals, [var.aval for var in eqn.outvars])


# Primitives of JAX and of this library. Those without bodies compute no matrix products, except the ones listed below.
_registry: set[Any] = set()
# Arithmetic of `jax.lax` that computes no matrix product and holds no program, for a fast path.
_leaves = frozenset(
    primitives.__dict__[f"{name}_p"]
    for name in (
        "add", "sub", "mul", "div", "neg", "max", "min", "exp", "log", "tanh", "logistic", "sin", "cos", "sqrt",
        "rsqrt",
        "integer_pow", "pow", "abs", "sign", "reduce_sum", "reduce_max", "erf", "eq", "ne", "lt", "le", "gt", "ge",
    )
)  # fmt: skip


def _dot(params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    (contracted, _), _ = params["dimension_numbers"]
    return 2 * math.prod(outputs[0].shape) * math.prod(inputs[0].shape[axis] for axis in contracted)


def _convolution(params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    kernel = inputs[1].shape
    outermost = params["dimension_numbers"].rhs_spec[0]  # output features
    return 2 * math.prod(outputs[0].shape) * math.prod(kernel) // max(kernel[outermost], 1)


def _ragged(params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts each row once, since a row is in one group; if groups split a contracted axis, counts each term once."""
    numbers = params["ragged_dot_dimension_numbers"]
    whole = {"dimension_numbers": numbers.dot_dimension_numbers}
    contracted = numbers.dot_dimension_numbers[0][0]
    groups = inputs[2].shape[-1] if set(numbers.lhs_ragged_dimensions) <= set(contracted) else 1
    return _dot(whole, inputs, outputs) // max(groups, 1)


def _scaled(params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    return 2 * math.prod(outputs[0].shape) * int(inputs[0].shape[-1])


def _sparse(params: Mapping[str, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Counts the product of each stored number with each column of the other factor."""
    (_, contracted), (_, batch) = params["dimension_numbers"]
    columns = (size for axis, size in enumerate(inputs[-1].shape) if axis not in (*contracted, *batch))
    return 2 * math.prod(inputs[0].shape) * math.prod(columns)


_FORMULAS = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged,
    "scaled_matmul_wrapper": _scaled,
    "scaled_matmul": _scaled,
    "bcoo_dot_general": _sparse,
    "bcsr_dot_general": _sparse,
    "bcoo_dot_general_sampled": _dot,
}
# Matrix products of other sparse arrays.
_SPARSE = ("bcoo_spdot_general", "coo_matmat", "coo_matvec", "csr_matmat", "csr_matvec")
