"""Memory: buffers of patterns that are written by one program and read by another one.

The pattern is made on the device, word by word from the index, and the digest of the buffer is a program of its own:
the words have to go to memory and come back. Retention waits between the two.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from .data import address_in_address, walking_ones
from .registry import Request
from .workload import Bench, Workload


def _walking(at: UInt32[Array, "n"]) -> UInt32[Array, "n"]:
    return jnp.uint32(1) << ((at + at // jnp.uint32(32)) % jnp.uint32(32))


def _mixed(at: Any, one: Callable[[int], Any]) -> Any:
    """Words that look random, by the finalizer of MurmurHash3; for JAX and NumPy alike."""
    at = (at ^ (at >> one(16))) * one(0x85EBCA6B)
    at = (at ^ (at >> one(13))) * one(0xC2B2AE35)
    return at ^ (at >> one(16))


ON_DEVICE: Mapping[str, Callable[[UInt32[Array, "n"]], UInt32[Array, "n"]]] = {
    "walking-ones": _walking,
    "walking-zeros": lambda at: ~_walking(at),
    "address": lambda at: at,
    "address-inverted": lambda at: ~at,
    "random": lambda at: _mixed(at, jnp.uint32),
}
ON_HOST: Mapping[str, Callable[[tuple[int]], UInt32[np.ndarray, "n"]]] = {
    "walking-ones": walking_ones,
    "walking-zeros": lambda shape: ~walking_ones(shape),
    "address": address_in_address,
    "address-inverted": lambda shape: ~address_in_address(shape),
    "random": lambda shape: _mixed(address_in_address(shape), np.uint32),
}


def write(start: UInt32[Array, ""], *, pattern: str, words: int) -> UInt32[Array, "words"]:
    """A buffer of a pattern; `start` is 0, which the compiler does not know."""
    return ON_DEVICE[pattern](lax.iota(jnp.uint32, words) + start)


def write_on_host(start: UInt32[np.ndarray, ""], *, pattern: str, words: int) -> UInt32[np.ndarray, "words"]:
    """The same by NumPy."""
    return ON_HOST[pattern]((words,))


def write_and_wait(bench: Bench, *, seconds: float) -> Any:
    """Writes a buffer and leaves it alone for a while."""
    written = jax.block_until_ready(bench.call(*bench.arguments))
    bench.rest(seconds)
    return written


def build(request: Request) -> Iterator[Workload]:
    """Each pattern, and retention of the random one."""
    words, seconds = request.level.buffer // 4, request.level.retention
    for pattern in ON_DEVICE:
        yield _workload(pattern, pattern, words, None)
    yield _workload("retention", "random", words, functools.partial(write_and_wait, seconds=seconds))


def _workload(name: str, pattern: str, words: int, drive: Callable[[Bench], Any] | None) -> Workload:
    return Workload(
        name=f"memory/{name}/{words}",
        family="memory",
        dtype="uint32",
        data=pattern,
        sizes=(words,),
        program=f"memory/{pattern}/{words}",
        inputs=start,
        run=functools.partial(write, pattern=pattern, words=words),
        elements=words,
        work=8.0 * words,
        unit="byte",
        reference=functools.partial(write_on_host, pattern=pattern, words=words),
        drive=drive,
    )


def start() -> tuple[UInt32[np.ndarray, ""]]:
    """The index of the first word."""
    return (np.asarray(0, np.uint32),)
