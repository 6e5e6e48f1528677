"""JSON as it comes from files: of bounded depth, so that whatever walks through it comes to its end.

Python's parser and every function that calls itself for each level fail with a RecursionError, at depths that depend on
the version of Python and on who calls. A bound of one's own is the same everywhere and can be told.
"""

import json
from typing import Any

DEEPEST = 100
"""Lists and objects within one another. Records need seven."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or is nested deeper than `DEEPEST`.

    Example:
        >>> from sdc.record.parsing import parse_json
        >>> parse_json('{"text": ["a"]}')
        {'text': ['a']}
        >>> parse_json("[" * 101 + "]" * 101)
        Traceback (most recent call last):
        ValueError: it is nested deeper than 100 levels
    """
    try:
        value = json.loads(text)
    except RecursionError:
        value, level = None, DEEPEST + 1
    else:
        level = _depth(value)
    if level > DEEPEST:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    return value


def _depth(value: Any) -> int:
    """Levels of a value, as far as they matter; counted level by level, without recursion."""
    depth, level = 0, [value]
    while depth <= DEEPEST and (level := [each for each in level if isinstance(each, dict | list)]):
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return depth
