"""Deterministic analysis of silent data corruption in JAX programs.

Every tool here is a transformation of a step that somebody else may have written, in the family of `jax.grad`.
The pages of docs/api show every public name at work, a page for each package.
"""

from typing import TYPE_CHECKING

from ._lazy import facade

if TYPE_CHECKING:
    # The rooms of the library.
    from . import (
        aggregation as aggregation,
        campaigns as campaigns,
        checkpoints as checkpoints,
        checksums as checksums,
        faults as faults,
        nodes as nodes,
        program as program,
        records as records,
        twins as twins,
    )

    # The places of a step, and rules of one's own.
    from .program import (
        Reports as Reports,
        Selector as Selector,
        Site as Site,
        probe as probe,
        rewrite as rewrite,
        sites as sites,
    )

    # A step on simulated faulty hardware.
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

    # Two runs of a step, and where they part.
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

    # A step that checks its own products.
    from .checksums import abft as abft

    # Checkpoints that restore to what was saved.
    from .checkpoints import certify as certify

    # Thousands of faults, one after the other, and what becomes of training after each.
    from .campaigns import campaign as campaign

__getattr__, __dir__, __all__ = facade(__name__)
