"""Estimates the uncertainty of a mismatch frequency, and the number of steps that a run needs to show a burst."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .intervals import bootstrap_interval as bootstrap_interval, burn_in_steps as burn_in_steps
    from .intervals import count_bursts as count_bursts
    from .intervals import excluded_interval as excluded_interval, frequency_interval as frequency_interval
    from .intervals import frequency_upper_bound as frequency_upper_bound, mean_interval_limits as mean_interval_limits
    from .intervals import needed_mismatches as needed_mismatches, probability_seen as probability_seen
    from .intervals import proportion_interval as proportion_interval

__getattr__, __dir__, __all__ = facade(__name__, public=False)
