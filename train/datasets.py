"""What readers of data sets share: where files are kept, orders that are the same on every host, and digests.

Letters of shapes:

    n  things to put in order
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64


def cache_folder(name: str) -> Path:
    """The folder of that name below `jax-sdc` in XDG_CACHE_HOME, else in `~/.cache`; it need not exist.

    Raises:
        RuntimeError: neither is known.

    Example:
        >>> from sdc.train.datasets import cache_folder
        >>> cache_folder("archives").parts[-2:]
        ('jax-sdc', 'archives')
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the specification of XDG_CACHE_HOME says to ignore relative paths
        base = Path.home() / ".cache"
    return base / "jax-sdc" / name


def fixed_order(count: int, seed: int, stream: int) -> Int64[np.ndarray, "n"]:
    """A permutation that is the same on every host: NumPy fixes a bit generator's raw output, but not its shuffles.

    Args:
        count: how many numbers, from 0.
        seed: seed of the order, in 0 to 2^64 - 1.
        stream: one of the orders of that seed, such as that of an epoch, in 0 to 2^64 - 1.

    Example:
        >>> from sdc.train.datasets import fixed_order
        >>> fixed_order(6, seed=7, stream=0).tolist()
        [4, 1, 3, 2, 5, 0]
    """
    raw = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(count)
    return np.argsort(raw, kind="stable")


def freeze(*arrays: np.ndarray[Any, Any]) -> str:
    """Makes arrays read-only and returns the SHA-256 (hexadecimal) over their types, shapes and contents.

    Example:
        >>> import numpy as np
        >>> from sdc.train.datasets import freeze
        >>> freeze(np.arange(3, dtype=np.int32))[:8]
        '82c392ca'
    """
    digest = hashlib.sha256()
    for array in arrays:
        array.flags.writeable = False
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    return digest.hexdigest()
