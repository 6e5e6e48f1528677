"""Watching a training run: comparisons that cost a percent of a step.

- `recomputation`: compares what a step computes twice (`witness`).
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # What a step computes twice.
    from .recomputation import (
        WitnessCalibration as WitnessCalibration,
        NotRepeatable as NotRepeatable,
        Witnessed as Witnessed,
        calibrate as calibrate,
        comparable as comparable,
        first_mismatch as first_mismatch,
        witness as witness,
        witnessed_share as witnessed_share,
    )

__getattr__, __dir__, __all__ = facade(__name__)
