"""Checkpoints of version 0.1, which are read and no longer written.

FOLDER/STEP/arrays/          the state (Orbax)
FOLDER/STEP/contents.json    dtype and shape of each array, and where the data iterator stands
FOLDER/STEP/checksums.json   SHA-256 of every other file; written last
"""

import hashlib
import os
from typing import Any

from etils import epath

from sdc.records import parse_json, read_bytes

from .seals import Damage

ARRAYS, CONTENTS, CHECKSUMS = "arrays", "contents.json", "checksums.json"


def is_complete(path: epath.Path) -> bool:
    """Whether a folder of this layout was written to its end."""
    return bool((path / CHECKSUMS).exists())


def read_contents(path: epath.Path) -> dict[str, Any]:
    """Compares all files with their checksums and reads what the checkpoint says of itself.

    Raises:
        Damage: a file is missing, new, or differs.
    """
    try:
        expected = parse_json(read_bytes(path / CHECKSUMS))
        found = _checksums(path, path)
    except (OSError, ValueError) as error:
        raise Damage(f"{CHECKSUMS} cannot be read: {error}") from error
    if not isinstance(expected, dict):
        raise Damage(f"{CHECKSUMS} is no table of checksums")
    for name in sorted({*expected, *found}):
        if name not in found:
            raise Damage(f"{name} is missing")
        if found[name] != expected.get(name):
            raise Damage(f"the checksum of {name} differs")
    return dict(parse_json(read_bytes(path / CONTENTS)))


def _checksums(folder: epath.Path, top: epath.Path) -> dict[str, str]:
    sums: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not os.path.islink(path):
            sums |= _checksums(path, top)
        elif path != top / CHECKSUMS:
            sums[path.relative_to(top).as_posix()] = hashlib.sha256(read_bytes(path)).hexdigest()
    return sums
