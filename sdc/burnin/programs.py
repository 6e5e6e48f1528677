"""Workloads compiled for devices, and one run of them: digest, flags and time."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from sdc.checksums import abft
from sdc.faults import Fault

from ..records import program_fingerprint
from ..twins import tree_digest
from .corrupting import Corrupter, faults_of
from .exporting import export_flat
from .host import digest_text, equal_bits, host_digest
from .loading import Loadable
from .workload import AXIS, Bench, Workload


class Checks(NamedTuple):
    """What the checksums of a run's products said, in rows; see `sdc.checksums.Flags`."""

    checked: int = 0
    flagged: int = 0
    confirmed: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run of a workload on a device came to.

    Attributes:
        workload: its name.
        device: index of the device among those of the burn-in.
        digest: of the outputs, 16 hexadecimal digits.
        right: whether it is that of the outputs as the host computes them; None where the host cannot.
        checks: of its matrix products.
        elements: numbers that were checked.
        seconds: from the call to the end of the program, without waits, digest and comparison.
        simulated: elements that simulated faults changed.
        outputs: the arrays themselves, on the device, or on the host where that is where they are compared.
    """

    workload: str
    device: int
    digest: str
    right: bool | None
    checks: Checks
    elements: int
    seconds: float
    simulated: int
    outputs: Any = dataclasses.field(repr=False, compare=False)


class Ready(NamedTuple):
    """A workload on one device, or, if it spans them all, on all.

    Attributes:
        call: the compiled program; returns outputs and the counts of `Checks`.
        arguments: placed.
        fingerprint: SHA-256 of the program's text.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    fingerprint: str


class Reference(NamedTuple):
    """What the host computes.

    Attributes:
        digest: of the outputs.
        outputs: themselves, where they are compared on the host at each run.
    """

    digest: str
    outputs: Any


