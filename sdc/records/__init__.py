"""Records of runs on disk, deterministic execution, and the comparability of two runs.

- `format`: JSON files with checksums, one `Format` for each kind of file
- `lines`: files of lines that grow during a run
- `storage`: local disks, NFS and object stores
- `lock`: one writer at a time
- `layout`: the files of each kind of record, with types from `sdc.schema`
- `record`: writing and reading a record
- `determinism`, `devices`: everything that determines the bits of a result, and the hardware that computes these bits
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Records of runs, traces, campaigns and studies.
    from .record import FolderTaken as FolderTaken, Record as Record
    from .lock import RecordBusy as RecordBusy
    from .record import Contents as Contents, read_manifest as read_manifest, read_record as read_record
    from .storage import RecordError as RecordError
    from .format import to_json as to_json

    # Their layout.
    from .layout import KINDS as KINDS, Kind as Kind, json_schema as json_schema

    # Their author.
    from ..schema import Host as Host, identify as identify, stamp as stamp

    # Their hardware.
    from .devices import describe_devices as describe_devices, on_mesh as on_mesh

    # Determinism.
    from .determinism import (
        differences as differences,
        environment as environment,
        prepare as prepare,
        program_fingerprint as program_fingerprint,
    )

if TYPE_CHECKING:  # for the other packages of this project
    from .format import from_json as from_json
    from .determinism import (
        GPU_FLAGS as GPU_FLAGS,
        MOST_DEVICES as MOST_DEVICES,
        THREADS as THREADS,
        check_deterministic as check_deterministic,
    )
    from .devices import Sources as Sources
    from .format import (
        Format as Format,
        encode as encode,
        parse_json as parse_json,
        read_json as read_json,
        seal as seal,
        write_text as write_text,
    )
    from ..schema import now as now, package_version as package_version
    from .layout import (
        INJECTIONS as INJECTIONS,
        MANIFEST as MANIFEST,
        STEPS as STEPS,
        SUMMARY as SUMMARY,
        TRACE as TRACE,
    )
    from .record import Given as Given, write_summary as write_summary
    from .lock import Lock as Lock
    from .storage import (
        AnyPath as AnyPath,
        check_files as check_files,
        own_folder as own_folder,
        endless as endless,
        names as names,
        read_bytes as read_bytes,
        reason as reason,
        write_bytes as write_bytes,
    )

__getattr__, __dir__, __all__ = facade(__name__)
