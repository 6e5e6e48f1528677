"""What it means that checks at random steps found nothing, and how long they take to find a fault.

Steps are divided into windows, and a check runs at one random step of each window of w steps. Each step is thus checked
with probability 1 / w, whatever the fault does, so the bounds need no assumption about when a device computes wrong
numbers. A check runs the step again. If the device is in a bad state at some steps, all of which would be found, all of
them go unchecked with a probability of at most the product of their (1 - 1 / w), spread out or in bursts (a stratified
sample; Cochran, *Sampling Techniques*, 1977, section 5.2, and 1 - k / w <= (1 - 1 / w)^k). If each computation is wrong
independently, n checks are all right with a probability of (1 - rate)^n. Both are at most exp(-sum of 1 / w over the
wrong steps), which the bound uses.
"""

import math
from collections.abc import Iterable, Mapping

from sdc.verdict import Judgement, Verdict, limit

CONFIDENCE = 0.95
LEAST_COVERED = 0.5  # of a step, for a verdict of clean
PLACES = 1_000  # of a burst within a window, over which its probability is averaged


def excludes(coverage: float | None, share: float) -> bool:
    """Returns whether the silence of a layer is a verdict of clean: it covers half of a step, and excludes that half of
    the steps were wrong.

    Args:
        coverage: share of the step that the layer covers; None if its silence bounds nothing.
        share: the largest share of wrong steps that is compatible with its silence.
    """
    return (coverage or 0.0) >= LEAST_COVERED and share <= 0.5


def judge_silence(steps: int, layers: Iterable[tuple[str, str, float | None, float]]) -> Judgement:
    """Returns the verdict on steps in which a guard found nothing.

    Args:
        steps: number of steps.
        layers: for each layer of evidence its name, what it compares, and the arguments of `excludes`.
    """
    enough = [(share, name, compares) for name, compares, coverage, share in layers if excludes(coverage, share)]
    if not enough:
        return Judgement(
            Verdict.INCONCLUSIVE,
            f"the guard found nothing, but its checks in {steps:,} steps are too few, or cover too little, to exclude "
            "that half of the steps were wrong",
        )
    share, name, compares = min(enough)
    return Judgement(
        Verdict.CLEAN,
        f"the guard found nothing in {steps:,} steps: {bounded(share)}, in what {name} compares ({compares})",
    )


def bounded(share: float) -> str:
    """Returns what silence excludes, in words."""
    most = limit(100 * share, 3, up=True)
    return f"with {100 * CONFIDENCE:.0f} % confidence, at most {most} % of the steps of each device were wrong"


def most_wrong(steps: Mapping[int, int], *, confidence: float = CONFIDENCE, recall: float = 1.0) -> float:
    """Returns the largest number of wrong steps that is compatible with checks that found nothing.

    Args:
        steps: numbers of steps by the length of their window; a length of 0 stands for steps that could not be checked.
        confidence: probability that the bound holds, before the checks run.
        recall: probability that a check finds a wrong step.

    Returns:
        The solution k of sum(recall / w_i) = -log(1 - confidence) over the k least checked steps, as a real number; at
        most the number of steps.

    Example:
        >>> from sdc.guarding import most_wrong
        >>> round(most_wrong({100: 10_000}))  # 3 / (1 / 100)
        300
    """
    left, wrong = -math.log1p(-confidence), 0.0
    for window, count in sorted(steps.items(), key=lambda item: (item[0] != 0, -item[0])):
        each = recall / window if window else 0.0
        if each * count >= left:
            return wrong + left / each
        left -= each * count
        wrong += count
    return wrong


def expected_delay(window: float, rate: float, *, burst: float = 1.0, recall: float = 1.0) -> float:
    """Returns the mean number of steps until a check finds a fault, from the beginning of the fault.

    If steps are wrong independently, the check of each window finds a wrong step with the probability recall * rate,
    and the mean is window * (1 / (recall * rate) - 1 / 2). Bursts of n steps begin n / rate steps apart on average, and
    the fault begins with one. A burst is found with a probability p that depends on its place in the windows that it
    touches; the mean is (1 / p - 1) * n / rate, and the time within a burst. The formula for bursts is for rates up to
    0.1.

    Args:
        window: length of the windows in steps; 1 if every step is checked.
        rate: share of wrong steps.
        burst: number of consecutive wrong steps.
        recall: probability that a check finds a wrong step.

    Example:
        >>> from sdc.guarding import expected_delay
        >>> round(expected_delay(100, 1e-3)), round(expected_delay(100, 1e-3, burst=1000))
        (99950, 58)
    """
    if rate <= 0 or recall <= 0:
        return math.inf
    if burst <= 1:
        return window * (1 / (recall * rate) - 0.5)
    found, within = _burst(window, burst, recall)
    return (1 / found - 1) * burst / rate + within


def _burst(window: float, burst: float, recall: float) -> tuple[float, float]:
    """Returns the probability that the checks of the windows that a burst touches find it, averaged over its place, and
    the mean time from its beginning until they do."""
    found = time = 0.0
    for place in range(PLACES):
        passed, part, missed = 0.0, min(burst, window * (1 - (place + 0.5) / PLACES)), 1.0
        while part > 0 and missed > 1e-9:
            here = missed * recall * part / window
            found, time, missed = found + here, time + here * (passed + part / 2), missed - here
            passed += part
            part = min(burst - passed, window)
    return found / PLACES, time / found
