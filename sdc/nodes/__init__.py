"""Published figures on faulty devices, and simulations of these devices.

- `published_tables`: the study's figures; `silicon`: profiles from two studies of GPUs.
- `simulated_nodes`: the fifteen nodes as faults, and the tail of severities that follows from a run's largest severity.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Published figures.
    from .published_tables import (
        NODES as NODES,
        SUBMODULES as SUBMODULES,
        published as published,
        published_accuracy as published_accuracy,
        published_disagreement as published_disagreement,
        published_layers as published_layers,
        published_noise as published_noise,
    )
    from .silicon import SILICON as SILICON

    # Simulations.
    from .simulated_nodes import expected_frequency as expected_frequency, node_faults as node_faults

if TYPE_CHECKING:  # for the other packages of this project
    from .published_tables import (
        ELEMENTS as ELEMENTS,
        LAST_BIT as LAST_BIT,
        MICROSTEPS as MICROSTEPS,
        ONE_ELEMENT as ONE_ELEMENT,
        PARAMETER_STEPS as PARAMETER_STEPS,
        STEPS as STEPS,
        Layers as Layers,
        node_number as node_number,
    )
    from .simulated_nodes import (
        FREAK as FREAK,
        FittedValue as FittedValue,
        Load as Load,
        behaviour as behaviour,
        fitted as fitted,
        largest_mean as largest_mean,
        none_below as none_below,
        parse_suspect as parse_suspect,
        rate_interval as rate_interval,
        silent as silent,
    )

__getattr__, __dir__, __all__ = facade(__name__)
