"""Outcomes of training after a fault: their classes, detectors of faults, and detection latencies.

A struck run is compared with the clean run of the same program, step by step. The outcome of the struck run is one of:

===========  =======================================================================================================
outcome      meaning
===========  =======================================================================================================
not_reached  the struck operation was not executed: it is in a branch that was not taken
masked       after the struck step, the state and all observed numbers equal those of the clean run bit for bit
benign       the state differs, but no loss exceeds the clean loss by more than `SPIKE` times the clean loss
spike        a loss exceeded the clean loss by more than this amount, but the last observed loss does not
divergence   the last observed loss exceeds the clean loss by more than this amount
nonfinite    the loss, another observed number or the state became NaN or infinite
===========  =======================================================================================================

A training run can use each of these detectors without a clean twin:

===================  ===============================================================================================
detector             fires when
===================  ===============================================================================================
fingerprint          the digest of the state differs from the recorded one (needs a golden trace)
nonfinite            the loss, another observed number or the state is NaN or infinite
loss_spike           the loss rises from one step to the next by more than twice the largest rise in the clean run,
                     and by more than `LEAST_RISE` times the mean clean loss
gradient_norm_spike  the gradient norm grows from one step to the next by more than twice the largest factor in the
                     clean run, and by more than `LEAST_FACTOR`
history_bound        the optimizer's history exceeds a bound that no sound step can exceed, after He et al.,
                     *Understanding and Mitigating Hardware Failures in Deep Learning Training Systems* (ISCA 2023)
abft                 a checksum flags a row of a matrix product of the struck step (if products are checked)
===================  ===============================================================================================

The thresholds of the two spike detectors are derived from the clean run, so neither raises a false alarm on that run.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SPIKE = 0.1  # least excess of a loss over the clean loss in a spike, as a share of the clean loss
VISIBLE = 1e-3  # least visible difference between a loss and the clean loss, as a share of the clean loss
LEAST_RISE = 0.05
LEAST_FACTOR = 3.0
OUTCOMES = ("not_reached", "masked", "benign", "spike", "divergence", "nonfinite")
DETECTORS = ("fingerprint", "nonfinite", "loss_spike", "gradient_norm_spike", "history_bound")
ABFT = "abft"


class Observed(NamedTuple):
    """Numbers observed in one step of a run.

    Attributes:
        loss: loss of the step.
        gradient_norm: norm of the step's gradient; None if not observed.
        history: largest ratio of the optimizer's history to its bound; None if not observed.
        finite: whether the state after the step and all of these numbers are finite.
        digest: digest of the state after the step and of all of these numbers.
    """

    loss: float
    gradient_norm: float | None
    history: float | None
    finite: bool
    digest: tuple[int, int]


class Thresholds(NamedTuple):
    """Thresholds of the spike detectors: for the rise in the loss, and for the growth factor of the gradient norm."""

    rise: float
    factor: float


def thresholds(clean: Sequence[Observed]) -> Thresholds:
    """Returns the thresholds of the spike detectors, calibrated on a clean run."""
    losses = [step.loss for step in clean]
    norms = [step.gradient_norm for step in clean if step.gradient_norm is not None]
    rises = [b - a for a, b in itertools.pairwise(losses)]
    factors = [b / a for a, b in itertools.pairwise(norms) if a > 0]
    least = LEAST_RISE * sum(map(abs, losses)) / max(len(losses), 1)
    return Thresholds(max([least, *(2 * rise for rise in rises)]), max([LEAST_FACTOR, *(2 * f for f in factors)]))


def decided(clean: Observed, struck: Observed, *, first: bool) -> bool:
    """Returns whether the outcome is certain after a step, because it is masked or nonfinite."""
    return not struck.finite or (first and struck.digest == clean.digest)


def classify(clean: Sequence[Observed], struck: Sequence[Observed], start: int, limits: Thresholds) -> dict[str, Any]:
    """Returns the outcome, the detections and the latencies of one struck run.

    Args:
        clean: the whole clean run.
        struck: the struck step and the observed steps after it.
        start: number of the struck step.
        limits: see `thresholds`.

    Returns:
        `outcome`, `followed` (number of observed steps after the struck step), `peak_excess` and `last_excess` (excess
        of the loss over the clean loss, as a share of the clean loss; None if not finite), `detected` (for each
        detector, the number of steps from fault to detection, or None), `visible_after` (number of steps until the loss
        differs visibly, or None).
    """
    same = clean[start : start + len(struck)]
    excess = [_excess(a.loss, b.loss) for a, b in zip(same, struck, strict=True)]
    finite = [value for value in excess if value is not None]
    detected: dict[str, int | None] = dict.fromkeys(DETECTORS)
    for latency, (a, b) in enumerate(zip(same, struck, strict=True)):
        before = struck[latency - 1] if latency else clean[start - 1] if start else None
        for name, fires in _fires(a, b, before, limits).items():
            if fires and detected[name] is None:
                detected[name] = latency
    if struck[0].digest == same[0].digest:
        outcome = "masked"
    elif not all(step.finite for step in struck):
        outcome = "nonfinite"
    elif finite[-1] > SPIKE:
        outcome = "divergence"
    else:
        outcome = "spike" if max(finite) > SPIKE else "benign"
    visible = (latency for latency, value in enumerate(excess) if value is None or abs(value) > VISIBLE)
    return {
        "outcome": outcome,
        "followed": len(struck) - 1,
        "peak_excess": max(finite, default=None),
        "last_excess": excess[-1],
        "detected": detected,
        "visible_after": next(visible, None),
    }


def _excess(clean: float, struck: float) -> float | None:
    return (struck - clean) / max(abs(clean), 1e-30) if math.isfinite(struck) else None


def _fires(clean: Observed, struck: Observed, before: Observed | None, limits: Thresholds) -> Mapping[str, bool]:
    """Returns, for each detector, whether it fires at a step; only the fingerprint uses the clean run."""
    rise = struck.loss - before.loss if before is not None else 0.0
    norm, earlier = struck.gradient_norm, before.gradient_norm if before is not None else None
    return {
        "fingerprint": struck.digest != clean.digest,
        "nonfinite": not struck.finite,
        # The detector `nonfinite` covers values that are not finite.
        "loss_spike": math.isfinite(rise) and rise > limits.rise,
        "gradient_norm_spike": (
            norm is not None
            and earlier is not None
            and math.isfinite(norm)
            and math.isfinite(earlier)
            and norm > limits.factor * earlier
        ),
        "history_bound": struck.history is not None and struck.history > 1,
    }
