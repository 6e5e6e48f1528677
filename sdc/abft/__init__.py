"""Algorithm-based fault tolerance: checksummed matrix products that work in narrow types, forward and backward."""

from .check import Flags, Places, Settings, check, merge_flags
from .layers import checksum, collect, dot_general, einsum
from .profile import Profile
from .roundoff import Arithmetic
from .transform import abft as _transform
from .transform import accumulators


class _Abft:
    """`sdc.abft(step)` transforms a step; `sdc.abft.dot_general` and its kin check single layers."""

    __call__ = staticmethod(_transform)
    accumulators = staticmethod(accumulators)
    checksum = staticmethod(checksum)
    collect = staticmethod(collect)
    dot_general = staticmethod(dot_general)
    einsum = staticmethod(einsum)
    Arithmetic = Arithmetic
    Flags = Flags
    Profile = Profile
    Settings = Settings


abft = _Abft()
abft.__doc__ = _transform.__doc__

__all__ = [
    "Arithmetic",
    "Flags",
    "Places",
    "Profile",
    "Settings",
    "abft",
    "accumulators",
    "check",
    "checksum",
    "collect",
    "dot_general",
    "einsum",
    "merge_flags",
]
