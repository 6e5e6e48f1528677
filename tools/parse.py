"""From words to flags: which commands there are, and the module of each."""

import contextlib
import dataclasses
import difflib
import importlib
import io
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import tyro

from .bench.options import BenchOptions
from .errors import CommandError
from .estimate_options import EstimateOptions
from .options import (
    CampaignOptions,
    CheckpointOptions,
    DiffOptions,
    ReportOptions,
    TraceOptions,
    TrainOptions,
    TwinOptions,
)
from .study_options import AbftOptions, StudyOptions

DESCRIPTION = "Deterministic analysis of silent data corruption in JAX training. Example: sdc twin --suspect node11"

Command = (
    Annotated[TwinOptions, tyro.conf.subcommand("twin")]
    | Annotated[TrainOptions, tyro.conf.subcommand("train")]
    | Annotated[TraceOptions, tyro.conf.subcommand("trace")]
    | Annotated[DiffOptions, tyro.conf.subcommand("diff")]
    | Annotated[CampaignOptions, tyro.conf.subcommand("campaign")]
    | Annotated[AbftOptions, tyro.conf.subcommand("abft")]
    | Annotated[StudyOptions, tyro.conf.subcommand("study")]
    | Annotated[EstimateOptions, tyro.conf.subcommand("estimate")]
    | Annotated[CheckpointOptions, tyro.conf.subcommand("checkpoint")]
    | Annotated[ReportOptions, tyro.conf.subcommand("report")]
    | Annotated[BenchOptions, tyro.conf.subcommand("bench")]
)
MODULES: dict[type, str] = {
    TwinOptions: ".commands._twin",
    TrainOptions: ".commands._train",
    TraceOptions: ".commands._trace",
    DiffOptions: ".commands._diff",
    CampaignOptions: ".commands._campaign",
    AbftOptions: ".commands._abft",
    StudyOptions: ".commands._study",
    EstimateOptions: ".commands._estimate",
    CheckpointOptions: ".commands._checkpoint",
    ReportOptions: ".commands._report",
    BenchOptions: ".bench.command",
}
"""Where the function `run` of each command is."""


def command_of(options: Any) -> Callable[[Any], int]:
    """The function that runs a command."""
    command: Callable[[Any], int] = importlib.import_module(MODULES[type(options)], __package__).run
    return command


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
    below = list(_subcommands(arguments[0])) if len(arguments) > 1 else []
    if below and arguments[1] not in below and not arguments[1].startswith("-"):
        raise CommandError(f"{arguments[1]}: expected one of {', '.join(below)}. See sdc {arguments[0]} --help")
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
    if applied := re.findall(r"(\S+) \(applied to sdc [^)]*\)", unknown):  # where another command has that flag
        unknown = f"Unrecognized options: {', '.join(applied)}"
    kinds = {each.__metadata__[0].name: each.__origin__ for each in typing.get_args(Command)}
    mistyped = re.findall(r"--[a-z][a-z-]*", unknown)
    own = set(_flags(kinds[command])) if command in kinds else set()
    others = set(re.findall(r"--[a-z][a-z-]*", hint)) - set(mistyped)  # of all commands
    near = []
    for flag in mistyped:
        near += difflib.get_close_matches(flag, own, 1) or difflib.get_close_matches(flag, others, 1)
    meant = f"; did you mean {', '.join(near)}?" if near else "."
    return f"{unknown}{meant} See sdc {command} --help"


def _subcommands(command: str) -> Iterator[str]:
    """Names of the commands below a command."""
    kinds = {each.__metadata__[0].name: each.__origin__ for each in typing.get_args(Command)}
    hints = typing.get_type_hints(kinds[command], include_extras=True) if command in kinds else {}
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
