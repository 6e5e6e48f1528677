"""Products that are used the other way round, computed that way.

JAX's gradient of a product by its second factor is a product that is transposed afterwards. XLA writes such a product
in the layout in which it is used, and the transposition is nothing. Where a tool looks at the product, its layout is
that of the product, and the tensor is copied. So for TPUs and GPUs the factors change places first, and the product
that is looked at is the one that is used: the axes of such a site are in the order of the gradient.
"""

from typing import Any

from jax._src import core
from jax.extend.core import primitives

from .mesh import compiled_for


def in_use_order(jaxpr: Any) -> Any:
    """A program whose products are as they are used; for a CPU, which copies nothing more either way, as it is."""
    return jaxpr if compiled_for().platform == "cpu" else _reordered(jaxpr)


def _reordered(jaxpr: Any) -> Any:
    uses = [var for eqn in jaxpr.eqns for var in eqn.invars if isinstance(var, core.Var)]
    uses += [var for var in jaxpr.outvars if isinstance(var, core.Var)]
    count: dict[Any, int] = {}
    for var in uses:
        count[var] = count.get(var, 0) + 1
    transposes = {
        eqn.invars[0]: eqn
        for eqn in jaxpr.eqns
        if eqn.primitive is primitives.transpose_p and count.get(eqn.invars[0]) == 1
    }
    gone, eqns = set(), []
    for eqn in jaxpr.eqns:
        transpose = transposes.get(eqn.outvars[0]) if eqn.primitive is primitives.dot_general_p else None
        if transpose is not None and _swaps(eqn, transpose.params["permutation"]):
            (contracted, batch), (a, b) = eqn.params["dimension_numbers"], eqn.invars
            dimensions = tuple(reversed(contracted)), tuple(reversed(batch))
            params = {**eqn.params, "dimension_numbers": dimensions}
            eqns.append(eqn.replace(invars=[b, a], outvars=list(transpose.outvars), params=params))
            gone.add(id(transpose))
        elif id(eqn) not in gone:
            inside = {name: _inside(value) for name, value in eqn.params.items()}
            changed = any(inside[name] is not value for name, value in eqn.params.items())
            eqns.append(eqn.replace(params=inside) if changed else eqn)
    same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _swaps(product: Any, permutation: Any) -> bool:
    """Whether a transposition puts the axes of the second factor before those of the first."""
    if product.params.get("out_sharding") is not None:
        return False
    (contracted, _), (batched, _) = product.params["dimension_numbers"]
    outer = len(batched)
    rows = product.invars[0].aval.ndim - len(contracted) - outer
    axes = range(product.outvars[0].aval.ndim)
    return tuple(permutation) == (*axes[:outer], *axes[outer + rows :], *axes[outer : outer + rows])


def _inside(value: Any) -> Any:
    """A parameter of an equation, with the programs in it reordered."""
    if isinstance(value, tuple):
        parts = tuple(_inside(part) for part in value)
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    if isinstance(value, core.Jaxpr):  # on jax 0.12 with constants, or without
        return _reordered(value)
    inner = getattr(value, "jaxpr", None)
    if not isinstance(inner, core.Jaxpr) or (new := _reordered(inner)) is inner:
        return value
    return value.replace(jaxpr=new)
