"""How every file of this project begins, and what its fields have in common.

A file says its format, the version of that, and who wrote it: the host, the process, and the version of jax-sdc.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

Number: TypeAlias = int | float | None
"""A measured number or count; `null` was not measured. NaN and infinity are strings in files, and numbers when read."""
Numbers: TypeAlias = Number | list[Number]
"""One number for each twin, or a single one."""
MACHINE_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
BOOT_FILE = "/proc/sys/kernel/random/boot_id"


def about(text: str, *, ge: int | None = None, le: int | None = None) -> msgspec.Meta:
    """Describes a field in Markdown, for the published schema and the tables of the documentation."""
    return msgspec.Meta(description=text, ge=ge, le=le)


class Fields(msgspec.Struct, gc=False):  # trees, of which a long record has millions
    """A JSON object of a file. Fields that its type does not name are allowed."""


class Host(Fields, kw_only=True):
    """A process and the machine that it runs on. It holds no secret."""

    name: Annotated[str, about("host name")]
    machine: Annotated[
        str | None, about("hash of the machine's identity, which does not reveal it; `null` if it has none")
    ] = None
    boot: Annotated[str | None, about("identity of this boot of the system; `null` if it has none")] = None
    pid: Annotated[int | None, about("process number (PID) on that host")] = None
    process: Annotated[int | None, about("index of the process among those of the run, from 0")] = None


def identify() -> Host:
    """The process that calls, and its host.

    Returns:
        Host name, hash of the machine's identity, identity of this start of the system, number of the process, and
        its index in a run of several processes. JAX is not imported for the index, and not started.
    """
    return Host(
        name=platform.node(), machine=_machine(), boot=_first_line(BOOT_FILE), pid=os.getpid(), process=_index()
    )


@functools.cache
def package_version(package: str) -> str:
    """Version of an installed distribution, or `not installed`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _machine() -> str | None:
    """systemd asks that the identity itself is not shown to others: it is hashed with the name of the application."""
    found = next((text for path in MACHINE_FILES if (text := _first_line(path))), None)
    return None if found is None else hashlib.sha256(f"jax-sdc {found}".encode()).hexdigest()[:16]


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").partition("\n")[0] or None
    except OSError:
        return None


def _index() -> int:
    """Only a process that has joined others has another index than 0. Asking it starts no devices before then."""
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return 0
    return int(jax.process_index())


class Header(Fields, kw_only=True, tag_field="format"):
    """How a file begins: with its format, which is the `tag` of its type, the version of that, and who wrote it."""

    schema: Annotated[int, about("version of this layout, 1")] = 1
    version: Annotated[str, about("version of jax-sdc that wrote the file")] = msgspec.field(
        default_factory=lambda: package_version("jax-sdc")
    )
    host: Annotated[Host, about("who wrote the file")] = msgspec.field(default_factory=identify)


def stamp(format: str = "jax-sdc output", *, lasting: bool = False) -> dict[str, Any]:
    """What every JSON output begins with: its format, the version of that, the version of jax-sdc, and who wrote it.

    Args:
        format: the format.
        lasting: leave out what is another one in each process, so that the same result gives the same file.

    Returns:
        `format`, `schema`, `version` and `host`, to be merged into the output.
    """
    host: dict[str, Any] = msgspec.to_builtins(identify())
    if lasting:
        host = {key: host[key] for key in ("name", "machine")}
    return {"format": format, "schema": 1, "version": package_version("jax-sdc"), "host": host}
