"""Kernels of TPUs charged by their own instructions.

The compiler has no estimate of what a Pallas kernel costs. It can write the instructions that it makes of every kernel
(`prepare_compilers(schedules=...)`), bundle by bundle, and a bundle is a cycle.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

_FILE = re.compile(r"\d+-(?P<name>.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"^\s*0x[0-9a-f]+\s*:", re.MULTILINE)
_GRID = re.compile(r"iteration_bounds: \(([\d, ]*)\)")


class Uncharged(ValueError):
    """A program has a kernel whose cost is not known, so that a sum without it would flatter."""


def read_schedules(folder: Path) -> Mapping[str, int]:
    """Cycles of each kernel and fusion, by the name of its instruction.

    Every bundle counts once in each iteration of the grid: an upper bound, since what stands before and behind the loop
    runs once only.
    """
    found = {}
    for path in folder.glob("*-final_bundles.txt"):
        if (named := _FILE.fullmatch(path.name)) and "schedule-analysis" not in path.name:
            text = path.read_text(encoding="utf-8", errors="replace")
            grids = (math.prod(int(side) for side in re.findall(r"\d+", grid)) for grid in _GRID.findall(text))
            found[named["name"]] = len(_BUNDLE.findall(text)) * max(grids, default=1)
    return found
