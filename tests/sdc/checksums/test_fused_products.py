"""The fused product for TPUs, interpreted: the product and its sums in every form that it takes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.checksums import Profile
from sdc.checksums.fused_products import (
    TPU_KINDS as KINDS,
    TPU_LEAST as LEAST,
    tpu_product,
)
from sdc.checksums.products import Dot
from sdc.checksums.roundoff import PLATFORMS
from sdc.checksums.schemes import signed_weights
from sdc.program import compiling_for

RNG = np.random.default_rng(14)
FORMS = {"rows by columns": (1, 0), "rows by rows": (1, 1), "columns by columns": (0, 0), "columns by rows": (0, 1)}


def dot(over_a: int, over_b: int, ndim: tuple[int, int] = (2, 2)) -> Dot:
    return Dot((((over_a,), (over_b,)), ((), ())), ndim, dtype=jnp.dtype(jnp.float32))


def factors(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.asarray(RNG.normal(size=shape), jnp.bfloat16) for shape in shapes]


def agrees(found: Any, exact: np.ndarray) -> None:
    c, (weighted, squares) = found
    np.testing.assert_allclose(c, exact, rtol=1e-4, atol=1e-3)
    weights = np.asarray(signed_weights(exact.shape[-1]), np.float64)
    np.testing.assert_allclose(weighted, exact @ weights, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(squares, (exact**2).sum(-1), rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_the_product_and_its_sums(form: str) -> None:
    """Against NumPy in float64; several tiles of rows and of columns, of different sides."""
    over = FORMS[form]
    a, b = factors((1024, LEAST) if over[0] else (LEAST, 1024), (768, LEAST) if over[1] else (LEAST, 768))
    wide = [np.asarray(x, np.float64) for x in (a, b)]
    exact = (wide[0] if over[0] else wide[0].T) @ (wide[1].T if over[1] else wide[1])
    with jax.enable_x64(form == "rows by rows"):
        agrees(tpu_product(dot(*over), a, b, interpret=True), exact)


def test_leading_axes_and_a_mesh() -> None:
    """Nothing is checked of which axes values vary over: JAX cannot interpret a kernel then."""
    a, b = factors((4, 512, LEAST), (LEAST, 256))
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def run(a: Any, b: Any) -> Any:
        return tpu_product(dot(2, 0, (3, 2)), a, b, interpret=True)

    agrees(run(a, b), exact)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    agrees(jax.jit(mapped)(a, b), exact)


def test_a_profile_decides() -> None:
    a, b = factors((1024, LEAST), (LEAST, 256))
    for fused in (False, True):
        step = sdc.abft(lambda a, b: a @ b, profile=Profile(PLATFORMS["tpu"], fused=fused))
        with compiling_for("tpu", whole=True, kind=KINDS[-1]):
            assert ("sdc_kernel" in str(jax.make_jaxpr(step)(a, b))) is fused
        assert "sdc_kernel" not in str(jax.make_jaxpr(step)(a, b))


def test_what_is_assumed_is_assumed_of_the_target() -> None:
    """A step that was transformed before anybody said what it is compiled for."""
    step = sdc.abft(lambda a, b: a @ b)
    a, b = (x.astype(jnp.float32) for x in factors((128, 128), (128, 128)))
    here = str(jax.make_jaxpr(step)(a, b))
    with compiling_for("tpu", whole=True, kind=KINDS[0]):
        assert str(jax.make_jaxpr(step)(a, b)) != here  # other bounds
