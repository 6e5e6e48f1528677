"""Counts of the floating-point operations of an equation and of its matrix products, from shapes alone."""

import functools
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
    "argument", "result", "saved", "probe", "port", "mark", "checked_product", "broadcast_in_dim", "reshape",
    "transpose", "squeeze", "expand_dims",
    "slice", "dynamic_slice", "rev", "pad", "concatenate", "dynamic_update_slice", "gather", "scatter", "iota",
    "copy", "copy_p", "convert_element_type", "bitcast_convert_type", "select_n", "optimization_barrier",
    "stop_gradient", "ppermute", "all_gather", "all_gather_invariant", "all_to_all", "pvary", "pbroadcast",
    "sharding_constraint", "reshard", "mesh_cast", "get", "swap", "freeze", "axis_index", "device_put", "split",
})  # fmt: skip
# Primitives of JAX without a program of their own that are known to compute no matrix product: arithmetic, data
# movement, randomness and collectives; collectives in two parts; decompositions and solvers; Pallas; conversions of
# sparse arrays and of arrays of several processes. The number of operations of any other primitive is unknown.
WITHOUT_PRODUCTS = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "add_dependency", "addupdate", "after_all", "all_gather",
    "all_gather_done", "all_gather_invariant", "all_gather_reduced", "all_gather_reduced_start", "all_gather_start",
    "all_to_all", "all_to_all_done", "all_to_all_start", "and", "approx_top_k", "argmax", "argmin", "asin", "asinh",
    "atan", "atan2", "atanh", "atomic_cas", "atomic_rmw", "axis_index", "bcoo_extract", "bcoo_fromdense",
    "bcoo_sort_indices", "bcoo_sum_duplicates", "bcoo_todense", "bcoo_transpose", "bcsr_extract", "bcsr_fromdense",
    "bcsr_todense", "bessel_i0e", "bessel_i1e", "bitcast", "bitcast_convert_type", "broadcast_in_dim",
    "broadcast_to", "cbrt", "ceil", "cholesky", "cholesky_update", "clamp", "clz", "complex", "concatenate", "conj",
    "convert_element_type", "coo_fromdense", "coo_todense", "copy", "copy_p", "cos", "cosh", "create_token",
    "csr_fromdense", "csr_todense", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "dce_sink",
    "debug_barrier_p", "debug_callback", "debug_print", "delay", "device_put", "digamma", "dim_as_value",
    "dimension_size", "div",
    "dma_start", "dma_wait", "dynamic_slice", "dynamic_update_slice", "eig", "eigh", "empty", "empty2", "empty_ref",
    "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expand_dims", "expm1", "fft", "floor", "freeze",
    "from_edtype", "gather", "ge", "geqp3", "geqrf", "get", "get_barrier_semaphore", "get_global",
    "global_array_to_host_local_array", "gt", "hessenberg", "host_local_array_to_global_array", "igamma",
    "igamma_grad_a", "igammac", "imag", "inspect_sharding", "integer_pow", "iota", "iota_2x32_shape", "is_finite",
    "layout_constraint", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "lu",
    "lu_pivots_to_permutation", "masked_load", "masked_swap", "max", "max_contiguous", "mesh_cast", "min", "mul",
    "mulhi", "multiple_of", "name", "ne", "neg", "new_ref", "nextafter", "not", "num_programs", "one_minus_square",
    "optimization_barrier", "or", "pack_elementwise", "pad", "pbroadcast", "pbroadcast_done", "pbroadcast_dynamic",
    "pbroadcast_start", "philox2x32", "philox4x32", "platform_index", "pmax", "pmin", "polygamma", "polynomial",
    "population_count", "pow", "ppermute", "ppermute_done", "ppermute_start", "precv", "preduced", "prng_join",
    "prng_random_bits", "prng_seed", "prng_split", "program_id", "psend", "psum", "psum_done", "psum_invariant",
    "psum_invariant_start", "psum_start", "pvary", "qr", "ragged_all_to_all", "random_bits", "random_clone",
    "random_fold_in", "random_gamma", "random_seed", "random_split", "random_unwrap", "random_wrap", "real",
    "reciprocal", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_precision", "reduce_prod",
    "reduce_scatter", "reduce_scatter_done", "reduce_scatter_start", "reduce_sum", "reduce_window_max",
    "reduce_window_min", "reduce_window_sum", "reduce_xor", "reduced_vary_cast", "reduced_vary_cast_p",
    "regularized_incomplete_beta", "relayout", "rem", "remove_memory_space", "reshape", "reshard", "rev",
    "rng_bit_generator", "rng_uniform", "roll", "round", "rsqrt", "scatter", "scatter-add", "scatter-max",
    "scatter-min", "scatter-mul", "scatter-sub", "schur", "select_and_gather_add", "select_and_scatter_add",
    "select_n", "semaphore_read", "semaphore_signal", "semaphore_wait", "shape_assertion", "sharding_constraint",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "slice", "sort", "split",
    "spsolve", "sqrt", "square", "squeeze", "stack", "stage", "stochastic_round", "stop_gradient", "sub", "svd", "swap",
    "tan", "tanh", "threefry2x32", "threefry4x32", "tie", "tile", "to_edtype", "todense", "top_k", "trace_value",
    "transpose", "triangular_solve", "tridiagonal", "tridiagonal_solve", "unpack_elementwise", "unreduced_pmax",
    "unreduced_pmin", "unreduced_psum", "unreduced_psum_start", "unreduced_reduce_scatter",
    "unreduced_reduce_scatter_start", "unstack", "vary_unreduced_cast", "vary_unreduced_cast_p",
    "with_memory_space_constraint", "xor", "zeros_like", "zeta",
})  # fmt: skip
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
    unknown for any primitive that is neither of these nor in `WITHOUT_PRODUCTS` and returns numbers other than
    integers, unless its function in another library can be traced.
    """
    name = primitive.name
    if name in FREE:
        return 0
    if name in _FORMULAS:
        return _FORMULAS[name](params, inputs, outputs)
    if name == "call_exported":
        text = params["exported"].mlir_module()
        return None if any(word in text for word in ("dot_general", "convolution", "custom_call")) else 0
    if name in WITHOUT_PRODUCTS and _registered(primitive):
        return 0
    if not any(hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact) for x in outputs):
        return 0
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
    if _registered(primitive):  # the function of a callback must not be called, and that of foreign code does not show
        return None
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


# Primitives of JAX and of this library, since another library's primitive may have the name of one of them.
_registry: set[Any] = set()


@functools.lru_cache(maxsize=4096)
def _registered(primitive: Any) -> bool:
    """Returns whether a primitive belongs to JAX or this library."""
    if primitive not in _registry:
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(LIBRARIES):
                _registry.update(value for value in vars(module).values() if isinstance(value, core.Primitive))
    return primitive in _registry


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
