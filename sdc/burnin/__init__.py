"""Burn-in: programs with known results, run again and again on every device of a host, and what their bits say of it.

Nothing is loaded here: read `workload` and `registry` for what is run, `rounds` for how, `evidence` for what a run
proves, `verdict` for what follows from all of it.
"""
