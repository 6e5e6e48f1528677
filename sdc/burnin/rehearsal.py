"""Simulated faults for rehearsals of a burn-in: text form, targets, and the number of rounds needed to detect them.

A fault is specified by a node of the published study or by a line of text. It corrupts the outputs of the workloads
whose names match its `site`, either on the device that its `at` specifies or on all devices. The module `programs`
applies the faults.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from sdc.settings import SettingError

from ..faults import Fault, parse_fault
from ..nodes import NODES, node_faults, rate_interval
from .results import NodeOutlook, Tally
from .workloads import AXIS, BurninWorkload

if TYPE_CHECKING:
    import jax

# Workloads whose outputs represent those of the study's submodules; the published frequencies refer to elements of
# these outputs.
SITES = {"fwd/attn": "attention/*", "fwd/ffn": "matrix/*", "bwd/attn": "training/*", "bwd/ffn": "training/*"}
POINTS = 4096  # number of points for averaging over the random variation of a rate


def rehearsed(suspect: str | None, faults: Sequence[str], device: int) -> list[Fault]:
    """Returns the simulated faults that the flags request; `device` is the target of faults that specify no device.

    A node's frequencies are the shares of wrong elements in the outputs of submodules during a training step, measured
    without synchronization. In a rehearsal, these frequencies apply to the outputs of each run of a workload, and the
    times of bursts are counted in runs instead of steps.
    """
    if suspect is not None and faults:
        raise SettingError(
            "suspect", suspect, "faults are given too; give one or the other, because both simulate faults"
        )
    at = {AXIS: device}
    if suspect is not None:
        try:
            found = node_faults(suspect, layers=1, at=at, sync="none")
        except ValueError as error:
            raise SettingError("suspect", suspect, str(error)) from error
        return [dataclasses.replace(fault, site=SITES[str(fault.site)]) for fault in found]
    read = []
    for text in faults:
        try:
            fault = parse_fault(text)
        except ValueError as error:
            raise SettingError("fault", None, str(error)) from error  # the message quotes the text
        read.append(dataclasses.replace(fault, at={**at, **fault.at}))
    return read


def strikes(fault: Fault, workload: str) -> bool:
    """Returns whether a fault strikes the workload of this name, on any device."""
    return fnmatchcase(workload, str(fault.site))


def matching(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Returns the faults whose site matches a workload's name; a node may also have faults for other families."""
    found = [fault for fault in faults if any(strikes(fault, name) for name in names)]
    if faults and not found:
        sites = ", ".join(dict.fromkeys(str(fault.site) for fault in faults))
        raise SettingError(
            "fault",
            sites,
            f"matches none of the selected workloads, such as {names[0]}; give another site, or select more families",
        )
    return found


def check_faults(faults: Sequence[Fault], devices: "Sequence[jax.Device]", workloads: Sequence[BurninWorkload]) -> None:
    """Raises SettingError for a fault that has no rate or no pattern of names, or strikes none of these workloads."""
    for fault in faults:
        if not isinstance(fault, Fault):
            raise SettingError("inject", fault, "expected a sequence of sdc.Fault")
        place = fault.at.get(AXIS, 0)
        for right, problem in (
            (fault.rate is not None, "has no rate; give the probability that an element is corrupted, as in rate=1e-4"),
            (
                fault.by_name and fault.layer is None,
                "expected a pattern of workload names as its site, such as 'matrix/*', and no layer",
            ),
            (not set(fault.at) - {AXIS}, f"expected a device in the form at={{'{AXIS}': 1}}"),
            (0 <= place < len(devices), f"expected a device from 0 to {len(devices) - 1}"),
            (
                any(strikes(fault, workload.name) for workload in workloads),
                "its site matches no workload; give a pattern such as 'matrix/*'",
            ),
        ):
            if not right:
                raise SettingError("inject", fault, problem)


def faults_of(faults: Sequence[Fault], workload: BurninWorkload, index: int) -> tuple[Fault, ...]:
    """Returns the faults that strike a workload on a device, with their device and site removed."""
    mine = [fault for fault in faults if fault.at.get(AXIS, index) == index and strikes(fault, workload.name)]
    return tuple(dataclasses.replace(fault, at={}, site="*") for fault in mine)


def chance_of_run(fault: Fault, elements: int) -> float:
    """Returns the probability that a fault changes at least one of `elements` elements in one run.

    A fault strikes a run with probability `spike`. It then corrupts each of the n elements with probability rate/spike;
    if the kind varies its rate (`Tailed`), this probability is multiplied by (1 + few) u^few for a uniform u. The
    result is therefore spike E_u[1 - exp(-n rate (1 + few) u^few / spike)]. The higher rate at the onset of a burst is
    neglected, so the true probability is slightly higher in the first runs.
    """
    rate = float(np.mean(np.asarray(fault.rate, np.float64)))
    return _chance(rate / fault.when.spike, float(getattr(fault.what, "few", 0.0)), elements) * fault.when.spike


@functools.lru_cache(4096)
def _chance(rate: float, few: float, elements: int) -> float:
    u = (np.arange(POINTS) + 0.5) / POINTS
    most = np.minimum(rate * (1 + few) * u**few, 1 - 1e-12)
    return float(np.mean(-np.expm1(elements * np.log1p(-most))))


def chance_of_round(faults: Iterable[Fault], workloads: Sequence[BurninWorkload]) -> float:
    """Returns the probability that one round of the workloads shows a difference on the device that has the faults."""
    quiet = 0.0
    for fault in faults:
        for workload in workloads:
            if strikes(fault, workload.name):
                quiet += math.log1p(-min(chance_of_run(fault, workload.elements), 1 - 1e-16))
    return -math.expm1(quiet)


def rounds_for(chance: float, confidence: float = 0.95) -> float:
    """Returns the number of rounds that detect a difference with this confidence; infinite if `chance` is 0."""
    if chance <= 0:
        return math.inf
    return 1 if chance >= confidence else math.ceil(math.log1p(-confidence) / math.log1p(-chance))


def node_outlooks(tallies: Sequence[Tally]) -> list[NodeOutlook]:
    """Returns, for each node of the study, the probability that the runs which were checked would have shown it.

    The probability is that of the device for which it is least. Runs of throttled devices do not count. It follows from
    the same model as a rehearsal of the node: rates per element of a workload's output, whatever the size of the model.
    """
    found = []
    for node in NODES:
        low, high = rate_interval(node)
        chances = [_chance_of_runs(node, times, tallies) for times in (1.0, low, high)]
        found.append(NodeOutlook(node=node, probability=chances[0], low=chances[1], high=chances[2]))
    return found


def _chance_of_runs(node: str, times: float, tallies: Sequence[Tally]) -> float:
    """Returns the least probability of a difference on any device, with the node's rates multiplied by `times`."""
    quiet = {tally.device: 0.0 for tally in tallies}
    for fault in rehearsed(f"{node}(times={times!r})", (), 0) if times else ():
        for tally in tallies:
            if tally.runs and not tally.void and not tally.zeros and strikes(fault, tally.workload):
                chance = chance_of_run(fault, round(tally.elements / tally.runs))
                quiet[tally.device] += tally.runs * math.log1p(-min(chance, 1 - 1e-16))
    return -math.expm1(max(quiet.values(), default=0.0))
