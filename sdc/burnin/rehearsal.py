"""Simulated faults for rehearsals of a burn-in, from a node of the published study or from lines of text."""

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase

from sdc.settings import SettingError

from ..faults import Fault, node_faults, parse_fault
from .workload import AXIS

SITES = {"fwd/attn": "attention/*", "fwd/ffn": "matrix/*", "bwd/attn": "training/*", "bwd/ffn": "training/*"}
"""Workloads whose outputs stand for those of the study's submodules: its frequencies are of elements of these."""


def rehearsed(suspect: str | None, faults: Sequence[str], device: int) -> list[Fault]:
    """The simulated faults that flags ask for.

    A node's frequencies are those of wrong elements in the outputs of submodules, at each training step, of nodes that
    do not wait for each other. Here they strike outputs of workloads, at each run: the times of bursts count runs.

    Args:
        suspect: a node, see `sdc.faults.nodes.parse_suspect`; None for none.
        faults: lines of text, see `sdc.faults.parse_fault`; `site` is a pattern of workloads' names, and `device=2` the
            device.
        device: index of the device that has them where a line does not say another.

    Raises:
        SettingError: a line cannot be understood, or both are given.

    Example:
        >>> from sdc.burnin.rehearsal import rehearsed
        >>> [fault.site for fault in rehearsed("node13", [], 3)]
        ['training/*']
        >>> rehearsed(None, ["bitflip,rate=1e-3,site=matrix/*,device=1"], 3)[0].at
        {'device': 1}
    """
    if suspect is not None and faults:
        raise SettingError("suspect", suspect, "faults are given too; give one of them, since both simulate")
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
            raise SettingError("fault", None, str(error)) from error  # which quotes the text
        read.append(dataclasses.replace(fault, at={**at, **fault.at}))
    return read


def matching(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Those whose site matches a workload's name: a node's strike families that may not run.

    Raises:
        SettingError: there are faults, and none matches.
    """
    found = [fault for fault in faults if any(fnmatchcase(name, str(fault.site)) for name in names)]
    if faults and not found:
        sites = ", ".join(dict.fromkeys(str(fault.site) for fault in faults))
        raise SettingError("fault", sites, "matches no workload; give a site such as matrix/*, or run more families")
    return found
