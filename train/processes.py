"""Several processes of one run: what each has to say, and whether they may be compared."""

import json
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from sdc.record.determinism import differences

from .multihost import everyone


class Incomparable(RuntimeError):
    """Processes, or runs, of which a difference would mean nothing."""


def fetch(tree: Any) -> Any:
    """Global arrays as NumPy arrays, in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def check_comparable(manifest: Mapping[str, Any]) -> None:
    """Twins on several processes must agree on everything that decides what they compute.

    Raises:
        Incomparable: they do not; with what differs, line by line.
    """
    own = {key: value for key, value in manifest.items() if key not in ("command", "created", "host")}
    lines = differences([json.loads(text) for text in everyone(json.dumps(own))])
    if lines:
        raise Incomparable(
            "the processes are not comparable, so that no difference between them would mean anything:\n  "
            + "\n  ".join(line.describe() for line in lines)
            + "\nmake them equal and start again"
        )
