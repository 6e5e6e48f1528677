"""Collectives over the local devices, of numbers whose sums are exact, so that NumPy gets the same bits."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from .data import random_words
from .registry import Request
from .workload import AXIS, Workload


class Collective(NamedTuple):
    """A collective on the devices and on the host.

    Attributes:
        run: takes the shard of one device, `[1, n, m]` for n devices.
        reference: takes those of all devices, `[n, n, m]`; the first axis of what it returns is the device.
        alike: whether all devices get the same.
    """

    run: Callable[[Any], Any]
    reference: Callable[[Any], Any]
    alike: bool


def _of_all(x: Shaped[np.ndarray, "*shape"]) -> Shaped[np.ndarray, "n *shape"]:
    """The same for each of as many devices as there are shards."""
    return np.broadcast_to(x, (x.shape[-2], *x.shape))


def _next(size: int) -> list[tuple[int, int]]:
    return [(source, (source + 1) % size) for source in range(size)]


COLLECTIVES: Mapping[str, Collective] = {
    "psum": Collective(
        lambda x: lax.psum(x, AXIS),
        lambda x: _of_all(x.sum(axis=0, dtype=x.dtype)),
        alike=True,
    ),
    "pmax": Collective(lambda x: lax.pmax(x, AXIS), lambda x: _of_all(x.max(axis=0)), alike=True),
    "all_gather": Collective(
        lambda x: lax.all_gather(x[0], AXIS)[None],
        _of_all,
        alike=True,
    ),
    "psum_scatter": Collective(
        lambda x: lax.psum_scatter(x[0], AXIS, scatter_dimension=0, tiled=True),
        lambda x: x.sum(axis=0, dtype=x.dtype),
        alike=False,
    ),
    "all_to_all": Collective(
        lambda x: lax.all_to_all(x[0], AXIS, 0, 0, tiled=True)[None],
        lambda x: np.swapaxes(x, 0, 1),
        alike=False,
    ),
    "ppermute": Collective(
        lambda x: lax.ppermute(x, AXIS, _next(x.shape[1])),
        lambda x: np.roll(x, 1, axis=0),
        alike=False,
    ),
}


def exchange(
    whole: Shaped[Array, "1 n m"], real: Shaped[Array, "1 n m"], *, name: str
) -> dict[str, Shaped[Array, "1 ..."]]:
    """A collective of whole numbers and one of floating-point numbers."""
    run = COLLECTIVES[name].run
    return {"int32": run(whole), "float32": run(real)}


def exchange_on_host(
    whole: Shaped[np.ndarray, "n n m"], real: Shaped[np.ndarray, "n n m"], *, name: str
) -> dict[str, Shaped[np.ndarray, "n ..."]]:
    """The same by NumPy."""
    reference = COLLECTIVES[name].reference
    return {"int32": reference(whole), "float32": reference(real)}


def build(request: Request) -> Iterator[Workload]:
    """Each collective, where there are two devices."""
    count = len(request.devices)
    if count < 2:
        return
    width = max(request.level.numbers // count, 1)
    for name, collective in COLLECTIVES.items():
        program = f"collectives/{name}/{count}x{width}"
        shards = {"psum_scatter": 1, "all_gather": count * count}.get(name, count)
        yield Workload(
            name=program,
            family="collectives",
            dtype="float32",
            data="whole",
            sizes=(count, width),
            program=program,
            inputs=functools.partial(operands, count, width, request.seed),
            run=functools.partial(exchange, name=name),
            elements=2 * shards * width,
            work=8.0 * count * width,
            unit="byte",
            seed=request.seed,
            multi=True,
            alike=collective.alike,
            reference=functools.partial(exchange_on_host, name=name),
        )


def operands(count: int, width: int, seed: int) -> tuple[Shaped[np.ndarray, "n n m"], Shaped[np.ndarray, "n n m"]]:
    """Whole numbers of 32 bits, which wrap, and multiples of 1/256 below 32 in size, whose sums float32 holds."""
    words = random_words((2, count, count, width), seed)
    real = (words[1] >> np.uint32(18)).astype(np.float32) / np.float32(256) - np.float32(32)
    return words[0].view(np.int32), real
