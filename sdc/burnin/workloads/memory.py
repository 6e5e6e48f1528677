"""Memory and copies: buffers of patterns that one program writes and another one reads, and words that travel.

A pattern is made on the device, word by word from the index, and the digest of the buffer is a program of its own:
the words have to go to memory and come back. Retention waits between the two. Copies go from the host to a device and
back, or by way of the other devices, and are compared on the host.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from .arrays import murmur, random_words
from .registry import FamilyRequest
from .workload import Bench, Workload


def _walking(at: Any, word: Callable[[int], Any]) -> Any:
    """One bit that is set, the next one in each word; each 32 words begin with another one."""
    return word(1) << ((at + at // word(32)) % word(32))


PATTERNS: Mapping[str, Callable[[Any, Callable[[int], Any]], Any]] = {
    "walking-ones": _walking,
    "walking-zeros": lambda at, word: ~_walking(at, word),
    "address": lambda at, word: at,
    "address-inverted": lambda at, word: ~at,
    "random": murmur,
}
"""Words from their indices; `word` makes a constant, by JAX or NumPy. A stuck address line makes two addresses one."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Pattern(Workload):
    """A buffer of a pattern, left alone for a while where there are seconds of retention."""

    seconds: float = 0.0

    def inputs(self) -> tuple[UInt32[np.ndarray, ""]]:
        return (np.asarray(0, np.uint32),)  # the index of the first word, which the compiler does not know

    def run(self, start: UInt32[Array, ""]) -> UInt32[Array, "words"]:
        return PATTERNS[self.data](lax.iota(jnp.uint32, self.sizes[0]) + start, jnp.uint32)

    def reference(self, start: UInt32[np.ndarray, ""]) -> UInt32[np.ndarray, "words"]:
        words: np.ndarray = PATTERNS[self.data](np.arange(self.sizes[0], dtype=np.uint32), np.uint32)
        return words

    def drive(self, bench: Bench) -> Any:
        written = bench.call(*bench.arguments)
        if self.way:
            jax.block_until_ready(written)
            bench.rest(self.seconds)
        return written


def build_memory(request: FamilyRequest) -> Iterator[Workload]:
    """Each pattern, and retention of the random one."""
    words = request.level.buffer // 4
    for name, pattern in [*((pattern, pattern) for pattern in PATTERNS), ("retention", "random")]:
        yield Pattern(
            name=f"memory/{name}/{words}",
            family="memory",
            dtype="uint32",
            data=pattern,
            sizes=(words,),
            program=f"memory/{pattern}/{words}",
            elements=words,
            work=8.0 * words,
            unit="byte",
            exact=True,
            way="retention" if name == "retention" else "",
            seconds=request.level.retention,
        )


class Transfers(Workload):
    """Words to which a device adds one, so that what comes back was there."""

    def inputs(self) -> tuple[UInt32[np.ndarray, "words"]]:
        return (random_words(self.sizes, self.seed),)

    def run(self, x: UInt32[Array, "n"]) -> UInt32[Array, "n"]:
        return x + jnp.uint32(1)

    def reference(self, x: UInt32[np.ndarray, "n"]) -> UInt32[np.ndarray, "n"]:
        return x + np.uint32(1)

    def drive(self, bench: Bench) -> Any:
        """From the host to the device, or from it to each of the other devices, one after the other, and back."""
        if self.way == "host-device-host":
            return bench.call(*jax.device_put(bench.host(), bench.device))
        out = bench.call(*bench.arguments)
        for other in bench.others:
            out = jax.device_put(jax.device_put(out, other), bench.device)
        return out


def build_transfers(request: FamilyRequest) -> Iterator[Workload]:
    """Copies between host and device, and between devices where there are two."""
    words = request.level.buffer // 4
    ways = {"host-device-host": 1}
    if len(request.devices) > 1:
        ways["device-device"] = len(request.devices) - 1
    for way, turns in ways.items():
        yield Transfers(
            name=f"transfers/{way}/{words}",
            family="transfers",
            dtype="uint32",
            data="random",
            sizes=(words,),
            program=f"transfers/{words}",
            elements=words,
            work=8.0 * words * turns,
            unit="byte",
            seed=request.seed,
            on_host=True,
            exact=True,
            way=way,
        )
