"""The parent of the processes that `flips` starts imports this module, which makes them report their state."""

from .flips import hook

hook()
