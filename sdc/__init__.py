"""Deterministic analysis of silent data corruption in JAX programs."""

from .fingerprint import fingerprint
from .rewrite import Reports, rewrite, sites
from .sites import Site, probe

__all__ = ["Reports", "Site", "fingerprint", "probe", "rewrite", "sites"]
