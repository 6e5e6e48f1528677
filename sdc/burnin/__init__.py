"""Burn-in, which repeatedly runs programs with known results on every device of a host and compares their outputs.

workloads/   the programs, with their levels, families and data
sensors/     readings and errors that drivers and the kernel report during a burn-in
programs     workloads compiled for devices, their runs, and digests of their outputs
rounds       rounds of all workloads on all devices
examination  evidence from runs, reruns after a difference, and element-by-element comparison
rehearsal    simulated faults, and the number of rounds needed to detect them
results      the result of a burn-in, and `result.json`
identity     the identity of a device, by which it is recognized
judgement    the verdict that follows from a result
session      a burn-in of a host, from its settings to its files
host         requested devices, locks on devices, and the properties other than the program that determine bits
golden_register  registers of golden digests
recorder     recording and verification of golden digests on this host
bundle       evidence for the vendor, with a standalone program (`reproduce`) that demonstrates the fault
pair         the result of comparing hosts, `pair.json` and `pool.json`
exports      results as JUnit XML and Prometheus metrics, and JSON Schemas of the files
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .exports import check_metrics_file as check_metrics_file, junit as junit, metrics as metrics
    from .golden_register import (
        A_FOLDER as A_FOLDER,
        GOLDEN as GOLDEN,
        Register as Register,
        describe_dispute as describe_dispute,
        merge as merge,
    )
    from .host import (
        claimed as claimed,
        parse_devices as parse_devices,
    )
    from .identity import candidates as candidates, compare_names as compare_names
    from .judgement import BURN_IN as BURN_IN, judge as judge
    from .pair import (
        PairDifference as PairDifference,
        FOLDERS as FOLDERS,
        OperationRow as OperationRow,
        PAIR as PAIR,
        PAIR_FORMAT as PAIR_FORMAT,
        POOL as POOL,
        Pair as Pair,
        RankDifference as RankDifference,
        Stage as Stage,
        StageRow as StageRow,
        TwinRow as TwinRow,
    )
    from .programs import Programs as Programs
    from .recorder import Confirmed as Confirmed, record as record, verify as verify
    from .rehearsal import (
        chance_of_round as chance_of_round,
        matching as matching,
        rehearsed as rehearsed,
        rounds_for as rounds_for,
    )
    from .results import (
        DeviceRequest as DeviceRequest,
        BUNDLE as BUNDLE,
        BurninResult as BurninResult,
        Ended as Ended,
        Finding as Finding,
        NodeOutlook as NodeOutlook,
        EVENTS as EVENTS,
        RESULT as RESULT,
        BurninSettings as BurninSettings,
        MOST_ROUNDS as MOST_ROUNDS,
        Standing as Standing,
        Tally as Tally,
        CheckedDevice as CheckedDevice,
    )
    from .rounds import burn_in as burn_in, planned_result as planned_result
    from .session import NotOnRecord as NotOnRecord, Session as Session

__getattr__, __dir__, __all__ = facade(__name__, public=False)
