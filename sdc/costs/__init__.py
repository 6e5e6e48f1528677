"""What a step costs on accelerators that are not here: compiled for them, with nothing but their compilers."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # What to compile for.
    from .chips import CHIPS as CHIPS, Chip as Chip, Target as Target, find_target as find_target
    from .compilers import devices_of as devices_of, prepare_compilers as prepare_compilers

    # What it costs.
    from ._estimate import DoesNotFit as DoesNotFit, Estimate as Estimate, estimate as estimate, measure as measure
    from .collectives import Collective as Collective
    from .schedules import Uncharged as Uncharged
    from .variants import Tool as Tool, with_tool as with_tool

if TYPE_CHECKING:  # for the other packages of this project
    from .collectives import kind_of as kind_of
    from .compilers import check_compiler as check_compiler
    from .groups import groups_of as groups_of
    from .hlo import parse_module as parse_module, sizes_of as sizes_of
    from .options import Value as Value, check_options as check_options, read_options as read_options

__getattr__, __dir__, __all__ = facade(__name__)
