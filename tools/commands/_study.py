"""`sdc study`: runs a study and writes its report."""

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sdc.settings import SettingError
from sdc.train.studies import LEAST, check_training

from .. import (
    AggregationStudyOptions,
    Exit,
    NodesStudyOptions,
    ScarStudyOptions,
    StudyOptions,
    check_folder,
    experiment,
    new_folder,
    onward,
    run_errors,
    usage_errors,
)

if TYPE_CHECKING:
    from sdc.train.studies import Sources


def run(options: StudyOptions) -> int:
    """Runs the study and returns the exit code."""
    command = options.command
    if isinstance(command, ScarStudyOptions):
        return _scar(command)
    return _nodes(command) if isinstance(command, NodesStudyOptions) else _aggregation(command)


def _aggregation(options: AggregationStudyOptions) -> int:
    with usage_errors():
        check_training(LEAST if options.steps is None else options.steps, options.seed)
        folder = new_folder(options.study, options.run)
    from sdc.analysis.studies import write_study
    from sdc.train.studies import STUDIES, chosen_tasks

    from .. import show

    with usage_errors():
        steps = {} if options.steps is None else {"steps": options.steps}
        chosen = STUDIES[options.study](seed=options.seed, **steps)
        tasks = chosen_tasks(options.workload, images=options.images, corpus=options.corpus)
    started = time.perf_counter()
    measured = experiment(options.study, chosen.count(tasks), chosen.run(tasks))
    manifest = {
        "command": ["sdc", *sys.argv[1:]],
        "seconds": round(time.perf_counter() - started),
        "options": {key: str(value) for key, value in dataclasses.asdict(options).items()},
    }
    with run_errors(folder, resumable=False):
        summary = write_study(folder, measured, manifest)
    show("aggregation study", summary, as_json=options.json)
    return int(Exit.CLEAN)


def _scar(options: ScarStudyOptions) -> int:
    with usage_errors():
        if options.resume and options.run is None:
            raise SettingError("resume", None, "continues what is in the folder that --run names; give --run DIR")
        folder = options.run.absolute() if options.run else new_folder("scar")
        check_folder(folder, options.resume, "scar study")
        if not options.workload:
            raise SettingError("workload", None, "expected one or several; see --help")
    from sdc.analysis import conclude
    from sdc.records import prepare
    from sdc.train.studies import ScarStudy, record_study, subjects

    from .. import CountProgress, show

    with usage_errors():
        study = ScarStudy(trials=options.trials, starts=options.starts, seed=options.seed)
        chosen = subjects(options.workload, _sources(options))
        prepare(cpu_devices=os.cpu_count() or 1, cpu_threads=os.cpu_count())  # trials are shared out
    onward.folder = folder
    with run_errors(folder), CountProgress("scar", len(study.parts(chosen))) as progress:
        record_study(
            study, chosen, folder, resume=options.resume, command=["sdc", *sys.argv[1:]], on_part=progress.advance
        )
        summary = conclude(folder)
    show("scar study", summary, as_json=options.json)
    return int(Exit.CLEAN)


def _nodes(options: NodesStudyOptions) -> int:
    with usage_errors():
        folder = new_folder("nodes", options.run)
    from sdc.analysis.studies import write_nodes_study
    from sdc.train.studies import NodesStudy

    from .. import show

    with usage_errors():
        study = NodesStudy(nodes=options.nodes, runs=options.runs, steps=options.steps, seed=options.seed)
    with run_errors(folder, resumable=False):
        if not folder.exists():  # whether it can be made is told now, and not after minutes of work
            folder.mkdir(parents=True)
            folder.rmdir()  # a signal ends the process at once, and is to leave nothing behind
    started = time.perf_counter()
    measured = experiment("nodes", study.count(), study.run())
    manifest = {
        "command": ["sdc", *sys.argv[1:]],
        "seconds": round(time.perf_counter() - started),
        "settings": {"nodes": list(options.nodes), "runs": options.runs, "steps": options.steps},
    }
    with run_errors(folder, resumable=False):
        summary = write_nodes_study(folder, measured, manifest)
    show("nodes study", summary, as_json=options.json)
    return int(Exit.CLEAN)


def _sources(options: ScarStudyOptions) -> "Sources":
    from sdc.train.studies import Sources

    return Sources(
        images=options.images, table=options.table, ratings=_path(options.ratings), documents=_path(options.documents),
        corpus=options.corpus, archives=options.archives,
    )  # fmt: skip


def _path(source: str) -> str | Path:
    """What holds a path separator, or is there, is a file or a folder."""
    return Path(source) if os.sep in source or os.path.exists(source) else source
