"""Simulated faults, and steps that suffer them.

- `kinds`: what becomes of an element; `patterns`: which elements are hit together.
- `fault`: a kind, a pattern, a place, a rate and a time; and its text.
- `_inject`: a step with faults that hit at random, at their rates; `_strike`: one fault at one place, as data.
- `events`: when an injected step runs, and what its faults did.
- `study_tables`, `nodes`, `silicon`: what was published of faulty devices, and these devices simulated.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # What happens to an element.
    from .kinds import (
        Add as Add,
        BitFlip as BitFlip,
        Gaussian as Gaussian,
        Mixed as Mixed,
        Relative as Relative,
        Rotate as Rotate,
        Scale as Scale,
        Sign as Sign,
        Stuck as Stuck,
        StuckBit as StuckBit,
        Tailed as Tailed,
        What as What,
    )

    # Which elements, where and when; and as text.
    from .patterns import One as One, Row as Row, Run as Run, Stride as Stride, Tile as Tile, Whole as Whole
    from .fault import Fault as Fault, When as When, as_fault as as_fault, parse_fault as parse_fault

    # Published nodes and silicon, simulated.
    from .nodes import expected_frequency as expected_frequency, node_faults as node_faults
    from .silicon import SILICON as SILICON
    from .study_tables import (
        NODES as NODES,
        SUBMODULES as SUBMODULES,
        published as published,
        published_disagreement as published_disagreement,
        published_layers as published_layers,
        published_noise as published_noise,
    )

    # Steps with faults, and the ground truth.
    from ._inject import inject as inject
    from ._strike import Strike as Strike, no_strike as no_strike, strike as strike, strike_on as strike_on
    from .events import Events as Events, Hits as Hits, Moment as Moment

if TYPE_CHECKING:  # for the other packages of this project
    from .comparing import (
        Compared as Compared,
        compare_tables as compare_tables,
        compare_time as compare_time,
        correlation as correlation,
    )
    from .events import NUMBERS as NUMBERS, strikable as strikable
    from .fault import read_hit as read_hit
    from .fitting import NoiseModel as NoiseModel, fit_bursts as fit_bursts, fit_tail as fit_tail
    from .kinds import field_bits as field_bits, field_of as field_of
    from .measured import Drifting as Drifting, NodesMeasured as NodesMeasured, Response as Response
    from .nodes import Load as Load, behaviour as behaviour, fitted as fitted, parse_suspect as parse_suspect
    from .study_tables import ELEMENTS as ELEMENTS, LAST_BIT as LAST_BIT

__getattr__, __dir__, __all__ = facade(__name__)
