"""`repair`: only the blocks that are wrong are put right, and it is said from where and how old what came is.

Digests of a certificate, or of two states that should be alike (twins, replicas of a step), say which blocks are
wrong. Everything else of the state stays as it is: it is as new as it was.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import jax
import numpy as np

from ._certify import Certified
from ._partition import named_leaves
from .blocks import bits_of, cut_of, take, total
from .boxes import Box, overlap, volume
from .certificate import CertificateError
from .recovery import Part, Reader, put_back, rows_of
from .scar import RunningCheckpoint
from .verifying import Wrong

State = TypeVar("State")


class Source(Protocol):
    """Where rows of arrays can come from."""

    def rows(self, name: str, start: int, stop: int) -> tuple[Sequence[Part], int]:
        """Parts of an array that cover these rows, and the step that they are of.

        Raises:
            CertificateError: it has them not, or not as they were saved.
        """

    def __str__(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Repair:
    """What was put right.

    Attributes:
        name: of the array.
        rows: first row, and the one behind the last.
        source: where they came from.
        step: that they are of.
    """

    name: str
    rows: tuple[int, int]
    source: str
    step: int

    def __str__(self) -> str:
        return f"{self.name} rows {self.rows[0]}:{self.rows[1]} from {self.source}, step {self.step}"


@dataclasses.dataclass(frozen=True)
class Repaired(Generic[State]):
    """A state with blocks put right.

    Attributes:
        state: the state, with the shardings that it had.
        repairs: what was put right, from where.
        left: what is still wrong: no source had it.
    """

    state: State
    repairs: Sequence[Repair]
    left: Sequence[Wrong]


@dataclasses.dataclass(frozen=True)
class FromState:
    """A state that is known to be right, on the same processes: a twin's, or that of other replicas.

    Attributes:
        state: of the structure of the one that is repaired.
        step: that it is of.
        name: what it is called in reports.
    """

    state: Any
    step: int
    name: str = "another state"

    def rows(self, name: str, start: int, stop: int) -> tuple[Sequence[Part], int]:
        """See `Source`."""
        return [_part(named_leaves(self.state)[name], name, start, stop)], self.step

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class FromCheckpoint:
    """A certified checkpoint; of it only the arrays that are wrong are read, and compared with their digests.

    Attributes:
        checkpointer: that saved it.
        step: of the checkpoint.
        abstract: shapes, types and shardings of the whole state, as `load` takes them.
    """

    checkpointer: Certified
    step: int
    abstract: Any

    def rows(self, name: str, start: int, stop: int) -> tuple[Sequence[Part], int]:
        """See `Source`."""

        def wanted(path: Any, leaf: Any) -> Any:
            return leaf if jax.tree_util.keystr(path, simple=True, separator="/") == name else ...

        loaded = self.checkpointer.load(self.step, jax.tree_util.tree_map_with_path(wanted, self.abstract))
        (found,) = [leaf for leaf in jax.tree.leaves(loaded) if isinstance(leaf, jax.Array)]
        return [_part(found, name, start, stop)], self.step

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step}"


@dataclasses.dataclass(frozen=True)
class FromRunning:
    """A running checkpoint: whole blocks of it, each of its own step.

    Attributes:
        running: the checkpoint, or what reads it.
    """

    running: RunningCheckpoint | Reader

    def rows(self, name: str, start: int, stop: int) -> tuple[Sequence[Part], int]:
        """See `Source`."""
        reader = self.running.reader() if isinstance(self.running, RunningCheckpoint) else self.running
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
    """The blocks in which two states differ, by digests on their devices. Both may be sharded as they like.

    Raises:
        CertificateError: arrays are not alike in name, shape and type, or not wholly on this process's devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from sdc.checkpoints import differing
        >>> differing({"w": jnp.zeros((4, 2))}, {"w": jnp.zeros((4, 2)).at[1, 1].set(1.0)})
        [Wrong(name='w', what='differs', rows=((0, 4),))]
    """
    first, second = named_leaves(state), named_leaves(reference)
    for name in sorted({*first, *second}):
        kinds = [_kind(one.get(name)) for one in (first, second)]
        if kinds[0] != kinds[1]:
            raise CertificateError(f"{name} is {kinds[0]} in one state and {kinds[1]} in the other")
    digests = [{name: total(shares) for name, shares in take(one)()[0].items()} for one in (first, second)]
    wrong = []
    for name, leaf in first.items():
        bits = jax.eval_shape(bits_of, leaf)
        cut = cut_of(bits.shape, bits.dtype.itemsize)
        blocks = np.flatnonzero((digests[0][name] != digests[1][name]).any(axis=1))
        if blocks.size:
            wrong.append(Wrong(name, "differs", tuple(cut.block(int(block)) for block in blocks)))
    return wrong


def repair(state: State, wrong: Sequence[Wrong], sources: Sequence[Source]) -> Repaired[State]:
    """Puts right the blocks of a state that are wrong, and nothing else.

    Args:
        state: a tree of JAX arrays.
        wrong: what is wrong, as `differing` or a `Damaged` checkpoint tells it.
        sources: where it may come from, the first one first: `FromState`, `FromCheckpoint`, `FromRunning`.

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
    parts: dict[str, list[Part]] = {}
    for one in wrong:
        name = _name(one.name, leaves)
        missing = []
        rows = _rows(leaves[name])
        for start, stop in one.rows or ((0, rows),):
            if not 0 <= start < stop <= rows:
                raise CertificateError(f"{name} has rows 0:{rows}, and {start}:{stop} are told to be wrong")
            found = _first(sources, leaves[name], name, start, stop)
            if found is None:
                missing.append((start, stop))
                continue
            source, given, step = found
            parts.setdefault(name, []).extend(given)
            repairs.append(Repair(name, (start, stop), source, step))
        if missing:
            left.append(one._replace(rows=tuple(missing)))
    return Repaired(put_back(state, parts), repairs, left)


