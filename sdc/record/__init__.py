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

__getattr__, __dir__, __all__ = facade(__name__)
