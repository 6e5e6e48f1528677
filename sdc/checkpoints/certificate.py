"""Certificates: what a checkpoint must restore to, in files beside it.

    FOLDER/certificates/STEP/process-N.json   process N's: digests of what its devices held when the step was saved
    FOLDER/certificates/STEP/status.json      who vouches for it, see `ledger.py`

Each file is one JSON object with its own checksum, written whole or not at all. docs/checkpoints.md has its fields. The
algorithm of the digests is named in it; those of another one are never compared with each other.
"""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np
from etils import epath

from sdc.records import RecordError

from ..records import read_json, reason, write_sealed
from ..twins import ALGORITHM
from .blocks import Apart, Cut, Shares, bits_of, cut_of, take, whole
from .boxes import box_text, parse_box

FORMAT = 1
"""Of the files."""
FOLDER = "certificates"
Reason: TypeAlias = Literal["digest", "twins", "guard"]
REASONS: tuple[Reason, ...] = get_args(Reason)
CANDIDATE, VERIFIED = "CANDIDATE", "VERIFIED"


class CertificateError(ValueError):
    """A checkpoint that has no certificate, does not agree with it, or cannot be given one."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What an array must be.

    Attributes:
        dtype: its type.
        shape: its shape.
        cut: its blocks.
        shares: digests of the blocks, by the shards of the run that saved.
    """

    dtype: str
    shape: tuple[int, ...]
    cut: Cut
    shares: Shares


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What a checkpoint must restore to.

    Attributes:
        step: of the checkpoint.
        history: whether the digests were taken before the state was saved. If not, they are of what was restored later.
        arrays: by name, which is `CHECKPOINTABLE/PATH/IN/TREE`.
        values: SHA-256 of what is no JAX array (NumPy's, numbers, strings), by name.
        uncovered: checkpointables of which nothing is known.
        apart: arrays that devices should hold alike and did not when they were saved.
    """

    step: int
    history: bool
    arrays: Mapping[str, Entry]
    values: Mapping[str, str]
    uncovered: Sequence[str]
    apart: Sequence[str]

    @property
    def names(self) -> list[str]:
        """Of everything that is covered."""
        return sorted({*self.arrays, *self.values})


@dataclasses.dataclass(frozen=True)
class Status:
    """What is known of a checkpoint.

    Attributes:
        step: of the checkpoint.
        state: `CANDIDATE`, or `VERIFIED`: compared with its digests after a restore, or vouched for.
        reasons: who vouches: `digest`, `twins`, `guard`.
        history: whether its digests were taken before it was saved.
    """

    step: int
    state: str
    reasons: tuple[Reason, ...]
    history: bool


class Draft:
    """A certificate under way: digests that devices are computing. What they are of may be donated at once."""

    def __init__(self, checkpointables: Mapping[str, Any]) -> None:
        covered, self._uncovered = named(checkpointables)
        arrays = {name: leaf for name, leaf in covered.items() if isinstance(leaf, jax.Array)}
        self._types = {name: (str(leaf.dtype), tuple(leaf.shape), _cut(leaf)) for name, leaf in arrays.items()}
        self._values = {name: value_digest(leaf) for name, leaf in covered.items() if name not in arrays}
        self._digests = take(arrays)

    def write(self, folder: epath.Path, step: int, *, history: bool = True) -> None:
        """Waits for the digests and writes this process's file.

        Raises:
            OSError: it cannot be written.
        """
        shares, apart = self._digests()
        arrays = {}
        for name, (dtype, shape, cut) in self._types.items():
            blocks = {box_text(box): _words(share) for box, share in shares[name].items()}
            arrays[name] = {"dtype": dtype, "shape": list(shape), "rows": cut.rows, "blocks": blocks}
        body = {
            "format": FORMAT, "algorithm": ALGORITHM, "step": step, "process": jax.process_index(),
            "processes": jax.process_count(), "history": history, "arrays": arrays, "values": self._values,
            "uncovered": self._uncovered, "apart": [_apart_text(each) for each in apart],
        }  # fmt: skip
        place = step_folder(folder, step)
        place.mkdir(parents=True, exist_ok=True)
        write_sealed(place / f"process-{jax.process_index()}.json", body)


def path_of(folder: str | os.PathLike[str]) -> epath.Path:
    """A folder as Orbax and TensorStore take it: they know no relative paths."""
    where = os.fspath(folder)
    return epath.Path(where if "://" in where else os.path.abspath(where))


def step_folder(folder: epath.Path, step: int) -> epath.Path:
    """Where the certificate of a step lies."""
    return folder / FOLDER / str(step)


def named(checkpointables: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Everything that digests can be taken of, by name, and the checkpointables that hold anything else.

    What a partial restore leaves out (`...`) is not told.
    """
    found: dict[str, Any] = {}
    uncovered = []
    for key, tree in checkpointables.items():
        leaves = named_tree(key, tree)
        if all(map(_is_covered, leaves.values())):
            found |= {name: leaf for name, leaf in leaves.items() if leaf is not ...}
        else:
            uncovered.append(key)
    return found, uncovered


def named_tree(key: str, tree: Any) -> dict[str, Any]:
    """The leaves of a checkpointable by their names; where two paths look alike, all are written as Python has them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    simple = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if len(set(simple)) < len(simple):
        simple = [jax.tree_util.keystr(path) for path, _ in leaves]
    return {f"{key}/{name}" if name else key: leaf for name, (_, leaf) in zip(simple, leaves, strict=True)}


def _is_covered(leaf: Any) -> bool:
    return leaf is ... or isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex | str)


def value_digest(value: Any) -> str:
    """SHA-256 of a NumPy array, number or string, with its type and shape."""
    if isinstance(value, str):
        return hashlib.sha256(f"str {value}".encode()).hexdigest()
    array = np.ascontiguousarray(value)
    array = array.astype(array.dtype.newbyteorder("<"))
    return hashlib.sha256(f"{array.dtype.str} {np.shape(value)} ".encode() + array.tobytes()).hexdigest()


def read_certificate(folder: epath.Path, step: int) -> Certificate:
    """Reads the certificate of a step, from the files of all processes.

    Raises:
        CertificateError: there is none, it is damaged or not complete, or it is of a version that is not known here.
    """
    place = step_folder(folder, step)
    first = _read(place, 0, step)
    parts = [first, *(_read(place, process, step) for process in range(1, first["processes"]))]
    try:
        return _merged(step, parts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CertificateError(f"the certificate of step {step} is damaged ({error!r})") from error


def _read(place: epath.Path, process: int, step: int) -> dict[str, Any]:
    path = place / f"process-{process}.json"
    try:
        body = read_json(path, sealed=True)
    except RecordError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            what = "there is no certificate" if process == 0 else f"the certificate lacks the part of process {process}"
            raise CertificateError(f"step {step}: {what} ({path} is missing)") from None
        raise CertificateError(f"step {step}: {error}") from error
    except OSError as error:
        raise CertificateError(f"step {step}: {path} cannot be read ({reason(error)})") from error
    known = {"format": FORMAT, "algorithm": ALGORITHM, "step": step, "process": process}
    for field, value in known.items():
        if body.get(field) != value:
            raise CertificateError(
                f"step {step}: {path} has {field} {body.get(field)!r}, where {value!r} was expected; it is of "
                f"{'another checkpoint' if field in ('step', 'process') else 'a version that this one cannot compare'}"
            )
    return body


def _merged(step: int, parts: Sequence[Mapping[str, Any]]) -> Certificate:
    arrays: dict[str, Entry] = {}
    values: dict[str, str] = {}
    apart = [text for part in parts for text in part["apart"]]
    for part in parts:
        values |= part["values"]
        for name, entry in part["arrays"].items():
            shape = tuple(entry["shape"])
            there = arrays.setdefault(name, Entry(entry["dtype"], shape, Cut(shape or (1,), entry["rows"]), {}))
            for text, words in entry["blocks"].items():
                box, share = parse_box(text), _shares(words)
                if not np.array_equal(there.shares.setdefault(box, share), share):
                    apart.append(_apart_text(Apart(name, box)))
    for name, entry in arrays.items():
        data = next(iter(entry.shares), ())
        # The data of PRNG keys has an axis more than the keys.
        shape = (*entry.shape, *(stop for _, stop in data[len(entry.shape) :]))
        if not whole(entry.shares, shape):
            raise CertificateError(f"step {step}: its certificate does not cover the whole of {name}")
        arrays[name] = dataclasses.replace(entry, cut=Cut(shape or (1,), entry.cut.rows))
    uncovered = sorted({key for part in parts for key in part["uncovered"]})
    return Certificate(step, all(part["history"] for part in parts), arrays, values, uncovered, apart)


def _cut(leaf: Any) -> Cut:
    bits = jax.eval_shape(bits_of, leaf)
    return cut_of(bits.shape, bits.dtype.itemsize)


def _words(share: np.ndarray) -> dict[str, str]:
    """The blocks that a shard touches, by number, each as two words."""
    return {str(number): f"{h:08x}{squares:08x}" for number, (h, squares) in enumerate(share.tolist()) if h or squares}


def _shares(words: Mapping[str, str]) -> np.ndarray:
    found = np.zeros((max(map(int, words), default=-1) + 1, 2), np.uint32)
    for number, text in words.items():
        found[int(number)] = int(text[:8], 16), int(text[8:], 16)
    return found


def _apart_text(apart: Apart) -> str:
    return f"{apart.name} at {box_text(apart.box) or 'its only element'}"
