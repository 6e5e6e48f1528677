"""The kinds of records: which files each has, and what numbers its lines."""

import dataclasses

from .fields import Fields
from .manifests import CampaignManifest, Manifest, RunManifest, StudyManifest, TraceManifest
from .parts import PartRow
from .rows import DiscardedRow, InjectionRow, MismatchRow, StepRow, TraceRow
from .storage import RecordError
from .summaries import CampaignSummary, Ending, RunSummary, StudySummary

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
