"""Which workloads there are: families by name, and those of a level.

Whoever has other programs to load a device with, such as a training step, registers a family of them.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from sdc.settings import SettingError

from .levels import Level, find_level
from .workload import Workload


class Request(NamedTuple):
    """What a family is asked for.

    Attributes:
        level: sizes.
        devices: devices that they are to run on.
        dtypes: types of floating-point numbers.
        seed: from which data are made.
    """

    level: Level
    devices: Sequence[jax.Device]
    dtypes: tuple[str, ...]
    seed: int


Build: TypeAlias = Callable[[Request], Iterable[Workload]]
BUILT_IN = {
    "matrix": "matrices",
    "attention": "attending",
    "functions": "special",
    "reductions": "reducing",
    "ordering": "ordering",
    "memory": "memory",
    "transfers": "transfers",
    "collectives": "collectives",
}
"""Module of this package that builds each family."""
_REGISTERED: dict[str, Build] = {}
DTYPES = ("float32", "bfloat16")
KNOWN = ("float32", "bfloat16", "float16")
"""Types of floating-point numbers that the families have data for."""


def register(name: str, build: Build) -> None:
    """Adds a family of workloads, which `workloads` then gives too.

    Args:
        name: of the family.
        build: makes its workloads.

    Raises:
        SettingError: there is a family of that name.

    Example:
        >>> from sdc.burnin.registry import families, register, unregister
        >>> register("mine", lambda request: [])
        >>> "mine" in families()
        True
        >>> unregister("mine")
    """
    if name in families():
        raise SettingError("name", name, "is a family of workloads already; choose another name")
    _REGISTERED[name] = build


def unregister(name: str) -> None:
    """Takes a family back that was registered.

    Raises:
        SettingError: none of that name was registered.
    """
    if name not in _REGISTERED:
        raise SettingError("name", name, f"was not registered; registered are {', '.join(_REGISTERED) or 'none'}")
    del _REGISTERED[name]


def families() -> tuple[str, ...]:
    """Names of all families, in the order in which they run."""
    return (*BUILT_IN, *_REGISTERED)


def workloads(
    level: str | Level,
    devices: Sequence[jax.Device],
    dtypes: Sequence[str] = DTYPES,
    *,
    only: Sequence[str] | None = None,
    seed: int = 0,
) -> list[Workload]:
    """The workloads of a level.

    Args:
        level: name of a level, or one of your own.
        devices: devices that they are to run on. Copies between devices and collectives need two of them.
        dtypes: types of floating-point numbers.
        only: names of families; by default all.
        seed: from which data are made.

    Raises:
        SettingError: there is no such level, type or family, no device was given, or two workloads have one name.

    Example:
        >>> import jax
        >>> from sdc.burnin.registry import workloads
        >>> found = workloads("quick", jax.local_devices()[:1], ["float32"], only=["attention"])
        >>> found[0].name
        'attention/float32/2x256x32/normal'
    """
    if not devices:
        raise SettingError("devices", None, "expected one device at least")
    for dtype in dtypes:
        if dtype not in KNOWN:
            raise SettingError("dtypes", dtype, f"expected some of {', '.join(KNOWN)}")
    for name in only or ():
        if name not in families():
            raise SettingError("only", name, f"expected some of {', '.join(families())}")
    request = Request(find_level(level), devices, tuple(jnp.dtype(dtype).name for dtype in dtypes), seed)
    found = [each for name in families() if only is None or name in only for each in _builder(name)(request)]
    names = [each.name for each in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingError("name", twice[0], "two workloads have this name; give each its own")
    return found


def _builder(name: str) -> Build:
    if name in _REGISTERED:
        return _REGISTERED[name]
    build: Build = importlib.import_module(f"sdc.burnin.{BUILT_IN[name]}").build
    return build
