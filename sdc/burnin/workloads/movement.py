"""Data movement: memory patterns, copies, and collectives over the local devices. The host can compute the correct bits
of all results.

The device generates each word of a pattern from the word's index, and a separate program digests the buffer, so the
words must pass through memory. To test retention, a workload waits between the two programs. Copies go from the host to
a device and back, or from a device to the other devices and back, and are compared on the host. Collectives use numbers
whose sums are exact.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped, UInt32

from .arrays import murmur, random_words
from .workload import AXIS, Bench, BurninWorkload, FamilyRequest


def _walking(at: Any, word: Callable[[int], Any]) -> Any:
    """Returns words in which a single bit is set, one position higher in each word than in the word before; each group
    of 32 words starts one position higher than the group before."""
    return word(1) << ((at + at // word(32)) % word(32))


# Functions from the index of a word to the word; `word` creates a constant, in JAX or NumPy. The address patterns show
# stuck address lines, which alias two addresses.
PATTERNS: Mapping[str, Callable[[Any, Callable[[int], Any]], Any]] = {
    "walking-ones": _walking,
    "walking-zeros": lambda at, word: ~_walking(at, word),
    "address": lambda at, word: at,
    "address-inverted": lambda at, word: ~at,
    "random": murmur,
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Pattern(BurninWorkload):
    """A buffer with a pattern; during the retention time, if any, the buffer is not accessed."""

    seconds: float = 0.0

    def inputs(self) -> tuple[UInt32[np.ndarray, ""]]:
        return (np.asarray(0, np.uint32),)  # the index of the first word, which must not be a compile-time constant

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


def build_memory(request: FamilyRequest) -> Iterator[BurninWorkload]:
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
            way="retention" if name == "retention" else "",
            seconds=request.level.retention,
        )


class Transfers(BurninWorkload):
    """Copies of words. A device adds one to each word, which shows that the returned words were on the device."""

    def inputs(self) -> tuple[UInt32[np.ndarray, "words"]]:
        return (random_words(self.sizes, self.seed),)

    def run(self, x: UInt32[Array, "n"]) -> UInt32[Array, "n"]:
        return x + jnp.uint32(1)

    def reference(self, x: UInt32[np.ndarray, "n"]) -> UInt32[np.ndarray, "n"]:
        return x + np.uint32(1)

    def drive(self, bench: Bench) -> Any:
        """Copies words from the host to the device and back, or from the device to each other device in turn and
        back."""
        if self.way == "host-device-host":
            return bench.call(*jax.device_put(bench.host(), bench.device))
        out = bench.call(*bench.arguments)
        for other in bench.others:
            out = jax.device_put(jax.device_put(out, other), bench.device)
        return out


def build_transfers(request: FamilyRequest) -> Iterator[BurninWorkload]:
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
            way=way,
        )


def _of_all(x: Shaped[np.ndarray, "*shape"]) -> Shaped[np.ndarray, "n *shape"]:
    """Returns an array repeated for each device; there are as many devices as shards."""
    return np.broadcast_to(x, (x.shape[-2], *x.shape))


# Each collective as a function on one of n devices, which takes its shard `[1, n, m]`, and as a function on the host,
# which takes all shards, `[n, n, m]`, and returns results whose first axis is the device.
COLLECTIVES: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "psum": (lambda x: lax.psum(x, AXIS), lambda x: _of_all(x.sum(axis=0, dtype=x.dtype))),
    "pmax": (lambda x: lax.pmax(x, AXIS), lambda x: _of_all(x.max(axis=0))),
    "all_gather": (lambda x: lax.all_gather(x[0], AXIS)[None], _of_all),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x[0], AXIS, scatter_dimension=0, tiled=True),
        lambda x: x.sum(axis=0, dtype=x.dtype),
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x[0], AXIS, 0, 0, tiled=True)[None],
        lambda x: np.swapaxes(x, 0, 1),
    ),
    "ppermute": (
        lambda x: lax.ppermute(x, AXIS, [(source, (source + 1) % x.shape[1]) for source in range(x.shape[1])]),
        lambda x: np.roll(x, 1, axis=0),
    ),
}
ALIKE = ("psum", "pmax", "all_gather")  # collectives that give all devices the same result


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Exchange(BurninWorkload):
    """A collective on integers and on floating-point numbers."""

    collective: str

    def inputs(self) -> tuple[Shaped[np.ndarray, "n n m"], Shaped[np.ndarray, "n n m"]]:
        """Returns 32-bit integers, whose sums wrap around, and multiples of 1/256, whose sums in float32 are exact."""
        count, width = self.sizes
        words = random_words((2, count, count, width), self.seed)
        real = (words[1] >> np.uint32(18)).astype(np.float32) / np.float32(256) - np.float32(32)
        return words[0].view(np.int32), real

    def run(self, whole: Shaped[Array, "1 n m"], real: Shaped[Array, "1 n m"]) -> dict[str, Shaped[Array, "1 ..."]]:
        run, _ = COLLECTIVES[self.collective]
        return {"int32": run(whole), "float32": run(real)}

    def reference(
        self, whole: Shaped[np.ndarray, "n n m"], real: Shaped[np.ndarray, "n n m"]
    ) -> dict[str, Shaped[np.ndarray, "n ..."]]:
        _, reference = COLLECTIVES[self.collective]
        return {"int32": reference(whole), "float32": reference(real)}


def build_collectives(request: FamilyRequest) -> Iterator[BurninWorkload]:
    count = len(request.devices)
    if count < 2:
        return
    width = max(request.level.numbers // count, 1)
    for name in COLLECTIVES:
        program = f"collectives/{name}/{count}x{width}"
        shards = {"psum_scatter": 1, "all_gather": count * count}.get(name, count)
        yield Exchange(
            name=program,
            family="collectives",
            dtype="float32",
            data="whole",
            sizes=(count, width),
            program=program,
            elements=2 * shards * width,
            work=8.0 * count * width,
            unit="byte",
            seed=request.seed,
            multi=True,
            alike=name in ALIKE,
            collective=name,
        )
