"""Comparison of two runs of a step, side by side or one after the other.

- `digests`: 64-bit digests of tensors and of the values of a step (`fingerprint`); `digest_kernel`: a kernel for TPUs.
- `_lockstep`: twins that are compared and repaired at every probe; `mismatch`: measures of their differences.
- `first_differences`: the first difference between two fingerprints, and bisection.
- `traces`: fingerprints of a run on disk.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Digests.
    from .digests import digest as digest, fingerprint as fingerprint, tree_digest as tree_digest

    # Side by side.
    from ._lockstep import Compare as Compare, Exchange as Exchange, lockstep as lockstep, synchronize as synchronize
    from ._lockstep import Agreement as Agreement, agreement as agreement, squared_distance as squared_distance
    from .mismatch import (
        Difference as Difference,
        Mismatch as Mismatch,
        difference as difference,
        mismatch_frequency as mismatch_frequency,
        mismatch_severity as mismatch_severity,
        noise_to_signal as noise_to_signal,
    )

    # One after the other.
    from .first_differences import (
        Bisection as Bisection,
        FirstDifference as FirstDifference,
        Round as Round,
        bisect as bisect,
        first_difference as first_difference,
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
    from ._lockstep import from_reference as from_reference, gather_twins as gather_twins
    from .digests import ALGORITHM as ALGORITHM, DigestRule as DigestRule, GOLDEN as GOLDEN, MIX as MIX
    from .digests import row_digests as row_digests
    from .first_differences import describe_place as describe_place, place_of as place_of
    from .mismatch import (
        LARGEST as LARGEST,
        largest_severity as largest_severity,
        mean_frequency as mean_frequency,
        merge as merge,
        no_difference as no_difference,
    )
    from .traces import SITES as SITES, encode as encode, sites_table as sites_table

__getattr__, __dir__, __all__ = facade(__name__)
