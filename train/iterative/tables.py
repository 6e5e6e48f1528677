"""Rows of features with the class of each, such as CoverType's.

Letters of shapes:

    n  rows     M  features
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64, Int32

from .. import freeze
from .archives import DataError, read_file
from .parsing import parse_numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Labelled rows of features. The arrays are read-only.

    Attributes:
        features: every column has mean 0 and deviation 1, or is 0 where it never changes.
        labels: the class of each row, from 0.
        classes: number of classes, at least 2.
        source: where they come from, for the run record.
        digest: SHA-256 (hexadecimal) over the two arrays.
    """

    features: Float32[np.ndarray, "n M"]
    labels: Int32[np.ndarray, "n"]
    classes: int
    source: str
    digest: str


def read_table(path: str | Path) -> Table:
    """Reads a CSV file of numbers whose last column is the class, as in `covtype.data`.

    Args:
        path: the file, packed if its name ends in `.gz`. A first line of names is passed over. Classes are whole
            numbers, and numbered anew from 0 in their order.

    Returns:
        The rows in the order of the file. Features are standardized with sums that are rounded once, and so do not
        depend on the host.

    Raises:
        DataError: the file is missing, damaged or empty, a row has a field that is no finite number or another number
            of columns, a class is no whole number, or there is only one class or no feature.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from sdc.train.iterative.tables import read_table
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "rows.csv"
        ...     _ = file.write_text("1,5,2\\n3,5,7\\n")
        ...     table = read_table(file)
        >>> table.features.tolist(), table.labels.tolist(), table.classes
        ([[-1.0, 0.0], [1.0, 0.0]], [0, 1], 2)
    """
    numbers = parse_numbers(read_file(Path(path)), ",", path)
    values, last = numbers.values[:, :-1], numbers.values[:, -1]
    if not values.shape[1]:
        raise DataError(path, "has one column; expected features and then a class, between commas")
    numbers.refuse(last != np.floor(last), "a whole number as the class, in the last column")
    known, labels = np.unique(last, return_inverse=True)
    if len(known) < 2:
        raise DataError(path, f"has only the class {known[0]:g}; give rows of two classes or more")
    features = np.empty(values.shape, np.float32)
    for column in range(values.shape[1]):
        features[:, column] = _standardized(values[:, column])
    labels = labels.astype(np.int32)
    return Table(features, labels, len(known), str(path), freeze(features, labels))


def _standardized(values: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    centred = values - math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum(centred * centred) / len(values))
    if deviation == 0 or values.min() == values.max():  # a mean may be rounded
        return np.zeros_like(values)
    return centred / deviation
