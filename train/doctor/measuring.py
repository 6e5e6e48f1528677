"""Runs operations in this process, and takes digests of what comes out."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sdc.records import program_fingerprint

from .layout import Measured
from .operation import Operation

DIGITS = 16


def measure(operations: Sequence[Operation], devices: Sequence[jax.Device], *, runs: int) -> list[Measured]:
    """Runs each operation several times, and once with the devices in the opposite order.

    Args:
        operations: what to run.
        devices: of this process.
        runs: of each operation, at least 2.

    Returns:
        One entry for each operation; one that cannot be run says why, and the others are run all the same.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from sdc.train.doctor.measuring import measure
        >>> from sdc.train.doctor.operation import single
        >>> [found] = measure([single("double", lambda x: x * 2, lambda: np.ones(3))], jax.devices()[:1], runs=2)
        >>> found.digests[0] == found.digests[1], found.permuted
        (True, None)
    """
    return [_measured(operation, devices, runs) for operation in operations]


def digest_of(tree: Any) -> str:
    """The first digits of a SHA-256 over types, shapes and bytes, computed by the host."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.ascontiguousarray(jax.device_get(leaf))
        total.update(f"{array.dtype} {array.shape};".encode())
        total.update(array.tobytes())
    return total.hexdigest()[:DIGITS]


def _measured(operation: Operation, devices: Sequence[jax.Device], runs: int) -> Measured:
    row = Measured(operation=operation.name, devices=len(devices) if operation.several else 1)
    try:
        fn, arguments = operation.build(devices)
        row.inputs = digest_of(arguments)
        lowered = jax.jit(fn).lower(*arguments)
        row.program = program_fingerprint(lowered)[:DIGITS]
        compiled = lowered.compile()
        row.digests = [digest_of(compiled(*arguments)) for _ in range(runs)]
        if row.devices > 1:
            turned, placed = operation.build(devices[::-1])
            row.permuted = digest_of(jax.jit(turned)(*placed))
    except Exception as error:  # whatever an operation throws is told; the others are run
        row.problem = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    return row
