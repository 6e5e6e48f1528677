"""SCAR: a running checkpoint, which frequently saves the blocks that moved most instead of rarely saving all blocks.

Qiao, Aragam, Zhang, Xing: Fault Tolerance in Iterative-Convergent Machine Learning, ICML 2019, section 4. In the paper,
SCAR is part of a parameter server; here, blocks are rows of sharded arrays, and each process writes the data of its own
devices.

A distance is a function `(new, old) -> distances` of two arrays of parameters that returns one nonnegative number for
each row. Blocks are ranked by the sum of the distances of their rows, divided by the size of the block.
"""

import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32

from ..multihost import PeerError, everyone, together
from ..records import Lock, reason
from ..settings import SettingError
from ..text import NOTHING
from .certificate import StoreError, path_of
from .outlook import POLICIES, Outlook, Policy, SaveClock, Timings, Watch, choose
from .partitions import By, Fragment, Partition, fetch, held_by, named_leaves, partition
from .recovery import Reader, Recovered
from .store import SEAL, SEALS, Seal, Store, StoreLayout, last_save

LOG = logging.getLogger("sdc.checkpoints")
State = TypeVar("State")
WAIT_MS = 600_000  # milliseconds for which a background save waits for the saves of the other processes
_openings = itertools.count()  # all processes open their running checkpoints in the same order


Distance: TypeAlias = Callable[[Array, Array], Array]


def squared_distance(new: Float[Array, "rows *rest"], old: Float[Array, "rows *rest"]) -> Float32[Array, " rows"]:
    """Returns ||new - old||_2^2 for each row: what losing the row contributes to ||delta||^2 in theorem 3.2.

    Qiao, Aragam, Zhang, Xing: Fault Tolerance in Iterative-Convergent Machine Learning, ICML 2019, section 4.2.
    """
    same = (new == old) | ((new != new) & (old != old))  # including infinities and NaN
    moved = jnp.where(same, 0, jnp.abs(new - old)).astype(jnp.float32)
    return jnp.sum(jnp.square(moved), axis=tuple(range(1, moved.ndim)))


def total_variation(lengths: Float[Array | np.ndarray, " rows"] | None = None) -> Distance:
    """Returns the paper's distance for topic models: the total variation between the old and new distributions of each
    row, times the length of the document::

        length_d * 1/2 * sum_k |new_dk / sum_k new_dk - old_dk / sum_k old_dk|

    Args:
        lengths: lengths of the documents (default: 1).
    """

    def distance(new: Float[Array, "rows topics"], old: Float[Array, "rows topics"]) -> Float32[Array, " rows"]:
        def share(x: Float32[Array, "rows *topics"]) -> Float32[Array, "rows *topics"]:
            total = jnp.sum(x, axis=tuple(range(1, x.ndim)), keepdims=True)
            return x / jnp.where(total == 0, jnp.float32(1), total)

        p, q = (share(x.astype(jnp.float32)) for x in (new, old))
        apart = 0.5 * jnp.sum(jnp.abs(p - q), axis=tuple(range(1, p.ndim)))
        return apart if lengths is None else apart * lengths.astype(jnp.float32)

    return distance


