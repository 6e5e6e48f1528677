"""The record of a run on disk, what makes a run repeat itself, and whether two may be compared."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Records of runs, traces, campaigns and studies.
    from .lifecycle import FolderTaken as FolderTaken, Record as Record
    from .lock import RecordBusy as RecordBusy
    from .reading import Contents as Contents, read_manifest as read_manifest, read_record as read_record
    from .files import RecordError as RecordError, to_json as to_json

    # Their layout.
    from .kinds import KINDS as KINDS, Kind as Kind
    from .schema import json_schema as json_schema

    # Who wrote them.
    from .identity import Host as Host, identify as identify, stamp as stamp

    # What they computed on.
    from .devices import describe_devices as describe_devices, on_mesh as on_mesh

    # Determinism.
    from .determinism import (
        Difference as Difference,
        differences as differences,
        environment as environment,
        prepare as prepare,
        program_fingerprint as program_fingerprint,
    )

if TYPE_CHECKING:  # for the other packages of this project
    from .determinism import (
        GPU_FLAGS as GPU_FLAGS,
        MOST_DEVICES as MOST_DEVICES,
        THREADS as THREADS,
        check_deterministic as check_deterministic,
    )
    from .devices import Sources as Sources
    from .fields import Fields as Fields, Number as Number, SEALED as SEALED, about as about
    from .files import (
        encode as encode,
        read_json as read_json,
        write_json as write_json,
        write_sealed as write_sealed,
        write_text as write_text,
    )
    from .format import Format as Format, Header as Header
    from .identity import package_version as package_version
    from .integrity import is_sound as is_sound, seal as seal
    from .kinds import (
        INJECTIONS as INJECTIONS,
        MANIFEST as MANIFEST,
        STEPS as STEPS,
        SUMMARY as SUMMARY,
        TRACE as TRACE,
    )
    from .lifecycle import check_free as check_free
    from .lock import Lock as Lock
    from .manifests import (
        CampaignManifest as CampaignManifest,
        Device as Device,
        Environment as Environment,
        RunManifest as RunManifest,
        StudyManifest as StudyManifest,
        TraceManifest as TraceManifest,
    )
    from .parts import PartRow as PartRow
    from .parsing import parse_json as parse_json
    from .rows import (
        DiscardedRow as DiscardedRow,
        InjectionRow as InjectionRow,
        MismatchRow as MismatchRow,
        OutlookRow as OutlookRow,
        ProductCounts as ProductCounts,
        ProductRow as ProductRow,
        RecoveryRow as RecoveryRow,
        SiteCounts as SiteCounts,
        StepRow as StepRow,
        TwinCounts as TwinCounts,
    )
    from .summaries import CampaignSummary as CampaignSummary, RunSummary as RunSummary
    from .storage import (
        AnyPath as AnyPath,
        endless as endless,
        names as names,
        read_bytes as read_bytes,
        reason as reason,
        write_bytes as write_bytes,
    )

__getattr__, __dir__, __all__ = facade(__name__)
