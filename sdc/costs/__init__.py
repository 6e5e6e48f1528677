"""What a step costs on accelerators that are not here: compiled for them, with nothing but their compilers.

- `targets`: chips, their compilers and options; `variants`: a step with each of the tools.
- `_estimate`: what a compiled program costs; `hlo`: its text, with collectives and traffic.
- `cycles`: cycles on a TPU; `schedules`: those of kernels, by their instructions.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # What to compile for.
    from .targets import (
        CHIPS as CHIPS,
        Chip as Chip,
        Target as Target,
        Tool as Tool,
        devices_of as devices_of,
        find_target as find_target,
        prepare_compilers as prepare_compilers,
    )

    # What it costs.
    from ._estimate import DoesNotFit as DoesNotFit, Estimate as Estimate, estimate as estimate, measure as measure
    from .hlo import Collective as Collective
    from .schedules import Uncharged as Uncharged
    from .variants import with_tool as with_tool

if TYPE_CHECKING:  # for the other packages of this project
    from .hlo import groups_of as groups_of, kind_of as kind_of, parse_module as parse_module, sizes_of as sizes_of
    from .targets import (
        Value as Value,
        check_compiler as check_compiler,
        check_options as check_options,
        read_options as read_options,
    )

__getattr__, __dir__, __all__ = facade(__name__)
