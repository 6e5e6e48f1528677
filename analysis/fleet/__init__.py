"""Results of many hosts: who disagrees with whom, who is slow, what adds up over time, and whom to pair with whom.

collection      results from files of others, and the devices in them
suspects        hosts vote on digests; which devices are suspects, and how sure that is
ledger          what all burn-ins together checked on each device
fleet_summary   all of that in one result
fleet_page      its page and sheets
pair_schedule   whom to pair with whom
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
