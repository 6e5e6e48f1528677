"""Parses command lines: the list of commands, and how tyro reads the fields of a command as its flags.

A command is a dataclass. The fields of this dataclass and of the specs in it are flags (see `sdc.settings.Flag`).
"""

import ast
import collections
import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import io
import itertools
import operator
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from sdc._lazy import missing, remedy
from sdc.settings import Flag, Within, check_fields, refuse_url

from .runtime import CommandError, name_flags, usage_errors, write

CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
DESCRIPTION = "Finds silent data corruption in JAX programs."
WIDTH = 80  # columns of the help
EXAMPLE = "Example: "


# Groups of commands, in the order of the overview.
QUESTIONS = ("Test a host", "Compare hosts", "Look into a step", "Train", "Study and measure")
TEST, COMPARE, LOOK, TRAIN, STUDY = QUESTIONS
ENDING = (
    "Options: --version prints the versions; sdc COMMAND --help explains a command.",
    "Completion: sdc --tyro-print-completion bash (or zsh, tcsh) prints a script.",
    "Exit codes: 0 clean or done, 1 corruption found, 2 bad usage, 3 inconclusive.",
    "Example: sdc twin --suspect node11",
)


class Entry(NamedTuple):
    """A command: module and name of its dataclass, its function, its group, and the extras that it needs."""

    module: str
    spec: str
    run: str
    group: str
    extras: tuple[str, ...] = ()


# All commands; a module is imported only when its command runs.
COMMANDS: Mapping[str, Entry] = {
    "twin": Entry(".commands.runs", "TwinCommand", "execute", COMPARE, ("report", "text")),
    "train": Entry(".commands.runs", "TrainCommand", "execute", TRAIN, ("report", "text")),
    "trace": Entry(".commands.runs", "TraceCommand", "execute", LOOK, ("report", "text")),
    "diff": Entry(".commands.reports", "DiffCommand", "diff", LOOK, ("report",)),
    "campaign": Entry(".commands.runs", "CampaignCommand", "campaign", STUDY, ("report", "text")),
    "abft": Entry(".commands.studies", "AbftCommand", "abft", STUDY, ("report", "text")),
    "study": Entry(".commands.studies", "StudyCommand", "study", STUDY, ("report", "text")),
    "estimate": Entry(".commands.estimates", "EstimateCommand", "estimate", STUDY, ("report",)),
    "doctor": Entry(".commands.doctor", "DoctorCommand", "run", TEST),
    "checkpoint": Entry(".commands.reports", "CheckpointCommand", "checkpoint", TRAIN),
    "burnin": Entry(".commands.burnin", "BurninCommand", "run", TEST),
    "golden": Entry(".commands.golden", "GoldenCommand", "run", TEST),
    "verdict": Entry(".commands.verdict", "VerdictCommand", "run", TEST),
    "pair": Entry(".commands.pairs", "PairCommand", "pair", COMPARE, ("report", "text")),
    "pool": Entry(".commands.pairs", "PoolCommand", "pool", COMPARE, ("report", "text")),
    "fleet": Entry(".commands.fleet", "FleetCommand", "run", COMPARE, ("report",)),
    "report": Entry(".commands.reports", "ReportCommand", "report", TRAIN, ("report",)),
    "bench": Entry(".bench.command", "BenchOptions", "run", STUDY, ("report", "text")),
}


# Groups of flags in the help of a command, by flag name or declaring class; all others are listed as options.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "run": ("Planned", "Job", "RecordedStudy", "JobCommand", "CampaignCommand"),
    "options": (),
    "simulated faults": ("suspect", "fault"),
    "checked matrix products": ("abft", "Checks"),
    "checkpoints": ("Running",),
    "model and data": ("Workload", "Sources"),
    "several processes": ("Peers",),
    "output": ("ResultCommand",),
}


def spec_of(command: str) -> type:
    kind: type = getattr(importlib.import_module(COMMANDS[command].module, __package__), COMMANDS[command].spec)
    lay_out(kind)
    return kind


