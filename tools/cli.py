"""The command `sdc`."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

# The runtime's own log goes to standard error by the hundred lines; what people need, the commands say.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import tyro

from .bench.lockstep import BenchOptions, bench
from .cluster import leave_at_once
from .errors import CommandError, Exit
from .options import TrainOptions, TwinOptions
from .report import ReportOptions, report
from .train import train
from .twin import twin

DESCRIPTION = "Deterministic analysis of silent data corruption in JAX training. Example: sdc twin --suspect node11"

Command = (
    Annotated[TwinOptions, tyro.conf.subcommand("twin")]
    | Annotated[TrainOptions, tyro.conf.subcommand("train")]
    | Annotated[ReportOptions, tyro.conf.subcommand("report")]
    | Annotated[BenchOptions, tyro.conf.subcommand("bench")]
)
RUN: dict[type, Callable[[Any], int]] = {
    TwinOptions: twin,
    TrainOptions: train,
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
        options = tyro.cli(
            Command,
            args=list(arguments),
            prog="sdc",
            description=DESCRIPTION,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        return RUN[type(options)](options)
    except CommandError as error:
        label = "inconclusive" if error.code is Exit.INCONCLUSIVE else "error"
        print(f"sdc: {label}: {error}", file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        print("sdc: inconclusive: interrupted; continue a run with --resume", file=sys.stderr)
        return int(Exit.INCONCLUSIVE)
    except Exception:
        # A failure of the tool says nothing about the hardware, least of all "corruption found" (1).
        traceback.print_exc()
        print("sdc: inconclusive: the command failed (above); please report it", file=sys.stderr)
        return int(Exit.INCONCLUSIVE)
