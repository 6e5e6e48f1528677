"""The folder of a study's record."""

import datetime
import os
from pathlib import Path

from .errors import CommandError


def new_folder(run: Path | None, name: str) -> Path:
    """The folder that `--run` names, or a new one below `runs/`.

    Raises:
        CommandError: there is something in it already.
    """
    folder = (run or Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}").absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"run folder {folder} exists already; name another with --run")
    return folder
