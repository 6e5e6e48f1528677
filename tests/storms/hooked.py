"""Imported by the parent of the processes that `flips` starts: their state can be found from outside."""

from .flips import hook

hook()
