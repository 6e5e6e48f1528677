"""The fused product for TPUs, interpreted: the product and its sums in every form that it takes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from sdc.checksums.fused_products import (
    TPU_KINDS as KINDS,
    TPU_LEAST as LEAST,
    TPU_MEMORY as MEMORY,
    tpu_fits,
)
from sdc.program import compiling_for
from tests.sdc.checksums.test_fused_products import dot


@pytest.mark.parametrize(
    ("a", "b", "over", "taken"),
    [
        ((1024, 4096), (4096, 512), (1, 0), True),
        ((LEAST, 1024), (256, LEAST), (0, 1), True),
        ((4, 256, LEAST), (LEAST, 256), (2, 0), True),
        ((4, 256, LEAST), (4, 256, LEAST), (2, 2), True),
        (
            (128, 8, LEAST),
            (LEAST, 256),
            (2, 0),
            False,
        ),  # rows that do not fill registers are moved to be joined
        ((LEAST, 32, 32), (LEAST, 256), (0, 0), False),
        ((512, LEAST), (LEAST, 512), (1, 0), False),  # rows for one of two cores
        ((1024, LEAST), (LEAST, 128), (1, 0), False),  # small tiles are slow
        ((1024, 1024), (1024, 512), (1, 0), False),  # and so are few terms
        ((1024, LEAST + 64), (LEAST + 64, 512), (1, 0), False),
        ((0, LEAST), (LEAST, 512), (1, 0), False),
        ((1024, LEAST), (LEAST, 0), (1, 0), False),
        ((1024, 0), (0, 512), (1, 0), False),
        ((1024, 1 << 16), (1 << 16, 512), (1, 0), False),  # terms that the core's memory cannot hold
    ],
)
def test_what_it_takes(a: tuple[int, ...], b: tuple[int, ...], over: tuple[int, int], taken: bool) -> None:
    product = dot(*over, (len(a), len(b)))
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (a, b)]
    wide = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (a, b)]
    with compiling_for("tpu", whole=True, kind=KINDS[0]):
        assert tpu_fits(product, *given) is taken
        assert not tpu_fits(product, *wide)
        assert not tpu_fits(dataclasses.replace(product, dtype=jnp.dtype(jnp.bfloat16)), *given)
        assert not tpu_fits(product.mapped(), *given)
    for kind, whole in ((KINDS[0], False), ("TPU v4", True), ("TPU7x", True), ("", True)):
        with compiling_for("tpu", whole=whole, kind=kind):
            assert not tpu_fits(product, *given)
    assert MEMORY < 64 << 20
