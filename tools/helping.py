"""Descriptions of commands as `--help` shows them: paragraphs as such, and each example on a line of its own."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Iterator
from typing import Any

MARK = "Example: "


@functools.cache
def lay_out(kind: Any) -> Any:
    """Lays out the docstrings of a command's options, and of those of the commands below it; returns the options.

    tyro joins the lines of a paragraph, those of several examples too, and breaks it before each line that does not
    begin with a letter: whole paragraphs leave it nothing to join, and examples below the first one are indented.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if kind.__doc__:
            kind.__doc__ = laid_out(kind.__doc__)
        for hint in typing.get_type_hints(kind).values():
            for below in typing.get_args(hint):
                lay_out(below)
    return kind


def laid_out(text: str) -> str:
    """A docstring with one line for each paragraph and example.

    Example:
        >>> from sdc.tools.helping import laid_out
        >>> print(laid_out("Says it.\\n\\nExample: sdc a\\nExample: sdc b\\n\\nExit codes: 0,\\n1 or 2."))
        Says it.
        <BLANKLINE>
        Example: sdc a
                 sdc b
        <BLANKLINE>
        Exit codes: 0, 1 or 2.
    """
    return "\n\n".join("\n".join(_lines(part)) for part in inspect.cleandoc(text).split("\n\n"))


def _lines(paragraph: str) -> Iterator[str]:
    """Lines of a paragraph: its examples, the first of them marked and the others below it, or all of it as one."""
    first, *more = paragraph.split(f"\n{MARK}")
    yield " ".join(first.split("\n"))
    yield from (" " * len(MARK) + " ".join(each.split("\n")) for each in more)
