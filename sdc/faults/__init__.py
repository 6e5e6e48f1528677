"""Simulated faults: kinds, patterns and times, their text form, published nodes, and steps that suffer them."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # What happens to an element.
    from .kinds import (
        Add as Add,
        BitFlip as BitFlip,
        Gaussian as Gaussian,
        Mixed as Mixed,
        Rotate as Rotate,
        Scale as Scale,
        Sign as Sign,
        Stuck as Stuck,
        StuckBit as StuckBit,
        What as What,
    )
    from .relative import Relative as Relative, Tailed as Tailed
    from .changes import Change as Change

    # Which elements, where and when.
    from .patterns import (
        One as One,
        Pattern as Pattern,
        Row as Row,
        Run as Run,
        Stride as Stride,
        Tile as Tile,
        Whole as Whole,
    )
    from .fault import Fault as Fault, When as When, describe as describe

    # As text.
    from .language import parse_fault as parse_fault, parse_kind as parse_kind

    # The nodes of the study, simulated.
    from .nodes import (
        HEALTHY as HEALTHY,
        expected_frequency as expected_frequency,
        node_faults as node_faults,
    )
    from .study_tables import (
        NODES as NODES,
        SUBMODULES as SUBMODULES,
        Layers as Layers,
        Published as Published,
        published as published,
        published_disagreement as published_disagreement,
        published_layers as published_layers,
        published_noise as published_noise,
    )

    # Faults of silicon that were published, simulated.
    from .silicon import SILICON as SILICON, silicon_faults as silicon_faults, silicon_frequency as silicon_frequency

    # Steps with faults, and the ground truth.
    from ._inject import inject as inject
    from ._strike import Strike as Strike, no_strike as no_strike, strike as strike, strike_on as strike_on
    from .events import Events as Events, Hits as Hits, Moment as Moment

if TYPE_CHECKING:  # for the other packages of this project
    from ._strike import NUMBERS as NUMBERS
    from .changes import FIELDS as FIELDS, field_bits as field_bits
    from .comparing import (
        Compared as Compared,
        compare_tables as compare_tables,
        compare_time as compare_time,
        correlation as correlation,
    )
    from .events import strikable as strikable
    from .fault import check_moves as check_moves
    from .fitting import NoiseModel as NoiseModel, fit_bursts as fit_bursts, fit_tail as fit_tail
    from .kinds import KINDS as KINDS
    from .language import as_fault as as_fault, pattern_of as pattern_of
    from .measured import Drifting as Drifting, NodesMeasured as NodesMeasured, Response as Response
    from .nodes import Load as Load, behaviour as behaviour, fitted as fitted, parse_suspect as parse_suspect
    from .patterns import PATTERNS as PATTERNS
    from .study_tables import ELEMENTS as ELEMENTS, LAST_BIT as LAST_BIT

__getattr__, __dir__, __all__ = facade(__name__)
