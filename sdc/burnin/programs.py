"""Compiled workloads and their runs, which yield digests, checksum flags and times.

A workload is compiled once for all devices of a kind. The executable for one device is then loaded onto the other
devices, which takes milliseconds. All devices therefore run the same machine code, and the compiler cannot cause
differences between devices.
"""

import contextlib
import dataclasses
import functools
import io
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax._src import compiler
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped, UInt, UInt32

from sdc.checksums import abft
from sdc.faults import Fault, Moment, inject
from sdc.program import probe

from ..records import program_fingerprint
from ..twins import GOLDEN, MIX, tree_digest
from .rehearsal import faults_of
from .workloads import AXIS, Bench, BurninWorkload, murmur

BLOCK = 2**20  # number of elements per block when the host computes a digest


def host_digest(tree: Any) -> str:
    """Computes `tree_digest` with NumPy, as text, for a pytree of arrays whose elements have 8 to 64 bits."""
    total = np.zeros(2, np.uint32)
    for position, leaf in enumerate(jax.tree.leaves(tree)):
        bits, found = bits_of(np.asarray(leaf)), np.zeros(2, np.uint32)
        narrow, wide = bits.dtype.itemsize <= 2, bits.dtype.itemsize == 8
        for start in range(0, bits.size, BLOCK):
            block = bits[start : start + BLOCK]
            at = np.arange(start, start + block.size, dtype=np.uint32)
            words = [block.astype(np.uint32), *([(block >> 32).astype(np.uint32)] if wide else ())]
            for number, word in enumerate(words):
                v = word + at * np.uint32(GOLDEN * len(words) % 2**32) + np.uint32(number * GOLDEN % 2**32)
                p = (v if narrow else v ^ (v >> np.uint32(16))) * np.uint32(MIX)
                h = p ^ (p >> np.uint32(15))
                found += np.asarray([h.sum(dtype=np.uint32), (h * h).sum(dtype=np.uint32)])
        total += murmur(found + np.uint32(position * GOLDEN % 2**32), np.uint32)
    return digest_text(total)


def digest_text(words: UInt32[np.ndarray, "2"]) -> str:
    return f"{int(words[0]):08x}{int(words[1]):08x}"


def bits_of(x: Shaped[np.ndarray, "*shape"]) -> UInt[np.ndarray, "n"]:
    """Returns the bits of the elements, in row-major order, as unsigned integers of the same width."""
    return np.ascontiguousarray(x).reshape(-1).view(f"uint{8 * x.dtype.itemsize}")


def equal_bits(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(bits_of(np.asarray(x)), bits_of(np.asarray(y))) for x, y in pairs)


class CheckedRows(NamedTuple):
    """Numbers of checked, flagged and confirmed rows in a run's matrix products; see `sdc.checksums.Flags`."""

    checked: int = 0
    flagged: int = 0
    confirmed: int = 0


@dataclasses.dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run of a workload on a device."""

    workload: str
    device: int  # index of the device among those of the burn-in
    digest: str  # digest of the outputs, 16 hexadecimal digits
    right: bool | None  # whether the digest equals that of the host; None if the host cannot compute the outputs
    checks: CheckedRows
    elements: int  # number of elements checked
    seconds: float  # time from the call to the end of the program, without waits, digest and comparison
    simulated: int  # number of elements that simulated faults changed
    outputs: Any = dataclasses.field(repr=False, compare=False)  # on the device, or on the host if compared there


class Ready(NamedTuple):
    """A compiled workload with its arguments on one device or, if the workload spans all devices, on all of them."""

    call: Callable[..., Any]  # the compiled program; returns the outputs and the counts of checks
    arguments: tuple[Any, ...]
    fingerprint: str  # SHA-256 of the program's text


class Reference(NamedTuple):
    """The host's result: the digest, and also the outputs if every run is compared on the host."""

    digest: str
    outputs: Any


def _shapes(outputs: Any) -> Any:
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", outputs)


