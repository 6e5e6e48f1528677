"""Results of many hosts: disagreements, slow devices, totals over time, and schedules of pairs.

collection      results from external files, and the devices that they contain
suspects        majority votes of hosts on digests; the suspects, and the confidence in each
ledger          the totals of all burn-ins on each device
fleet_summary   the summary, which combines all of the above
fleet_report    the summary as a page and as spreadsheets
pair_schedule   schedules of pairs, and simulations of them
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .collection import collect as collect, find_results as find_results
    from .fleet_report import (
        fleet_page as fleet_page,
        prepare_folder as prepare_folder,
        simulation_table as simulation_table,
        write_pages as write_pages,
    )
    from .fleet_summary import device_rows as device_rows, summarize_results as summarize_results
    from .ledger import read_ledger as read_ledger, update_ledger as update_ledger
    from .pair_schedule import (
        jobset_lines as jobset_lines,
        make_schedule as make_schedule,
        simulate_naming as simulate_naming,
        srun_lines as srun_lines,
    )
    from .suspects import vote as vote

__getattr__, __dir__, __all__ = facade(__name__, public=False)
