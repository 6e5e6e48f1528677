"""The layout of records: which files each kind has, what numbers their lines, and what is published of it."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..schema import (
    CampaignManifest,
    CampaignSummary,
    Data,
    Device,
    DiscardedRow,
    Ending,
    Environment,
    Fields,
    Header,
    Host,
    InjectionRow,
    Manifest,
    MismatchRow,
    PartRow,
    RankRow,
    RunManifest,
    RunSummary,
    SiteCounts,
    StepRow,
    StudyManifest,
    StudySummary,
    Suspect,
    TraceManifest,
    TraceRow,
    TwinCounts,
)
from .format import NON_FINITE
from .lock import LOCK, Holder
from .storage import RecordError

MANIFEST, SUMMARY = "manifest.json", "summary.json"
STEPS, MISMATCHES, TRACE, INJECTIONS = "steps.jsonl", "mismatches.jsonl", "trace.jsonl", "injections.jsonl"
DISCARDED, PARTS = "discarded.jsonl", "parts.jsonl"


@dataclasses.dataclass(frozen=True)
class LineFile:
    """A file of lines."""

    name: str  # name of the file
    row: type[Fields]  # type of its lines


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of record.

    Attributes:
        name: its name in the manifest.
        manifest: type of `manifest.json`.
        summary: type of `summary.json`.
        lines: one line for each number, or None for a record without lines.
        details: lines that a number can have beside its own, or None.
        discarded: lines of what was run again, or None where that proves nothing.
        number: the field that numbers the lines.
    """

    name: str
    manifest: type[Manifest]
    summary: type[Ending]
    lines: LineFile | None = None
    details: LineFile | None = None
    discarded: LineFile | None = None
    number: str = "step"

    @property
    def files(self) -> tuple[LineFile, ...]:
        """Its files of lines. Details come first, as they are written first."""
        return tuple(file for file in (self.details, self.lines) if file is not None)


_STEPS, _DISCARDED = LineFile(STEPS, StepRow), LineFile(DISCARDED, DiscardedRow)

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("twin", RunManifest, RunSummary, _STEPS, LineFile(MISMATCHES, MismatchRow), _DISCARDED),
        Kind("train", RunManifest, RunSummary, _STEPS, LineFile(MISMATCHES, MismatchRow), _DISCARDED),
        Kind("trace", TraceManifest, RunSummary, _STEPS, LineFile(TRACE, TraceRow), _DISCARDED),
        Kind("campaign", CampaignManifest, CampaignSummary, LineFile(INJECTIONS, InjectionRow), number="injection"),
        Kind("abft study", StudyManifest, StudySummary),
        Kind("aggregation study", StudyManifest, StudySummary),
        Kind("scar study", StudyManifest, StudySummary, LineFile(PARTS, PartRow), number="part"),
        Kind("nodes study", StudyManifest, StudySummary),
        Kind("estimate", StudyManifest, StudySummary),
    )
}
"""Every kind, by its name in the manifest."""


def kind_of(name: object) -> Kind:
    """The entry of `KINDS` with that name; a RecordError where there is none."""
    if not isinstance(name, str) or name not in KINDS:
        raise RecordError(f"kind of record {name!r} is unknown; expected one of {', '.join(KINDS)}")
    return KINDS[name]


TABLES: tuple[type[Fields], ...] = (
    Header, Manifest, RunManifest, TraceManifest, CampaignManifest, StudyManifest, Host, Environment, Device, Data,
    Suspect, StepRow, SiteCounts, TwinCounts, MismatchRow, RankRow, TraceRow, InjectionRow,
    PartRow, Ending, RunSummary, CampaignSummary, StudySummary, Holder,
)  # fmt: skip
"""Types of which the documentation has a table."""


def json_schema() -> dict[str, Any]:
    """The layout of records as JSON Schema (draft 2020-12).

    Returns:
        `$defs` describes every object; `files` names by kind of record and file the object that the file holds, or
        that each of its lines holds.
    """
    files = {
        kind.name: {
            MANIFEST: kind.manifest,
            **{file.name: file.row for file in (*reversed(kind.files), kind.discarded) if file is not None},
            SUMMARY: kind.summary,
            LOCK: Holder,
        }
        for kind in KINDS.values()
    }
    types = list(dict.fromkeys(type for names in files.values() for type in names.values()))
    references, definitions = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    definitions = _as_written(definitions)
    named = dict(zip(types, references, strict=True))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Records of jax-sdc",
        "files": {kind: {name: named[type] for name, type in names.items()} for kind, names in files.items()},
        "$defs": definitions,
    }


def _as_written(schema: Any) -> Any:
    """A schema in which each number may also be one that JSON has no word for."""
    if isinstance(schema, list):
        return [_as_written(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "number" and len(schema) == 1:
        return {"anyOf": [schema, {"enum": sorted(NON_FINITE)}]}
    return {key: _as_written(each) for key, each in schema.items()}


def field_table(type: type[Fields]) -> str:
    """A table of the fields of a type, in Markdown, one line for each that it does not inherit; required ones first."""
    inherited = {} if type.__base__ is Fields else _descriptions(type.__base__)
    shown = {name: text for name, text in _descriptions(type).items() if inherited.get(name) != text}
    return "\n".join(["| field | meaning |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in shown.items())])


def render_tables(page: str, types: Sequence[type[Fields]] = TABLES) -> str:
    """A page with current tables of fields, between `<!-- fields: TYPE -->` and `<!-- end -->`."""
    tables = {type.__name__: type for type in types}
    pattern = re.compile(r"^(<!-- fields: (\w+) -->\n).*?^(<!-- end -->)$", re.DOTALL | re.MULTILINE)
    return pattern.sub(lambda match: f"{match[1]}\n{field_table(tables[match[2]])}\n\n{match[3]}", page)


def _descriptions(type: Any) -> dict[str, str]:
    """Required fields come first, so that the number of a line heads its table."""
    info = msgspec.inspect.type_info(type)
    assert isinstance(info, msgspec.inspect.StructType)
    found = {}
    if info.tag is not None:
        found["format"] = f"`{info.tag}`"
    for field in sorted(info.fields, key=lambda field: not field.required):
        assert isinstance(field.type, msgspec.inspect.Metadata), f"{type.__name__}.{field.name} has no description"
        found[field.encode_name] = str((field.type.extra_json_schema or {})["description"])
    return found
