"""Results of many hosts: who disagrees with whom, who is slow, what adds up over time, and whom to pair with whom."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .collecting import collect as collect, find_results as find_results
    from .launching import jobset_lines as jobset_lines, srun_lines as srun_lines
    from .ledger import read_ledger as read_ledger, update_ledger as update_ledger
    from .majority import vote as vote
    from .naming import simulate_naming as simulate_naming
    from .pages import (
        LABELS as LABELS,
        facts as facts,
        how_often as how_often,
        notes as notes,
        operations as operations,
        part_of as part_of,
        prepare_folder as prepare_folder,
        simulation_words as simulation_words,
        write_pages as write_pages,
    )
    from .pairing import make_schedule as make_schedule
    from .summarizing import device_rows as device_rows, summarize_results as summarize_results

__getattr__, __dir__, __all__ = facade(__name__, public=False)
