"""Algorithm-based fault tolerance: checksummed matrix products that work in narrow types, forward and backward."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # A whole step.
    from .transform import abft as abft, accumulators as accumulators
    from .equations import coverage as coverage

    # Single layers.
    from .layers import checksum as checksum, collect as collect, dot_general as dot_general, einsum as einsum

    # What a check found.
    from ._check import (
        Flags as Flags,
        WrongElements as WrongElements,
        check as check,
        merge_flags as merge_flags,
    )
    from .settings import Settings as Settings

    # What is known of a device.
    from .profile import Profile as Profile
    from .roundoff import Rounding as Rounding

__getattr__, __dir__, __all__ = facade(__name__)
