"""`sdc pair --resolve`: results of several pairs, and the hosts that they name."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from sdc.analysis import resolve_pairs
from sdc.burnin import read_pair

from .errors import usage_errors
from .output import Output, write
from .pairs import STYLES


def resolve(files: Sequence[Path], *, as_json: bool) -> int:
    """Shows which hosts some pairs name, and returns the exit code."""
    with usage_errors():
        found = resolve_pairs([read_pair(file) for file in files])
    if as_json:
        write(json.dumps({**dataclasses.asdict(found), "code": found.code}, indent=1))
        return found.code
    console = Output()
    mark = "  (simulated faults)" if found.simulated else ""
    console.print(f"{found.word}{mark}", style=STYLES[found.word], markup=False)
    for text in found.sentences:
        console.print(text, soft_wrap=True, markup=False)
    return found.code
