"""Settings of specs: how a command line reads them, and an error that names one that cannot be."""

import dataclasses
import typing
from collections.abc import Sequence
from numbers import Integral
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple

LARGEST_SEED = 2**31 - 2  # seeds of everything random: the next one is used too, and fits 32 bits


class Flag(NamedTuple):
    """How a command line reads a field of a spec, where the field's name and type do not say it; goes into `Annotated`.

    Example:
        >>> import dataclasses
        >>> from typing import Annotated
        >>> from sdc.settings import Flag
        >>> @dataclasses.dataclass(frozen=True)
        ... class Plan:
        ...     faults: Annotated[tuple[str, ...], Flag("fault", repeated=True)] = ()
    """

    name: str | None = None  # of the flag, where it is not that of the field
    type: Any = None  # what its words are read as, where the field takes objects too
    repeated: bool = False  # whether it is given once for each value
    argument: bool = False  # whether it is a word that must be given, without a flag before it
    without: str = ""  # of an optional spec: what is wrong with its flags where it is not asked for


class Within(NamedTuple):
    """The numbers that a field of a spec may have; goes into `Annotated`."""

    least: float
    most: float
    above: bool = False  # whether `least` itself is too little

    def hold(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def expected(self, whole: bool) -> str:
        """What to say to somebody who gave another number."""
        noun = "a whole number" if whole else "a number"
        ends = f"above {self.least:,}, at most" if self.above else f"from {self.least:,} to"
        return f"expected {noun} {ends} {self.most:,}"


class SettingError(ValueError):
    """A setting that makes no sense; one line says what was given, what was expected and how to mend it.

    The library knows no flags. Whoever offers settings as flags, form fields or columns of a sheet puts their own name
    in the place of `setting`.

    Attributes:
        setting: name of the parameter, as in Python.
        given: its value; None where the value has nothing to do with it, such as a flag that is missing.
        problem: what is wrong and how to mend it.

    Example:
        >>> from sdc.settings import SettingError
        >>> str(SettingError("steps", 0, "expected at least 1"))
        'steps=0: expected at least 1'
    """

    def __init__(self, setting: str, given: object, problem: str) -> None:
        self.setting, self.given, self.problem = setting, given, problem
        super().__init__(f"{setting}={given}: {problem}" if given is not None else f"{setting}: {problem}")


SEVERAL = {"corpus": "texts"}  # what a setting has several of, where its name is no plural
WORDS = {str: "a text", int: "a whole number", bool: "True or False", NoneType: "None"}


def check_fields(settings: Any) -> None:
    """Checks that every field of a dataclass holds what its type says, for people who pass what a type checker refuses.

    Types may be classes, `Literal`, unions of types, and sequences of one type. A bool is no number, and a text is no
    sequence of texts. A number is `Within` its bounds.

    Raises:
        SettingError: a field holds something else.

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
            raise SettingError(name, value, f"expected each of them to be {item}")
        shown = repr(value) if value is None or isinstance(value, str) else value
        raise SettingError(name, shown, f"expected {_words(hint)}")


def check_several(setting: str, value: object) -> None:
    """Refuses a single value, a text above all, where there may be several."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        noun = SEVERAL.get(setting, setting)
        raise SettingError(setting, value, f"expected several {noun}, such as a list of one text")


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
