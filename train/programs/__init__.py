"""Programs: what a run executes at each step, and what it writes down of it. One protocol for all of them."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # What every program can do.
    from .protocol import Program as Program, Rows as Rows

    # What one device computes: parameters sharded over all ranks, or each data rank with its own.
    from .device import DeviceStep as DeviceStep, Transform as Transform, sharded as sharded
    from ._replicated import make_replicas as make_replicas, replicated as replicated

    # One copy; twins; a trace; workers that each watch a real clock.
    from .single import SingleProgram as SingleProgram
    from .twins import TwinProgram as TwinProgram
    from .traced import TraceProgram as TraceProgram
    from .clocked import ClockedProgram as ClockedProgram

if TYPE_CHECKING:  # for the other packages of this project
    from .device import (
        described as described,
        described_batch as described_batch,
        initial_state as initial_state,
        plain as plain,
    )
    from .operations import OperationsProgram as OperationsProgram

__getattr__, __dir__, __all__ = facade(__name__)
