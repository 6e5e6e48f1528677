"""Checked matrix products for single layers, and `collect`, which makes a step return the flags of these products."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, Shaped

from ..program import Place, Reports, Values, primitive, rewrite
from ._check import Flags, check, merge_flags
from .fused_products import multiply
from .products import Dimensions, Dot, arranged
from .roundoff import Mode, Output, Profile, SchemeName, Settings, check_choice, unit, work_type
from .schemes import fold
from .transform import abft, carried

# Identity on a product that also takes the flags of its check, so that the flags are kept as long as the product is
# used.
checked_product_p = Primitive("checked_product")
checked_product_p.def_impl(lambda out, *flags, structure: out)
checked_product_p.def_abstract_eval(lambda out, *flags, structure: out)
mlir.register_lowering(checked_product_p, lambda ctx, out, *flags, structure: [out])


def _batch(values: Any, axes: Any, *, structure: Any) -> Any:
    """Merges flags over the axis that `vmap` maps, because the mapped product counts as one product."""
    out, *flags = values
    if any(axis is not None for axis in axes[1:]):
        size = next(x.shape[axis] for x, axis in zip(values, axes, strict=True) if axis is not None)
        rows = [
            jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(flags, axes[1:], strict=True)
        ]
        rows = jax.tree.unflatten(structure, rows)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), rows)
        flags = jax.tree.leaves(lax.scan(lambda total, new: (merge_flags(total, new), None), zeros, rows)[0])
    return checked_product_p.bind(out, *flags, structure=structure), axes[0]


batching.primitive_batchers[checked_product_p] = _batch


def _carry(out: Any, flags: Flags) -> Any:
    leaves, structure = jax.tree.flatten(flags)
    return checked_product_p.bind(out, *leaves, structure=structure)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Everything that determines how a layer's product is computed and checked."""

    product: Dot
    settings: Settings
    output: Output
    profile: Profile = dataclasses.field(compare=False)


def dot_general(
    lhs: Shaped[Array, "*lhs"],
    rhs: Shaped[Array, "*rhs"],
    dimension_numbers: Dimensions,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    mode: Mode = "detect",
    output: Output = "float32 accumulator",
    scheme: SchemeName = "two-tier",
    profile: Profile | None = None,
    checksum: Float[Array, "*folded"] | None = None,
) -> Shaped[Array, "*out"]:
    """Computes a checked `lax.dot_general`, and also checks the two matrix products of its backward pass.

    This function can be passed wherever Flax accepts a `dot_general`, as in
    `nnx.Linear(4, 8, dot_general=sdc.checksums.dot_general, rngs=rngs)`; bind other settings with `functools.partial`.
    With `sdc.checksums.collect`, the step returns the flags; without `collect`, `mode="correct"` corrects products
    without reporting flags.

    Args:
        lhs: first factor.
        rhs: second factor, for instance a weight.
        dimension_numbers, precision, preferred_element_type, out_sharding: see `lax.dot_general`.
        mode, output, scheme, profile: see `sdc.abft`.
        checksum: checksum of `rhs`, if known (see `checksum`); weights need a new checksum only after an optimizer
            step.

    Returns:
        The product, which can be differentiated in reverse mode.

    Raises:
        ValueError: see `sdc.abft`; also raised if `checksum` does not fit `rhs`.
    """
    check_choice("output", output, get_args(Output))
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
    dimensions: Dimensions = (tuple(lhs_contracted), tuple(rhs_contracted)), (tuple(lhs_batch), tuple(rhs_batch))
    dtype = None if preferred_element_type is None else jnp.dtype(preferred_element_type)
    product = Dot(dimensions, (lhs.ndim, rhs.ndim), precision, dtype, out_sharding)
    profile = Profile.given(profile)
    if checksum is not None:
        wanted = jax.eval_shape(lambda rhs: _checksum(rhs, dimensions, scheme=scheme), rhs)
        if (checksum.shape, checksum.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"checksum has shape {checksum.shape} and dtype {checksum.dtype}, but rhs of shape {rhs.shape} needs "
                f"{wanted.shape} and {wanted.dtype}; compute the checksum with sdc.checksums.checksum(rhs, "
                f"dimension_numbers, scheme={scheme!r})"
            )
    settings = profile.settings(Settings(mode, scheme), "")
    return _product(_Layer(product, settings, output, profile), lhs, rhs, checksum)


