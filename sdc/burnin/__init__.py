"""Burn-in: programs with known results, run again and again on every device of a host, and what their bits say of it.

Nothing is loaded here: read `workload` and `registry` for what is run, `rounds` for how, `evidence` for what a run
proves, `verdict` for what follows from all of it.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .asking import Asked as Asked, parse_devices as parse_devices
    from .claiming import claim_names as claim_names, claimed as claimed
    from .data import make_floats as make_floats, normal as normal, random_words as random_words
    from .golden import (
        A_FOLDER as A_FOLDER,
        Register as Register,
        read_golden as read_golden,
        write_golden as write_golden,
    )
    from .golden_checking import Confirmed as Confirmed, record as record, verify as verify
    from .golden_merging import describe_dispute as describe_dispute, merge as merge
    from .levels import LEVELS as LEVELS, Level as Level, SMALLEST as SMALLEST
    from .metrics import check_metrics_file as check_metrics_file
    from .observed import Result as Result
    from .pair_report import (
        Difference as Difference,
        FOLDERS as FOLDERS,
        OperationRow as OperationRow,
        PAIR as PAIR,
        POOL as POOL,
        Pair as Pair,
        RankRow as RankRow,
        Stage as Stage,
        StageRow as StageRow,
        TwinRow as TwinRow,
        read_pair as read_pair,
        write_pair as write_pair,
    )
    from .predicting import chance_of_round as chance_of_round, rounds_for as rounds_for
    from .programs import Programs as Programs
    from .registry import Request as Request, families as families, register as register, workloads as workloads
    from .rehearsal import matching as matching, rehearsed as rehearsed
    from .report import (
        BUNDLE as BUNDLE,
        CODES as CODES,
        DeviceRow as DeviceRow,
        EndedRow as EndedRow,
        FindingRow as FindingRow,
        Outlook as Outlook,
        RESULT as RESULT,
        Report as Report,
        Settings as Settings,
        VerdictPart as VerdictPart,
        Word as Word,
        read_report as read_report,
    )
    from .rounds import burn_in as burn_in
    from .session import NotOnRecord as NotOnRecord, Session as Session
    from .standing import Standing as Standing, standing_of as standing_of
    from .workload import Workload as Workload

__getattr__, __dir__, __all__ = facade(__name__, public=False)
