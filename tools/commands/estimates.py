"""`sdc estimate`: compiles programs for chips that this machine lacks, each in a process of its own."""

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import msgspec

from sdc.costs import Tool
from sdc.schema import ProgramEstimate
from sdc.settings import SettingError
from sdc.train import Compiled, Subject
from sdc.verdict import Exit

from .. import CommandError, ResultCommand, flag, new_folder, run_errors, usage_errors

LAST = 12  # lines of a compiler's output to show if it crashes


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimateCommand(ResultCommand):
    """Estimates what steps and tools cost on absent accelerators.

    Example: sdc estimate --target v5p:2x2x4 --config llama3_8b_16l --model 8
    Example: sdc estimate --target h100 --tool plain abft

    Compiles the plain step, and the step with each tool, for the given targets; this needs the real compilers (pip
    install 'jax-sdc[targets]') but not the hardware. Reports cycles and the most expensive operations (TPU), kernels
    and the bytes that they move (GPU), collectives, memory and compile time. Nothing is measured. Exit codes: 0 done, 2
    bad usage or a step that does not fit into memory, 3 a crash of the compiler.
    """

    target: tuple[str, ...]
    """Chips: v4:2x2x1, v5e:4x4, v5p:2x2x4, v6e:4x4, 7x:2x2x1; 2xv5p:2x2x4 for two slices; h100x1, h100x8, 2xh100x8."""
    tool: tuple[Tool, ...] = ("plain", "lockstep")
    """Tools to estimate; the others are compared with the first."""
    program: Compiled = dataclasses.field(default_factory=Compiled)
    compiler_option: tuple[str, ...] = ()
    """Compiler option NAME=VALUE, such as xla_tpu_enable_sdc_checker=true."""
    run: Path | None = None
    """New folder for the record; by default one below runs/."""


def estimate(options: EstimateCommand) -> int:
    """Estimates each tool on each target; if an estimate fails, reports this and keeps the other ones."""
    from sdc.costs import check_compiler, find_target, prepare_compilers, read_options

    with usage_errors():
        for name in ("target", "tool"):
            if not getattr(options, name):
                raise SettingError(name, None, "expected at least one")
        chosen = read_options(options.compiler_option)
        subjects = [
            Subject(**vars(options.program), target=target, tool=tool, options=chosen)
            for target in dict.fromkeys(options.target)
            for tool in dict.fromkeys(options.tool)
        ]
        for subject in subjects:
            subject.check()
        for subject in subjects:  # before starting a process for each program
            check_compiler(find_target(subject.target))
        folder = new_folder("estimate", options.run)
    prepare_compilers()  # this process uses JAX at the end
    from .. import CountProgress

    rows: list[ProgramEstimate] = []
    failed: list[CommandError] = []
    with CountProgress("estimate", len(subjects)) as progress:
        for subject in subjects:
            try:
                found = _process(subject)
                if "uncharged" in found:  # compiled again, for the instructions of foreign kernels
                    found = _process(subject, "")
                for wrong in ("usage", "uncharged"):
                    if wrong in found:
                        raise CommandError(found[wrong])
                about = {"tool": subject.tool, "target": subject.target, **found.get("estimate", found)}
                rows.append(msgspec.convert(about, ProgramEstimate))
            except CommandError as error:
                if not rows:  # an error in the first program is likely to occur in all
                    raise
                failed.append(error)
            progress.advance(f"{subject.target} {subject.tool}")
    from sdc.analysis import describe
    from sdc.analysis.studies import write_estimate

    from .. import show

    compiled = options.program.config or options.program.step
    flags = {"target": options.target, "tool": options.tool, "compiler_option": options.compiler_option}
    settings = dataclasses.asdict(options.program) | flags
    with run_errors(folder, resumable=False):
        summary = write_estimate(folder, rows, command=["sdc", *sys.argv[1:]], subject=compiled, settings=settings)
    show(summary, describe(folder).report, as_json=options.json)
    for one in failed:
        sys.stderr.write(f"sdc: error: {one}\n")
    codes = [one.code for one in failed] + [Exit.USAGE for row in rows if row.does_not_fit is not None]
    return int(max(codes, default=Exit.CLEAN))


def _process(subject: Subject, kernel: str | None = None) -> dict[str, Any]:
    from sdc.program import Tags

    kernel = Tags.KERNEL if kernel is None else kernel
    with tempfile.TemporaryDirectory(prefix="sdc-estimate-") as folder:
        given, result, schedules = (Path(folder) / name for name in ("subject.json", "result.json", "schedules"))
        schedules.mkdir()
        given.write_text(json.dumps(dataclasses.asdict(subject)), encoding="utf-8")
        words = [sys.executable, "-m", "sdc.tools.commands.estimates", *map(str, (given, result, schedules)), kernel]
        ended = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if ended.returncode == 0 and result.exists():
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return found
        how = signal.Signals(-ended.returncode).name if ended.returncode < 0 else f"exit code {ended.returncode}"
        last = "\n  ".join(ended.stderr.decode(errors="replace").splitlines()[-LAST:])
        raise CommandError(
            f"the compiler of {subject.target} ended with {how} on the {subject.tool} step and produced no estimate; "
            f"its last output:\n  {last}",
            Exit.INCONCLUSIVE,
        )


def main() -> None:
    """Estimates one program in a process of its own, so that a compiler crash affects nothing else.

    python -m sdc.tools.commands.estimates SUBJECT RESULT SCHEDULES KERNEL

    KERNEL is the name of the kernel whose instructions are written, or an empty string for all kernels. The process
    reads a `Subject` as JSON and writes the estimate, or the user's error, as JSON.
    """
    given, result, schedules = map(Path, sys.argv[1:4])
    subject = json.loads(given.read_text(encoding="utf-8"))
    result.write_text(json.dumps(_found(subject, schedules, sys.argv[4] or None)), encoding="utf-8")


def _found(subject: dict[str, Any], schedules: Path, kernel: str | None) -> dict[str, Any]:
    from sdc.costs import prepare_compilers

    prepare_compilers(schedules, kernel)
    import jax

    from sdc.costs import DoesNotFit, Uncharged
    from sdc.train import estimate_subject

    try:
        return {"estimate": msgspec.to_builtins(estimate_subject(Subject(**subject)))}
    except DoesNotFit as error:
        return {"does_not_fit": str(error)}
    except Uncharged as error:
        return {"uncharged": str(error)}
    except SettingError as error:
        return {"usage": flag(error)}
    except jax.errors.JaxRuntimeError:  # from the compiler
        raise
    except Exception as error:
        if subject["step"] is None and not isinstance(error, ValueError | TypeError):
            raise  # only this project's code has run
        first, where = str(error).partition("\n")[0], traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {first} ({where.filename}:{where.lineno})"
        return {"usage": f"{subject['step'] or subject['config']}: {problem}"}


if __name__ == "__main__":
    main()
