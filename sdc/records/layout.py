"""The layout of records: the files of each kind, the numbering of their lines, and the published schema."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from .. import schema
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
    row: type[schema.Fields]  # type of its lines


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of record.

    Attributes:
        name: name of the kind in the manifest.
        manifest: type of `manifest.json`.
        summary: type of `summary.json`.
        lines: file with one line for each number, or None.
        details: file with further lines for a number, or None.
        discarded: file with the earlier lines of repeated steps, or None if such lines prove nothing.
        number: the field that numbers the lines.
    """

    name: str
    manifest: type[schema.Manifest]
    summary: type[schema.Ending]
    lines: LineFile | None = None
    details: LineFile | None = None
    discarded: LineFile | None = None
    number: str = "step"

    @property
    def files(self) -> tuple[LineFile, ...]:
        """The files of lines. Details come first, since they are written first."""
        return tuple(file for file in (self.details, self.lines) if file is not None)

    @property
    def has_mismatches(self) -> bool:
        """Whether the file of details holds mismatches."""
        return self.details is not None and self.details.row is schema.MismatchRow


_STEPS, _DISCARDED = LineFile(STEPS, schema.StepRow), LineFile(DISCARDED, schema.DiscardedRow)
_MISMATCHES, _INJECTIONS = LineFile(MISMATCHES, schema.MismatchRow), LineFile(INJECTIONS, schema.InjectionRow)

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("twin", schema.RunManifest, schema.RunSummary, _STEPS, _MISMATCHES, _DISCARDED),
        Kind("train", schema.RunManifest, schema.RunSummary, _STEPS, _MISMATCHES, _DISCARDED),
        Kind("trace", schema.TraceManifest, schema.RunSummary, _STEPS, LineFile(TRACE, schema.TraceRow), _DISCARDED),
        Kind(
            "campaign",
            schema.CampaignManifest,
            schema.CampaignSummary,
            LineFile(INJECTIONS, schema.InjectionRow),
            number="injection",
        ),
        Kind("abft study", schema.ProductsManifest, schema.ProductsSummary),
        *(
            Kind(name, schema.StudyManifest, schema.StudySummary, LineFile(PARTS, schema.PartRow), number="part")
            for name in ("aggregation study", "scar study", "nodes study", "finetune study")
        ),
        Kind("estimate", schema.EstimateManifest, schema.EstimateSummary),
    )
}
"""All kinds of records, by their names in the manifest."""


def kind_of(name: object) -> Kind:
    """Returns the entry of `KINDS` with the given name; raises RecordError if no kind has this name."""
    if not isinstance(name, str) or name not in KINDS:
        raise RecordError(f"kind of record {name!r} is unknown; expected one of {', '.join(KINDS)}")
    return KINDS[name]


# Types for which the documentation has a table.
TABLES: tuple[type[schema.Fields], ...] = (
    schema.Header, schema.Manifest, schema.RunManifest, schema.TraceManifest, schema.CampaignManifest,
    schema.StudyManifest, schema.Host, schema.Environment, schema.Device, schema.Data, schema.Suspect, schema.StepRow,
    schema.SiteCounts, schema.TwinCounts, schema.MismatchRow, schema.RankRow, schema.TraceRow, schema.InjectionRow,
    schema.PartRow, schema.Ending, schema.RunSummary, schema.CampaignSummary, schema.StudySummary, schema.GuardFinding,
    schema.GuardTotals, schema.GuardLayer, Holder,
)  # fmt: skip


def json_schema() -> dict[str, Any]:
    """Returns the layout of records as JSON Schema (draft 2020-12).

    Returns:
        `$defs` describes every object; `files` maps each kind of record and each of its files to the object in the file
        or in each line of the file.
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
    named = dict(zip(types, references, strict=True))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Records of jax-sdc",
        "files": {kind: {name: named[type] for name, type in names.items()} for kind, names in files.items()},
        "$defs": _as_written(definitions),
    }


def _as_written(part: Any) -> Any:
    """Extends a schema so that each number may also be non-finite."""
    if isinstance(part, list):
        return [_as_written(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "number" and len(part) == 1:
        return {"anyOf": [part, {"enum": sorted(NON_FINITE)}]}
    return {key: _as_written(each) for key, each in part.items()}


def render_tables(page: str, types: Sequence[type[Any]] = TABLES) -> str:
    """Replaces each line `<!-- fields: TYPE -->` of a page with the table of the fields of that type.

    A table has one row for each field that the type does not inherit; required fields come first.
    """
    tables = {type.__name__: type for type in types}

    def table(match: re.Match[str]) -> str:
        type = tables[match[1]]
        inherited = {} if type.__base__ in (schema.Fields, object) else _descriptions(type.__base__)
        shown = [f"| `{name}` | {text} |" for name, text in _descriptions(type).items() if inherited.get(name) != text]
        return "\n".join(["| field | meaning |", "|---|---|", *shown])

    return re.sub(r"^<!-- fields: (\w+) -->$", table, page, flags=re.MULTILINE)


def _descriptions(type: Any) -> dict[str, str]:
    """Returns descriptions by field, required fields first, so that the field that numbers the lines comes first."""
    info = msgspec.inspect.type_info(type)
    assert isinstance(info, msgspec.inspect.StructType | msgspec.inspect.DataclassType)
    tag = getattr(info, "tag", None)
    found = {} if tag is None else {"format": f"`{tag}`"}
    for field in sorted(info.fields, key=lambda field: not field.required):
        assert isinstance(field.type, msgspec.inspect.Metadata), f"{type.__name__}.{field.name} has no description"
        found[field.encode_name] = str((field.type.extra_json_schema or {})["description"])
    return found
