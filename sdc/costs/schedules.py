"""Kernels of TPUs charged by their own instructions.

The compiler has no estimate of what a Pallas kernel costs. It can write the instructions that it makes of every kernel,
bundle by bundle, and a bundle is a cycle.
"""

import atexit
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

PASS = "final_bundles"
"""What the compiler calls the last of its passes, behind which nothing changes."""
_FILE = re.compile(rf"\d+-(?P<name>.+)-\d+-{PASS}\.txt")
_BUNDLE = re.compile(r"^\s*0x[0-9a-f]+\s*:", re.MULTILINE)
_GRID = re.compile(r"iteration_bounds: \(([\d, ]*)\)")


class Uncharged(ValueError):
    """A program has a kernel whose cost is not known, so that a sum without it would flatter."""


_folder: Path | None = None


def dump_schedules(folder: Path | None, kernel: str | None) -> list[str]:
    """Flags of the compiler with which it writes those of a kernel into a folder."""
    global _folder
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="sdc-schedules-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _folder = folder
    only = [] if kernel is None else [f"--xla_jf_dump_only_matching_hlo={kernel}*"]
    return [
        f"--xla_jf_dump_to={folder}",
        "--xla_jf_dump_llo_text=true",
        f"--xla_jf_dump_llo_pass_label_regex={PASS}",
        *only,
    ]


def forget_schedules() -> None:
    """Removes what was written of other programs, which have kernels of the same names."""
    for path in [] if _folder is None else _folder.iterdir():
        path.unlink()


def schedules() -> Mapping[str, int]:
    """Cycles of each kernel and fusion of the last program; none where nobody has asked the compiler to write them."""
    return {} if _folder is None else read_schedules(_folder)


def read_schedules(folder: Path) -> Mapping[str, int]:
    """Cycles of each kernel and fusion, by the name of its instruction.

    Every bundle counts once in each iteration of the grid: an upper bound, since what stands before and behind the loop
    runs once only.
    """
    found = {}
    for path in folder.glob(f"*-{PASS}.txt"):
        if (named := _FILE.fullmatch(path.name)) and "schedule-analysis" not in path.name:
            text = path.read_text(encoding="utf-8", errors="replace")
            grids = (math.prod(int(side) for side in re.findall(r"\d+", grid)) for grid in _GRID.findall(text))
            found[named["name"]] = len(_BUNDLE.findall(text)) * max(grids, default=1)
    return found