def _kind(leaf: jax.Array | None) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def _part(leaf: jax.Array, name: str, start: int, stop: int) -> Part:
    whole = np.asarray(rows_of(leaf))
    rows = whole[start:stop]
    return name, ((start, start + len(rows)), *((0, size) for size in whole.shape[1:])), rows


def _first(
    sources: Sequence[Source], leaf: jax.Array, name: str, start: int, stop: int
) -> tuple[str, Sequence[Part], int] | None:
    """What the first source has that has all of these rows, in the shape and type of the array."""
    bits = jax.eval_shape(rows_of, leaf)
    rows: Box = ((start, stop), *((0, size) for size in bits.shape[1:]))
    for source in sources:
        try:
            given, step = source.rows(name, start, stop)
        except (CertificateError, KeyError):
            continue
        fits = all(len(box) == bits.ndim and array.dtype == bits.dtype for _, box, array in given)
        parts = [_only(part, start, stop) for part in given]
        if fits and sum(volume(overlap(box, rows)) for _, box, _ in parts) == volume(rows):
            return str(source), parts, step
    return None


def _only(part: Part, start: int, stop: int) -> Part:
    """A part without the rows that nobody asked for."""
    name, ((first, last), *rest), array = part
    begin, end = max(first, start), max(min(last, stop), max(first, start))
    return name, ((begin, end), *rest), array[begin - first : end - first]


def _name(name: str, leaves: Mapping[str, Any]) -> str:
    """Names of certificates begin with that of the checkpointable."""
    for one in (name, name.partition("/")[2]):
        if one in leaves:
            return one
    raise CertificateError(f"the state has no {name}; it has {', '.join(list(leaves)[:8])}")


def _rows(leaf: jax.Array) -> int:
    bits = jax.eval_shape(bits_of, leaf)
    return int(bits.shape[0]) if bits.ndim else 1
