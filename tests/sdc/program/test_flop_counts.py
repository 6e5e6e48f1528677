"""Counts of operations: the primitives of the installed JAX that are known."""

from jax._src import core
from jax._src.lax import lax, linalg, parallel, slicing, special, windowed_reductions

from sdc.program.flop_counts import _FORMULAS, FREE, WITHOUT_PRODUCTS

# These primitives hold a program or multiply matrices.
UNKNOWN = {
    "composite", "householder_product", "ormqr", "reduce", "reduce_window", "scaled_dot", "select_and_scatter",
    "symmetric_product",
}  # fmt: skip


def test_every_primitive_of_jaxs_arithmetic_is_known() -> None:
    """A new version of JAX adds primitives, each of which must be entered in one of the lists."""
    names = {
        value.name
        for module in (lax, linalg, parallel, slicing, special, windowed_reductions)
        for value in vars(module).values()
        if isinstance(value, core.Primitive)
    }
    assert len(names) > 150
    assert names - FREE - WITHOUT_PRODUCTS - set(_FORMULAS) <= UNKNOWN
