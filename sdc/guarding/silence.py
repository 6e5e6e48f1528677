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
from collections.abc import Mapping

CONFIDENCE = 0.95


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

    Wrong steps come in bursts at random times. A check of one random step in each window finds a burst of n steps with
    the probability p = recall * n / window, if n is at most `window`, and 1 - (1 - recall)^(n / window) otherwise.
    Bursts begin every n / rate steps on average, so the mean is n / (rate p).

    Args:
        window: length of the windows in steps; 1 if every step is checked.
        rate: share of wrong steps.
        burst: number of consecutive wrong steps.
        recall: probability that a check finds a wrong step.

    Example:
        >>> from sdc.guarding import expected_delay
        >>> round(expected_delay(100, 1e-3)), round(expected_delay(100, 1e-3, burst=1000))
        (100000, 1000000)
    """
    if rate <= 0:
        return math.inf
    windows = burst / window
    found = recall * windows if windows <= 1 else 1 - (1 - recall) ** windows if recall < 1 else 1.0
    return burst / (rate * found) if found else math.inf
