"""The command `sdc`. Nothing heavy is imported before the flags are read, and no failure looks like a verdict."""

import os
import sys
import traceback
from collections.abc import Sequence

# The runtime's own log goes to standard error by the hundred lines; what people need, the commands say. Of several
# processes it reports a lost peer as an error of its own, before the command can name it.
_SEVERAL = any(word.partition("=")[0] == "--coordinator" for word in sys.argv)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if _SEVERAL else "2")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

INCONCLUSIVE = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: parses the command line, runs the command, exits with its code.

    Python ends with 1 where an exception is left over, an import that fails among them. Here 1 means that a comparison
    found corruption: everything else that goes wrong ends with 3.
    """
    code = INCONCLUSIVE
    try:
        from .runtime import deaf, leave_at_once, listen

        listen()
        code = run(sys.argv[1:] if arguments is None else arguments)
        deaf()
        leave_at_once(code)
    except KeyboardInterrupt as interrupt:
        _interrupted(interrupt)
    except Exception:
        code = _failed()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code; prints errors as one line on standard error."""
    if list(arguments) == ["--version"]:
        import importlib.metadata
        import platform

        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax-sdc", "jax", "jaxlib")]
        print(", ".join([*versions, f"Python {platform.python_version()}"]))
        return 0
    from sdc.verdict import Exit

    from .runtime import CommandError

    try:
        from .parse import command_of, parse

        options = parse(arguments)
        command = command_of(arguments[0])
        try:
            return int(command(options))
        except SystemExit as ended:  # that something in it asks for: no verdict either
            raise RuntimeError(f"the command was ended from within, with {ended.code!r}") from ended
    except CommandError as error:
        label = "inconclusive" if error.code is Exit.INCONCLUSIVE else "error"
        print(f"sdc: {label}: {error}", file=sys.stderr)
        return int(error.code)
    except BrokenPipeError:  # the reader of our output had enough, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return int(Exit.INCONCLUSIVE)
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except Exception:
        return _failed()


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    """Says where the record is and how to go on; what is on record stays."""
    from .runtime import onward

    told = filter(None, [f"interrupted by {interrupt or 'SIGINT'}", onward.how()])
    print(f"sdc: inconclusive: {'. '.join(told)}", file=sys.stderr)
    return INCONCLUSIVE


def _failed() -> int:
    """A failure of the tool says nothing about the hardware, least of all "corruption found" (1)."""
    traceback.print_exc()
    print("sdc: inconclusive: the command failed (above); please report it", file=sys.stderr)
    return INCONCLUSIVE
