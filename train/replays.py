"""What a run with a way of aggregation writes down of its decisions and losses, and reads again to repeat them."""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, UInt8

from sdc.aggregation import LossyLog, Recorded, recorded
from sdc.records import read_manifest, read_record

from .config import TrainConfig
from .methods import parse_aggregation
from .model import init_params


def aggregation_row(reports: Mapping[str, Any]) -> dict[str, Any]:
    """Reports of all data ranks as the line of a step has them; what all ranks say alike, once."""
    row: dict[str, Any] = {}
    for name, value in reports.items():
        if name == "lossy":
            row |= {key: float(leaf[0]) for key, leaf in value.items()}
        elif name == "log":
            row["lost"] = {key: packed(leaf) for key, leaf in value.items()}
        elif name == "shadow":
            one = jax.tree.map(lambda leaf: leaf[0], value)
            row |= {
                "watched": int(one.watched), "spares": one.spares, "differed": bool(one.differed),
                "repeats": bool(one.repeats), "blamed": np.flatnonzero(one.blamed),
                "mismatched": one.difference.mismatched, "checked": one.difference.checked,
            }  # fmt: skip
        elif name == "synchronized":
            if not value.all():  # a divergence of which nothing was measured is not one of zero
                row |= {"divergence": None, "expected_divergence": None}
        elif name in ("period", "next", "synchronizations"):
            row[name] = int(value[0])
        else:
            row[name] = value
    return row


def packed(arrived: UInt8[np.ndarray, "..."]) -> str:
    """A log of arrivals as text: shape, and bytes, compressed."""
    shape = "x".join(map(str, arrived.shape))
    return f"{shape}:{base64.b64encode(zlib.compress(np.ascontiguousarray(arrived).tobytes(), 9)).decode()}"


def unpacked(text: str) -> UInt8[np.ndarray, "..."]:
    """The inverse of `packed`."""
    shape, _, data = text.partition(":")
    return np.frombuffer(zlib.decompress(base64.b64decode(data)), np.uint8).reshape([int(n) for n in shape.split("x")])


def completed_log(folder: str, data: int, steps: int, micro_batches: int) -> Int32[np.ndarray, "steps data"]:
    """Micro-batches that each data rank of a recorded run completed.

    Raises:
        ValueError: the run has no such log, it is damaged, or it does not fit so many ranks, steps or micro-batches.
    """
    manifest = read_manifest(folder)
    settings = parse_aggregation(str(manifest.get("aggregate", ""))).dropcompute if "aggregate" in manifest else None
    if settings is None:
        raise ValueError(f"replay={folder}: this run was no run of dropcompute; name one that was")
    recorded_cut = settings.micro_batches or manifest["config"]["microsteps"]
    if recorded_cut != micro_batches:
        raise ValueError(
            f"replay={folder}: a log of {recorded_cut} micro-batches does not fit {micro_batches}; "
            f"give micro_batches={recorded_cut}"
        )
    counts = np.asarray([row["completed"] for row in _lines(folder, "completed", steps)], np.int32)
    if counts.ndim != 2 or counts.shape[1] != data:
        raise ValueError(f"replay={folder}: a log of {counts.shape[-1]} data ranks does not fit {data}")
    if counts.min() < 0 or counts.max() > micro_batches:
        raise ValueError(
            f"replay={folder}: its log has ranks that completed {counts.min()} to {counts.max()} of {micro_batches} "
            "micro-batches; it is damaged"
        )
    return counts


def losses_log(
    folder: str, config: TrainConfig, packet: int | None, data: int, steps: int
) -> tuple[Recorded, Recorded]:
    """The channels of gradients and parameters that lose what a recorded run lost.

    Raises:
        ValueError: the run has no such log, or it does not fit.
    """
    logs = [
        LossyLog(*(jnp.asarray(unpacked(row["lost"][name])) for name in LossyLog._fields))
        for row in _lines(folder, "lost", steps)
    ]
    params = jax.eval_shape(lambda: init_params(config.model, jax.random.key(0)))
    try:
        channels = recorded(logs, params, packet=packet)
    except ValueError as error:
        raise ValueError(f"replay={folder}: {error}") from error
    ranks = channels[0].arrived.shape[1]
    if ranks != data:
        raise ValueError(f"replay={folder}: a log of {ranks} data ranks does not fit {data}")
    return channels


def _lines(folder: str, what: str, steps: int) -> list[Mapping[str, Any]]:
    """What the lines of a recorded run say of its aggregation."""
    rows = [row.get("aggregation", {}) for row in read_record(folder).lines]
    if len(rows) < steps:
        raise ValueError(
            f"replay={folder}: a log of {len(rows)} steps, fewer than the {steps} of this run; do {len(rows)}"
        )
    if not rows or any(what not in row for row in rows):
        raise ValueError(f"replay={folder}: this run has no log of {what!r} to replay; name a run with that method")
    return rows
