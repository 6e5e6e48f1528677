"""The fixed stages of a comparison of hosts: first at full load and, if the hosts differ, in increasing detail."""

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
    job: FullLoad,  # the first stage; its folder is that of the comparison, with a subfolder for each stage
    *,
    differs: Callable[[Path], bool],  # whether the record of a stage shows a difference
    loaded: Loaded | None = None,  # the result of `job.load()`, if already called
    devices: Sequence[jax.Device] | None = None,
    command: Sequence[str] = (),
    stop: Callable[[], bool] = lambda: False,
    watched: Callable[[Stage], AbstractContextManager[OnStep]] = _unwatched,  # context that shows the lines of a stage
) -> list[Path]:
    """Compares twins at full load and, if the twins differ, at each submodule and then operation by operation.

    The later stages run whenever the first stage found a difference, even if the difference does not recur. All
    processes call this function with the same arguments and follow the decision of process 0. Returns the folders of
    the stages that ran.
    """
    if job.folder is None:
        raise SettingError("folder", None, "a comparison needs a folder for its stages; give a new one")
    whole, done = Path(job.folder).absolute(), list[Path]()
    # The omitted fields distinguish the stages; each kind of job sets them itself.
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
        if not json.loads(everyone(json.dumps(on), at="when asked whether the hosts differ")[0]):
            break
    return done
