"""Whether bursts such as the published study saw would be seen by a burn-in: its intervals were each observed once."""

import math
from collections.abc import Iterable

from sdc.burnin import Outlook

from .waiting import mean_interval_limits, probability_seen

PUBLISHED = {"node 13": (450, True), "node 14": (4500, False)}
"""Steps between bursts as observed once (arXiv:2502.12340, section 6.2 and figure 6; section 4.2 and figure 3), and
whether the observation ended with the burst."""


def outlooks(steps: int, published: Iterable[str] = tuple(PUBLISHED)) -> list[Outlook]:
    """What a number of training steps would have seen.

    The chance is that of at least one burst of a Poisson process, averaged over what one observed interval leaves open
    (`waiting.probability_seen`), between those at the exact limits (95 %) of the mean interval.

    Args:
        steps: training steps on one device.
        published: names of nodes.

    Example:
        >>> from sdc.analysis.bursts import outlooks
        >>> seen = outlooks(1350)[0]
        >>> seen.node, round(seen.probability, 2), round(seen.low, 2), round(seen.high, 2)
        ('node 13', 0.75, 0.07, 1.0)
    """
    found = []
    for node in published:
        interval, ends = PUBLISHED[node]
        low, high = mean_interval_limits(interval, 1, ends_with_burst=ends)
        found.append(
            Outlook(
                node=node,
                interval=interval,
                steps=steps,
                probability=probability_seen(steps, interval, observed=1),
                low=-math.expm1(-steps / high),
                high=-math.expm1(-steps / low),
            )
        )
    return found
