"""Deterministic analysis of silent data corruption in JAX programs."""

from .abft import abft
from .bisect import Bisection, bisect
from .campaign import campaign
from .faults import Fault
from .fingerprint import fingerprint
from .first_difference import FirstDifference, first_difference
from .inject import Events, Hits, Moment, inject
from .lockstep import Mismatch, lockstep, synchronize
from .probe import probe
from .rewrite import Reports, rewrite, sites
from .sites import Selector, Site
from .strike import Strike, no_strike, strike, strike_on

__all__ = [
    "Bisection",
    "Events",
    "Fault",
    "FirstDifference",
    "Hits",
    "Mismatch",
    "Moment",
    "Reports",
    "Selector",
    "Site",
    "Strike",
    "abft",
    "bisect",
    "campaign",
    "fingerprint",
    "first_difference",
    "inject",
    "lockstep",
    "no_strike",
    "probe",
    "rewrite",
    "sites",
    "strike",
    "strike_on",
    "synchronize",
]
