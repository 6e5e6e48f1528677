"""Deterministic analysis of silent data corruption in JAX programs.

Every tool is a function transformation, as `jax.grad` is, and is applied to a training step that the user supplies. The
folder docs/api has one page per package, with an example for every public name.
"""

from typing import TYPE_CHECKING

from ._lazy import facade

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    # Subpackages.
    from . import (
        aggregation as aggregation,
        campaigns as campaigns,
        checkpoints as checkpoints,
        checksums as checksums,
        faults as faults,
        guarding as guarding,
        integrations as integrations,
        nodes as nodes,
        program as program,
        records as records,
        twins as twins,
    )

    # Sites of a step, and custom rewriting rules.
    from .program import (
        Reports as Reports,
        Selector as Selector,
        Site as Site,
        probe as probe,
        rewrite as rewrite,
        sites as sites,
    )

    # Fault injection.
    from .faults import (
        Events as Events,
        Fault as Fault,
        Hits as Hits,
        Moment as Moment,
        Strike as Strike,
        inject as inject,
        no_strike as no_strike,
        strike as strike,
        strike_on as strike_on,
    )

    # Comparison of two runs of a step.
    from .twins import (
        Bisection as Bisection,
        FirstDifference as FirstDifference,
        Mismatch as Mismatch,
        bisect as bisect,
        fingerprint as fingerprint,
        first_difference as first_difference,
        lockstep as lockstep,
        synchronize as synchronize,
    )

    # Checksums on the matrix products of a step.
    from .checksums import abft as abft

    # Certified checkpoints.
    from .checkpoints import certify as certify

    # Evidence of corruption from a running training loop.
    from .guarding import first_nonfinite as first_nonfinite, guard as guard, witness as witness

    # Campaigns: thousands of injections, and the outcome of each.
    from .campaigns import campaign as campaign

__getattr__, __dir__, __all__ = facade(__name__)
