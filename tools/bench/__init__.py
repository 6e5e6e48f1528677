"""Benchmarks: `sdc bench`."""
