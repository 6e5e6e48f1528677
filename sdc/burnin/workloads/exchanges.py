"""Collectives over the local devices, of numbers whose sums are exact, so that NumPy gets the same bits."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from .arrays import random_words
from .registry import FamilyRequest
from .workload import AXIS, Workload


class ExactCollective(NamedTuple):
    """A collective on the devices and on the host."""

    run: Callable[[Any], Any]  # takes the shard of one device, `[1, n, m]` for n devices
    reference: Callable[[Any], Any]  # takes those of all, `[n, n, m]`; the first axis of what it returns is the device
    alike: bool  # whether all devices get the same


def _of_all(x: Shaped[np.ndarray, "*shape"]) -> Shaped[np.ndarray, "n *shape"]:
    """The same for each of as many devices as there are shards."""
    return np.broadcast_to(x, (x.shape[-2], *x.shape))


def _next(size: int) -> list[tuple[int, int]]:
    return [(source, (source + 1) % size) for source in range(size)]


COLLECTIVES: Mapping[str, ExactCollective] = {
    "psum": ExactCollective(
        lambda x: lax.psum(x, AXIS),
        lambda x: _of_all(x.sum(axis=0, dtype=x.dtype)),
        alike=True,
    ),
    "pmax": ExactCollective(lambda x: lax.pmax(x, AXIS), lambda x: _of_all(x.max(axis=0)), alike=True),
    "all_gather": ExactCollective(
        lambda x: lax.all_gather(x[0], AXIS)[None],
        _of_all,
        alike=True,
    ),
    "psum_scatter": ExactCollective(
        lambda x: lax.psum_scatter(x[0], AXIS, scatter_dimension=0, tiled=True),
        lambda x: x.sum(axis=0, dtype=x.dtype),
        alike=False,
    ),
    "all_to_all": ExactCollective(
        lambda x: lax.all_to_all(x[0], AXIS, 0, 0, tiled=True)[None],
        lambda x: np.swapaxes(x, 0, 1),
        alike=False,
    ),
    "ppermute": ExactCollective(
        lambda x: lax.ppermute(x, AXIS, _next(x.shape[1])),
        lambda x: np.roll(x, 1, axis=0),
        alike=False,
    ),
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Exchange(Workload):
    """A collective of whole numbers and one of floating-point numbers."""

    collective: ExactCollective

    def inputs(self) -> tuple[Shaped[np.ndarray, "n n m"], Shaped[np.ndarray, "n n m"]]:
        """Whole numbers of 32 bits, which wrap, and multiples of 1/256 below 32 in size, whose sums float32 holds."""
        count, width = self.sizes
        words = random_words((2, count, count, width), self.seed)
        real = (words[1] >> np.uint32(18)).astype(np.float32) / np.float32(256) - np.float32(32)
        return words[0].view(np.int32), real

    def run(self, whole: Shaped[Array, "1 n m"], real: Shaped[Array, "1 n m"]) -> dict[str, Shaped[Array, "1 ..."]]:
        return {"int32": self.collective.run(whole), "float32": self.collective.run(real)}

    def reference(
        self, whole: Shaped[np.ndarray, "n n m"], real: Shaped[np.ndarray, "n n m"]
    ) -> dict[str, Shaped[np.ndarray, "n ..."]]:
        return {"int32": self.collective.reference(whole), "float32": self.collective.reference(real)}


def build_collectives(request: FamilyRequest) -> Iterator[Workload]:
    """Each collective, where there are two devices."""
    count = len(request.devices)
    if count < 2:
        return
    width = max(request.level.numbers // count, 1)
    for name, collective in COLLECTIVES.items():
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
            alike=collective.alike,
            exact=True,
            collective=collective,
        )
