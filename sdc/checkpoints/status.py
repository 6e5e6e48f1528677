"""What is known of the checkpoints in a folder, beside what they must restore to: who vouches, and who writes.

The first process of a run keeps it. What cannot be read counts as good where something would be deleted, and as unknown
where somebody asks.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

import jax
import msgspec
from etils import epath

from ..records import Format, Lock, RecordError, reason
from ..schema import Header
from .certificate import FOLDER, CertificateError, step_folder

STATUS = "status.json"
Reason: TypeAlias = Literal["digest", "twins", "guard"]
REASONS: tuple[Reason, ...] = get_args(Reason)
CANDIDATE, VERIFIED = "CANDIDATE", "VERIFIED"


@dataclasses.dataclass(frozen=True)
class Status:
    """What is known of a checkpoint.

    Attributes:
        step: of the checkpoint.
        state: `CANDIDATE`, or `VERIFIED`: compared with its digests after a restore, or vouched for.
        reasons: who vouches: `digest`, `twins`, `guard`.
        history: whether its digests were taken before it was saved.
    """

    step: int
    state: str
    reasons: tuple[Reason, ...]
    history: bool


class Known(Header, kw_only=True, tag="jax-sdc checkpoint status"):
    """The file of a step."""

    step: int
    reasons: tuple[Reason, ...] = ()
    doubt: bool = False  # it could not be read, which the storage may have been at fault for
    leaving: bool = False  # it is about to be deleted
    protected: bool = False  # no policy may delete it


KNOWN = Format(type=Known, noun="status of a checkpoint", remedy="delete it")


class Statuses:
    """Of one folder of checkpoints. What cannot be written is an OSError."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder = folder
        self._lock: Lock | None = None

    def status(self, step: int, *, history: bool) -> Status:
        """What is known of a step. One that cannot be read, or is in doubt, is one of a candidate."""
        known = self._known(step)
        found = () if known is None or known.doubt else known.reasons
        return Status(step, VERIFIED if found else CANDIDATE, found, history)

    def vouch(self, step: int, reason: Reason) -> None:
        """Somebody vouches for a step, which ends all doubt, and all that was known of its deletion."""
        known = self._known(step) or Known(step=step)
        if reason not in known.reasons or known.doubt:
            reasons = tuple(sorted({*known.reasons, reason}))
            self._write(step, Known(step=step, reasons=reasons, protected=known.protected))

    def revoke(self, step: int) -> None:
        """Nobody vouches for a step any more: it was compared, and is not what was saved."""
        known = self._known(step)
        if known is None or known.reasons or known.doubt:
            left, protected = known is not None and known.leaving, known is not None and known.protected
            self._write(step, Known(step=step, leaving=left, protected=protected))

    def doubt(self, step: int) -> None:
        """A step could not be read: it stays, and so does an older one; but not what is left after a deletion."""
        known = self._known(step)
        if known is not None and known.leaving:
            self.revoke(step)
        elif known is not None and known.reasons and not known.doubt:
            self._write(step, msgspec.structs.replace(known, doubt=True))

    def leaving(self, step: int) -> None:
        """A step is about to be deleted. If a run is killed over that, its remains are no damaged checkpoint."""
        if step_folder(self._folder, step).exists() and not self.left(step):
            self._write(step, msgspec.structs.replace(self._known(step) or Known(step=step), leaving=True))

    def left(self, step: int) -> bool:
        """Whether a step was about to be deleted. It may be whole all the same."""
        known = self._known(step)
        return known is not None and known.leaving

    def protect(self, step: int, protected: bool) -> None:
        """No policy deletes this step, or one may again."""
        self._write(step, msgspec.structs.replace(self._known(step) or Known(step=step), protected=protected))

    def is_protected(self, step: int) -> bool:
        """Whether no policy deletes this step; where that cannot be read, none does."""
        known = self._known(step)
        return known is None or known.protected

    def kept(self, steps: Iterable[int]) -> set[int]:
        """What no policy may delete: the newest step that is verified, those of which that may be so, the protected."""
        known = {step: self._known(step) for step in steps}
        stays = {step for step, one in known.items() if one is None or one.doubt or one.protected}
        return stays | {*sorted(step for step, one in known.items() if one and one.reasons and not one.doubt)[-1:]}

    def forget(self, step: int) -> None:
        """Another state is saved in the place of one: nothing that is known of that is of this, but its protection."""
        place = step_folder(self._folder, step)
        if _first():
            if (place / STATUS).exists() and self.is_protected(step):
                self._write(step, Known(step=step, protected=True))
            else:
                (place / STATUS).unlink(missing_ok=True)
        # Each process its own: none deletes what another one is writing already.
        (place / f"process-{jax.process_index()}.json").unlink(missing_ok=True)

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
        """Takes the folder for this run, until it is released; a CertificateError if another process writes it."""
        if not _first() or self._lock is not None:
            return
        place = self._folder / FOLDER
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(place)
        except RecordError as error:
            raise CertificateError(str(error)) from error
        except OSError as error:
            raise CertificateError(f"{place} cannot be written ({reason(error)})") from error

    def release(self) -> None:
        """Lets go of the folder."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _write(self, step: int, known: Known) -> None:
        if _first():
            KNOWN.write(step_folder(self._folder, step) / STATUS, known)

    def _known(self, step: int) -> Known | None:
        """What is noted of a step; None if that cannot be read."""
        path = step_folder(self._folder, step) / STATUS
        if not path.exists():
            return Known(step=step)
        try:
            known = KNOWN.read(path)
        except RecordError:
            return None
        return known if known.step == step else None


def _first() -> bool:
    return jax.process_index() == 0
