"""Restored arrays against a certificate, under whatever sharding they were restored."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sdc.multihost import everyone

from .blocks import Shares, bits_of, take, total, whole
from .boxes import box_text, parse_box
from .certificate import Certificate, CertificateError, Entry, named_tree, value_digest

MISSING = "is missing"


class Wrong(NamedTuple):
    """What is not as certified.

    Attributes:
        name: of the array or value.
        what: in words.
        rows: first and behind the last row of each block that differs; empty where that cannot be said.
    """

    name: str
    what: str
    rows: tuple[tuple[int, int], ...] = ()

    @property
    def missing(self) -> bool:
        """Whether it is not there at all."""
        return self.what == MISSING

    def __str__(self) -> str:
        some = ", ".join(f"{start}:{stop}" for start, stop in self.rows[:4])
        more = f" and {len(self.rows) - 4} more blocks" if len(self.rows) > 4 else ""
        return f"{self.name} {self.what}{some and f' in rows {some}'}{more}"


class Damaged(CertificateError):
    """A checkpoint that does not restore to what was saved.

    Attributes:
        step: of the checkpoint.
        wrong: what is not as certified; empty where it could not be read at all.
        remains: whether it was about to be deleted: then this is what is left of it.
    """

    def __init__(self, step: int, words: str, wrong: Sequence[Wrong] = (), *, remains: bool = False) -> None:
        self.step, self.wrong, self.remains = step, list(wrong), remains
        super().__init__(words)


def compare(certificate: Certificate, leaves: Mapping[str, Any]) -> list[Wrong]:
    """Compares what was restored with what it must be. All processes call it, with the same names.

    Args:
        certificate: of the checkpoint.
        leaves: arrays and values by name; those that the certificate does not have are wrong, those that it has
            besides are not looked at.

    Returns:
        What is wrong, the same in all processes.

    Raises:
        Unreachable: a process did not come.
    """
    wrong = [Wrong(text.partition(" at ")[0], f"differed between devices when it was saved ({text})") for text in
             certificate.apart]  # fmt: skip
    wrong += [Wrong(name, "is not in the certificate") for name in leaves if name not in certificate.names]
    arrays = {}
    for name, leaf in leaves.items():
        if name in certificate.values:
            if _value(leaf) != certificate.values[name]:
                wrong.append(Wrong(name, "differs"))
        elif name in certificate.arrays:
            entry, array = certificate.arrays[name], _array(leaf)
            if problem := _misfit(entry, leaf, array):
                wrong.append(Wrong(name, problem))
            else:
                arrays[name] = array
    shares, apart = take(arrays)()
    wrong += [Wrong(each.name, f"differs between devices at {box_text(each.box)}") for each in apart]
    told: dict[str, Wrong] = {}
    if jax.process_count() == 1:
        found = {name: [shares[name]] for name in arrays}
        told |= {f"{one.name} {one.what}": one for one in wrong}
    else:
        said = [json.loads(text) for text in everyone(json.dumps(_plain(shares, wrong)), at="verifying a checkpoint")]
        found = _merged(said, arrays)
        for name, what in (one for part in said for one in part["wrong"]):
            told.setdefault(f"{name} {what}", Wrong(name, what))
    for name, held in found.items():
        if one := _differing(name, certificate.arrays[name], held, arrays[name]):
            told.setdefault(str(one), one)
    return list(told.values())


def misfits(certificate: Certificate, abstract: Mapping[str, Any]) -> list[str]:
    """In what an abstract state differs from the one that was saved, in words: it cannot be restored so.

    Args:
        certificate: of the checkpoint.
        abstract: by checkpointable; None for whatever is there.
    """
    found = []
    for key, tree in abstract.items():
        if tree is None or key in certificate.uncovered:
            continue
        saved = {name for name in certificate.names if name == key or name.startswith(f"{key}/")}
        leaves = named_tree(key, tree)
        found += [f"it has {name}, which was not saved" for name in leaves if name not in saved]
        found += [f"it has no {name}, which was saved" for name in sorted(saved) if name not in leaves]
        for name, leaf in leaves.items():
            if name in certificate.values and isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
                found.append(f"{name} was saved as a NumPy array, a number or text; give one such there")
            elif name in certificate.arrays and isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
                problem = _misfit(certificate.arrays[name], leaf, leaf)
                found += [f"{name} {problem}"] if problem else []
    return found


def _value(leaf: Any) -> str:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return "it lies on several processes"
    return value_digest(leaf)


def _array(leaf: Any) -> Any:
    """As a JAX array of the same type; None where there is none."""
    if isinstance(leaf, jax.Array):
        return leaf
    array = jnp.asarray(leaf)
    return array if array.dtype == np.asarray(leaf).dtype else None


def _misfit(entry: Entry, leaf: Any, array: Any) -> str | None:
    if array is None:
        return f"has type {np.asarray(leaf).dtype}, which JAX would convert; set jax_enable_x64"
    if str(array.dtype) != entry.dtype:
        return f"was certified as {entry.dtype} and not as {array.dtype}; restore it so, and convert it afterwards"
    if tuple(array.shape) != entry.shape:
        return f"was certified with shape {list(entry.shape)} and not {list(array.shape)}"
    return None


def _plain(shares: Mapping[str, Shares], wrong: Sequence[Wrong]) -> dict[str, Any]:
    plain = {name: {box_text(box): share.tolist() for box, share in held.items()} for name, held in shares.items()}
    return {"shares": plain, "wrong": [[one.name, one.what] for one in wrong]}


def _merged(said: Sequence[Mapping[str, Any]], arrays: Mapping[str, Any]) -> dict[str, list[Shares]]:
    """Of each array the shares that all processes hold: as many views of it as there are different ones."""
    found: dict[str, list[Shares]] = {}
    for name in arrays:
        views: list[Shares] = [{}]
        for part in said:
            for text, rows in part["shares"].get(name, {}).items():
                box, share = parse_box(text), np.asarray(rows, np.uint32)
                if not np.array_equal(views[0].setdefault(box, share), share):
                    views.append({**views[0], box: share})
        found[name] = views
    return found


def _differing(name: str, entry: Entry, views: Sequence[Shares], array: Any) -> Wrong | None:
    shape = jax.eval_shape(bits_of, array).shape
    expected = np.zeros((entry.cut.blocks, 2), np.uint32)
    for share in entry.shares.values():
        expected[: len(share)] += share
    rows: set[tuple[int, int]] = set()
    for view in views:
        if not whole(view, shape):
            raise CertificateError(f"{name}: these processes do not hold all of it; restore it on all of their devices")
        rows |= {entry.cut.block(int(number)) for number in np.flatnonzero((total(view) != expected).any(axis=1))}
    return Wrong(name, "differs", tuple(sorted(rows))) if rows else None
