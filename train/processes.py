"""Several processes of one run: what each has to say, and whether they may be compared."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils

from sdc.multihost import everyone
from sdc.records import differences, to_json


class Incomparable(RuntimeError):
    """Processes, or runs, of which a difference would mean nothing."""


def fetch(tree: Any) -> Any:
    """Global arrays as NumPy arrays, in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def as_read(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest as it is read from its file, in which infinity is a text."""
    found: dict[str, Any] = json.loads(json.dumps(to_json(manifest), default=str))
    return found


def changes(then: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str], words: tuple[str, str]) -> list[str]:
    """The entries in which two manifests differ, in words."""
    found = differences([as_read({key: manifest.get(key) for key in keys}) for manifest in (then, now)])
    return [each.describe(words) for each in found]


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
