"""From run records to verdicts, statistics, tables, figures and one offline HTML page."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # A record as a whole.
    from ._conclude import (
        conclude as conclude,
        report_anew as report_anew,
        summarize_folder as summarize_folder,
    )
    from .report import write_report as write_report
    from .summary import summarize as summarize
    from .traces import describe_difference as describe_difference
    from .trace_report import write_difference as write_difference
    from .overview import write_overview as write_overview
    from .beside import write_beside as write_beside
    from .campaigns import summarize_campaign as summarize_campaign

    # How sure a frequency is, and how long a burn-in has to be.
    from .bootstrap import bootstrap_interval as bootstrap_interval
    from .waiting import (
        burn_in_steps as burn_in_steps,
        excluded_interval as excluded_interval,
        mean_interval_limits as mean_interval_limits,
        probability_seen as probability_seen,
    )
    from .statistics import (
        frequency_interval as frequency_interval,
        frequency_upper_bound as frequency_upper_bound,
        needed_mismatches as needed_mismatches,
        proportion_interval as proportion_interval,
    )

    # What perturbations of an iterate cost, and losses of a part of it.
    from sdc.checkpoints.perturbations import (
        Convergence as Convergence,
        error_floor as error_floor,
        fit_convergence as fit_convergence,
        iteration_cost_bound as iteration_cost_bound,
    )

__getattr__, __dir__, __all__ = facade(__name__)