def checksum(
    rhs: Shaped[Array, "*rhs"], dimension_numbers: Dimensions, *, scheme: SchemeName = "two-tier"
) -> Float[Array, "*folded"]:
    """Computes the checksum of a second factor, for use in many products with that factor."""
    (lhs_contracted, _), (lhs_batch, _) = dimension_numbers
    product = Dot(dimension_numbers, (len(lhs_contracted) + len(lhs_batch), rhs.ndim))
    check_choice("scheme", scheme, get_args(SchemeName))
    return fold(scheme, product, rhs.astype(work_type(rhs.dtype)))


_checksum = checksum  # `dot_general` has an argument of that name


def einsum(subscripts: str, *operands: Shaped[Array, "..."], **settings: Any) -> Shaped[Array, "..."]:
    """Computes `jnp.einsum` with checked products; also accepts `mode`, `output`, `scheme` and `profile` of
    `dot_general`."""
    own = {name: settings.pop(name) for name in ("mode", "output", "scheme", "profile") if name in settings}
    product = functools.partial(dot_general, **own)
    out: Array = jnp.einsum(subscripts, *operands, _dot_general=product, **settings)
    return out


def collect(step: Callable[..., Any]) -> Callable[..., tuple[Any, Reports[Flags]]]:
    """Transforms a step whose layers check their own products so that the step also returns the flags of these
    products.

    Args:
        step: any function that JAX can trace, typically one that differentiates a model.

    Returns:
        A function that returns `(out, flags)`, with `Flags` for each product in the directions `fwd`, `remat` and
        `bwd`.

    Raises:
        ValueError: the step has no checked product.
    """
    return rewrite(step, primitive(checked_product_p.name), _Collect(), required=True)


class _Collect:
    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Flags]:
        flags: Flags = jax.tree.unflatten(place.params["structure"], inputs[1:])
        return bind(*inputs), flags

    merge = staticmethod(merge_flags)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(layer: _Layer, a: Any, b: Any, folded: Any) -> Any:
    dtype = jax.eval_shape(layer.product, a, b).dtype
    work = work_type(a.dtype, b.dtype, dtype)
    narrow = unit(dtype) > unit(work)
    if narrow and layer.settings.scheme == "residual":
        whole, operands = carried(layer.product, a, b, dtype)
        return _carry(*check(whole, layer.settings, operands))
    product = layer.product
    if narrow and layer.output == "float32 accumulator":
        dimensions, a, b = arranged(product.dimensions, a, b)
        product = dataclasses.replace(product, dimensions=dimensions, dtype=jnp.dtype(work))
    operands = multiply(product, layer.settings, a, b)._replace(checksum=folded)
    c, flags = check(product, layer.settings, operands)
    return _carry(c.astype(dtype), flags)


def _forward(layer: _Layer, a: Any, b: Any, folded: Any) -> Any:
    return _product(layer, a, b, folded), (a, b)


def _backward(layer: _Layer, factors: Any, cotangent: Any) -> Any:
    mode, scheme = layer.settings.mode, layer.settings.scheme

    def pulled(number: int) -> Any:
        def pull(cotangent: Any) -> Any:
            return jax.vjp(layer.product, *factors)[1](cotangent)[number]

        checked = abft(pull, mode=mode, output=layer.output, scheme=scheme, profile=layer.profile)
        transposed, flags = checked(cotangent)
        return _carry(transposed, functools.reduce(merge_flags, flags.values()))

    return pulled(0), pulled(1), None


_product.defvjp(_forward, _backward)