class Programs:
    """Cache of the programs compiled for a burn-in; several burn-ins on the same devices may share it."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = tuple(devices)
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._seeds: dict[str, int] = {}  # of the data in the caches below, by workload
        self._seeds_lock = threading.Lock()
        self._loadable: dict[tuple[str, str], tuple[Any, str]] = {}
        self._outputs: dict[str, Any] = {}
        self._compiled: dict[tuple[str, int | None], tuple[Callable[..., Any], str]] = {}
        self._ready: dict[tuple[str, int | None], Ready] = {}
        self._host: dict[str, tuple[Any, ...]] = {}
        self._travelling: set[str] = set()
        self._references: dict[tuple[str, int | None], Reference] = {}
        self._corruptions: dict[tuple[str, ...], Callable[..., Any]] = {}
        self._digest = jax.jit(tree_digest)

    def _forget_other_data(self, workload: BurninWorkload) -> None:
        """Removes data and references of a workload that were generated from another seed from the caches."""
        name = workload.name
        with self._seeds_lock:
            if self._seeds.get(name) != workload.seed:
                self._host.pop(name, None)
                self._ready = {key: ready for key, ready in self._ready.items() if key[0] != name}
                self._references = {key: known for key, known in self._references.items() if key[0] != name}
                self._seeds[name] = workload.seed

    def host(self, workload: BurninWorkload) -> tuple[Any, ...]:
        """Returns a workload's arguments as NumPy arrays; caches those that every run needs, and the latest ones."""
        self._forget_other_data(workload)
        key = workload.name
        if key not in self._host:
            self._host = {name: kept for name, kept in self._host.items() if name in self._travelling}
            self._host[key] = workload.inputs()
            if workload.on_host:
                self._travelling.add(key)
        return self._host[key]

    def expected(self, workload: BurninWorkload, index: int) -> Any:
        """Returns a device's right outputs, computed by the host; None if the host cannot compute them."""
        if not workload.exact:
            return None
        outputs = jax.tree.map(np.asarray, workload.reference(*self.host(workload)))
        shapes, compiled = _shapes(outputs), self._outputs.get(workload.program, None)
        if compiled is not None and shapes != compiled:
            raise ValueError(f"reference returns the outputs {shapes}; expected those of run, {compiled}")
        return jax.tree.map(lambda x: x[index : index + 1], outputs) if workload.multi else outputs

    def reference(self, workload: BurninWorkload, index: int) -> Reference | None:
        """Returns the digest of a device's right outputs, computed by the host; None if the host cannot compute it."""
        if not workload.exact:
            return None
        self._forget_other_data(workload)
        key = workload.name, index if workload.multi else None
        if key not in self._references:
            outputs = self.expected(workload, index)
            self._references[key] = Reference(host_digest(outputs), outputs if workload.on_host else None)
        return self._references[key]

    def prepare(self, workload: BurninWorkload, index: int | None) -> Ready:
        """Compiles a workload for one device or for all devices together, and places its arguments; caches the program
        and the arguments.

        Several threads may call this method concurrently for different devices.
        """
        self._forget_other_data(workload)
        key, program = (workload.name, index), (workload.program, index)
        if key in self._ready:
            return self._ready[key]
        with self._lock:
            place = NamedSharding(self._mesh, PartitionSpec(AXIS)) if index is None else self.devices[index]
            arguments = jax.device_put(self.host(workload), place)
            one_at_a_time = self._locks.setdefault(workload.program, threading.Lock())
        with one_at_a_time:  # other programs can be compiled at the same time
            if program not in self._compiled:
                self._compiled[program] = self._compile(workload, index, arguments)
        self._ready[key] = Ready(self._compiled[program][0], arguments, self._compiled[program][1])
        return self._ready[key]

    def _compile(self, workload: BurninWorkload, index: int | None, arguments: Any) -> tuple[Callable[..., Any], str]:
        kind = "" if index is None else self.devices[index].device_kind
        known = self._loadable.get((workload.program, kind))
        if known is not None and index is not None:
            serialized, fingerprint = known
            try:
                loaded = _load(serialized, self.devices[index])
                # An executable from a compilation cache may lack functions, which becomes apparent only at run time.
                jax.block_until_ready(loaded(*arguments))
                return loaded, fingerprint
            except Exception:  # the program is then compiled for this device
                del self._loadable[workload.program, kind]
        lowered = jax.jit(self._traceable(workload)).lower(*arguments)
        self._outputs[workload.program] = _shapes(lowered.out_info[0])
        compiled, fingerprint = lowered.compile(), program_fingerprint(lowered)
        if index is not None and len(self.devices) > 1:
            with contextlib.suppress(Exception):  # programs that cannot be serialized are compiled for each device
                self._loadable[workload.program, kind] = serialize_executable.serialize(compiled), fingerprint
        return compiled, fingerprint

    def run(
        self,
        workload: BurninWorkload,
        index: int | None,
        *,
        faults: Sequence[Fault] = (),
        moment: int = 0,
        seed: int = 0,
        rest: Callable[[float], None] = time.sleep,
    ) -> list[RunOutcome]:
        """Runs a workload once, on one device or on all devices together; returns an outcome for each device that ran.

        Simulated faults are drawn from `seed` and from `moment`, the number of the run, which takes the place of the
        step.
        """
        ready = self.prepare(workload, index)
        waited, counts = 0.0, None

        def rested(seconds: float) -> None:
            nonlocal waited
            since = time.perf_counter()
            rest(seconds)
            waited += time.perf_counter() - since

        def call(*arguments: Any) -> Any:
            nonlocal counts
            outputs, counts = ready.call(*arguments)
            return outputs

        began = time.perf_counter()
        if index is None:
            outputs = call(*ready.arguments)
        else:
            device = self.devices[index]
            others = [other for other in self.devices if other != device]
            outputs = workload.drive(Bench(call, ready.arguments, lambda: self.host(workload), device, others, rested))
        jax.block_until_ready((outputs, counts))
        seconds = time.perf_counter() - began - waited
        checks = CheckedRows(*map(int, np.asarray(counts))) if counts is not None else CheckedRows()
        found = []
        for place in range(len(self.devices)) if index is None else [index]:
            mine = outputs if index is not None else jax.tree.map(functools.partial(self._shard, place), outputs)
            struck = faults_of(faults, workload, place)
            found.append(self._outcome(workload, place, mine, checks, seconds, struck, moment, seed))
        return found

    def _shard(self, index: int, x: Array) -> Array:
        return next(shard.data for shard in x.addressable_shards if shard.device == self.devices[index])

    def _outcome(
        self, workload: BurninWorkload, index: int, outputs: Any, checks: CheckedRows, seconds: float,
        faults: Sequence[Fault], moment: int, seed: int,
    ) -> RunOutcome:  # fmt: skip
        if (counted := sum(x.size for x in jax.tree.leaves(outputs))) < workload.elements:
            raise ValueError(
                f"{workload.name} has outputs of {counted} elements, but declares that a run checks "
                f"{workload.elements}; declare at most {counted}"
            )
        changed = 0
        if faults:  # the first device corrupts all devices' outputs; equal faults, shapes and types share a program
            key = tuple(map(str, faults))
            if key not in self._corruptions:
                self._corruptions[key] = jax.jit(_corruption(faults))
            random = jax.random.fold_in(jax.random.key(seed), zlib.crc32(workload.name.encode()))
            (device,) = jax.tree.leaves(outputs)[0].devices()
            at, there = jax.device_put((Moment(random, jnp.int32(moment)), outputs), self.devices[0])
            corrupted, changes = self._corruptions[key](at, there)
            outputs, changed = jax.device_put(corrupted, device), int(changes)
        known = self.reference(workload, index)
        if workload.on_host:
            outputs = jax.device_get(outputs)
            same = known is not None and equal_bits(known.outputs, outputs)
            digest = known.digest if same and known is not None else host_digest(outputs)
        else:
            digest = digest_text(np.asarray(self._digest(outputs)))
        right = None if known is None else digest == known.digest
        return RunOutcome(workload.name, index, digest, right, checks, workload.elements, seconds, changed, outputs)

    def exported(self, workload: BurninWorkload) -> tuple[bytes, int]:
        """Returns a workload as a serialized program that takes arrays and needs only JAX, and the number of outputs.

        The program returns the outputs of the workload, followed by the counts of checks.
        """
        traceable = self._traceable(workload)
        arguments = self.prepare(workload, None if workload.multi else 0).arguments
        leaves, structure = jax.tree.flatten(tuple(arguments))

        def flat(*leaves: Any) -> tuple[Any, ...]:
            outputs, counts = traceable(*jax.tree.unflatten(structure, leaves))
            return (*jax.tree.leaves(outputs), *jax.tree.leaves(counts))

        exported = export.export(jax.jit(flat))(*leaves)
        outputs, _ = jax.eval_shape(traceable, *arguments)
        return bytes(exported.serialize()), len(jax.tree.leaves(outputs))

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.asarray(self.devices), (AXIS,))

    def _traceable(self, workload: BurninWorkload) -> Callable[..., Any]:
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
                for field in CheckedRows._fields
            ]
            return outputs, jnp.stack(sums)

        return checked


