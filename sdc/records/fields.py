"""What the fields of a record have in common: their description, and numbers that JSON has no word for."""

from typing import TypeAlias

import msgspec

SCHEMA = 3
"""Version of the layout of records. It changes with every change that an older reader would misread."""
READABLE = (1, 2, 3)
"""Versions that this package reads. Schema 1 is that of jax-sdc 0.1: it has neither `version` nor `host`."""
SEALED = 3
"""Since this version files and lines carry checksums."""

Number: TypeAlias = int | float | None
"""A measured number or count; `null` was not measured. NaN and infinity are strings in files, and numbers when read."""
Numbers: TypeAlias = Number | list[Number]
"""One number for each twin, or a single one."""


def about(text: str, *, ge: int | None = None, le: int | None = None) -> msgspec.Meta:
    """Describes a field in Markdown, for the published schema and the tables of the documentation.

    It stands beside the type in `Annotated`. `ge` and `le` are the smallest and the largest number allowed, if any is.
    """
    return msgspec.Meta(description=text, ge=ge, le=le)


class Fields(msgspec.Struct):
    """A JSON object of a record. Fields that its type does not name are allowed, and readers keep them."""
