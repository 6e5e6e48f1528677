"""Algorithm-based fault tolerance: checksums for matrix products, including those of narrow types, in forward and
backward passes.

- `transform`: checks the matrix products of a whole step.
- `layers`: checks the matrix products of single layers.
- `_check`: checks one product with a scheme from `schemes`, and recomputes the product if it looks wrong.
- `examination`: runs a suspicious step again, in another program.
- `products`: matrix products as linear maps.
- `fused_products`: kernels that multiply and sum rows at the same time.
- `roundoff`: settings, roundoff of types and devices, and measured profiles of devices.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # A whole step.
    from .transform import abft as abft, accumulators as accumulators
    from ._check import coverage as coverage

    # Single layers.
    from .layers import checksum as checksum, collect as collect, dot_general as dot_general, einsum as einsum

    # Results of a check.
    from ._check import Flags as Flags, WrongElements as WrongElements, check as check, merge_flags as merge_flags

    # Settings of a check, and profiles of devices.
    from .roundoff import Profile as Profile, Rounding as Rounding, Settings as Settings

if TYPE_CHECKING:  # for the other packages of this project
    from .examination import ScreenedStep as ScreenedStep, Screening as Screening, is_suspicious as is_suspicious
    from ._check import expect as expect, rounded_off as rounded_off, row_margins as row_margins
    from .transform import product_of as product_of, screened as screened
    from .judgement import LEAST_COVERAGE as LEAST_COVERAGE
    from .judgement import judge_rows as judge_rows, lacking_coverage as lacking_coverage
    from .fused_products import multiply as multiply, time_both as time_both
    from .products import Dot as Dot
    from .roundoff import (
        PLATFORMS as PLATFORMS,
        SIGMAS as SIGMAS,
        SPREAD as SPREAD,
        Examine as Examine,
        Mode as Mode,
        SchemeName as SchemeName,
        Units as Units,
        hardware as hardware,
    )
    from .schemes import Expected as Expected, Operands as Operands, make_scheme as make_scheme

__getattr__, __dir__, __all__ = facade(__name__)
