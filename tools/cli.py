"""The command `sdc`. No slow module is imported before the flags are parsed, and no failure of the tool looks like a
verdict."""

import logging
import os
import sys
import traceback
from collections.abc import Sequence

# The runtime logs hundreds of lines to standard error, and the commands print what users need. With several processes
# the runtime also logs an error for a lost peer before the command can name that peer.
_DISTRIBUTED = any(word.partition("=")[0] == "--coordinator" for word in sys.argv)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if _DISTRIBUTED else "2")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

INCONCLUSIVE = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: parses the command line, runs the command, and exits with its code.

    Python exits with 1 after an uncaught exception, including a failed import. In this project, 1 means that a
    comparison found corruption, so every other failure exits with 3.
    """
    code = INCONCLUSIVE
    try:
        from .runtime import deaf, leave_at_once, listen

        listen()
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what it does, and raises what it logs
        words = sys.argv[1:] if arguments is None else arguments
        if [*words[:1]] in (["burnin"], ["golden"]):  # a damaged cache of programs is no fault of a device
            os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        code = run(words)
        deaf()
        leave_at_once(code)
    except KeyboardInterrupt as interrupt:
        _interrupted(interrupt)
    except Exception:
        code = _failed()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code; prints errors as one line on standard error."""
    from .runtime import onward

    onward.unprinted = ""
    try:
        code = _run(arguments)
    finally:
        if onward.unprinted:
            print(f"sdc: {onward.unprinted}", file=sys.stderr)
    return code or INCONCLUSIVE if onward.unprinted else code


def _run(arguments: Sequence[str]) -> int:
    from sdc.verdict import Exit

    from .runtime import CommandError, write

    if list(arguments) == ["--version"]:
        import importlib.metadata
        import platform

        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax-sdc", "jax", "jaxlib")]
        write(", ".join([*versions, f"Python {platform.python_version()}"]))
        return 0
    try:
        from .parse import command_of, parse

        options = parse(arguments)
        command = command_of(arguments[0])
        try:
            return int(command(options))
        except SystemExit as ended:  # raised by code below the command: not a verdict
            raise RuntimeError(f"the command called sys.exit({ended.code!r})") from ended
    except CommandError as error:
        label = "inconclusive" if error.code is Exit.INCONCLUSIVE else "error"
        print(f"sdc: {label}: {error}", file=sys.stderr)
        return int(error.code)
    except BrokenPipeError:  # the reader has closed the pipe, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return int(Exit.INCONCLUSIVE)
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except Exception:
        return _failed()


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    """Prints where the record is kept and how to resume the run."""
    from .runtime import onward

    sentences = filter(None, [f"interrupted by {interrupt or 'SIGINT'}", onward.how()])
    print(f"sdc: inconclusive: {'. '.join(sentences)}", file=sys.stderr)
    return INCONCLUSIVE


def _failed() -> int:
    """Prints the traceback and returns 3: a failure of the tool says nothing about the hardware."""
    traceback.print_exc()
    print("sdc: inconclusive: the command failed (see above); please report it", file=sys.stderr)
    return INCONCLUSIVE
