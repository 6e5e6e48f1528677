"""Watching a training run: comparisons that cost a percent of a step.

- `recomputation`: compares what a step computes twice (`witness`).
- `watch`: runs a step with evidence for a share of its time (`guard`); `schedule` chooses the steps.
- `evidence`: layers of evidence: `checked_steps` (witness and abft), `state`, `neighbours` (other devices), `replays`
  (later, or by the vendor), `spikes`.
- `nonfinite`: the first operation that makes a NaN or an infinity.
- `silence`: what it means that nothing was found.
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

    # Evidence from a running loop.
    from .watch import GuardReport as GuardReport, LayerReport as LayerReport, Watch as Watch, guard as guard
    from .watch import layers_for as layers_for
    from .evidence import Detection as Detection, Layer as Layer
    from .checked_steps import Checksums as Checksums, Recomputation as Recomputation
    from .neighbours import Ring as Ring
    from .replays import Replay as Replay, VendorChecker as VendorChecker
    from .spikes import Spikes as Spikes
    from .state import State as State

    # Numbers that are not finite.
    from .nonfinite import first_nonfinite as first_nonfinite

    # What silence means.
    from .silence import excludes as excludes, expected_delay as expected_delay, most_wrong as most_wrong

if TYPE_CHECKING:  # for the other packages of this project
    from .silence import judge_silence as judge_silence

__getattr__, __dir__, __all__ = facade(__name__)
