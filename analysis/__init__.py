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
    from sdc.checkpoints import (
        Convergence as Convergence,
        error_floor as error_floor,
        fit_convergence as fit_convergence,
        iteration_cost_bound as iteration_cost_bound,
    )

if TYPE_CHECKING:  # for the other packages of this project
    from .advice import Action as Action
    from .canvas import (
        COLOURS as COLOURS,
        DASHES as DASHES,
        LeftOut as LeftOut,
        MARKERS as MARKERS,
        Picture as Picture,
        powers as powers,
        whole_numbers as whole_numbers,
    )
    from .definitions import Definition as Definition
    from .findings import (
        Chart as Chart,
        Check as Check,
        Findings as Findings,
        Grid as Grid,
        Line as Line,
        headline_of_study as headline_of_study,
        summarize_findings as summarize_findings,
    )
    from .headline import Headline as Headline
    from .page import Report as Report, make_report as make_report
    from .pairing import Opening as Opening, judge_pair as judge_pair, stage_differs as stage_differs
    from .products import COUNTS as COUNTS
    from .rendering import render as render
    from .resolving import Resolution as Resolution, resolve_pairs as resolve_pairs
    from .series import Row as Row, mapping as mapping, number as number, sequence as sequence
    from .summary import SUBMODULES as SUBMODULES
    from .tables import Table as Table, show as show
    from .verdict import final_states as final_states

__getattr__, __dir__, __all__ = facade(__name__)