def _corruption(faults: Sequence[Fault]) -> Callable[..., Any]:
    injected = inject(lambda outputs: probe(outputs, "output"), list(faults))

    def corruption(moment: Moment, outputs: Any) -> Any:
        corrupted, events = injected(moment, outputs)
        changed = jnp.zeros((), jnp.uint32)
        for event in jax.tree.leaves(events, is_leaf=lambda x: hasattr(x, "changed")):
            changed += jnp.sum(event.changed, dtype=jnp.uint32)
        return corrupted, changed

    return corruption


def _load(serialized: Any, device: jax.Device) -> jax.stages.Compiled:
    """Loads a program that was compiled for one device onto another device of the same kind.

    JAX's public function (`serialize_executable`) loads programs only onto the devices for which they were compiled;
    the function of JAX's compilation cache takes the device as an option.
    """
    content, inputs, outputs = serialized
    program, arguments, no_keywords = _Onto(io.BytesIO(content), device.client, [device]).load()
    return jax.stages.Compiled(program.load(), [], inputs.unflatten(arguments), outputs, no_kwargs=no_keywords)


class _Onto(serialize_executable._JaxPjrtUnpickler):
    """Unpickler that replaces the device for which the program was compiled."""

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        (device,) = self.devices_by_id.values()
        if pid[0] == "exec":
            options = compiler.get_compile_options(
                num_replicas=1, num_partitions=1, device_assignment=np.asarray([[device.id]])
            )
            return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
        return device if pid[0] == "device" else super().persistent_load(pid)