def overview() -> str:
    """Returns the help of `sdc`; the line of each command is read from its source file, because importing the commands
    takes a second."""
    lines = ["usage: sdc COMMAND [OPTIONS]", "", DESCRIPTION]
    group = ""
    for command, entry in sorted(COMMANDS.items(), key=lambda item: QUESTIONS.index(item[1].group)):
        if entry.group != group:
            group = entry.group
            lines += ["", f"{group}:"]
        source = Path(__file__).parent.joinpath(*entry.module.split(".")[1:]).with_suffix(".py").read_text("utf-8")
        node = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == entry.spec)
        lines.append(f"  {command:<11} {(ast.get_docstring(node) or '').splitlines()[0]}")
    return "\n".join([*lines, "", *ENDING])


def command_of(command: str) -> Callable[[Any], int]:
    entry = COMMANDS[command]
    require(f"sdc {command}", *entry.extras)
    function: Callable[[Any], int] = getattr(importlib.import_module(entry.module, __package__), entry.run)
    return function


def require(what: str, *extras: str) -> None:
    """Raises CommandError if one of the extras is not installed."""
    if lacking := [extra for extra in extras if missing(extra)]:
        raise CommandError(f"{what} {remedy(*lacking)}")


class Only(tuple[str, ...]):
    """Specifies which fields of a spec are flags of a command, in the `Annotated` type of the command's field."""

    def __new__(cls, *names: str) -> "Only":
        return super().__new__(cls, names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultCommand:
    """A command that prints its result as text or JSON."""

    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


class Offered(NamedTuple):
    """A flag: the class that declares its field, the path from the command to this field, and tyro's spec."""

    owner: type
    path: tuple[str, ...]
    flag: StructFieldSpec


Maker = Callable[[Mapping[str, Any]], Any]  # builds an object from the values of all flags


def offered(kind: type, only: Sequence[str] = ()) -> tuple[list[Offered], Maker]:
    """Returns the flags of a dataclass and of the specs in it, and a function that builds it from their values."""
    every: list[Offered] = []
    makers: dict[str, Maker] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    # `--json` comes last.
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.name == "json"):
        if only and field.name not in only:
            continue
        hint, *marks = _unwrapped(hints[field.name])
        flag = next((mark for mark in marks if isinstance(mark, Flag)), Flag())
        kinds = (hint, *(typing.get_args(hint) if flag.without else ()))
        spec = next((each for each in kinds if isinstance(each, type) and dataclasses.is_dataclass(each)), None)
        below: list[Offered] = []
        if spec is not None:
            below, makers[field.name] = offered(spec, next((mark for mark in marks if isinstance(mark, Only)), ()))
        if spec is not hint:
            about = next((mark.description for mark in marks if isinstance(mark, msgspec.Meta)), None)
            text = f"{about[0].upper()}{about[1:]}." if about else functools.partial(_text, kind, field.name)
            read_as, default = _read_as(hint, field, flag, marks), _default(field, flag)
            own = StructFieldSpec(flag.name or field.name, read_as, default, text)
            owner = next(base for base in kind.__mro__ if field.name in inspect.get_annotations(base))
            every.append(Offered(owner, (field.name,), own))
            make = makers.get(field.name)
            makers[field.name] = (
                operator.itemgetter(own.name) if make is None else _optional(own, flag.without, below, make)
            )
        every += (each._replace(path=(field.name, *each.path)) for each in below)
    return every, lambda values: kind(**{name: make(values) for name, make in makers.items()})


def _unwrapped(hint: Any) -> list[Any]:
    return [*typing.get_args(hint)] if typing.get_origin(hint) is Annotated else [hint]


