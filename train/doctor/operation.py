"""Something that the doctor runs: a function and its arguments, made for devices in some order."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from sdc.burnin.workloads import normal

AXIS = "devices"


class Built(NamedTuple):
    """A function of arrays that can be jitted, and where its arguments are."""

    fn: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """Something to run.

    Attributes:
        name: how it is called in the result.
        build: makes the function and its arguments for devices in an order; one that runs on a single device takes the
            first.
        several: whether it runs on all devices.
    """

    name: str
    build: Callable[[Sequence[jax.Device]], Built]
    several: bool = False


def single(name: str, fn: Callable[..., Any], *inputs: Callable[[], np.ndarray]) -> Operation:
    """An operation on one device.

    Args:
        name: its name.
        fn: a function of arrays.
        inputs: make the arguments.
    """
    return Operation(name, lambda devices: Built(fn, tuple(jax.device_put(make(), devices[0]) for make in inputs)))


def collective(name: str, fn: Callable[..., Any], elements: int) -> Operation:
    """An operation over all devices, each of which holds a row of so many numbers; `fn` gets a row, bound to `AXIS`."""

    def build(devices: Sequence[jax.Device]) -> Built:
        mesh = Mesh(np.asarray(devices), (AXIS,), axis_types=(AxisType.Auto,))
        rows = normal((len(devices), elements), "float32", 31)
        placed = jax.device_put(rows, NamedSharding(mesh, P(AXIS)))
        mapped = jax.shard_map(
            lambda row: fn(row[0])[None], mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
        )
        return Built(mapped, (placed,))

    return Operation(name, build, several=True)
