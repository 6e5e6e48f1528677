"""Deterministic analysis of silent data corruption in JAX programs."""

from .rewrite import Reports, rewrite, sites
from .sites import Site, probe

__all__ = ["Reports", "Site", "probe", "rewrite", "sites"]
