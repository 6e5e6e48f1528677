"""A study of SCAR run into a record, which can be resumed."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdc.records import Contents, Record, RecordError, environment, read_manifest, read_record

from .. import changes
from ..iterative import DoesNotConverge
from ._scar import Found, Part, ScarStudy
from .scar_workloads import Subject

KIND = "scar study"
SETTINGS = ("study", "settings", "workloads", "environment")
"""A study is resumed only as it was started."""


def record_study(
    study: ScarStudy,
    subjects: Sequence[Subject],
    folder: Path,
    *,
    resume: bool = False,
    command: Sequence[str] = (),
    on_part: Callable[[str], object] = lambda title: None,
) -> Contents:
    """Runs a study of SCAR into its folder. It neither prints nor ends the process.

    Args:
        study: the study.
        subjects: what it trains.
        folder: of the record.
        resume: whether to go on with what is in it.
        command: the command line that asks for it, for the record.
        on_part: told of each part that is done.

    Returns:
        The record; `sdc.analysis.conclude` says what follows from it.

    Raises:
        RecordError: the folder holds something else, or a study with other settings.
    """
    parts = study.parts(subjects)
    manifest = {
        "kind": KIND, "command": list(command), "study": "scar", "settings": dataclasses.asdict(study),
        "parts": len(parts), "seed": study.seed, "environment": environment(),
        "workloads": {one.name: f"{one.task.source}, {one.iterations} iterations" for one in subjects},
    }  # fmt: skip
    found: list[Mapping[str, Any]] = []
    if resume:
        found = _done(folder, manifest)
        record = Record.resume(folder, manifest, at=len(found))
    else:
        record = Record.create(folder, manifest)
    with record:
        for row in found:
            on_part(parts[row["part"]].title)

        def done(row: Mapping[str, Any]) -> None:
            record.line(row)
            on_part(parts[row["part"]].title)

        finish_parts(parts, found, done)
        record.sync()
    return read_record(folder)


def finish_parts(
    parts: Sequence[Part], before: Sequence[Found] = (), on_row: Callable[[Found], object] = lambda row: None
) -> list[Found]:
    """Runs the parts of a study, and keeps what they find in memory.

    Args:
        parts: all parts of the study.
        before: what the first of them found already.
        on_row: told of what each finds, as it stands in a record.

    Returns:
        All that was found. A part whose training does not converge says so in `failed`.
    """
    found = list(before)
    for number, part in enumerate(parts[len(found) :], len(found)):
        began = time.perf_counter()
        try:
            told = part.run(found)
        except DoesNotConverge as error:
            told = {"failed": str(error)}
        row = {
            "part": number, "what": part.what, "workload": part.workload, "start": part.start,
            "seconds": round(time.perf_counter() - began, 2), "found": told,
        }  # fmt: skip
        found.append(row)
        on_row(row)
    return found


def _done(folder: Path, manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts on record, from the first on without a gap."""
    old = read_manifest(folder, KIND)
    if changed := changes(old, manifest, SETTINGS, ("the study had", "now")):
        raise RecordError(
            f"{folder} is another study ({'; '.join(changed[:5])}); resume it with its own settings and on its own "
            "machine, or name another folder"
        )
    rows = {row["part"]: row for row in read_record(folder, KIND).lines}
    return [rows[number] for number in range(next(n for n in range(len(rows) + 1) if n not in rows))]