class RunningCheckpoint:
    """A checkpoint that always exists and whose blocks come from different steps: each block has the values of its last
    save.

    In a run with several processes, all processes create the running checkpoint in the same shared folder and make the
    same calls to `save`.

    Attributes:
        partition: the blocks.
        steps: step at which each block was last saved; -1 for a block that was never saved, which has its initial
            values.
        copy: the parameters in the checkpoint, by name, on the devices.
        outlook: the cost of a loss just before the last save; the same in all processes. The outlook is None if the
            distance is a custom one, if the movement of some block is still unknown, if the state is not finite, or if
            the step is before that of an earlier save.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from sdc.checkpoints import RunningCheckpoint
        >>> state = {"w": jnp.zeros((8, 4)), "step": jnp.int32(0)}
        >>> with RunningCheckpoint(tempfile.mkdtemp(), state, fraction=0.25, rows=2) as running:
        ...     moved = {"w": state["w"].at[3].add(2.0), "step": jnp.int32(1)}
        ...     saved = running.save(moved, 1)
        ...     done = running.wait()
        ...     found = running.recover(["w"], {"w": jnp.full((8, 4), jnp.nan), "step": jnp.int32(7)})
        >>> found.state["w"][3], int(found.state["step"])
        (Array([2., 2., 2., 2.], dtype=float32), 7)
        >>> found.steps, found.initial
        ({1: 1}, [0, 2, 3])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        initial: Any,
        *,
        fraction: float = 0.125,
        policy: Policy = "priority",
        moving: str | Callable[[str], bool] = "",
        by: By = "rows",
        rows: int | None = None,
        distance: Distance = squared_distance,
        seed: int = 0,
        again: Callable[[], Any] | None = None,
    ) -> None:
        """Opens a running checkpoint, or creates one.

        Args:
            folder: folder of the running checkpoint; may be on `gs://`.
            initial: the initial state; blocks that were never saved have its values.
            fraction: fraction of the bytes that each save writes, above 0 and at most 1.
            policy: selection of blocks: `priority`, `round-robin` or `random`.
            moving, by, rows: partition of the state (see `partition`).
            distance: measure of the movement of rows: `squared_distance`, or a custom distance.
            seed: seed of `random`.
            again: a function that recreates the initial state; needed if that state is donated to the first step
                (default: the state is kept).

        Raises:
            SettingError: an option is invalid.
            StoreError: the folder contains the running checkpoint of another state.
            RecordBusy: another process is writing to the folder.
        """
        if not 0 < fraction <= 1:
            raise SettingError("fraction", fraction, "expected more than 0 and at most 1")
        if policy not in POLICIES:
            raise SettingError("policy", policy, f"expected one of {', '.join(POLICIES)}")
        self.folder = path_of(folder)
        self.partition: Partition = partition(initial, moving=moving, by=by, rows=rows)
        self._fraction, self._policy, self._seed, self._cursor = fraction, policy, seed, 0
        self._budget = 0.0
        self._distance = distance
        self._store = Store(self.folder, jax.process_index())
        try:
            self._store.place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot write to {self._store.place} ({reason(error)})") from error
        self._lock = Lock(self._store.place)
        leaves = named_leaves(initial)
        self._held: Mapping[int, Sequence[Fragment]] = held_by(self.partition, leaves)
        layout = StoreLayout(
            partition=self.partition.schema,
            processes=jax.process_count(),
            blocks={str(block): list(held) for block, held in self._held.items()},
        )
        self._opening = next(_openings)
        self._initial = again or (lambda: initial)
        self._saves = 0
        self._unsaved = np.zeros(self.partition.choices, bool)
        self.steps = np.full(len(self.partition.blocks), -1)
        self.copy = {name: jnp.copy(leaf) for name, leaf in auto(self._moving(leaves)).items()}
        self._measure = measuring(self.partition, self.copy, distance)
        self.outlook: Outlook | None = None
        self._watch, self._clock = Watch(self.partition.sizes[:-1]), SaveClock()
        self._since = np.full(len(self.partition.blocks), -1)
        self._looked: _Looked | None = None
        self._pool = ThreadPoolExecutor(1, "sdc-running-checkpoint")
        self._writing: Future[int] | None = None
        self.bytes = 0  # bytes written by this process so far
        try:
            together(lambda: self._store.create(layout))
            sealed = together(lambda: last_save(self.folder))
            # Some processes may have written their part of an interrupted save, so its number is not reused.
            self._saves = max(map(int, everyone(str(self._store.last()), at="opening a checkpoint")))
            if sealed is None:  # from here on, a missing seal is a loss
                together(lambda: self._seal(0, 0) if jax.process_index() == 0 else None)
            else:  # the copy is set to the content of the store
                reader = self.reader()
                self._saves = max(self._saves, reader.save)
                self._store.versions = reader.versions[self._store.process]
                if not sealed.sealed or self._store.process in reader.behind:
                    self._store.doubt()
                found = reader.recover(list(range(len(self.partition.blocks))), initial)
                self.copy = auto(self._moving(named_leaves(found.state)))
                for block, step in found.steps.items():
                    self.steps[block] = step
        except PeerError as error:
            self._lock.release()
            raise StoreError(f"another process cannot open {self.folder} ({error})") from error
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise StoreError(f"cannot write to {self._store.place} ({reason(error)})") from error
            raise

    def save(self, state: Any, step: int, *, note: Mapping[str, Any] = NOTHING) -> list[int]:
        """Saves the blocks that are due, in the background; the state may be donated as soon as this method returns.

        Args:
            state: state with the structure, shapes, types and shardings of the initial state.
            step: number of steps done.
            note: JSON-serializable note stored with the save, such as the position of the data iterator.

        Returns:
            Numbers of the saved blocks.

        Raises:
            StoreError: the state has another structure.
        """
        leaves = named_leaves(state)
        looked, self._looked = self._looked, None
        same = looked is not None and all(leaves.get(name) is leaf for name, leaf in looked.moving.items())
        if looked is None or not same or looked.step != step:
            looked = self._look(leaves, step)
        started = time.perf_counter()
        moving, moved = auto(looked.moving), looked.moved
        sizes = self.partition.sizes[:-1]
        self._budget += self._fraction * sum(sizes)
        chosen, self._cursor = choose(
            self._policy, self._budget, sizes, moved, cursor=self._cursor, seed=self._seed + step
        )
        # Carries unused or excess bytes over to the next saves, so that the average matches the fraction.
        self._budget -= sum(sizes[block] for block in chosen)
        mask = np.zeros(self.partition.choices, bool)
        mask[chosen] = True
        self.copy = self._measure.updated(moving, self.copy, mask)
        everything = [*chosen, self.partition.choices]  # every save includes the last block
        copying = time.perf_counter()
        pieces = fetch({block: self._held[block] for block in everything if block in self._held}, leaves)
        share = sum(sizes[block] for block in chosen) / max(sum(sizes), 1)
        self._clock.held(looked.seconds + copying - started, time.perf_counter() - copying, share=share)
        self._unsaved |= mask  # until they are written
        self._saves += 1
        self._writing = self._pool.submit(self._write, self._saves, step, everything, pieces, note)
        return chosen

    def look(self, state: Any, step: int) -> Outlook | None:
        """Returns the current cost of a loss: see `outlook`. A subsequent save of the same state does not repeat the
        measurement.

        Args:
            state, step: as in `save`; call this method before `save`.

        Raises:
            StoreError: the state has another structure.
        """
        self._looked = self._look(named_leaves(state), step)
        return self.outlook

    def went_back(self, blocks: Sequence[int], step: int) -> None:
        """Records that training continues after this step with the saved versions of these blocks."""
        self._since[list(blocks)] = step
        self._watch.went_back([block for block in blocks if block < self.partition.choices], step)

    def saved(self) -> np.ndarray:
        """Returns the step of the saved version of each block that can be chosen, or -1 for the initial version."""
        self.wait()
        return np.maximum(self.steps, self._since)[:-1]

    @property
    def timings(self) -> Timings | None:
        """Durations of saves; None after too few saves."""
        return self._clock.timings

    def wait(self) -> bool:
        """Waits until the pending save is written and sealed, and returns whether this succeeded. The blocks of a
        failed save are saved again later."""
        writing, self._writing = self._writing, None
        if writing is None:
            return True
        try:
            self.bytes += writing.result()
            return True
        except Exception as error:  # errors of the storage or a device, which do not concern training
            LOG.error("a save of the running checkpoint failed: %s; training continues without it", error)
            return False

    def recover(self, lost: Sequence[str | int], state: State, **options: Any) -> Recovered[State]:
        """Restores the lost blocks of a state.

        Args:
            lost, state: see `Reader.recover`.
            **options: `policy`, `devices` and `zeroed` of `Reader.recover`.

        Raises:
            StoreError: a required block has no undamaged version.
        """
        return self.reader().recover(lost, state, **options)

    def reader(self) -> Reader:
        """Returns a reader of the current content."""
        self.wait()
        return Reader(self.folder, self.partition, self._initial)

    @staticmethod
    def read(
        folder: str | os.PathLike[str],
        initial: Any,
        *,
        moving: str | Callable[[str], bool] = "",
        by: By = "rows",
        rows: int | None = None,
    ) -> Reader:
        """Returns a reader, on the mesh of `initial`, of a running checkpoint that this process does not write."""
        return Reader(path_of(folder), partition(initial, moving=moving, by=by, rows=rows), lambda: initial)

    def distance(self, state: Any, other: Any) -> float:
        """Returns the L2 norm of the difference between two states' parameters, which measures the perturbation caused
        by a recovery."""
        parts = [list(auto(self._moving(named_leaves(one))).values()) for one in (state, other)]
        return float(difference(*parts))

    def _look(self, leaves: Mapping[str, jax.Array], step: int) -> "_Looked":
        self.partition.check(leaves)
        self.wait()
        moving = jax.block_until_ready(self._moving(leaves))  # do not count the time of a pending step
        started = time.perf_counter()
        measured = np.asarray(self._measure.moved(auto(moving), self.copy))
        moved = np.where(self._unsaved, np.inf, measured)
        if self._distance is squared_distance:
            # There is no outlook for a state that is not finite; the movement of blocks that were not written is
            # unknown.
            known = np.where(np.isfinite(measured), moved, np.nan)
            self.outlook = self._watch.saved(step, self.saved(), known)
        return _Looked(moving, step, moved, time.perf_counter() - started)

    def _moving(self, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: leaves[name] for name in self.partition.moving}

    def close(self) -> None:
        """Waits for pending saves and releases the folder."""
        self.wait()
        self._pool.shutdown()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, save: int, step: int, blocks: Sequence[int], pieces: Any, note: Mapping[str, Any]) -> int:
        failure, written, started = "", 0, time.perf_counter()
        try:
            written = self._store.write(save, step, pieces(), note)
        except Exception as error:  # errors of the storage or a device: the other processes wait for this one's part
            failure = str(error) or type(error).__name__
        self._agree(save, "written", failure)
        if jax.process_index() == 0:
            try:
                self._seal(save, step)
            except OSError as error:
                failure = f"save {save} cannot be sealed ({reason(error)})"
        self._agree(save, "sealed", failure)
        self.steps[list(blocks)] = step
        self._unsaved[[block for block in blocks if block < self.partition.choices]] = False
        self._clock.written(time.perf_counter() - started, sum(self.partition.sizes[block] for block in blocks))
        self._store.reclaim()
        return written

    def _seal(self, save: int, step: int) -> None:
        SEALS.write(self.folder / SEAL, Seal(save=save, step=step, processes=jax.process_count()))

    def _agree(self, save: int, part: str, failure: str) -> None:
        """Waits until all processes have done this part of a save; if one process fails, all processes choose the same
        blocks again.

        Raises StoreError with the failure of another process.
        """
        said, client = [failure], distributed.global_state.client
        if client is not None and jax.process_count() > 1:
            key, me = f"sdc/scar/{self._opening}/{save}/{part}", jax.process_index()
            client.key_value_set(f"{key}/{me}", failure or "done")
            try:
                answers = (client.blocking_key_value_get(f"{key}/{one}", WAIT_MS) for one in range(jax.process_count()))
                said = ["" if word == "done" else str(word) for word in answers]
            except jax.errors.JaxRuntimeError as error:
                raise StoreError(f"save {save} is not sealed: another process has not completed its part") from error
        for word in filter(None, said):
            raise StoreError(word)


class _Looked(NamedTuple):
    """The movement of a state's blocks, and the time that the measurement took."""

    moving: dict[str, jax.Array]
    step: int
    moved: np.ndarray
    seconds: float


