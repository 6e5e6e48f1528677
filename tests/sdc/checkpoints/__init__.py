"""Checkpoints: certificates, running checkpoints, repair."""
