"""How a command ends other than well: one clear line and an exit code."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from sdc.record.files import RecordError
from sdc.settings import SettingError
from sdc.train.checkpoints import CheckpointError


class Exit(IntEnum):
    """Exit codes of every command."""

    CLEAN = 0
    CORRUPT = 1
    USAGE = 2
    INCONCLUSIVE = 3


VERDICTS = {"clean": Exit.CLEAN, "corrupt": Exit.CORRUPT, "inconclusive": Exit.INCONCLUSIVE, None: Exit.CLEAN}
"""Exit code of a run's verdict; a training run has none, and ends with 0."""


class CommandError(Exception):
    """Ends a command with a message and an exit code."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def usage_errors() -> Iterator[None]:
    """What goes wrong while input is read is the user's to mend: exit code 2."""
    try:
        with setting_errors():
            yield
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error


@contextmanager
def setting_errors() -> Iterator[None]:
    """A setting that makes no sense is named by its flag: exit code 2."""
    try:
        yield
    except SettingError as error:
        flag = f"--{error.setting.replace('_', '-')}"
        given = "" if error.given is None else f" {error.given}"
        raise CommandError(f"{flag}{given}: {error.problem}") from error


@contextmanager
def storage_errors(folder: object) -> Iterator[None]:
    """A full or broken disk ends a run with exit code 2; what was written stays readable."""
    try:
        yield
    except (CheckpointError, RecordError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES):
            raise
        raise CommandError(
            f"cannot write to {folder} ({error.strerror}); make room there, then continue with --resume"
        ) from error
