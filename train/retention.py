"""Which checkpoints stay: the newest ones, and those that somebody asked for."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from etils import epath

from .sealed import read_checked, write_checked

PROTECTED = "protected.json"


class Retention:
    """Orbax's preservation policy of a run: the newest `keep`, and the protected ones.

    A save also drops what is left of later steps: they belong to a course of the run that was given up, and a run that
    is started again would go on from them.
    """

    def __init__(self, folder: epath.Path, keep: int, complete: Callable[[], Iterable[int]]) -> None:
        self._file = folder / PROTECTED
        self._keep = keep
        self._complete = complete
        self.saving = 0
        """Step of the checkpoint that is being written."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's question before it deletes, once the new checkpoint is complete."""
        past = {step for step in self._complete() if step < self.saving}
        stays = {*sorted(past | {self.saving})[-self._keep :], *self.protected()}
        return [checkpoint.step in stays for checkpoint in checkpoints]

    def protected(self) -> frozenset[int]:
        """The protected steps, as the folder has them.

        Raises:
            Damage: the list is damaged.
        """
        return frozenset(read_checked(self._file)["steps"]) if self._file.exists() else frozenset()

    def protect(self, steps: Iterable[int]) -> None:
        """Replaces the list of protected steps."""
        if jax.process_index() == 0:
            write_checked(self._file, {"steps": sorted(steps)})
