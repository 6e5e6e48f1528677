"""Copies: from the host to a device and back, and by way of another device, compared on the host."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from .data import random_words
from .registry import Request
from .workload import Bench, Workload


def increase(x: UInt32[Array, "n"]) -> UInt32[Array, "n"]:
    """Adds one to each word, so that what comes back was on the device."""
    return x + jnp.uint32(1)


def increase_on_host(x: UInt32[np.ndarray, "n"]) -> UInt32[np.ndarray, "n"]:
    """The same by NumPy."""
    return x + np.uint32(1)


def from_host(bench: Bench) -> Any:
    """Brings the words to the device anew; the burn-in fetches what the program makes of them."""
    return bench.call(*jax.device_put(bench.host, bench.device))


def by_another(bench: Bench) -> Any:
    """Brings the program's output to each of the other devices, one after the other, and back."""
    out = bench.call(*bench.arguments)
    for other in bench.others:
        out = jax.device_put(jax.device_put(out, other), bench.device)
    return out


def build(request: Request) -> Iterator[Workload]:
    """Copies between host and device, and between devices where there are two."""
    words = request.level.buffer // 4
    ways = {"host-device-host": (from_host, 1)}
    if len(request.devices) > 1:
        ways["device-device"] = (by_another, len(request.devices) - 1)
    for name, (drive, turns) in ways.items():
        yield Workload(
            name=f"transfers/{name}/{words}",
            family="transfers",
            dtype="uint32",
            data="random",
            sizes=(words,),
            program=f"transfers/{words}",
            inputs=functools.partial(operand, words, request.seed),
            run=increase,
            elements=words,
            work=8.0 * words * turns,
            unit="byte",
            seed=request.seed,
            on_host=True,
            reference=increase_on_host,
            drive=drive,
        )


def operand(words: int, seed: int) -> tuple[UInt32[np.ndarray, "words"]]:
    """The words."""
    return (random_words((words,), seed),)
