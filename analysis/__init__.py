"""Derives verdicts, statistics, tables, figures and one offline HTML page from run records.

conclusion      verdict, tables and report of a record; the index of a folder of records
run_verdict     the only place where a run's verdict is derived from its lines
summary         totals of a run: the contents of `summary.json`
headline        the finding in a sentence, the affected steps, places and hardware, and the next actions
run_page        the page of a run, from its tables and figures (tables, figures, state_losses)
campaigns       the summary of a campaign; campaign_page shows it
trace_page      a comparison of two traces
burnin_page     the page of a burn-in
compare_runs    several runs on one page
host_diff       which hosts of a pair, a pool or several pairs differ
report/         sections and their renderers
statistics/     intervals of frequencies and of bursts
fleet/          results of many hosts
studies/        findings of studies
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # A record as a whole.
    from .conclusion import (
        conclude as conclude,
        summarize_folder as summarize_folder,
        write_overview as write_overview,
        write_report as write_report,
    )
    from .summary import summarize as summarize
    from .trace_page import describe_difference as describe_difference, write_difference as write_difference
    from .compare_runs import write_beside as write_beside
    from .campaigns import summarize_campaign as summarize_campaign

    # Confidence in a frequency, and the necessary length of a burn-in.
    from .statistics import (
        bootstrap_interval as bootstrap_interval,
        burn_in_steps as burn_in_steps,
        excluded_interval as excluded_interval,
        frequency_interval as frequency_interval,
        frequency_upper_bound as frequency_upper_bound,
        mean_interval_limits as mean_interval_limits,
        needed_mismatches as needed_mismatches,
        probability_seen as probability_seen,
        proportion_interval as proportion_interval,
    )

    # The cost of perturbing an iterate or losing a part of it.
    from sdc.checkpoints import (
        Convergence as Convergence,
        error_floor as error_floor,
        fit_convergence as fit_convergence,
        iteration_cost_bound as iteration_cost_bound,
    )

if TYPE_CHECKING:  # for the other packages of this project
    from .compare_runs import RunsBeside as RunsBeside
    from .report import Conclusion as Conclusion, sentence as sentence
    from .burnin_page import (
        burnin_report as burnin_report,
        outlook as outlook,
        write_burnin_report as write_burnin_report,
    )
    from .conclusion import Overview as Overview, describe as describe, draw_conclusion as draw_conclusion
    from .host_diff import (
        Opening as Opening,
        Resolution as Resolution,
        combine_results as combine_results,
        judge_pair as judge_pair,
        resolve_pairs as resolve_pairs,
        stage_differs as stage_differs,
    )
    from .run_verdict import PRODUCTS as PRODUCTS, final_states as final_states
    from .summary import SUBMODULES as SUBMODULES
    from .trace_page import PartedTraces as PartedTraces, TraceComparison as TraceComparison
    from .trace_page import difference_page as difference_page

__getattr__, __dir__, __all__ = facade(__name__)
