"""Burn-in: programs with known results, run again and again on every device of a host, and what their bits say of it.

workloads/   what is run: levels, families, data
sensors/     what drivers and the kernel report meanwhile
programs     workloads compiled for devices, one run of them, and digests of outputs
rounds       rounds through all workloads on all devices
examination  what runs prove of a device, runs right after a difference, and what differs element by element
rehearsal    simulated faults, and when they should be seen
results      what a burn-in found, and `result.json`
judgement    the verdict that follows from a result
session      a burn-in of a host from its settings to its files
host         devices that are asked for, locks of them, and what decides bits beside a program
golden_register  registers of golden digests
recorder     golden digests recorded and confirmed by the devices of this host
bundle       evidence for the vendor, with a program (`reproduce`) that shows the fault by itself
pair         what a comparison of hosts with each other found, `pair.json` and `pool.json`
standing     the last result of a host
exports      JUnit XML, metrics of Prometheus, JSON Schemas
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
        DeviceRequest as DeviceRequest,
        claim_names as claim_names,
        claimed as claimed,
        parse_devices as parse_devices,
    )
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
        BUNDLE as BUNDLE,
        BurninResult as BurninResult,
        Ended as Ended,
        Finding as Finding,
        BurstOutlook as BurstOutlook,
        RESULT as RESULT,
        BurninSettings as BurninSettings,
        MOST_ROUNDS as MOST_ROUNDS,
        Tally as Tally,
        CheckedDevice as CheckedDevice,
    )
    from .rounds import burn_in as burn_in, planned_result as planned_result
    from .session import NotOnRecord as NotOnRecord, Session as Session
    from .standing import Standing as Standing, standing_of as standing_of

__getattr__, __dir__, __all__ = facade(__name__, public=False)
