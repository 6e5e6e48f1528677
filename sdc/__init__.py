"""Deterministic analysis of silent data corruption in JAX programs."""
from .sites import probe as probe
