"""What is asked of an Orbax checkpointer beyond its public doors, in one place.

Versions of Orbax in which one of them is closed are told apart when a checkpointer is certified.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .certificate import CertificateError


def keep_also(checkpointer: Any, more: Callable[[], set[int]], leaving: Callable[[int], None]) -> None:
    """Puts what must stay around the checkpointer's own policy.

    Args:
        checkpointer: Orbax's; its policy is fixed when it is made.
        more: the steps of checkpoints that stay whatever that policy says, asked for at every save.
        leaving: is told each step that does not, before it is deleted.

    Raises:
        CertificateError: it is no checkpointer of Orbax's version 1.
    """
    manager: Any = getattr(checkpointer, "_manager", None)
    policy = getattr(manager, "_preservation_policy", None)
    if not hasattr(policy, "should_preserve") or not hasattr(manager, "all_steps"):
        raise CertificateError(
            f"{type(checkpointer).__name__} is no training.Checkpointer of Orbax's version 1, as far as this version "
            "of it goes; expected orbax.checkpoint.v1.training.Checkpointer"
        )
    manager._preservation_policy = _Keeping(policy, more, leaving)


def steps_of(checkpointer: Any) -> list[int]:
    """Steps of the complete checkpoints. The checkpointer's own list asks for times, which it may not have read."""
    return sorted(map(int, checkpointer._manager.all_steps()))


def state_key(checkpointer: Any) -> str:
    """The name under which Orbax saves a tree that is given none."""
    return str(inspect.signature(checkpointer.save).parameters["checkpointable_name"].default)


class _Keeping:
    """A preservation policy that keeps some more."""

    def __init__(self, policy: Any, more: Callable[[], set[int]], leaving: Callable[[int], None]) -> None:
        self._policy, self._more, self._leaving = policy, more, leaving

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        more = self._more()
        kept = self._policy.should_preserve(checkpoints, context=context)
        found = [bool(stays) or one.step in more for one, stays in zip(checkpoints, kept, strict=True)]
        for one, stays in zip(checkpoints, found, strict=True):
            if not stays:
                self._leaving(int(one.step))
        return found
