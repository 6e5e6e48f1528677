"""Recovery of a state with lost parts, from the remaining parts and a running checkpoint or a replica.

According to Qiao et al. (ICML 2019, section 4.1), a partial recovery, which restores only the lost blocks, perturbs the
state less than a full recovery: E ||delta'||^2 = p ||delta||^2 if a uniformly random fraction p of the blocks is lost.
Recovery from a replica, which a parameter server does not have, causes no perturbation.

`repair` replaces only wrong blocks, which are identified by the digests of a certificate or of two states that should
be equal; all other blocks remain current.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from ..results import Result, ResultTable, counted
from ..settings import SettingError
from ..verdict import Judgement, Verdict
from .blocks import Box, box_of, cut_of, overlap, take, total, volume, within
from .certificate import CertificateError, StoreError, Wrong
from .certified import Certified
from .partitions import Fragment, Partition, named_leaves, parts_of, path_name, row_count, rows_of
from .store import LAYOUT, Store, Version, Versions, last_save

if TYPE_CHECKING:
    from .scar import RunningCheckpoint

LOG = logging.getLogger("sdc.checkpoints")
RecoveryPolicy: TypeAlias = Literal["partial", "full", "replica"]
State = TypeVar("State")
Part: TypeAlias = tuple[str, Box, np.ndarray]  # name of an array, position in it, and the data


@dataclasses.dataclass(frozen=True, repr=False)
class Recovered(Result, Generic[State]):
    """A recovered state.

    Attributes:
        state: the state, with the shardings of the input.
        steps: for each block from the running checkpoint, the step at which it was saved.
        initial: blocks that were never saved and have their initial values.
        older: blocks whose newest version is damaged, so the previous one was used.
        copied: blocks copied from replicas on other devices.
        bytes: number of bytes read.
    """

    state: State
    steps: Mapping[int, int]
    initial: Sequence[int]
    older: Sequence[int]
    copied: Sequence[int]
    bytes: int

    def verdict(self) -> Judgement:
        """Returns None, and what was recovered: a recovery compares nothing."""
        older = (
            f", {len(self.older):,} of them in an older version, because the newest is damaged" if self.older else ""
        )
        return Judgement(
            None,
            f"{counted(len(self.steps), 'block')} read{older}; {len(self.copied):,} copied from replicas, "
            f"{len(self.initial):,} with their initial values",
        )

    def table(self) -> ResultTable:
        """Returns the source of each recovered block."""
        read = [(str(block), "older version" if block in self.older else "newest version", step)
                for block, step in self.steps.items()]  # fmt: skip
        copied = [(str(block), "a replica", None) for block in self.copied]
        return ResultTable(
            ("block", "source", "step"),
            (*read, *copied, *((str(block), "the initial values", None) for block in self.initial)),
        )

    def age(self, step: int) -> int:
        """Returns the number of steps by which the oldest block is behind; a block that was never saved is behind by
        all steps since the start."""
        return max([step - one for one in self.steps.values()] + [step] * bool(self.initial), default=0)


class Reader:
    """Reads a running checkpoint, as of the last sealed save. Any process can read the parts of all processes."""

    def __init__(self, folder: epath.Path, cut: Partition, initial: Callable[[], Any]) -> None:
        """Opens a running checkpoint; raises StoreError if it does not exist or belongs to another state.
        `RunningCheckpoint` creates readers."""
        self.cut = cut
        self._folder, self._initial = folder, initial
        self.older: set[int] = set()
        self.bytes = 0
        self._open()

    def _open(self) -> None:
        saved = last_save(self._folder)
        manifests = () if saved is None else saved.manifests
        self.save = 0 if saved is None else saved.save
        # Steps done at the save, and its note; if a manifest is missing or damaged, those of the previous save.
        self.step: int = 0 if saved is None else saved.oldest.step
        self.note: dict[str, Any] = {} if saved is None else saved.oldest.note
        self.behind = set() if saved is None else saved.behind  # processes whose last manifest is missing or damaged
        self.versions: list[Versions] = [one.blocks for one in manifests]  # of each process's blocks
        self._stores = [Store(self._folder, process) for process in range(len(manifests))]
        self._held: list[Mapping[str, Sequence[Fragment]]] = []
        if saved is None and not (self._folder / "process-0" / LAYOUT).exists():
            raise StoreError(f"there is no running checkpoint in {self._folder}")
        for store in self._stores:
            layout = store.layout()
            if layout.partition != self.cut.schema:
                raise StoreError(f"{store.place} is a running checkpoint of another state or partition")
            self._held.append(layout.blocks)

    def block(self, number: int) -> tuple[list[Part], int | None]:
        """Returns the parts of a block from all processes, and the oldest step of these parts, which is None if the
        block was never saved."""
        parts: list[Part] = []
        steps = []
        for store, held, versions in zip(self._stores, self._held, self.versions, strict=True):
            if str(number) not in held or number not in versions:
                continue
            mine = held[str(number)]
            arrays, version = self._newest(store, number, mine, versions[number])
            parts += [(one.name, one.box, array) for one, array in zip(mine, arrays, strict=True)]
            steps.append(version.step)
            if store.process in self.behind:
                self.older.add(number)
        if steps and sum(array.nbytes for _, _, array in parts) != self.cut.sizes[number]:
            raise StoreError(
                f"block {number} is incomplete: the part of a process is missing; restore a full checkpoint"
            )
        return parts, min(steps, default=None)

    def _newest(
        self, store: Store, number: int, held: Sequence[Fragment], versions: Sequence[Version]
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
                    LOG.warning(
                        "the newest version of block %d is damaged; using the version of step %d", number, version.step
                    )
                return arrays, version
        raise StoreError(f"block {number} of {store.place} has no undamaged version; restore a full checkpoint")

    def recover(
        self,
        lost: Sequence[str | int],
        state: State,
        *,
        policy: RecoveryPolicy = "partial",
        devices: Sequence[jax.Device] = (),
        zeroed: bool = False,
    ) -> Recovered[State]:
        """Restores lost blocks of a state.

        Args:
            lost: numbers of blocks, or names or parent paths of arrays.
            state: the remaining state, with arbitrary values in lost blocks.
            policy: `partial` reads only lost blocks, `full` reads all blocks, and `replica` copies lost blocks from
                devices with the same data.
            devices: with `replica`, the devices that lost their data.
            zeroed: whether optimizer arrays in the blocks that are read are set to zero instead of their saved values;
                cannot be combined with `replica`.

        Raises:
            StoreError: a block has no undamaged version, or no replica.
            SettingError: a block does not exist, or options contradict each other.
        """
        if policy not in get_args(RecoveryPolicy):
            raise SettingError("policy", policy, f"expected one of {', '.join(get_args(RecoveryPolicy))}")
        numbers = set(self.cut.of([one for one in lost if isinstance(one, str)]))
        for one in lost:
            whole = isinstance(one, int | np.integer) and not isinstance(one, bool)
            if not isinstance(one, str) and not (whole and 0 <= one < len(self.cut.blocks)):
                blocks = len(self.cut.blocks)
                raise SettingError("lost", one, f"expected the name of an array, or a block number below {blocks}")
            numbers |= set() if isinstance(one, str) else {int(one)}
        leaves = named_leaves(state)
        self.cut.check(leaves)
        if policy == "replica":
            if zeroed:
                raise SettingError(
                    "zeroed", zeroed, "recovery from a replica keeps the optimizer arrays; do not give zeroed"
                )
            return _from_replicas(self.cut, sorted(numbers), state, leaves, devices)
        every = range(len(self.cut.blocks)) if policy == "full" else sorted(numbers)
        wanted = [number for number in every if self.cut.sizes[number]]
        while True:
            try:
                return self._recovered(wanted, state, zeroed)
            except StoreError:
                save = self.save
                self._open()  # another process may have saved since
                if self.save == save:
                    raise

    def _recovered(self, wanted: Sequence[int], state: State, zeroed: bool) -> Recovered[State]:
        self.older.clear()
        self.bytes = 0
        steps: dict[int, int] = {}
        initial, moving = [], set(self.cut.moving)
        parts: list[Part] = []
        for store, versions in zip(self._stores, self.versions, strict=True):
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
                parts.append((name, box, np.zeros_like(array) if zero else array))
        if initial:
            LOG.warning("blocks %s were never saved, so they have their initial values", initial[:8])
        return Recovered(put_back(state, parts), steps, initial, sorted(self.older), [], self.bytes)

    def _first(self, number: int) -> list[Part]:
        """Returns the parts of a block with their initial values."""
        found = []
        initial = named_leaves(self._initial())
        for piece in self.cut.blocks[number]:
            if initial[piece.name].is_deleted():
                raise StoreError(f"block {number} was never saved, but the initial state was donated; give again=")
            array = rows_of(initial[piece.name])
            for shard in array.addressable_shards:  # all processes of a run have the same sharding
                box = box_of(shard.index, array.shape)
                part = overlap(box, ((piece.start, piece.stop), *box[1:]))
                if volume(part):
                    found.append((piece.name, part, np.asarray(shard.data)[within(part, box)]))
        return found


def put_back(state: State, parts: Iterable[Part]) -> State:
    """Returns the state with parts of its arrays replaced and its shardings unchanged."""
    of: dict[str, list[Part]] = {}
    for part in parts:
        of.setdefault(part[0], []).append(part)

    def one(path: Any, leaf: Any) -> Any:
        if (several := of.get(path_name(path))) is None:
            return leaf
        array, pieces = rows_of(leaf), []
        for shard in array.addressable_shards:
            box = box_of(shard.index, array.shape)
            hits = [(part, data, common) for _, part, data in several if volume(common := overlap(box, part))]
            if not hits:
                pieces.append(shard.data)
                continue
            host = np.array(shard.data)
            for part, data, common in hits:
                host[within(common, box)] = data[within(common, part)]
            pieces.append(jax.device_put(host, shard.device))
        bits = jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            key = bits.reshape(jax.random.key_data(leaf).shape)
            return jax.random.wrap_key_data(key, impl=jax.random.key_impl(leaf))
        found = bits if bits.dtype == leaf.dtype else bits.astype(leaf.dtype)
        return found.reshape(leaf.shape) if found.shape != leaf.shape else found

    return jax.tree_util.tree_map_with_path(one, state)


def _from_replicas(
    cut: Partition,
    numbers: Sequence[int],
    state: State,
    leaves: Mapping[str, jax.Array],
    devices: Sequence[jax.Device],
) -> Recovered[State]:
    if not devices:
        raise SettingError("devices", list(devices), "expected the devices that lost their data")
    gone = set(devices)
    parts: list[Part] = []
    for name in sorted({piece.name for number in numbers for piece in cut.blocks[number]}):
        array = rows_of(leaves[name])
        shards = [(box_of(shard.index, array.shape), shard) for shard in array.addressable_shards]
        living = {box: shard.data for box, shard in shards if shard.device not in gone}
        for box, shard in shards:
            if shard.device not in gone:
                continue
            if box not in living:
                raise StoreError(f"{name}: no other device holds the data of {shard.device}; use policy='partial'")
            parts.append((name, box, np.asarray(living[box])))
    return Recovered(put_back(state, parts), {}, [], [], list(numbers), 0)


class RowSource(Protocol):
    """A source of rows of arrays."""

    def rows(self, name: str, start: int, stop: int) -> tuple[Sequence[Part], int]:
        """Returns parts of an array that cover these rows, and their step; raises CertificateError if the source cannot
        provide correct rows."""

    def __str__(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Repair:
    """A repaired range of rows.

    Attributes:
        name: name of the array.
        rows: first row, and the row after the last one.
        source: source of the rows.
        step: step of the rows.
    """

    name: str
    rows: tuple[int, int]
    source: str
    step: int

    def __str__(self) -> str:
        return f"{self.name} rows {self.rows[0]}:{self.rows[1]} from {self.source}, step {self.step}"


@dataclasses.dataclass(frozen=True, repr=False)
class Repaired(Result, Generic[State]):
    """A state with repaired blocks.

    Attributes:
        state: the state, with its original shardings.
        repairs: repaired rows and their sources.
        left: wrong blocks that no source could provide.
    """

    state: State
    repairs: Sequence[Repair]
    left: Sequence[Wrong]

    def verdict(self) -> Judgement:
        """Returns the verdict on the state as it was given, whether or not its wrong rows are repaired."""
        if not self.repairs and not self.left:
            return Judgement(None, "no wrong rows were given, and nothing was compared")
        mended = f"{len(self.repairs):,} ranges of rows were wrong and are repaired"
        left = f"; {len(self.left):,} wrong arrays had no source, first {self.left[0]}" if self.left else ""
        return Judgement(Verdict.CORRUPT, f"{mended}{left}")

    def table(self) -> ResultTable:
        """Returns the repaired rows and their sources, and what is still wrong."""
        mended = [(one.name, f"{one.rows[0]}:{one.rows[1]}", one.source, one.step) for one in self.repairs]
        left = [(one.name, str(one), "still wrong", None) for one in self.left]
        return ResultTable(("array", "rows", "source", "step"), (*mended, *left))


@dataclasses.dataclass(frozen=True)
class FromState:
    """A state that is on the same processes and known to be correct, such as the state of a twin or of another replica.

    Attributes:
        state: state with the structure of the repaired state.
        step: step of the state.
        name: name of the state in reports.
    """

    state: Any
    step: int
    name: str = "another state"

    def rows(self, name: str, start: int, stop: int) -> tuple[Sequence[Part], int]:
        return [_part(named_leaves(self.state)[name], name, start, stop)], self.step

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class FromCheckpoint:
    """A certified checkpoint; only the wrong arrays are read from it, and they are then compared with their digests.

    Attributes:
        checkpointer: checkpointer that saved the checkpoint.
        step: step of the checkpoint.
        abstract: shapes, types and shardings of the whole state, as for `load`.
    """

    checkpointer: Certified
    step: int
    abstract: Any

    def rows(self, name: str, start: int, stop: int) -> tuple[Sequence[Part], int]:
        def wanted(path: Any, leaf: Any) -> Any:
            return leaf if path_name(path) == name else ...

        loaded = self.checkpointer.load(self.step, jax.tree_util.tree_map_with_path(wanted, self.abstract))
        (found,) = [leaf for leaf in jax.tree.leaves(loaded) if isinstance(leaf, jax.Array)]
        return [_part(found, name, start, stop)], self.step

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step}"


@dataclasses.dataclass(frozen=True)
class FromRunning:
    """A running checkpoint, which provides whole blocks, each from the step at which it was saved.

    Attributes:
        running: the checkpoint, or its reader.
    """

    running: "RunningCheckpoint | Reader"

    def rows(self, name: str, start: int, stop: int) -> tuple[Sequence[Part], int]:
        reader = self.running if isinstance(self.running, Reader) else self.running.reader()
        parts: list[Part] = []
        steps = []
        for number, pieces in enumerate(reader.cut.blocks):
            if not any(one.name == name and one.start < stop and start < one.stop for one in pieces):
                continue
            found, step = reader.block(number)
            if step is None:
                raise CertificateError(f"block {number} was never saved")
            parts += [part for part in found if part[0] == name]
            steps.append(step)
        if not steps:
            raise CertificateError(f"the running checkpoint has no {name}")
        return parts, min(steps)

    def __str__(self) -> str:
        return "the running checkpoint"


def differing(state: Any, reference: Any) -> list[Wrong]:
    """Returns the blocks in which two states differ according to digests that are computed on the states' devices.
    Shardings may differ.

    Raises:
        CertificateError: arrays differ in name, shape or type, or are not entirely on this process's devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from sdc.checkpoints import differing
        >>> differing({"w": jnp.zeros((4, 2))}, {"w": jnp.zeros((4, 2)).at[1, 1].set(1.0)})
        [Wrong(name='w', what='differs', rows=((0, 4),))]
    """
    first, second = named_leaves(state), named_leaves(reference)
    for name in sorted({*first, *second}):
        here, there = (
            f"{one[name].dtype}{list(one[name].shape)}" if name in one else "absent" for one in (first, second)
        )
        if here != there:
            raise CertificateError(f"{name} is {here} in one state and {there} in the other")
    digests = [{name: total(shares) for name, shares in take(one)()[0].items()} for one in (first, second)]
    rows = {name: cut_of(leaf).differing(*(one[name] for one in digests)) for name, leaf in first.items()}
    return [Wrong(name, "differs", several) for name, several in rows.items() if several]


def repair(state: State, wrong: Sequence[Wrong], sources: Sequence[RowSource]) -> Repaired[State]:
    """Replaces only the wrong blocks of a state.

    Args:
        state: a tree of JAX arrays.
        wrong: wrong blocks, from `differing` or a `Damaged` checkpoint.
        sources: sources in order of preference: `FromState`, `FromCheckpoint`, `FromRunning`.

    Example:
        >>> import jax.numpy as jnp
        >>> from sdc.checkpoints import FromState, differing, repair
        >>> good = {"w": jnp.zeros((4, 2))}
        >>> bad = {"w": jnp.zeros((4, 2)).at[1, 1].set(1.0)}
        >>> found = repair(bad, differing(bad, good), [FromState(good, 7, "the healthy twin")])
        >>> str(found.repairs[0]), differing(found.state, good)
        ('w rows 0:4 from the healthy twin, step 7', [])
    """
    leaves = named_leaves(state)
    repairs: list[Repair] = []
    left: list[Wrong] = []
    parts: list[Part] = []
    for one in wrong:
        # Names in certificates begin with the name of the checkpointable.
        name = next((name for name in (one.name, one.name.partition("/")[2]) if name in leaves), None)
        if name is None:
            raise CertificateError(f"the state has no {one.name}; its arrays include {', '.join(list(leaves)[:8])}")
        missing = []
        rows = row_count(leaves[name])
        for start, stop in one.rows or ((0, rows),):
            if not 0 <= start < stop <= rows:
                raise CertificateError(f"{name} has only rows 0:{rows}, but rows {start}:{stop} are listed as wrong")
            found = _first(sources, leaves[name], name, start, stop)
            if found is None:
                missing.append((start, stop))
                continue
            source, given, step = found
            parts.extend(given)
            repairs.append(Repair(name, (start, stop), source, step))
        if missing:
            left.append(one._replace(rows=tuple(missing)))
    return Repaired(put_back(state, parts), repairs, left)


def _part(leaf: jax.Array, name: str, start: int, stop: int) -> Part:
    whole = np.asarray(rows_of(leaf))
    rows = whole[start:stop]
    return name, ((start, start + len(rows)), *((0, size) for size in whole.shape[1:])), rows


def _first(
    sources: Sequence[RowSource], leaf: jax.Array, name: str, start: int, stop: int
) -> tuple[str, Sequence[Part], int] | None:
    """Returns the rows from the first source that has all of them, with the shape and type of the array."""
    bits = jax.eval_shape(rows_of, leaf)
    rows: Box = ((start, stop), *((0, size) for size in bits.shape[1:]))
    for source in sources:
        try:
            given, step = source.rows(name, start, stop)
        except (CertificateError, KeyError):
            continue
        fits = all(len(box) == bits.ndim and array.dtype == bits.dtype for _, box, array in given)
        parts: list[Part] = []
        for one, ((first, last), *rest), array in given:  # without rows that were not requested
            begin, end = max(first, start), max(min(last, stop), max(first, start))
            parts.append((one, ((begin, end), *rest), array[begin - first : end - first]))
        if fits and sum(volume(overlap(box, rows)) for _, box, _ in parts) == volume(rows):
            return str(source), parts, step
    return None
