"""Numbers in rows of text, such as a CSV file; what is wrong with them is told by the number of the line.

Letters of shapes:

    n  rows     M  columns
"""

import codecs
import dataclasses
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float64

from .archives import DataError

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
_SHOWN = 40  # characters of a bad line


@dataclasses.dataclass(frozen=True, eq=False)
class Numbers:
    """Rows of numbers, all of one length and finite in float32.

    Attributes:
        values: the numbers; at least one row and one column.
        source: where they come from, for messages.
        data: the text they were read from.
        header: whether its first line is one of names.
    """

    values: Float64[np.ndarray, "n M"]
    source: str | Path
    data: bytes
    header: bool

    def refuse(self, bad: Bool[np.ndarray, "n"], expected: str) -> None:
        """Raises a DataError that shows the first of the bad rows, and its line; nothing if there is none."""
        if not bad.any():
            return
        number, line = next(itertools.islice(_lines(self.data), int(bad.argmax()) + self.header, None))
        raise DataError(self.source, f"{_shown(number, line)}, expected {expected}; mend that line")


def parse_numbers(data: bytes, separator: str, source: str | Path) -> Numbers:
    """Reads rows of numbers between separators; blank lines are passed over, and a first line without any number too.

    Args:
        data: the text, in ASCII.
        separator: what stands between two numbers.
        source: where the text comes from, for messages.

    Raises:
        DataError: there is no row, a row has another number of columns than the first line, a field is no number, or a
            number is not finite in float32.

    Example:
        >>> from sdc.train.iterative.parsing import parse_numbers
        >>> parse_numbers(b"a,b\\n1,2\\n3,4\\n", ",", "example").values.tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    lines = (line for _, line in _lines(data))
    first = next(lines, "")
    header = not any(_is_number(field) for field in first.split(separator))
    rows = lines if header else itertools.chain([first], lines)
    row = next(rows, None)
    if row is None:
        raise DataError(source, "has no row of numbers; give a file that does")
    comma = separator if len(separator) == 1 else "\t"  # NumPy knows no longer ones
    try:
        values = np.loadtxt(
            (line.replace(separator, comma) for line in itertools.chain([row], rows)),
            delimiter=comma,
            comments=None,
            ndmin=2,
        )
    except ValueError as error:
        raise _fault(data, separator, source, header) from error
    numbers = Numbers(values, source, data, header)
    if values.shape[1] != len(first.split(separator)):
        raise _fault(data, separator, source, header)
    largest = np.abs(values).max(axis=1)  # NaN where there is one
    numbers.refuse(~(largest <= np.finfo(np.float32).max), "finite numbers of float32")
    return numbers


def first_line(data: bytes) -> str:
    """The first line that is not blank; an empty text if there is none."""
    return next((line for _, line in _lines(data)), "")


def _lines(data: bytes) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    text = io.TextIOWrapper(io.BytesIO(data.removeprefix(codecs.BOM_UTF8)), "latin-1")
    return ((number, line.rstrip("\n")) for number, line in enumerate(text, 1) if not line.isspace())


def _is_number(field: str) -> bool:
    return _NUMBER.fullmatch(field) is not None or field.strip().lower().lstrip("+-") in ("nan", "inf", "infinity")


def _fault(data: bytes, separator: str, source: str | Path, header: bool) -> DataError:
    """What is wrong with the first bad line."""
    columns = None
    for index, (number, line) in enumerate(_lines(data)):
        fields = line.split(separator)
        columns = columns or len(fields)
        if len(fields) != columns:
            return DataError(
                source, f"{_shown(number, line)}, {len(fields)} columns, expected {columns}; mend that line"
            )
        if not (header and index == 0):
            for column, field in enumerate(fields, 1):
                if not _is_number(field):
                    return DataError(
                        source, f"{_shown(number, line)}, expected a number in column {column}; mend that line"
                    )
    return DataError(source, f"has values that are no numbers between {separator!r}; mend the file")


def _shown(number: int, line: str) -> str:
    text = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
    return f"line {number} is {text!r}"
