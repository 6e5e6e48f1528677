"""Simulated faults, and training steps into which these faults are injected.

- `kinds`: how a fault changes an element.
- `fault`: a fault (kind, pattern of elements that are corrupted together, place, rate and time), and its text form.
- `_inject`: a step in which faults corrupt values at random, at given rates, and the ground truth of these changes.
- `_strike`: one fault at one place, as data.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Kinds: how an element changes.
    from .kinds import (
        Add as Add,
        BitFlip as BitFlip,
        Extreme as Extreme,
        FaultKind as FaultKind,
        Gaussian as Gaussian,
        Mixed as Mixed,
        Relative as Relative,
        Rotate as Rotate,
        Scale as Scale,
        Sign as Sign,
        Stuck as Stuck,
        StuckBit as StuckBit,
        Tailed as Tailed,
    )

    # Faults: their patterns, places, times and texts.
    from .fault import (
        Lattice as Lattice,
        One as One,
        Row as Row,
        Run as Run,
        Stride as Stride,
        Tile as Tile,
        Whole as Whole,
    )
    from .fault import Fault as Fault, When as When, as_fault as as_fault, parse_fault as parse_fault

    # Steps with faults, and the ground truth.
    from ._inject import inject as inject
    from ._strike import Strike as Strike, no_strike as no_strike, strike as strike, strike_on as strike_on
    from ._inject import Events as Events, Hits as Hits, Moment as Moment

if TYPE_CHECKING:  # for the other packages of this project
    from ._inject import NUMBERS as NUMBERS, strikable as strikable
    from .fault import read_hit as read_hit, write_hit as write_hit
    from .kinds import SMALLEST as SMALLEST, field_bits as field_bits, field_of as field_of

__getattr__, __dir__, __all__ = facade(__name__)
