"""How a command ends other than well: one clear line and an exit code."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sdc.settings import SettingError
from sdc.verdict import Exit

FLAGS: dict[str, str] = {"folder": "run"}
"""Flags of the command that this process runs whose name is not that of the setting."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
"""What a full or broken disk answers."""
LONGEST, SHOWN = 4_000, 3_000
"""Characters of a line of a message, and how many are shown at its beginning where it is longer: what a message quotes
can be of any length, and its remedy stands at the end."""


class CommandError(Exception):
    """Ends a command with a message and an exit code."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__("\n".join(map(_shortened, message.split("\n"))))
        self.code = code


def _shortened(line: str) -> str:
    if len(line) <= LONGEST:
        return line
    left_out = len(line) - LONGEST
    return f"{line[:SHOWN]} ... ({left_out:,} characters) ... {line[SHOWN + left_out :]}"


def name_flags(names: Mapping[str, str]) -> None:
    """Says which settings have a flag of another name; an argument that has no flag is in capitals (RUN)."""
    FLAGS.clear()
    FLAGS.update({"folder": "run", **names})


def flag(error: SettingError) -> str:
    """What is wrong with a setting, under the name of its flag."""
    name = FLAGS.get(error.setting, error.setting)
    if not name.isupper():
        name = "--" + name.replace("_", "-")
    return f"{name} {error.given}: {error.problem}" if error.given is not None else f"{name}: {error.problem}"


@contextmanager
def usage_errors() -> Iterator[None]:
    """What goes wrong while input is read is the user's to mend: exit code 2."""
    try:
        yield
    except SettingError as error:
        raise CommandError(flag(error)) from error
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error


@contextmanager
def run_errors(folder: object, *, resumable: bool = True) -> Iterator[None]:
    """What ends a run: input that is wrong, a full or broken disk (2), or what leaves nothing to say (3).

    What was written stays readable. The message names the folder that the command writes to, and says how to go on with
    it where the command has the flag `--resume`.
    """
    import jax

    from sdc.campaigns import NotDeterministic
    from sdc.multihost import Unreachable
    from sdc.train import Incomparable, NotWritten
    from sdc.twins import NotComparable

    try:
        yield
    except SettingError as error:
        raise CommandError(flag(error)) from error
    except (Incomparable, NotComparable, NotDeterministic, Unreachable) as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        said = str(error).partition("\n")[0]
        raise CommandError(
            f"the devices have too little memory for this run ({said}); take a smaller configuration, more ranks, or "
            "fewer states on one device"
        ) from error
    except NotWritten as error:
        raise CommandError(f"{error} with --resume") from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        no_place = error.errno in (errno.ENOTDIR, errno.ENOENT) and _leads_to(error.filename, folder)
        if not no_place and error.errno not in FULL:
            raise
        then = "continue with --resume" if resumable else "give the command again"
        remedy = "name another place" if no_place else f"make room there, then {then}"
        raise CommandError(f"cannot write to {folder or 'the run folder'} ({error.strerror}); {remedy}") from error


def _leads_to(path: object, folder: object) -> bool:
    """Whether a path is the folder or above it: what is missing inside of a folder is a failure of ours."""
    if path is None or folder is None:
        return False
    place = Path(str(folder)).absolute()
    return Path(str(path)).absolute() in (place, *place.parents)
