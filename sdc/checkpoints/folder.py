"""What a folder of checkpoints holds, and whether it restores to what was saved: without the program that saved it."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from etils import epath
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from ..multihost import first_line
from .certificate import CertificateError, Wrong, compare, named, path_of, read_certificate
from .certified import Certified, steps_of
from .status import Status, Statuses

AT_ONCE = 1 << 28
"""Bytes of arrays that are read at a time."""
REMAINS = "it was being deleted when a run ended; the next save of that run deletes the rest"


@dataclasses.dataclass(frozen=True)
class Audit:
    """What was found of a checkpoint.

    Attributes:
        step: of the checkpoint.
        status: what its certificate says; None if it has none that can be read.
        covered: number of arrays and values that are certified.
        bytes: of the arrays.
        uncovered: checkpointables of which the certificate knows nothing.
        compared: whether it was restored and compared.
        problem: why it could not be verified, in words; empty if nothing is wrong.
        remains: whether it is what is left of one that was being deleted when a run ended.
        wrong: what is not as certified.
    """

    step: int
    status: Status | None
    covered: int
    bytes: int
    uncovered: Sequence[str]
    compared: bool
    problem: str
    wrong: Sequence[Wrong]
    remains: bool = False


def checkpoints_in(folder: str) -> list[int]:
    """Steps of the complete checkpoints below a folder of Orbax's.

    Raises:
        CertificateError: there is no such folder, or it holds none.
    """
    place = path_of(folder)
    if not place.is_dir():
        raise CertificateError(f"{folder} is no folder; expected one that an Orbax checkpointer wrote")
    with _opened(place) as checkpointer:
        steps = steps_of(checkpointer)
    if (place / "process-0" / "layout.json").exists():
        raise CertificateError(f"{folder} is a running checkpoint; sdc.checkpoints.RunningCheckpoint.read reads it")
    if not steps:
        raise CertificateError(
            f"there are no complete checkpoints in {folder}; name the folder that holds them, in folders whose names "
            "are numbers"
        )
    return steps


def audit(folder: str, step: int, *, restore: bool = True) -> Audit:
    """Looks at one checkpoint, and restores it array by array on this process's first device.

    Args:
        folder: that an Orbax checkpointer wrote.
        step: of the checkpoint.
        restore: whether to restore and compare it, or to read its certificate alone.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from orbax.checkpoint import v1 as ocp
        >>> import sdc
        >>> from sdc.checkpoints import audit
        >>> folder = tempfile.mkdtemp()
        >>> with sdc.certify(ocp.training.Checkpointer(folder)) as checkpointer:
        ...     saved = checkpointer.save(10, {"w": jnp.arange(4.0)})
        >>> audit(folder, 10).problem
        ''
    """
    place = path_of(folder)
    try:
        certificate = read_certificate(place, step)
    except CertificateError as error:
        return Audit(step, None, 0, 0, (), False, str(error), ())
    status = Statuses(place).status(step, history=certificate.history)
    size = sum(_bytes(entry.dtype, entry.shape) for entry in certificate.arrays.values())
    about = Audit(step, status, len(certificate.names), size, certificate.uncovered, restore, "", ())
    if not certificate.names:
        return dataclasses.replace(about, compared=False, problem="nothing of it is certified")
    if not restore:
        return about
    wrong: list[Wrong] = []
    seen: set[str] = set()
    try:
        with _opened(place) as checkpointer:
            for part in _parts(checkpointer, step, set(certificate.uncovered)):
                seen |= set(part)
                wrong += [one for one in compare(certificate, part) if one not in wrong]
    except Exception as error:  # Orbax and its storage layer raise many kinds
        if Statuses(place).left(step) and not wrong:
            return dataclasses.replace(about, compared=False, problem=REMAINS, remains=True)
        return dataclasses.replace(about, problem=f"it cannot be read ({first_line(error)})", wrong=wrong)
    if lost := [name for name in certificate.names if name not in seen]:
        if Statuses(place).left(step) and not wrong:
            return dataclasses.replace(about, compared=False, problem=REMAINS, remains=True)
        problem = f"{lost[0]}{f' and {len(lost) - 1} more' if lost[1:] else ''} cannot be found in it"
        return dataclasses.replace(about, problem=problem, wrong=wrong)
    return dataclasses.replace(about, wrong=wrong, problem="; ".join(map(str, wrong[:3])))


def certify_folder(folder: str, step: int) -> None:
    """Gives a checkpoint that has none a certificate of what it restores to now, all of it at once.

    Raises:
        CertificateError: it has one, or cannot be restored.
    """
    with _opened(path_of(folder)) as checkpointer:
        place = SingleDeviceSharding(jax.local_devices()[0])
        metadata = checkpointer.checkpointables_metadata(step).metadata
        Certified(checkpointer).certify_all(step, jax.tree.map(lambda leaf: _abstract(leaf, place), metadata))


def _parts(checkpointer: Any, step: int, left_out: set[str]) -> Iterator[dict[str, Any]]:
    """All leaves of a checkpoint, some at a time."""
    place = SingleDeviceSharding(jax.local_devices()[0])
    for key, tree in checkpointer.checkpointables_metadata(step).metadata.items():
        if key in left_out:
            continue
        if tree is None:  # Orbax describes no tree that holds Python's True or False, and restores it as a whole
            yield named(checkpointer.load_checkpointables(step, {key: None}))[0]
            continue
        leaves, structure = jax.tree.flatten(tree)
        for chosen in _batches(leaves):
            wanted = [_abstract(leaf, place) if number in chosen else ... for number, leaf in enumerate(leaves)]
            loaded = checkpointer.load_checkpointables(step, {key: jax.tree.unflatten(structure, wanted)})
            yield named(loaded)[0]


def _batches(leaves: Sequence[Any]) -> Iterator[set[int]]:
    chosen: set[int] = set()
    held = 0
    for number, leaf in enumerate(leaves):
        size = leaf.dtype.itemsize * math.prod(leaf.shape) if hasattr(leaf, "dtype") else 0
        if chosen and held + size > AT_ONCE:
            yield chosen
            chosen, held = set(), 0
        chosen.add(number)
        held += size
    if chosen:
        yield chosen


def _abstract(leaf: Any, place: SingleDeviceSharding) -> Any:
    if hasattr(leaf, "sharding_metadata"):  # one that was on devices
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    return leaf


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    try:
        width = jax.numpy.dtype(dtype).itemsize
    except TypeError:  # PRNG keys: as good as nothing
        width = 8
    return width * math.prod(shape)


@contextlib.contextmanager
def _opened(place: epath.Path) -> Iterator[Any]:
    checkpointer: Any = ocp.training.Checkpointer(place)
    try:
        yield checkpointer
    finally:
        checkpointer.close()
