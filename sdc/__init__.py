"""Deterministic analysis of silent data corruption in JAX programs."""

from .faults import Fault
from .fingerprint import fingerprint
from .inject import Events, Moment, inject
from .lockstep import Mismatch, lockstep, synchronize
from .rewrite import Reports, rewrite, sites
from .sites import Site, probe

__all__ = [
    "Events",
    "Fault",
    "Mismatch",
    "Moment",
    "Reports",
    "Site",
    "fingerprint",
    "inject",
    "lockstep",
    "probe",
    "rewrite",
    "sites",
    "synchronize",
]