def auto(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the same arrays, without a copy, on meshes with automatic shardings."""

    def one(leaf: jax.Array) -> jax.Array:
        found = leaf.sharding
        if not isinstance(found, NamedSharding) or all(kind is AxisType.Auto for kind in found.mesh.axis_types):
            return leaf
        mesh = Mesh(found.mesh.devices, found.mesh.axis_names, axis_types=(AxisType.Auto,) * len(found.mesh.axis_names))
        parts = [shard.data for shard in leaf.addressable_shards]
        sharding = NamedSharding(mesh, found.spec, memory_kind=found.memory_kind)
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)

    return {name: one(leaf) for name, leaf in leaves.items()}


@jax.jit
def difference(new: Sequence[jax.Array], old: Sequence[jax.Array]) -> jax.Array:
    parts = [jnp.sum(squared_distance(a.reshape(-1), b.reshape(-1))) for a, b in zip(new, old, strict=True)]
    return jnp.sqrt(sum(parts, jnp.float32(0)))


class Measure(NamedTuple):
    """Two compiled programs: one measures the movement of each block, and the other updates some blocks of the copy."""

    moved: Callable[..., jax.Array]
    updated: Callable[..., dict[str, jax.Array]]


def measuring(cut: Partition, leaves: Mapping[str, jax.Array], distance: Distance) -> Measure:
    ids: dict[str, np.ndarray] = {}
    for name in cut.moving:
        shape = cut.types[name][1]
        ids[name] = np.zeros(shape[0] if shape else 1, np.int32)
    for block, pieces in enumerate(cut.blocks[:-1]):
        for piece in pieces:
            if piece.name in ids:
                ids[piece.name][piece.start : piece.stop] = block
    shardings = tuple(leaves[name].sharding for name in ids)
    return _measures(tuple((name, block.tobytes()) for name, block in ids.items()), shardings, cut.choices, distance)


@functools.lru_cache(maxsize=16)
def _measures(
    rows_of: tuple[tuple[str, bytes], ...], shardings: tuple[Any, ...], choices: int, distance: Distance
) -> Measure:
    """Compiles the programs, given the block of each row of each array (as 32-bit integers) and the arrays'
    shardings."""
    ids = {name: np.frombuffer(block, np.int32) for name, block in rows_of}

    def rows(x: jax.Array) -> jax.Array:
        return x if x.ndim else x[None]

    def moved(new: Mapping[str, jax.Array], old: Mapping[str, jax.Array]) -> jax.Array:
        total = jnp.zeros(choices, jnp.float32)
        for name, block in ids.items():
            far = distance(rows(new[name]), rows(old[name])).astype(jnp.float32)
            total += jax.ops.segment_sum(far, block, choices)
        return total

    def updated(new: Mapping[str, jax.Array], old: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
        def one(name: str) -> jax.Array:
            chosen = mask[ids[name]].reshape(-1, *[1] * (rows(new[name]).ndim - 1))
            return jnp.where(chosen, rows(new[name]), rows(old[name])).reshape(new[name].shape)

        return {name: one(name) for name in ids}

    # All processes choose by the same measurements, so each process must have all of these.
    everywhere = [NamedSharding(one.mesh, PartitionSpec()) for one in shardings if isinstance(one, NamedSharding)]
    placed = {name: one if isinstance(one, NamedSharding) else None for name, one in zip(ids, shardings, strict=True)}
    return Measure(
        jax.jit(moved, out_shardings=everywhere[0] if everywhere else None),
        jax.jit(updated, donate_argnums=1, out_shardings=placed),
    )
