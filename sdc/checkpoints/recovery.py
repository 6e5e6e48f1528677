"""A state whose parts were lost, put together again: from what is left, a running checkpoint, or a replica.

Qiao et al. (ICML 2019, section 4.1): a partial recovery gives back what was lost alone, and perturbs the state by less
than a full one: lost uniformly with fraction p, E ||delta'||^2 = p ||delta||^2. A replica, which a parameter server
does not have, does not perturb it at all.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from sdc.settings import SettingError

from ._partition import Partition, named_leaves
from .blocks import bits_of
from .boxes import Box, box_of, overlap, volume, within
from .pieces import Held, parts_of
from .store import LAYOUT, Store, StoreError, Version, Versions, last_save

LOG = logging.getLogger("sdc.checkpoints")
Policy: TypeAlias = Literal["partial", "full", "replica"]
State = TypeVar("State")
Part: TypeAlias = tuple[str, Box, np.ndarray]
"""Name of an array, where in it the numbers lie, and the numbers."""


@dataclasses.dataclass(frozen=True)
class Recovered(Generic[State]):
    """A state that was put together.

    Attributes:
        state: the state, with the shardings of the one that was given.
        steps: of each block that came from the running checkpoint, the step at which it was saved.
        initial: blocks that were never saved, and are as they were at the start.
        older: blocks whose newest version is damaged; the version before was taken.
        copied: blocks that came from replicas on other devices.
        bytes: that were read.
    """

    state: State
    steps: Mapping[int, int]
    initial: Sequence[int]
    older: Sequence[int]
    copied: Sequence[int]
    bytes: int

    def age(self, step: int) -> int:
        """Steps by which the oldest block is behind; one that was never saved is as it was before the first."""
        return max([step - one for one in self.steps.values()] + [step] * bool(self.initial), default=0)


class Reader:
    """A running checkpoint, as any process can read it: the parts of all processes, at the last sealed save."""

    def __init__(self, folder: epath.Path, cut: Partition, initial: Callable[[], Any]) -> None:
        """Opens it for reading.

        Args:
            folder: where it is.
            cut: the blocks of the state.
            initial: gives the state at the start, which blocks that were never saved hold.

        Raises:
            StoreError: there is none, or it is of another state.
        """
        self.cut = cut
        self._folder, self._initial = folder, initial
        self.older: set[int] = set()
        self.bytes = 0
        self._open()

    def _open(self) -> None:
        seal = last_save(self._folder)
        self.save, self.step, processes = (seal.save, seal.step, seal.processes) if seal is not None else (0, 0, 0)
        self._stores = [Store(self._folder, process) for process in range(processes)]
        self._held: list[dict[str, list[list[str]]]] = []
        self._versions: list[Versions] = []
        self._behind: set[int] = set()
        if seal is None and not (self._folder / "process-0" / LAYOUT).exists():
            raise StoreError(f"there is no running checkpoint in {self._folder}")
        for store in self._stores:
            layout = store.layout()
            if layout.get("schema") != self.cut.schema:
                raise StoreError(f"{store.place} is a running checkpoint of another state, or is cut otherwise")
            self._held.append(layout["blocks"])
            self._versions.append(self.versions(store))

    @property
    def note(self) -> dict[str, Any]:
        """What was noted of the last save.

        Raises:
            StoreError: its manifest is damaged.
        """
        return self._stores[0].note(self.save) if self._stores else {}

    def versions(self, store: Store) -> Versions:
        """Versions of a process's blocks: by the manifest of the sealed save, or the newest before that can be read."""
        for save in sorted((one for one in store.saves() if one <= self.save), reverse=True):
            try:
                return store.manifest(save)[1]
            except StoreError as error:
                LOG.warning("%s; taking the one before", error)
                self._behind.add(store.process)
        if self.save:
            raise StoreError(f"{store.place} has no manifest of save {self.save} or before that can be read")
        return {}

    def block(self, number: int) -> tuple[list[Part], int | None]:
        """The parts of a block from all processes, and the oldest step of any; None if it was never saved.

        Raises:
            StoreError: no version of a part is as it was saved.
        """
        parts: list[Part] = []
        steps = []
        for store, held, versions in zip(self._stores, self._held, self._versions, strict=True):
            if str(number) not in held or number not in versions:
                continue
            mine = [Held.parse(one) for one in held[str(number)]]
            arrays, version = self._newest(store, number, mine, versions[number])
            parts += [(one.name, one.box, array) for one, array in zip(mine, arrays, strict=True)]
            steps.append(version.step)
            if store.process in self._behind:
                self.older.add(number)
        if steps and sum(array.nbytes for _, _, array in parts) != self.cut.sizes[number]:
            raise StoreError(f"block {number} is not whole: a process lacks its part; restore a full checkpoint")
        return parts, min(steps, default=None)

    def _newest(
        self, store: Store, number: int, held: Sequence[Held], versions: Sequence[Version]
    ) -> tuple[list[np.ndarray], Version]:
        for place, version in enumerate(versions):
            try:
                content = store.read(number, version)
            except StoreError as error:
                LOG.warning("%s", error)
                continue
            self.bytes += len(content)
            if (arrays := parts_of(content, held, version.digests)) is not None:
                if place:
                    self.older.add(number)
                    LOG.warning("block %d: its newest version is damaged; taking that of step %d", number, version.step)
                return arrays, version
        raise StoreError(
            f"block {number} of {store.place} has no version that is as it was saved; restore a full checkpoint"
        )

    def recover(
        self,
        lost: Sequence[str | int],
        state: State,
        *,
        policy: Policy = "partial",
        devices: Sequence[jax.Device] = (),
        zeroed: bool = False,
    ) -> Recovered[State]:
        """Gives a state in which blocks were lost its blocks back.

        Args:
            lost: numbers of blocks, or names of arrays or paths above them.
            state: what is left, with whatever in the place of what was lost.
            policy: `partial`: only what was lost is read; `full`: everything; `replica`: nothing, what was lost is
                copied from devices that hold the same.
            devices: with `replica`, those that lost what they held.
            zeroed: of what is read, the optimizer's arrays become zero, as at the start, and not what was saved; not
                with `replica`.

        Raises:
            StoreError: a block has no version that is as it was saved, or no replica.
            SettingError: there is no such block, or options contradict each other.
        """
        if policy not in get_args(Policy):
            raise SettingError("policy", policy, f"expected one of {', '.join(get_args(Policy))}")
        numbers = _numbers(self.cut, lost)
        leaves = named_leaves(state)
        self.cut.check(leaves)
        if policy == "replica":
            if zeroed:
                raise SettingError("zeroed", zeroed, "a replica has the optimizer's arrays as they are")
            return _from_replicas(self.cut, numbers, state, leaves, devices)
        every = range(len(self.cut.blocks)) if policy == "full" else numbers
        wanted = [number for number in every if self.cut.sizes[number]]
        while True:
            try:
                return self._recovered(wanted, state, zeroed)
            except StoreError:
                save = self.save
                self._open()  # somebody may have saved since
                if self.save == save:
                    raise

    def _recovered(self, wanted: Sequence[int], state: State, zeroed: bool) -> Recovered[State]:
        self.older.clear()
        self.bytes = 0
        steps: dict[int, int] = {}
        initial, moving = [], set(self.cut.moving)
        parts: dict[str, list[Part]] = {}
        for store, versions in zip(self._stores, self._versions, strict=True):
            store.ask([(number, versions[number][0]) for number in wanted if number in versions])
        for number in wanted:
            found, step = self.block(number)
            if step is None:
                initial.append(number)
                found = self._first(number)
            else:
                steps[number] = step
            for name, box, array in found:
                zero = zeroed and number < self.cut.choices and name not in moving
                parts.setdefault(name, []).append((name, box, np.zeros_like(array) if zero else array))
        if initial:
            LOG.warning("blocks %s were never saved: they are as they were at the start", initial[:8])
        changed = put_back(state, parts)
        return Recovered(changed, steps, initial, sorted(self.older), [], self.bytes)

    def _first(self, number: int) -> list[Part]:
        """The parts of a block as they were at the start."""
        found = []
        initial = named_leaves(self._initial())
        for piece in self.cut.blocks[number]:
            if initial[piece.name].is_deleted():
                raise StoreError(f"block {number} was never saved, and the initial state was donated; give again=")
            array = rows_of(initial[piece.name])
            for shard in array.addressable_shards:  # of a run of several processes all have the same sharding
                box = box_of(shard.index, array.shape)
                part = overlap(box, ((piece.start, piece.stop), *box[1:]))
                if volume(part):
                    found.append((piece.name, part, np.asarray(shard.data)[within(part, box)]))
        return found


