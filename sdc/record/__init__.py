"""The record of a run on disk, what makes a run repeat itself, and whether two may be compared."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Run folders.
    from .records import (
        Campaign as Campaign,
        Run as Run,
        RunWriter as RunWriter,
        read_campaign as read_campaign,
        read_kind as read_kind,
        read_run as read_run,
    )
    from .files import RecordError as RecordError, to_json as to_json

    # Determinism.
    from .determinism import (
        differences as differences,
        environment as environment,
        prepare as prepare,
        program_fingerprint as program_fingerprint,
    )

__getattr__, __dir__, __all__ = facade(__name__)