class Programs:
    """Everything that is compiled for a burn-in, once; several burn-ins on the same devices may share it.

    Args:
        devices: of this process; outcomes count them from 0.

    Example:
        >>> import jax
        >>> from sdc.burnin.programs import Programs
        >>> from sdc.burnin.registry import workloads
        >>> devices = jax.local_devices()[:1]
        >>> workload = workloads("quick", devices, only=["ordering"])[0]
        >>> Programs(devices).run(workload, 0)[0].right
        True
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = tuple(devices)
        self.corrupter = Corrupter(self.devices[0])
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._loadable: dict[tuple[str, str], tuple[Loadable, str]] = {}
        self._compiled: dict[tuple[str, int | None], tuple[Callable[..., Any], str]] = {}
        self._ready: dict[tuple[str, int | None], Ready] = {}
        self._host: dict[str, tuple[Any, ...]] = {}
        self._driven: set[str] = set()
        self._references: dict[str, Reference] = {}
        self._digest = jax.jit(tree_digest)

    def host(self, workload: Workload) -> tuple[Any, ...]:
        """Its arguments as NumPy arrays; kept for those that need them at each run, and for the last one."""
        key = _identity(workload)
        if key not in self._host:
            self._host = {name: kept for name, kept in self._host.items() if name in self._driven}
            self._host[key] = workload.inputs()
            if workload.drive is not None:
                self._driven.add(key)
        return self._host[key]

    def expected(self, workload: Workload, index: int) -> Any:
        """Outputs of a device as the host computes them; None where the host cannot."""
        if workload.reference is None:
            return None
        outputs = jax.tree.map(np.asarray, workload.reference(*self.host(workload)))
        return jax.tree.map(lambda x: x[index : index + 1], outputs) if workload.multi else outputs

    def reference(self, workload: Workload, index: int) -> Reference | None:
        """Digest of the outputs of a device as the host computes them; None where the host cannot."""
        if workload.reference is None:
            return None
        key = f"{_identity(workload)} {index if workload.multi else ''}"
        if key not in self._references:
            outputs = self.expected(workload, index)
            self._references[key] = Reference(host_digest(outputs), outputs if workload.on_host else None)
        return self._references[key]

    def prepare(self, workload: Workload, index: int | None) -> Ready:
        """Compiles a workload and places its arguments, unless that was done; threads may do so for several devices.

        Args:
            workload: what to run.
            index: of the device; None for a workload that spans all of them.
        """
        key, program = (_identity(workload), index), (workload.program, index)
        if key in self._ready:
            return self._ready[key]
        with self._lock:
            place = NamedSharding(self._mesh, PartitionSpec(AXIS)) if index is None else self.devices[index]
            arguments = jax.device_put(self.host(workload), place)
            one_at_a_time = self._locks.setdefault(workload.program, threading.Lock())
        with one_at_a_time:  # other programs are compiled meanwhile
            if program not in self._compiled:
                self._compiled[program] = self._compile(workload, index, arguments)
        self._ready[key] = Ready(self._compiled[program][0], arguments, self._compiled[program][1])
        return self._ready[key]

    def _compile(self, workload: Workload, index: int | None, arguments: Any) -> tuple[Callable[..., Any], str]:
        """Compiles a program, or loads what was compiled for another device of this kind."""
        kind = "" if index is None else self.devices[index].device_kind
        known = self._loadable.get((workload.program, kind))
        if known is not None and index is not None:
            loadable, fingerprint = known
            try:
                loaded = loadable.load(self.devices[index])
                # What came from a compilation cache may lack its functions, and says so only when it runs.
                jax.block_until_ready(loaded(*arguments))
                return loaded, fingerprint
            except Exception:  # then it is compiled anew
                del self._loadable[workload.program, kind]
        lowered = jax.jit(self._traceable(workload)).lower(*arguments)
        compiled, fingerprint = lowered.compile(), program_fingerprint(lowered)
        if index is not None and len(self.devices) > 1:
            with contextlib.suppress(Exception):  # what cannot be written as bytes is compiled for each device
                self._loadable[workload.program, kind] = Loadable(compiled), fingerprint
        return compiled, fingerprint

    def run(
        self,
        workload: Workload,
        index: int | None,
        *,
        faults: Sequence[Fault] = (),
        moment: int = 0,
        seed: int = 0,
        rest: Callable[[float], None] = time.sleep,
    ) -> list[Outcome]:
        """Runs a workload once.

        Args:
            workload: what to run.
            index: of the device; None for a workload that spans all of them.
            faults: simulated ones.
            moment: number of the run, for the times of simulated faults.
            seed: of what simulated faults draw.
            rest: waits for so many seconds, for workloads that wait.

        Returns:
            One outcome, or one for each device.
        """
        ready = self.prepare(workload, index)
        waited = 0.0

        def rested(seconds: float) -> None:
            nonlocal waited
            since = time.perf_counter()
            rest(seconds)
            waited += time.perf_counter() - since

        began = time.perf_counter()
        if workload.drive is not None and index is not None:
            device = self.devices[index]
            others = [other for other in self.devices if other != device]
            bench = Bench(
                lambda *arguments: ready.call(*arguments)[0],
                ready.arguments,
                self.host(workload),
                device,
                others,
                rested,
            )
            outputs, counts = jax.block_until_ready(workload.drive(bench)), None
        else:
            outputs, counts = jax.block_until_ready(ready.call(*ready.arguments))
        seconds = time.perf_counter() - began - waited
        checks = Checks(*map(int, np.asarray(counts))) if counts is not None else Checks()
        each = [(index, outputs)] if index is not None else list(enumerate(self._shards(outputs)))
        return [
            self._outcome(workload, place, mine, checks, seconds, faults_of(faults, workload, place), moment, seed)
            for place, mine in each
        ]

    def _outcome(
        self,
        workload: Workload,
        index: int,
        outputs: Any,
        checks: Checks,
        seconds: float,
        faults: Sequence[Fault],
        moment: int,
        seed: int,
    ) -> Outcome:
        if (counted := sum(x.size for x in jax.tree.leaves(outputs))) < workload.elements:
            raise ValueError(
                f"{workload.name} has outputs of {counted} elements, and says that a run checks {workload.elements}"
            )
        changed = 0
        if faults:
            outputs, changed = self.corrupter.corrupt(faults, workload, outputs, moment, seed)
        known = self.reference(workload, index)
        if workload.on_host:
            outputs = jax.device_get(outputs)
            same = known is not None and equal_bits(known.outputs, outputs)
            digest = known.digest if same and known is not None else host_digest(outputs)
        else:
            digest = digest_text(np.asarray(self._digest(outputs)))
        right = None if known is None else digest == known.digest
        return Outcome(workload.name, index, digest, right, checks, workload.elements, seconds, changed, outputs)

    def exported(self, workload: Workload, index: int | None) -> tuple[bytes, int]:
        """A workload's program for those who have JAX alone; see `exporting.export_flat`."""
        return export_flat(self._traceable(workload), self.prepare(workload, index).arguments)

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.asarray(self.devices), (AXIS,))

    def _shards(self, outputs: Any) -> list[Any]:
        """The part of each device, in the order of the devices."""

        def part(x: Array, device: jax.Device) -> Array:
            return next(shard.data for shard in x.addressable_shards if shard.device == device)

        return [jax.tree.map(lambda x, device=device: part(x, device), outputs) for device in self.devices]

    def _traceable(self, workload: Workload) -> Callable[..., Any]:
        if workload.multi:
            spec = PartitionSpec(AXIS)
            mapped = jax.shard_map(workload.run, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False)
            return lambda *arguments: (mapped(*arguments), None)
        if not workload.checked:
            return lambda *arguments: (workload.run(*arguments), None)
        checking = abft(workload.run)

        def checked(*arguments: Any) -> tuple[Any, UInt32[Array, "3"]]:
            outputs, flags = checking(*arguments)
            sums = [
                sum((jnp.sum(getattr(each, field), dtype=jnp.uint32) for each in flags.values()), jnp.uint32(0))
                for field in Checks._fields
            ]
            return outputs, jnp.stack(sums)

        return checked


def _identity(workload: Workload) -> str:
    """Workloads of one name and other data are two."""
    return f"{workload.name} {workload.seed}"
