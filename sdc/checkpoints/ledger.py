"""What is known of the checkpoints in a folder, beside what they must restore to: who vouches, and who writes.

The first process of a run keeps it. What cannot be read counts as good where something would be deleted, and as unknown
where somebody asks.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import jax
from etils import epath

from sdc.records import RecordError

from ..records import Lock, read_json, write_sealed
from .certificate import CANDIDATE, FOLDER, REASONS, VERIFIED, CertificateError, Reason, Status, step_folder

STATUS = "status.json"


class _Known(NamedTuple):
    reasons: tuple[Reason, ...] = ()
    doubt: bool = False
    leaving: bool = False


class Ledger:
    """Of one folder of checkpoints."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder = folder
        self._lock: Lock | None = None

    def status(self, step: int, *, history: bool) -> Status:
        """What is known of a step. One that cannot be read, or is in doubt, is one of a candidate."""
        known = self._known(step)
        found = () if known is None or known.doubt else known.reasons
        return Status(step, VERIFIED if found else CANDIDATE, found, history)

    def vouch(self, step: int, reason: Reason) -> None:
        """Somebody vouches for a step, which ends all doubt.

        Raises:
            OSError: that cannot be written.
        """
        known = self._known(step) or _Known()
        if reason not in known.reasons or known.doubt:
            self._write(step, _Known((*known.reasons, reason)))

    def revoke(self, step: int) -> None:
        """Nobody vouches for a step any more: it was compared, and is not what was saved.

        Raises:
            OSError: that cannot be written.
        """
        known = self._known(step)
        if known is None or known.reasons or known.doubt:
            self._write(step, _Known(leaving=known is not None and known.leaving))

    def doubt(self, step: int) -> None:
        """A step could not be read, which the storage may have been at fault for: it stays, and so does an older one.

        Remains of one that was being deleted stay no longer.

        Raises:
            OSError: that cannot be written.
        """
        known = self._known(step)
        if known is not None and known.leaving:
            self.revoke(step)
        elif known is not None and known.reasons and not known.doubt:
            self._write(step, _Known(known.reasons, True))

    def leaving(self, step: int) -> None:
        """A step is about to be deleted. If a run is killed over that, its remains are no damaged checkpoint.

        Raises:
            OSError: that cannot be written.
        """
        if step_folder(self._folder, step).exists() and not self.left(step):
            self._write(step, (self._known(step) or _Known())._replace(leaving=True))

    def left(self, step: int) -> bool:
        """Whether a step was about to be deleted. It may be whole all the same."""
        known = self._known(step)
        return known is not None and known.leaving

    def kept(self, steps: Iterable[int]) -> set[int]:
        """What no policy may delete: the newest step that is verified, and those of which that may be so."""
        known = {step: self._known(step) for step in steps}
        unsure = {step for step, one in known.items() if one is None or one.doubt}
        return unsure | {*sorted(step for step, one in known.items() if one and one.reasons and not one.doubt)[-1:]}

    def forget(self, step: int) -> None:
        """Another state is saved in the place of one: what is known of that is not of this. Digests are overwritten."""
        if _first():
            (step_folder(self._folder, step) / STATUS).unlink(missing_ok=True)

    def discard(self, step: int) -> None:
        """Deletes a certificate."""
        if _first() and (place := step_folder(self._folder, step)).exists():
            place.rmtree()

    def prune(self) -> None:
        """Deletes certificates whose checkpoints are gone from the folder, whatever these are called there."""
        place = self._folder / FOLDER
        if not _first() or not place.exists():
            return
        found = (re.search(r"(\d+)\D*$", path.name) for path in self._folder.iterdir())
        there = {int(number[1]) for number in found if number}
        for stale in (path for path in place.iterdir() if path.name.isdecimal() and int(path.name) not in there):
            stale.rmtree()

    def lock(self) -> None:
        """Takes the folder for this run, until it is released.

        Raises:
            CertificateError: another process writes it.
        """
        if not _first() or self._lock is not None:
            return
        place = self._folder / FOLDER
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(place)
        except RecordError as error:
            raise CertificateError(str(error)) from error
        except OSError as error:
            raise CertificateError(f"{place} cannot be written ({error.strerror or error})") from error

    def release(self) -> None:
        """Lets go of the folder."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _write(self, step: int, known: "_Known") -> None:
        if _first():
            body = {"step": step, "reasons": sorted(set(known.reasons)), "doubt": known.doubt, "leaving": known.leaving}
            write_sealed(step_folder(self._folder, step) / STATUS, body)

    def _known(self, step: int) -> "_Known | None":
        """What is noted of a step; None if that cannot be read."""
        path = step_folder(self._folder, step) / STATUS
        if not path.exists():
            return _Known()
        try:
            body = read_json(path, sealed=True)
            reasons = tuple(sorted(set(body["reasons"]) & set(REASONS)))
            known = _Known(reasons, bool(body["doubt"]), bool(body.get("leaving", False)))
            return known if body["step"] == step else None
        except (RecordError, OSError, KeyError, TypeError):
            return None


def _first() -> bool:
    return jax.process_index() == 0