def _read_as(hint: Any, field: "dataclasses.Field[Any]", flag: Flag, marks: Sequence[Any]) -> Any:
    kind: Any = flag.type or hint
    if flag.type is not None and field.default is None and not (flag.without or flag.argument or flag.repeated):
        kind = kind | None
    if typing.get_origin(kind) is collections.abc.Sequence:
        kind = types.GenericAlias(tuple, (typing.get_args(kind)[0], ...))
    if isinstance(kind, types.UnionType):  # for which tyro imports typeguard, a tenth of the start of `sdc verdict`
        kind = typing.Union[typing.get_args(kind)]  # noqa: UP007
    own = [mark for mark in marks if not isinstance(mark, Flag | Only | Within | msgspec.Meta)]
    own += [tyro.conf.Positional] * flag.argument
    if (
        field.default is None or field.default is False or field.default == () or flag.without
    ):  # the help does not show such a default
        own.append(tyro.conf.arg(help_behavior_hint=""))
    for mark in own:
        kind = Annotated[kind, mark]
    return kind


def _default(field: "dataclasses.Field[Any]", flag: Flag) -> Any:
    if flag.without:
        return False if flag.type is bool else typing.get_args(flag.type)[0]
    if flag.argument:
        return tyro.MISSING
    if field.default is not dataclasses.MISSING:
        return () if flag.repeated and field.default is None else field.default
    return tyro.MISSING if field.default_factory is dataclasses.MISSING else field.default_factory()


def _optional(switch: StructFieldSpec, without: str, below: Sequence[Offered], make: Maker) -> Maker:
    """Builds a spec only if its flag is given; without this flag, raises CommandError for flags that depend on it."""

    def maybe(values: Mapping[str, Any]) -> Any:
        if values[switch.name] != switch.default:
            return make(values)
        for _, _, flag in below:
            if (value := values[flag.name]) != flag.default:
                shown = value[0] if isinstance(value, tuple) else value
                raise CommandError(f"--{flag.name.replace('_', '-')} {shown}: {without}")
        return None

    return maybe


REGISTRY = ConstructorRegistry()


@REGISTRY.struct_rule
def _rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    if not dataclasses.is_dataclass(info.type) or not info.type.__module__.startswith("sdc."):
        return None
    every, make = offered(info.type)

    def instantiate(**values: Any) -> Any:
        for value in values.values():
            for path in value if isinstance(value, tuple) else (value,):
                if isinstance(path, Path):
                    with usage_errors():
                        refuse_url(path)
        return make(values)

    instantiate.__doc__ = info.type.__doc__  # tyro's help shows it
    return StructConstructorSpec(instantiate, tuple(each.flag for each in every))


def flags(kind: Any) -> Iterator[Offered]:
    """Yields the flags of a command and of its subcommands."""
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        for inner in typing.get_args(kind):
            yield from flags(inner)
        return
    for each in offered(kind)[0]:
        yield each
        yield from flags(each.flag.type)


def given(command: Any) -> dict[str, Any]:
    """Returns the flags of a command whose values differ from the defaults, by name."""
    every = ((each.flag, functools.reduce(getattr, each.path, command)) for each in offered(type(command))[0])
    return {flag.name: value for flag, value in every if value != flag.default}


