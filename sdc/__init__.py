"""Deterministic analysis of silent data corruption in JAX programs."""

from .faults import Fault
from .fingerprint import fingerprint
from .first_difference import FirstDifference, first_difference
from .inject import Events, Moment, inject
from .lockstep import Mismatch, lockstep, synchronize
from .probe import probe
from .rewrite import Reports, rewrite, sites
from .sites import Selector, Site

__all__ = [
    "Events",
    "Fault",
    "FirstDifference",
    "Mismatch",
    "Moment",
    "Reports",
    "Selector",
    "Site",
    "fingerprint",
    "first_difference",
    "inject",
    "lockstep",
    "probe",
    "rewrite",
    "sites",
    "synchronize",
]
