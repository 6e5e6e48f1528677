"""Settings of specs: how a command line reads them, and the error that identifies an invalid setting."""

import dataclasses
import os
import re
import typing
from collections.abc import Sequence
from numbers import Integral
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple

LARGEST_SEED = 2**31 - 2  # for every random generator; the seed plus one is also used and must fit into 32 bits


class Flag(NamedTuple):
    """Instructions for reading a field of a spec from a command line, where the field's name and type are not enough;
    used in `Annotated`.

    Example:
        >>> import dataclasses
        >>> from typing import Annotated
        >>> from sdc.settings import Flag
        >>> @dataclasses.dataclass(frozen=True)
        ... class Plan:
        ...     faults: Annotated[tuple[str, ...], Flag("fault", repeated=True)] = ()
    """

    name: str | None = None  # name of the flag, if it differs from the field's name
    type: Any = None  # type as which the flag's value is parsed, if the field also accepts objects
    repeated: bool = False  # whether the flag is repeated for each value
    argument: bool = False  # whether the field is a required positional argument
    without: str = ""  # for an optional spec: error message if its flags are given but it is not


class Within(NamedTuple):
    """The range of values that a numeric field of a spec may have; used in `Annotated`."""

    least: float
    most: float
    above: bool = False  # whether `least` itself is excluded

    def hold(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def expected(self, whole: bool) -> str:
        """Returns the part of an error message that states the range."""
        noun = "a whole number" if whole else "a number"
        ends = f"above {self.least:,}, at most" if self.above else f"from {self.least:,} to"
        return f"expected {noun} {ends} {self.most:,}"


class SettingError(ValueError):
    """An error for an invalid setting; its one-line message states what was given, what was expected and how to fix it.

    The library itself has no flags. Callers that offer settings as flags, form fields or spreadsheet columns replace
    `setting` with their own name for the parameter.

    Attributes:
        setting: name of the parameter, as in Python.
        given: value of the parameter; None if the value does not matter, for example for a missing flag.
        problem: what is wrong and how to fix it.

    Example:
        >>> from sdc.settings import SettingError
        >>> str(SettingError("steps", 0, "expected at least 1"))
        'steps=0: expected at least 1'
    """

    def __init__(self, setting: str, given: object, problem: str) -> None:
        self.setting, self.given, self.problem = setting, given, problem
        super().__init__(f"{setting}={given}: {problem}" if given is not None else f"{setting}: {problem}")


def refuse_url(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a URL, also as a `Path`, which takes `gs://bucket` for a file in a folder named `gs:`."""
    if found := re.match(r"([a-z][a-z0-9]+:)/+(.*)", os.fspath(path)):
        raise ValueError(
            f"{'//'.join(found.groups())} is in an object store; give a path on a disk, NFS or a mounted bucket"
        )


SEVERAL = {"corpus": "texts"}  # plural noun for the values of a setting whose name is not a plural
WORDS = {str: "a string", int: "a whole number", bool: "True or False", NoneType: "None"}


def check_fields(settings: Any) -> None:
    """Checks at run time that every field of a dataclass has the annotated type.

    A type may be a class, a `Literal`, a union of types, or a sequence of one type. A bool does not count as a number,
    and a string does not count as a sequence of strings. Numbers must lie in the range of their `Within`.

    Raises:
        SettingError: a field has the wrong type, or its value lies outside the range.

    Example:
        >>> import dataclasses
        >>> from sdc.settings import check_fields
        >>> @dataclasses.dataclass
        ... class Job:
        ...     steps: int = 20
        >>> check_fields(Job())
        >>> check_fields(Job("20"))
        Traceback (most recent call last):
        sdc.settings.SettingError: steps='20': expected a whole number
    """
    hints = typing.get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        name, value, hint = field.name, getattr(settings, field.name), hints[field.name]
        marks: list[Any] = []
        if typing.get_origin(hint) is Annotated:
            hint, *marks = typing.get_args(hint)
        if _fits(value, hint):
            bounds = next((mark for mark in marks if isinstance(mark, Within)), None)
            if bounds is not None and value is not None and not bounds.hold(value):
                raise SettingError(name, value, bounds.expected(isinstance(value, Integral)))
            continue
        if typing.get_origin(hint) is Sequence:
            check_several(name, value)
            item = _words(typing.get_args(hint)[0])
            raise SettingError(name, value, f"expected every element to be {item}")
        shown = repr(value) if value is None or isinstance(value, str) else value
        raise SettingError(name, shown, f"expected {_words(hint)}")


def check_several(setting: str, value: object) -> None:
    """Raises SettingError if a single value, such as a string, is given where a sequence is expected."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        noun = SEVERAL.get(setting, setting)
        raise SettingError(setting, value, f"expected a sequence of {noun}; wrap a single one in a list")


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is Sequence:
        several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return several and all(_fits(item, arguments[0]) for item in typing.cast("Sequence[object]", value))
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    return WORDS.get(hint) or (origin or hint).__name__
