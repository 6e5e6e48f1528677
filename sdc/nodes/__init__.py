"""Faulty devices as studies published them, and these devices simulated.

- `published_tables`: the study's figures; `silicon`: profiles after two studies of GPUs.
- `simulated_nodes`: the fifteen nodes as faults; `severities`: what the largest severity of a run says of its tail.
- `fitting`, `comparing`, `measured`: what the study of the nodes fits, compares and finds.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # What was published.
    from .published_tables import (
        NODES as NODES,
        SUBMODULES as SUBMODULES,
        published as published,
        published_disagreement as published_disagreement,
        published_layers as published_layers,
        published_noise as published_noise,
    )
    from .silicon import SILICON as SILICON

    # The same devices, simulated.
    from .simulated_nodes import expected_frequency as expected_frequency, node_faults as node_faults

if TYPE_CHECKING:  # for the other packages of this project
    from .comparing import (
        Compared as Compared,
        compare_tables as compare_tables,
        compare_time as compare_time,
        correlation as correlation,
    )
    from .fitting import NoiseModel as NoiseModel, fit_bursts as fit_bursts, fit_tail as fit_tail
    from .measured import Drifting as Drifting, NodesMeasured as NodesMeasured, Response as Response
    from .published_tables import ELEMENTS as ELEMENTS, LAST_BIT as LAST_BIT
    from .simulated_nodes import (
        Load as Load,
        behaviour as behaviour,
        fitted as fitted,
        parse_suspect as parse_suspect,
    )

__getattr__, __dir__, __all__ = facade(__name__)
