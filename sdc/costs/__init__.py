"""Estimates of the cost of a step on accelerators, obtained from compilers alone, without access to the hardware.

- `targets`: chips, their compilers and compiler options, and the kernel instructions that a compiler dumps.
- `_estimate`: the cost of a compiled program, and steps with each tool.
- `hlo`: collectives and traffic in the text of a program.
- `cycles`: cycles of a program on a TPU.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Targets.
    from .targets import (
        CHIPS as CHIPS,
        Chip as Chip,
        Target as Target,
        Tool as Tool,
        devices_of as devices_of,
        find_target as find_target,
        prepare_compilers as prepare_compilers,
    )

    # Estimates.
    from ._estimate import DoesNotFit as DoesNotFit, estimate as estimate, measure as measure
    from ..schema import Collective as Collective, Estimate as Estimate
    from ._estimate import with_tool as with_tool
    from .targets import Uncharged as Uncharged

if TYPE_CHECKING:  # for the other packages of this project
    from .hlo import CollectiveCall as CollectiveCall, collective_calls as collective_calls
    from .targets import (
        Value as Value,
        check_compiler as check_compiler,
        check_options as check_options,
        read_options as read_options,
    )

__getattr__, __dir__, __all__ = facade(__name__)
