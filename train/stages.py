"""The fixed escalation by which hosts are compared: at full load, and where they differ ever closer."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import jax

from sdc.burnin import FOLDERS, Stage
from sdc.multihost import everyone
from sdc.settings import SettingError

from .loop import run
from .specs import ComparedTwins, FullLoad, Loaded, Operations

JOBS: dict[Stage, type[ComparedTwins]] = {"step": FullLoad, "probes": ComparedTwins, "operations": Operations}
OnStep: TypeAlias = Callable[[Mapping[str, Any]], None]


def _unwatched(stage: Stage) -> AbstractContextManager[OnStep]:
    return contextlib.nullcontext(lambda row: None)


def escalate(
    job: FullLoad,  # the first stage, whose folder is that of the comparison: each stage has one below it
    *,
    differs: Callable[[Path], bool],  # whether the record in the folder of a stage shows a difference
    loaded: Loaded | None = None,  # what `job.load()` returned, where it was called before
    devices: Sequence[jax.Device] | None = None,
    command: Sequence[str] = (),
    stop: Callable[[], bool] = lambda: False,
    watched: Callable[[Stage], AbstractContextManager[OnStep]] = _unwatched,  # shows the lines of a stage
) -> list[Path]:
    """Compares twins at full load; if they differ, at each submodule, and operation by operation.

    The later stages run whenever the first one saw a difference, also if it does not come again. Of several processes
    all call this alike, and go on as the first one says. Returns the folders of the stages that were run.
    """
    if job.folder is None:
        raise SettingError("folder", None, "a comparison needs a folder for its stages; name a new one")
    whole, done = Path(job.folder).absolute(), list[Path]()
    # What tells the stages apart is the kind's own.
    names = {field.name for field in dataclasses.fields(ComparedTwins)} - {"sync", "exchange", "folder"}
    shared = {name: getattr(job, name) for name in names}
    loaded = loaded or job.load()
    for stage, kind in JOBS.items():
        folder = whole / FOLDERS[stage]
        with watched(stage) as on_step:
            record = run(
                kind(**shared, folder=folder), loaded=loaded, devices=devices, on_step=on_step,
                command=command, stop=stop,
            )  # fmt: skip
        done.append(folder)
        on = record is not None and record.ended and (stage != "step" or differs(folder))
        if not json.loads(everyone(json.dumps(on), at="whether to look closer")[0]):
            break
    return done
