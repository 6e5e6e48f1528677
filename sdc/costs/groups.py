"""Who talks to whom in a collective, as compilers write it."""

import math
import re

import numpy as np

_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(?:\{(?P<lists>(?:\{[\d,]*\},?)*)\}|(?P<other>[^\]]*\]\S*(?: \{[^}]*\})?))"
)
_IOTA = re.compile(r"\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_MESH = re.compile(r"mesh\[(?P<mesh>[^\]]*)\]\s*\{(?P<axes>[^}]*)\}")


def groups_of(line: str) -> tuple[tuple[int, ...], ...]:
    """The devices that talk to one another, by their position in the program's device assignment; empty for all.

    Raises:
        ValueError: they are written in a form that is not known.
    """
    match = _GROUPS.search(line)
    if match is None:
        return ()
    if match["lists"] is not None:
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match["lists"]))
    if mesh := _MESH.match(match["other"]):  # XLA of jax 0.12
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh["mesh"])}
        talking = re.findall(r"'([^']+)'", mesh["axes"])
        order = [*(axis for axis in sizes if axis not in talking), *talking]
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        grid = grid.transpose([list(sizes).index(axis) for axis in order])
        return tuple(tuple(group) for group in grid.reshape(-1, math.prod(sizes[a] for a in talking)).tolist())
    iota = _IOTA.match(match["other"])
    if iota is None:
        raise ValueError(f"cannot read the replica groups of {line.strip()[:200]!r}")
    devices = np.arange(math.prod(_numbers(iota["dims"]))).reshape(_numbers(iota["dims"]))
    if iota["order"]:
        devices = devices.transpose(_numbers(iota["order"]))
    return tuple(tuple(group) for group in devices.reshape(_numbers(iota["shape"])).tolist())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
