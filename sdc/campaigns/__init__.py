"""Campaigns: thousands of single injections, and the outcome of training after each injection.

- `runner`: a campaign on one compiled step
- `outcomes`: classes of outcomes, and detectors of faults
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    from .runner import (
        Campaign as Campaign,
        Injection as Injection,
        NotDeterministic as NotDeterministic,
        campaign as campaign,
    )
    from .outcomes import (
        DETECTORS as DETECTORS,
        OUTCOMES as OUTCOMES,
        Observed as Observed,
        classify as classify,
        thresholds as thresholds,
    )

if TYPE_CHECKING:  # for the other packages of this project
    from .outcomes import (
        ABFT as ABFT,
        LEAST_FACTOR as LEAST_FACTOR,
        LEAST_RISE as LEAST_RISE,
        SPIKE as SPIKE,
        VISIBLE as VISIBLE,
    )

__getattr__, __dir__, __all__ = facade(__name__)
