"""Two runs of a step: digests of their values, comparison in lock-step, traces, and the first place where they part."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Digests.
    from .digests import digest as digest, tree_digest as tree_digest
    from ._fingerprint import fingerprint as fingerprint

    # Side by side.
    from ._lockstep import (
        Compare as Compare,
        Exchange as Exchange,
        lockstep as lockstep,
        synchronize as synchronize,
    )
    from .mismatch import Mismatch as Mismatch
    from ._agreement import Agreement as Agreement, agreement as agreement, squared_distance as squared_distance
    from .compare import (
        Difference as Difference,
        difference as difference,
        mismatch_frequency as mismatch_frequency,
        mismatch_severity as mismatch_severity,
        noise_to_signal as noise_to_signal,
    )

    # One after the other.
    from ._first_difference import FirstDifference as FirstDifference, first_difference as first_difference
    from ._bisect import (
        Bisection as Bisection,
        Round as Round,
        bisect as bisect,
        guilty_scope as guilty_scope,
        next_round as next_round,
    )

    # Traces on disk.
    from .traces import (
        NotComparable as NotComparable,
        Trace as Trace,
        TraceDifference as TraceDifference,
        TraceWriter as TraceWriter,
        check_comparable as check_comparable,
        diff as diff,
        read_trace as read_trace,
    )

if TYPE_CHECKING:  # for the other packages of this project
    from ._agreement import from_reference as from_reference, gather_twins as gather_twins
    from ._first_difference import describe_place as describe_place, place_of as place_of
    from .compare import (
        LARGEST as LARGEST,
        largest_severity as largest_severity,
        mean_frequency as mean_frequency,
        merge as merge,
        no_difference as no_difference,
    )
    from .digests import ALGORITHM as ALGORITHM, GOLDEN as GOLDEN, MIX as MIX, row_digests as row_digests
    from .traces import SITES as SITES, encode as encode, sites_table as sites_table

__getattr__, __dir__, __all__ = facade(__name__)
