"""One burn-in on a device at a time: two would slow each other down, and each void the other's time at load.

A device is claimed by a lock that the kernel gives up when its process ends, however it ends.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sdc.settings import SettingError

from ..records import Lock, RecordBusy


def claim_names(described: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each device is called on its host: by its bus address, UUID or serial number, else by its number.

    Args:
        described: what `sdc.records.describe_devices` returned.
    """
    names = []
    for known in described:
        part = next((str(known[name]) for name in ("bus", "uuid", "serial", "coordinates") if name in known), "")
        # Several processes of one host may have some of its chips each, and number them alike.
        names.append("".join(c if c.isalnum() else "-" for c in f"{known.get('kind', '')}-{part or known['id']}"))
    return names


def lock_folder() -> Path:
    """Where locks are: the system's folder for temporary files."""
    return Path(tempfile.gettempdir())


@contextmanager
def claimed(names: Iterable[str], folder: Path | None = None) -> Iterator[list[str]]:
    """Claims devices for the time of the block.

    Args:
        names: what `claim_names` returned.
        folder: where the locks are; by default the system's folder for temporary files, which is one for all processes
            of a host, but not for those of its containers.

    Yields:
        What could not be claimed because of the folder, in words.

    Raises:
        SettingError: another burn-in has one of the devices.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from sdc.burnin.claiming import claimed
        >>> with claimed(["gpu-0000-3b-00-0"], Path(mkdtemp())) as problems:
        ...     problems
        []
    """
    held: list[Lock] = []
    problems: list[str] = []
    try:
        for name in sorted(set(names)):
            place, file = folder or lock_folder(), f"jax-sdc-{name}.lock"
            try:
                held.append(Lock(place, file, lasting=True))
            except RecordBusy as error:
                raise SettingError(
                    "devices", None,
                    f"{name} is being tested by {error.holder or 'another process'} ({place / file}); "
                    "wait until that has ended",
                ) from error  # fmt: skip
            except OSError as error:
                problems.append(f"{name} is not locked against a second burn-in ({error.strerror}: {place / file})")
        yield problems
    finally:
        for lock in held:
            lock.release()
