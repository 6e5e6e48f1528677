"""Ordering: sorting, selecting, gathering and scattering of whole numbers, which the host computes bit for bit."""

import functools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt32

from .data import random_words
from .registry import Request
from .workload import Workload

LARGEST = 8
"""Elements that `top_k` returns."""


def order(keys: Int32[Array, "n"], at: UInt32[Array, "n"]) -> dict[str, Int32[Array, "_"]]:
    """Each operation, of the same keys and places."""
    places = (at % jnp.uint32(keys.size)).astype(jnp.int32)
    top, where = lax.top_k(keys, LARGEST)
    return {
        "sort": lax.sort(keys),
        "argsort": jnp.argsort(keys, stable=True).astype(jnp.int32),
        "gather": keys[places],
        "scatter": jnp.zeros_like(keys).at[places].add(keys),
        "top": top,
        "where": where.astype(jnp.int32),
    }


def order_on_host(keys: Int32[np.ndarray, "n"], at: UInt32[np.ndarray, "n"]) -> dict[str, Int32[np.ndarray, "_"]]:
    """The same by NumPy. Of equal keys the first one comes first."""
    places = (at % np.uint32(keys.size)).astype(np.int32)
    scattered = np.zeros_like(keys)
    np.add.at(scattered, places, keys)
    first = np.argsort(-keys.astype(np.int64), kind="stable")[:LARGEST]
    return {
        "sort": np.sort(keys),
        "argsort": np.argsort(keys, kind="stable").astype(np.int32),
        "gather": keys[places],
        "scatter": scattered,
        "top": keys[first],
        "where": first.astype(np.int32),
    }


def build(request: Request) -> Iterator[Workload]:
    """One workload."""
    count = request.level.numbers
    program = f"ordering/int32/{count}"
    yield Workload(
        name=f"{program}/random",
        family="ordering",
        dtype="int32",
        data="random",
        sizes=(count,),
        program=program,
        inputs=functools.partial(operands, count, request.seed),
        run=order,
        elements=4 * count + 2 * LARGEST,
        work=4.0 * 6 * count,
        unit="byte",
        seed=request.seed,
        reference=order_on_host,
    )


def operands(count: int, seed: int) -> tuple[Int32[np.ndarray, "n"], UInt32[np.ndarray, "n"]]:
    """Keys, of which many are equal, and places."""
    words = random_words((2, count), seed)
    keys = words[0] % np.uint32(max(count // 2, 2))
    return keys.astype(np.int32) - np.int32(count // 4), words[1]
