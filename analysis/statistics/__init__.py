"""Statistics: how sure a frequency is, and how long to wait for a burst.

frequencies       limits of frequencies and proportions, if elements fail independently
bootstrap         an interval of a frequency that holds although mismatches come in bursts
burst_intervals   how long to wait for a burst, and how often bursts come
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .bootstrap import bootstrap_interval as bootstrap_interval
    from .burst_intervals import (
        burn_in_steps as burn_in_steps,
        burst_outlooks as burst_outlooks,
        count_bursts as count_bursts,
        excluded_interval as excluded_interval,
        mean_interval_limits as mean_interval_limits,
        probability_seen as probability_seen,
    )
    from .frequencies import (
        frequency_interval as frequency_interval,
        frequency_upper_bound as frequency_upper_bound,
        needed_mismatches as needed_mismatches,
        proportion_interval as proportion_interval,
    )

__getattr__, __dir__, __all__ = facade(__name__, public=False)
