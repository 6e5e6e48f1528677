"""What is published of the layout of results: JSON Schemas. The tables of docs/burnin.md come from the same types."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from ..records import Fields
from .golden import Register
from .pair_report import Pair
from .report import (
    Course,
    DeviceRow,
    ElementRow,
    ElementsPart,
    EndedRow,
    FindingRow,
    GoldenPart,
    Outlook,
    Report,
    Sensors,
    Settings,
    VerdictPart,
    WorkloadRow,
)
from .standing import Standing

FILES: Mapping[str, type[Fields]] = MappingProxyType(
    {"result": Report, "pair": Pair, "golden": Register, "verdict": Standing}
)
"""Layouts by name: `result.json`, `pair.json` and `pool.json`, golden registers, what `sdc verdict --json` prints."""
TABLES: tuple[type[Fields], ...] = (
    Report, VerdictPart, Settings, DeviceRow, Course, Sensors, WorkloadRow, FindingRow, ElementsPart, ElementRow,
    EndedRow, GoldenPart, Outlook,
)  # fmt: skip
"""Types of which docs/burnin.md has a table."""


def file_schema(name: str) -> dict[str, Any]:
    """A layout as JSON Schema (draft 2020-12); files have a field `checksum` besides.

    Args:
        name: one of `FILES`.

    Example:
        >>> from sdc.burnin.schema import file_schema
        >>> file_schema("result")["$ref"]
        '#/$defs/Report'
    """
    ((reference,), definitions) = msgspec.json.schema_components([FILES[name]], ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"jax-sdc {name}",
        **reference,
        "$defs": definitions,
    }
