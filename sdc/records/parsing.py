"""JSON as it comes from files: of bounded depth, so that whatever walks through it comes to its end.

Python's parser and every function that calls itself for each level fail with a RecursionError, at depths that depend on
the version of Python and on who calls. A bound of one's own is the same everywhere and can be told.
"""

import json
from collections.abc import Callable
from typing import Any

DEEPEST = 100
"""Lists and objects within one another. Records need seven."""


def parse_json(text: str | bytes, decode: Callable[[Any], Any] = json.loads) -> Any:
    """The value of a JSON text.

    Args:
        text: the text.
        decode: reads it, and raises a ValueError or a RecursionError where it cannot.

    Raises:
        ValueError: it is no JSON, or is nested deeper than `DEEPEST`.

    Example:
        >>> from sdc.records.parsing import parse_json
        >>> parse_json('{"text": ["a"]}')
        {'text': ['a']}
        >>> parse_json("[" * 101 + "]" * 101)
        Traceback (most recent call last):
        ValueError: it is nested deeper than 100 levels
    """
    try:
        value = decode(text)
    except RecursionError:
        deep = True
    else:
        deep = _brackets(text) > DEEPEST and _is_deep(value)
    if deep:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    return value


def _brackets(text: str | bytes) -> int:
    """Most levels that a text can have, which a line of a record has not: to count them takes no time."""
    return text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")


def _is_deep(value: Any) -> bool:
    """Looked at level by level, without recursion."""
    level = [value]
    for _ in range(DEEPEST):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in inner for item in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in level)
