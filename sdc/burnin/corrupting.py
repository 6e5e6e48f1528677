"""Simulated faults for rehearsals: they corrupt the outputs of workloads on chosen devices."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

from sdc.faults import Fault, Moment, inject
from sdc.program import probe
from sdc.settings import SettingError

from .workload import AXIS, Workload

NAME = "output"


def check_faults(faults: Sequence[Fault], devices: Sequence[jax.Device], workloads: Sequence[Workload]) -> None:
    """Refuses faults that hit nothing here.

    Args:
        faults: each hits the device `at={"device": index}`, or all, and the workloads whose name its `site` matches.
        devices: those of the burn-in, of which `index` counts.
        workloads: those that run.

    Raises:
        SettingError: a fault has no rate, is no pattern of names, or matches no device or no workload.
    """
    for fault in faults:
        if not isinstance(fault, Fault):
            raise SettingError("inject", fault, "expected several sdc.Fault")
        if fault.rate is None:
            raise SettingError("inject", fault, "has no rate; give the probability of a hit, as in rate=1e-4")
        if not fault.by_name or fault.layer is not None:
            raise SettingError(
                "inject", fault, "expected site to be a pattern of workloads' names, such as 'matrix/*', and no layer"
            )
        if set(fault.at) - {AXIS}:
            raise SettingError("inject", fault, f"expected its place as at={{'{AXIS}': 1}}")
        if not 0 <= fault.at.get(AXIS, 0) < len(devices):
            raise SettingError("inject", fault, f"expected a device from 0 to {len(devices) - 1}")
        if not any(_named(fault, workload) for workload in workloads):
            raise SettingError("inject", fault, "its site matches no workload; give a pattern such as 'matrix/*'")


def _named(fault: Fault, workload: Workload) -> bool:
    return fnmatchcase(workload.name, str(fault.site))


def faults_of(faults: Sequence[Fault], workload: Workload, index: int) -> tuple[Fault, ...]:
    """The faults that hit a workload on a device, without their place."""
    mine = [fault for fault in faults if fault.at.get(AXIS, index) == index and _named(fault, workload)]
    return tuple(dataclasses.replace(fault, at={}, site="*") for fault in mine)


class Corrupter:
    """Programs that corrupt outputs; one for the same faults, shapes and types.

    Args:
        home: where all outputs are corrupted, so that nothing is compiled for each device.
    """

    def __init__(self, home: jax.Device) -> None:
        self.home = home
        self._compiled: dict[tuple[str, ...], Callable[..., Any]] = {}

    def corrupt(
        self, faults: Sequence[Fault], workload: Workload, outputs: Any, moment: int, seed: int
    ) -> tuple[Any, int]:
        """Corrupts outputs.

        Args:
            faults: what `faults_of` returned.
            workload: whose outputs they are.
            outputs: a pytree of arrays on one device.
            moment: number of the run, which is the step of the faults' times.
            seed: of what the faults draw.

        Returns:
            The outputs, and how many of their elements changed.
        """
        key = tuple(map(str, faults))
        if key not in self._compiled:
            self._compiled[key] = jax.jit(_corruption(faults))
        random = jax.random.fold_in(jax.random.key(seed), zlib.crc32(workload.name.encode()))
        (device,) = jax.tree.leaves(outputs)[0].devices()
        at, there = jax.device_put((Moment(random, jnp.int32(moment)), outputs), self.home)
        corrupted, changed = self._compiled[key](at, there)
        return jax.device_put(corrupted, device), int(changed)


def _corruption(faults: Sequence[Fault]) -> Callable[..., Any]:
    injected = inject(lambda outputs: probe(outputs, NAME), list(faults))

    def corruption(moment: Moment, outputs: Any) -> Any:
        corrupted, events = injected(moment, outputs)
        changed = jnp.zeros((), jnp.uint32)
        for event in jax.tree.leaves(events, is_leaf=lambda x: hasattr(x, "changed")):
            changed += jnp.sum(event.changed, dtype=jnp.uint32)
        return corrupted, changed

    return corruption