@functools.cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings of the fields of a module's classes, by class and field."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        for field, text in itertools.pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                about = found.setdefault(typing.cast(ast.ClassDef, node).name, {})
                about[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _text(kind: type, name: str) -> str | None:
    """Returns the docstring of a field, from the class or one of its bases."""
    found = (_texts(base.__module__).get(base.__name__, {}).get(name) for base in kind.__mro__ if base is not object)
    return next(filter(None, found), None)


@functools.cache
def lay_out(kind: Any) -> None:
    """Formats the docstrings of a command and its subcommands for `--help`, so that tyro lays them out correctly.

    tyro joins the lines of a paragraph, including those of several examples, but starts a new line before each line
    that does not begin with a letter. Therefore this function makes each paragraph one line, and indents every example
    but the first.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kind.__doc__ = laid_out(kind.__doc__ or "")
        for hint in typing.get_type_hints(kind).values():
            for below in typing.get_args(hint):
                lay_out(below)


def laid_out(text: str) -> str:
    """Returns a docstring with one line for each paragraph and example.

    Example:
        >>> from sdc.tools.parse import laid_out
        >>> print(laid_out("Says it.\\n\\nExample: sdc a\\nExample: sdc b\\n\\nExit codes: 0,\\n1 or 2."))
        Says it.
        <BLANKLINE>
        Example: sdc a
                 sdc b
        <BLANKLINE>
        Exit codes: 0, 1 or 2.
    """
    found = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        parts = [" ".join(part.split("\n")) for part in paragraph.split(f"\n{EXAMPLE}")]
        found.append(f"\n{' ' * len(EXAMPLE)}".join(parts))
    return "\n\n".join(found)


def parse(arguments: Sequence[str]) -> Any:
    """Returns the spec of a command line; turns a framed error message of tyro into one line."""
    if "" in arguments:
        before = arguments[arguments.index("") - 1] if arguments[0] else "sdc"
        raise CommandError(f"'' after {before}: expected a value; give one, or leave the flag out")
    for word in arguments:
        # Python decodes a byte that is not valid UTF-8 to a lone surrogate, which a record cannot hold.
        if "\0" in word or any("\ud800" <= character <= "\udfff" for character in word):
            raise CommandError(f"{word!r}: expected text in UTF-8 without zero bytes; give the file another name")
    command = arguments[0] if arguments else ""
    if command in ("-h", "--help"):
        write(overview())
        raise SystemExit(0)
    if not command:
        raise CommandError(f"expected a command, one of {', '.join(COMMANDS)}. See sdc --help")
    if command and command not in COMMANDS and not command.startswith("-"):
        near = difflib.get_close_matches(command, COMMANDS, 1)
        meant = f"; did you mean {near[0]}?" if near else "."
        raise CommandError(f"{command}: expected one of {', '.join(COMMANDS)}{meant} See sdc --help")
    if len(arguments) > 1 and command in COMMANDS:
        below = names_below(spec_of(command))
        if below and arguments[1] not in below and not arguments[1].startswith("-"):
            raise CommandError(f"{arguments[1]}: expected one of {', '.join(below)}. See sdc {command} --help")
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            if command not in COMMANDS:  # --tyro-print-completion
                kinds = (Annotated[spec_of(name), tyro.conf.subcommand(name)] for name in COMMANDS)
                return _read(functools.reduce(operator.or_, kinds), arguments, "sdc", DESCRIPTION)
            found = _read(spec_of(command), merged(spec_of(command), arguments[1:]), f"sdc {command}")
            own = getattr(found, "command", found)
            names = {}
            for each in flags(type(own)):
                if tyro.conf.Positional in _unwrapped(each.flag.type):  # an argument, shown in capitals
                    names[each.path[-1]] = each.flag.name.upper()
                elif each.flag.name != each.path[-1]:
                    names[each.path[-1]] = each.flag.name
            name_flags(names)
            with usage_errors():
                check_fields(own)
            return found
    except SystemExit as ended:
        if ended.code:
            below_title = message.getvalue().splitlines()[1:]
            words = " ".join(line.strip() for line in below_title if line.strip(" -"))
            raise CommandError(_brief(" ".join(words.split()), command)) from None
        raise
    except (AssertionError, OSError) as error:  # an unknown shell, or a file that cannot be written
        if not command.startswith("--tyro"):
            raise
        raise CommandError(f"{' '.join(arguments[:2])}: {error}") from error


def names_below(kind: type) -> list[str]:
    """Returns the names of the subcommands of a command, such as `record` of `golden`."""
    hint = typing.get_type_hints(kind, include_extras=True).get("command")
    inner = typing.get_args(typing.get_args(hint)[0]) if hint is not None else ()
    return [mark.name for each in inner for mark in getattr(each, "__metadata__", ()) if hasattr(mark, "name")]


def merged(kind: Any, arguments: Sequence[str]) -> list[str]:
    """Returns a command line that ends with the flags that take several values, each flag once and with all its values.

    A flag that precedes positional arguments takes only one value: otherwise it would consume these arguments.
    """
    every = [each.flag for each in flags(kind)]
    several = {_word(flag) for flag in every if _takes_several(flag.type)}
    open_ended = not any(tyro.conf.Positional in _unwrapped(flag.type) for flag in every)
    values: dict[str, list[str]] = {}
    others: list[str] = []
    words = collections.deque(arguments)
    while words:
        word = words.popleft()
        flag, equals, value = word.partition("=")
        if flag not in several:
            # A word is a positional argument unless it names a subcommand or is the value of a flag.
            before = others[-1] if others else "-" if names_below(kind) else ""
            open_ended = open_ended or not (word.startswith("-") or before.startswith("-"))
            others.append(word)
            continue
        found = [value] if equals else []
        while words and not re.match("--|-[a-z]", words[0]) and (open_ended or not found):
            found.append(words.popleft())
        if not found:
            raise CommandError(f"{flag}: expected at least one value; give one, or leave the flag out")
        values.setdefault(flag, []).extend(found)
    return [*others, *(word for flag, found in values.items() for word in (flag, *found))]


def _takes_several(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple or any(map(_takes_several, typing.get_args(hint)))


def grouped(text: str, kind: Any) -> str:
    """Returns a command's help with its options in groups and lines of 80 columns, from the text that tyro prints."""
    titles = {owner: title for title, owners in GROUPS.items() for owner in owners}
    found = {
        _word(each.flag): titles.get(each.flag.name, titles.get(each.owner.__name__, "options")) for each in flags(kind)
    }
    lines: list[str] = []
    boxes: dict[str, list[str]] = {title: [] for title in ("positional arguments", "subcommands", *GROUPS)}
    box = lines
    for line, rule in itertools.pairwise([*map(str.rstrip, text.splitlines()), ""]):
        line = re.sub(r"\[(\S+) \[\1 \.\.\.\]\]", r"\1 ...", line)
        if rule.startswith(" ---"):
            box = boxes.get(line.strip(), boxes["options"])
        elif box is lines:
            lines += textwrap.wrap(line, WIDTH, subsequent_indent=_indent(line)) or [""]
        elif line and not line.startswith(" ---"):
            if named := re.match(r"  (-h|--[a-z-]+)", line):
                box = boxes[found.get(named[1], "output")]
            box.append(line)
    for title, box in boxes.items():
        lines += [f"{title.capitalize()}:", *box, ""] if box else []
    return "\n".join(lines).rstrip("\n")


def _indent(line: str) -> str:
    text = line.removeprefix(EXAMPLE)
    return " " * (len(line) - len(text.lstrip()) + 2 * text.lstrip().startswith("sdc "))


def _read(kind: Any, arguments: Sequence[str], prog: str, description: str | None = None) -> Any:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return tyro.cli(
                kind, args=list(arguments), prog=prog, description=description, config=CONFIG, registry=REGISTRY
            )
    finally:
        if text := printed.getvalue():
            write(grouped(text, kind))


def _brief(message: str, command: str) -> str:
    """Returns tyro's message about unknown flags without the help texts, and suggests similar flags."""
    unknown, hint = (*re.split(r"[ -]+(?:Perhaps you meant|Arguments similar to)", message, maxsplit=1), "")[:2]
    if not hint:
        return message or "wrong options; see sdc --help"
    unknown = f"Unrecognized options: {unknown.rpartition('Unrecognized options: ')[2].rstrip(' -')}"
    if applied := re.findall(r"(\S+) \(applied to sdc [^)]*\)", unknown):  # if another command has that flag
        unknown = f"Unrecognized options: {', '.join(applied)}"
    own = set(_words(command)) if command in COMMANDS else set()
    near = []
    for word in re.findall(r"--[a-z][a-z-]*", unknown):
        if not (found := difflib.get_close_matches(word, own, 1)):
            found = difflib.get_close_matches(word, {word for each in COMMANDS for word in _words(each)}, 1)
        near += found
    meant = f"; did you mean {', '.join(near)}?" if near else "."
    return f"{unknown}{meant} See sdc {command} --help"


def _words(command: str) -> Iterator[str]:
    return (_word(each.flag) for each in flags(spec_of(command)))


def _word(flag: StructFieldSpec) -> str:
    return f"--{flag.name.replace('_', '-')}"
