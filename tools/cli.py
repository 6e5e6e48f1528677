"""The command `sdc`."""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

# The runtime's own log goes to standard error by the hundred lines; what people need, the commands say.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import tyro

from .abft.command import abft
from .abft.options import AbftOptions
from .bench.command import bench
from .bench.options import BenchOptions
from .campaign import campaign
from .cluster import leave_at_once
from .diff import diff
from .errors import CommandError, Exit
from .options import CampaignOptions, DiffOptions, TraceOptions, TrainOptions, TwinOptions
from .report import ReportOptions, report
from .study.command import study
from .study.options import StudyOptions
from .trace import trace
from .train import train
from .twin import twin

DESCRIPTION = "Deterministic analysis of silent data corruption in JAX training. Example: sdc twin --suspect node11"

Command = (
    Annotated[TwinOptions, tyro.conf.subcommand("twin")]
    | Annotated[TrainOptions, tyro.conf.subcommand("train")]
    | Annotated[TraceOptions, tyro.conf.subcommand("trace")]
    | Annotated[DiffOptions, tyro.conf.subcommand("diff")]
    | Annotated[CampaignOptions, tyro.conf.subcommand("campaign")]
    | Annotated[AbftOptions, tyro.conf.subcommand("abft")]
    | Annotated[StudyOptions, tyro.conf.subcommand("study")]
    | Annotated[ReportOptions, tyro.conf.subcommand("report")]
    | Annotated[BenchOptions, tyro.conf.subcommand("bench")]
)
RUN: dict[type, Callable[[Any], int]] = {
    TwinOptions: twin,
    TrainOptions: train,
    TraceOptions: trace,
    DiffOptions: diff,
    CampaignOptions: campaign,
    AbftOptions: abft,
    StudyOptions: study,
    ReportOptions: report,
    BenchOptions: bench,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: parses the command line, runs the command, exits with its code."""
    code = run(sys.argv[1:] if arguments is None else arguments)
    leave_at_once(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code; prints errors as one line on standard error."""
    try:
        options = _parse(arguments)
        return RUN[type(options)](options)
    except CommandError as error:
        label = "inconclusive" if error.code is Exit.INCONCLUSIVE else "error"
        print(f"sdc: {label}: {error}", file=sys.stderr)
        return int(error.code)
    except BrokenPipeError:  # the reader of our output had enough, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return int(Exit.INCONCLUSIVE)
    except KeyboardInterrupt:
        print("sdc: inconclusive: interrupted; continue a run with --resume", file=sys.stderr)
        return int(Exit.INCONCLUSIVE)
    except Exception:
        # A failure of the tool says nothing about the hardware, least of all "corruption found" (1).
        traceback.print_exc()
        print("sdc: inconclusive: the command failed (above); please report it", file=sys.stderr)
        return int(Exit.INCONCLUSIVE)


def _parse(arguments: Sequence[str]) -> Any:
    """Options from the command line; tyro's framed message on wrong ones becomes one line."""
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(
                Command,
                args=list(arguments),
                prog="sdc",
                description=DESCRIPTION,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as ended:
        if ended.code:
            words = " ".join(line.strip("│╭╮╰╯─ ") for line in message.getvalue().splitlines())
            raise CommandError(" ".join(words.split()) or "wrong options; see sdc --help") from None
        raise