def put_back(state: State, parts: Mapping[str, Sequence[Part]]) -> State:
    """A state of the same shardings, with parts of its arrays replaced."""
    leaves = named_leaves(state)
    new = {name: _as(leaves[name], _patched(rows_of(leaves[name]), several)) for name, several in parts.items()}
    return _replaced(state, new)


def rows_of(array: jax.Array) -> jax.Array:
    """The numbers of an array, with one axis at least."""
    bits = bits_of(array)
    return bits if bits.ndim else bits.reshape(1)


def _patched(array: jax.Array, parts: Sequence[Part]) -> jax.Array:
    """An array of the same sharding with parts replaced, shard by shard."""
    pieces = []
    for shard in array.addressable_shards:
        box = box_of(shard.index, array.shape)
        hits = [(part, data, common) for _, part, data in parts if volume(common := overlap(box, part))]
        if not hits:
            pieces.append(shard.data)
            continue
        host = np.array(shard.data)
        for part, data, common in hits:
            host[within(common, box)] = data[within(common, part)]
        pieces.append(jax.device_put(host, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def _as(leaf: jax.Array, bits: jax.Array) -> jax.Array:
    """Numbers in the type, shape and sharding of a leaf."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(bits.reshape(jax.random.key_data(leaf).shape), impl=jax.random.key_impl(leaf))
    found = bits if bits.dtype == leaf.dtype else bits.astype(leaf.dtype)
    return found.reshape(leaf.shape) if found.shape != leaf.shape else found


def _replaced(state: State, new: Mapping[str, jax.Array]) -> State:
    def one(path: Any, leaf: Any) -> Any:
        return new.get(jax.tree_util.keystr(path, simple=True, separator="/") or "state", leaf)

    return jax.tree_util.tree_map_with_path(one, state)


def _numbers(cut: Partition, lost: Sequence[str | int]) -> list[int]:
    numbers = set(cut.of([one for one in lost if isinstance(one, str)]))
    for one in lost:
        if not isinstance(one, str):
            if isinstance(one, bool) or not isinstance(one, int | np.integer) or not 0 <= one < len(cut.blocks):
                raise SettingError("lost", one, f"expected a name, or a number of one of the {len(cut.blocks)} blocks")
            numbers.add(int(one))
    return sorted(numbers)


def _from_replicas(
    cut: Partition,
    numbers: Sequence[int],
    state: State,
    leaves: Mapping[str, jax.Array],
    devices: Sequence[jax.Device],
) -> Recovered[State]:
    if not devices:
        raise SettingError("devices", list(devices), "expected those that lost what they held")
    gone = set(devices)
    parts: dict[str, list[Part]] = {}
    for name in sorted({piece.name for number in numbers for piece in cut.blocks[number]}):
        array = rows_of(leaves[name])
        living = {
            box_of(shard.index, array.shape): shard.data
            for shard in array.addressable_shards
            if shard.device not in gone
        }
        for shard in array.addressable_shards:
            box = box_of(shard.index, array.shape)
            if shard.device not in gone:
                continue
            if box not in living:
                raise StoreError(
                    f"{name}: no other device holds what {shard.device} held; recover it with policy='partial'"
                )
            parts.setdefault(name, []).append((name, box, np.asarray(living[box])))
    return Recovered(put_back(state, parts), {}, [], [], list(numbers), 0)
