"""From words to flags: which commands there are, and the module of each."""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import io
import operator
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import tyro

from .errors import CommandError
from .helping import lay_out

CONFIG = (tyro.conf.FlagCreatePairsOff,)
DESCRIPTION = "Deterministic analysis of silent data corruption in JAX training. Example: sdc twin --suspect node11"


class Entry(NamedTuple):
    """A command: the module and the name of its options, and the module of the function `run`."""

    module: str
    options: str
    run: str


COMMANDS: Mapping[str, Entry] = {
    "twin": Entry(".options", "TwinOptions", ".commands._twin"),
    "train": Entry(".options", "TrainOptions", ".commands._train"),
    "trace": Entry(".options", "TraceOptions", ".commands._trace"),
    "diff": Entry(".options", "DiffOptions", ".commands._diff"),
    "campaign": Entry(".options", "CampaignOptions", ".commands._campaign"),
    "abft": Entry(".study_options", "AbftOptions", ".commands._abft"),
    "study": Entry(".study_options", "StudyOptions", ".commands._study"),
    "estimate": Entry(".estimate_options", "EstimateOptions", ".commands._estimate"),
    "doctor": Entry(".doctor_options", "DoctorOptions", ".commands._doctor"),
    "checkpoint": Entry(".options", "CheckpointOptions", ".commands._checkpoint"),
    "burnin": Entry(".burnin_options", "BurninOptions", ".commands._burnin"),
    "golden": Entry(".golden_options", "GoldenOptions", ".commands._golden"),
    "verdict": Entry(".burnin_options", "VerdictOptions", ".commands._verdict"),
    "pair": Entry(".pair_options", "PairOptions", ".commands._pair"),
    "pool": Entry(".pair_options", "PoolOptions", ".commands._pool"),
    "fleet": Entry(".fleet_options", "FleetOptions", ".commands._fleet"),
    "report": Entry(".options", "ReportOptions", ".commands._report"),
    "bench": Entry(".bench.options", "BenchOptions", ".bench.command"),
}
"""All commands; a module of options is imported when its command is given, or all where help is asked for."""


def options_of(command: str) -> type:
    """The options of a command."""
    kind: type = getattr(importlib.import_module(COMMANDS[command].module, __package__), COMMANDS[command].options)
    lay_out(kind)
    return kind


def every_command() -> Any:
    """What tyro makes the whole command line from."""
    kinds = (Annotated[options_of(name), tyro.conf.subcommand(name)] for name in COMMANDS)
    return functools.reduce(operator.or_, kinds)


def command_of(command: str) -> Callable[[Any], int]:
    """The function that runs a command."""
    function: Callable[[Any], int] = importlib.import_module(COMMANDS[command].run, __package__).run
    return function


def parse(arguments: Sequence[str]) -> Any:
    """Options from the command line; tyro's framed message on wrong ones becomes one line.

    Raises:
        CommandError: the words cannot be understood.
    """
    if "" in arguments:
        before = arguments[arguments.index("") - 1] if arguments[0] else "sdc"
        raise CommandError(f"'' after {before}: expected a value; give one, or leave the flag out")
    for word in arguments:
        # A byte that is no UTF-8 comes as half of a surrogate pair, which no record can hold.
        if "\0" in word or any("\ud800" <= character <= "\udfff" for character in word):
            raise CommandError(f"{word!r}: expected text in UTF-8 without zero bytes; give the file another name")
    if arguments and arguments[0] not in COMMANDS and not arguments[0].startswith("-"):
        near = difflib.get_close_matches(arguments[0], COMMANDS, 1)
        meant = f"; did you mean {near[0]}?" if near else "."
        raise CommandError(f"{arguments[0]}: expected one of {', '.join(COMMANDS)}{meant} See sdc --help")
    below = list(_subcommands(arguments[0])) if len(arguments) > 1 else []
    if below and arguments[1] not in below and not arguments[1].startswith("-"):
        raise CommandError(f"{arguments[1]}: expected one of {', '.join(below)}. See sdc {arguments[0]} --help")
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            if arguments and arguments[0] in COMMANDS:
                return tyro.cli(
                    options_of(arguments[0]), args=list(arguments[1:]), prog=f"sdc {arguments[0]}", config=CONFIG
                )
            return tyro.cli(every_command(), args=list(arguments), prog="sdc", description=DESCRIPTION, config=CONFIG)
    except SystemExit as ended:
        if ended.code:
            words = " ".join(line.strip("│╭╮╰╯─ ") for line in message.getvalue().splitlines() if line[:1] != "╭")
            raise CommandError(_brief(" ".join(words.split()), *arguments[:1])) from None
        raise
    except (AssertionError, OSError) as error:  # of a shell that tyro does not know, or a file that cannot be written
        if not arguments[0].startswith("--tyro"):
            raise
        raise CommandError(f"{' '.join(arguments[:2])}: {error}") from error


def _brief(message: str, command: str = "") -> str:
    """Says which flags are unknown and which may have been meant, without their help, which tyro adds."""
    unknown, hint = (*re.split(r"[ -]+(?:Perhaps you meant|Arguments similar to)", message, maxsplit=1), "")[:2]
    if not hint:
        return message or "wrong options; see sdc --help"
    unknown = f"Unrecognized options: {unknown.rpartition('Unrecognized options: ')[2].rstrip(' -')}"
    if applied := re.findall(r"(\S+) \(applied to sdc [^)]*\)", unknown):  # where another command has that flag
        unknown = f"Unrecognized options: {', '.join(applied)}"
    mistyped = re.findall(r"--[a-z][a-z-]*", unknown)
    own = set(_flags(options_of(command))) if command in COMMANDS else set()
    others = {flag for each in COMMANDS for flag in _flags(options_of(each))}
    near = []
    for flag in mistyped:
        near += difflib.get_close_matches(flag, own, 1) or difflib.get_close_matches(flag, others, 1)
    meant = f"; did you mean {', '.join(near)}?" if near else "."
    return f"{unknown}{meant} See sdc {command} --help"


def _subcommands(command: str) -> Iterator[str]:
    """Names of the commands below a command."""
    hints = typing.get_type_hints(options_of(command), include_extras=True) if command in COMMANDS else {}
    for inner in typing.get_args(typing.get_args(hints.get("command", ()))[0] if "command" in hints else ()):
        yield from (mark.name for mark in getattr(inner, "__metadata__", ()) if hasattr(mark, "name"))


def _flags(kind: Any) -> Iterator[str]:
    """Flags of a command, and of the commands below it."""
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        for inner in typing.get_args(kind):
            yield from _flags(inner)
        return
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        yield f"--{name.replace('_', '-')}"
        yield from _flags(hint)
