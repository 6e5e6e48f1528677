"""A check does not break a step that runs: sums that the backend cannot return are computed in another way."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sdc
from sdc.checksums.roundoff import Output, SchemeName

SIZES = {"b": 2, "h": 3, "m": 64, "o": 5, "k": 64, "l": 4, "n": 64, "p": 3}


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype)
    return jnp.sum(jnp.einsum("bhst,bthd->bshd", weights, v).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("scheme", ["two-tier", "residual"])
@pytest.mark.parametrize("output", ["float32 accumulator", "as is"])
def test_the_gradient_of_attention_in_bfloat16(output: Output, scheme: SchemeName) -> None:
    """`bhst,bthd->bshd` has a layout for which XLA's CPU backend has no bfloat16 product with float32 sums."""
    gradient = jax.grad(attention, (0, 1, 2))
    arguments = [jax.random.normal(jax.random.key(i), (2, 128, 9, 128), jnp.bfloat16) for i in range(3)]
    out, flags = jax.jit(sdc.abft(gradient, output=output, scheme=scheme))(*arguments)
    assert len(flags) == 6
    assert all(int(flag.checked) == 2 * 9 * 128 and int(flag.flagged) == 0 for flag in flags.values())
    factors = {x.shape for site in flags.sites for x in site.inputs}
    # The result says which products were computed otherwise.
    transposed = output == "float32 accumulator" and scheme == "two-tier"
    assert ((2, 128, 9, 128) in factors) == (not transposed)
    for ours, plain in zip(out, jax.jit(gradient)(*arguments), strict=True):
        off, size = (np.linalg.norm(np.asarray(x, np.float32)) for x in (ours - plain, plain))
        assert off < 0.1 * size  # XLA leaves out some roundings to bfloat16 of the plain step


def some_products(number: int) -> list[tuple[str, str, str, str]]:
    """Axes of two factors, those of batches and those that are contracted, in any order."""
    draw, found = random.Random(0), []
    for _ in range(number):
        batch, contracted, rows, columns = (draw.sample(axes, draw.randint(0, 2)) for axes in ("bh", "kl", "mo", "np"))
        factors = [*batch, *contracted, *rows], [*batch, *contracted, *columns]
        for factor in factors:
            draw.shuffle(factor)
        found.append(("".join(factors[0]), "".join(factors[1]), "".join(batch), "".join(contracted)))
    return found


def test_products_of_random_dimensions_run() -> None:
    """The first three have no bfloat16 product with float32 sums on CPUs."""
    known = [("ko", "nkp", "", "k"), ("bhko", "npbhk", "bh", "k"), ("hlo", "hlnp", "h", "l")]
    for left, right, batch, contracted in [*known, *some_products(20)]:
        a, b = (jnp.ones([SIZES[axis] for axis in axes], jnp.bfloat16) for axes in (left, right))
        dimensions: Any = tuple(
            tuple(tuple(axes.index(axis) for axis in of) for axes in (left, right)) for of in (contracted, batch)
        )
        out, flags = jax.jit(sdc.abft(lambda a, b, of=dimensions: lax.dot_general(a, b, of)))(a, b)
        depth = np.prod([SIZES[axis] for axis in contracted])
        assert (np.asarray(out, np.float32) == depth).all(), (left, right)
        assert all(int(flag.flagged) == 0 < int(flag.checked) for flag in flags.values())


def test_the_margin_is_that_of_the_tier_that_decides() -> None:
    """Of many rows some come close to the bound of the first tier, or above it; nothing follows from that."""
    a, b = (jax.random.normal(jax.random.key(i), (size, 64)) for i, size in enumerate((1024, 64)))
    run = jax.jit(sdc.abft(lambda a, b: a @ b))
    [flag] = run(a, b)[1].values()
    assert int(flag.examined) == 0
    assert float(flag.margin) == 0
    assert 0 < float(flag.first_margin) <= 1
    # Rows that cancel are examined, and far from being flagged.
    [flag] = run(jnp.concatenate([a, -a], 1), jnp.concatenate([b, b * (1 + 1e-7)]))[1].values()
    assert int(flag.examined) > 0
    assert float(flag.first_margin) > 1
    assert 0 < float(flag.margin) < 0.9
    assert int(flag.flagged) == 0
