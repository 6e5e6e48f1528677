"""`sdc estimate`: compiles programs for chips that are not here, each in a process of its own."""

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdc.costs import check_compiler, find_target, prepare_compilers, read_options
from sdc.program import Tags
from sdc.settings import SettingError
from sdc.train import Subject

from .. import CommandError, EstimateOptions, Exit, new_folder, run_errors, usage_errors

LAST = 12
"""Lines of a compiler's output that are shown if it crashes."""


def run(options: EstimateOptions) -> int:
    """Estimates each tool on each target; one that fails is told, and those before it stay."""
    with usage_errors():
        subjects = _subjects(options)
        for subject in subjects:
            subject.check()
        for subject in subjects:  # before a process is started for each program
            check_compiler(find_target(subject.target))
        folder = new_folder("estimate", options.run)
    prepare_compilers()  # for what this process asks of JAX at the end
    from .. import CountProgress

    rows: list[dict[str, Any]] = []
    failed: list[CommandError] = []
    with CountProgress("estimate", len(subjects)) as progress:
        for subject in subjects:
            try:
                rows.append({"tool": subject.tool, **_estimated(subject)})
            except CommandError as error:
                if not rows:  # what is wrong with the first is likely wrong with all
                    raise
                failed.append(error)
            progress.advance(f"{subject.target} {subject.tool}")
    from sdc.analysis.studies import write_estimate

    from .. import show

    about = {"command": ["sdc", *sys.argv[1:]], "subject": options.config or options.step}
    with run_errors(folder, resumable=False):
        settings = {key: value for key, value in dataclasses.asdict(options).items() if key not in ("json", "run")}
        summary = write_estimate(folder, rows, about | {"settings": settings})
    show("estimate", summary, as_json=options.json)
    for one in failed:
        sys.stderr.write(f"sdc: error: {one}\n")
    codes = [one.code for one in failed] + [Exit.USAGE for row in rows if "does_not_fit" in row]
    return int(max(codes, default=Exit.CLEAN))


def _subjects(options: EstimateOptions) -> list[Subject]:
    for name in ("target", "tool"):
        if not getattr(options, name):
            raise SettingError(name, None, "expected at least one")
    shared = {
        key: getattr(options, key)
        for key in ("config", "step", "dtype", "where", "sync", "compare", "exchange", "twins", "data", "model")
    }
    chosen = read_options(options.compiler_option)
    return [
        Subject(target=target, tool=tool, options=chosen, **shared)
        for target in dict.fromkeys(options.target)
        for tool in dict.fromkeys(options.tool)
    ]


def _estimated(subject: Subject) -> Mapping[str, Any]:
    """What a process found of a program; one with kernels of others is compiled again, for their instructions."""
    found = _process(subject)
    if "uncharged" in found:
        found = _process(subject, "")
    for wrong in ("usage", "uncharged"):
        if wrong in found:
            raise CommandError(found[wrong])
    return {"target": subject.target, **found.get("estimate", found)}


def _process(subject: Subject, kernel: str = Tags.KERNEL) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sdc-estimate-") as folder:
        given, result, schedules = (Path(folder) / name for name in ("subject.json", "result.json", "schedules"))
        schedules.mkdir()
        given.write_text(json.dumps(dataclasses.asdict(subject)), encoding="utf-8")
        words = [sys.executable, "-m", "sdc.tools.estimator", *map(str, (given, result, schedules)), kernel]
        ended = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if ended.returncode == 0 and result.exists():
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return found
        how = signal.Signals(-ended.returncode).name if ended.returncode < 0 else f"exit code {ended.returncode}"
        said = "\n  ".join(ended.stderr.decode(errors="replace").splitlines()[-LAST:])
        raise CommandError(
            f"the compiler of {subject.target} ended with {how} on the {subject.tool} step, and estimated nothing; its "
            f"last words:\n  {said}",
            Exit.INCONCLUSIVE,
        )
