"""Running checkpoints of a training run (SCAR), and simulated losses of parts of its state."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sdc.settings import SettingError
from sdc.text import Form, form, read_term

if TYPE_CHECKING:
    pass

LOG = logging.getLogger("sdc.checkpoints")
FOLDER = "running"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LostShards:
    """`shards`: after a step, before anything is saved, some blocks of the state are lost, and given back.

    Attributes:
        step: number of the step, from 0.
        fraction: of the bytes of the parameters, above 0 and at most 1; which blocks is drawn.
        recover: `partial`: what was lost is read from the running checkpoint; `full`: everything is.
        seed: of the draw.
    """

    step: int
    fraction: float = 0.5
    recover: Literal["partial", "full"] = "partial"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"step={self.step}: expected at least 0")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction}: expected more than 0 and at most 1")


LOSSES: Mapping[str, Form] = {"shards": form(LostShards)}
EXAMPLE = "shards,step=30,fraction=0.5,recover=partial"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """Saves blocks that moved most, often, in the place of full checkpoints.

    Attributes:
        fraction: of the parameters' bytes that each save writes; a save is due after so many times
            `checkpoint_every` steps.
        losses: simulated losses, each as text: see `LostShards`.
    """

    fraction: float = 0.125
    losses: Sequence[str] = ()

    @property
    def lost(self) -> list[LostShards]:
        """The losses, read.

        Raises:
            ValueError: one cannot be understood.
        """
        return [read_term("loss", text, LOSSES, noun="loss", example=EXAMPLE).value for text in self.losses]

    def check(self, steps: int) -> None:
        """Checks everything that needs no device.

        Raises:
            ValueError: a setting makes no sense.
        """
        if not 0 < self.fraction <= 1:
            raise SettingError("checkpoint_fraction", self.fraction, "expected more than 0 and at most 1")
        for one in self.lost:
            if one.step >= steps:
                raise SettingError("lose_shards", f"step={one.step}", f"the run has {steps} steps, from 0")

    def described(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """What the manifest says: losses are faults that are simulated."""
        suspect = told["suspect"]
        every = [*suspect["faults"], *self.losses]
        name = suspect["name"] or ("losses" if every else None)
        suspect = {"name": name, "simulated": bool(every), "faults": every}
        return {**told, "running": dataclasses.asdict(self), "suspect": suspect}

    def every(self, checkpoint_every: int) -> int:
        """Steps from one save to the next."""
        return max(1, round(checkpoint_every * self.fraction))


class Keeper:
    """The running checkpoint of a run. In a run of several processes all make one, and call it alike."""

    def __init__(
        self, settings: Running, folder: Path, initial: Any, *, again: Callable[[], Any], checkpoint_every: int
    ) -> None:
        from sdc.checkpoints import RunningCheckpoint

        self.checkpoint: RunningCheckpoint = RunningCheckpoint(
            folder / FOLDER, initial, fraction=settings.fraction, moving="params", again=again
        )
        self._every = settings.every(checkpoint_every)
        self._lost = settings.lost

    def due(self, step: int) -> bool:
        """Whether so many steps end with a save."""
        return step % self._every == 0

    def recovered(self, state: Any, number: int) -> tuple[Any, dict[str, Any] | None]:
        """The state after a step, with what was lost in it given back, and what the record says of that."""
        told: dict[str, Any] | None = None
        for one in self._lost:
            if one.step == number:
                state, told = self._give_back(state, one)
        return state, told

    def save(self, state: Any, step: int, position: Mapping[str, Any]) -> None:
        """Saves what is due after so many steps, in the background."""
        self.checkpoint.save(state, step, note=position)

    def restored(self, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """What the checkpoint holds, each block of its own step, and the position of the data."""
        reader = self.checkpoint.reader()
        found = reader.recover([], state, policy="full")
        step = max(found.steps.values(), default=0)
        LOG.warning(
            "the run goes on from its running checkpoint of step %d; its oldest block is %d steps behind, and %d were "
            "never saved", step, found.age(step), len(found.initial),
        )  # fmt: skip
        return found.state, reader.note

    def close(self) -> None:
        """Waits for what is being saved."""
        self.checkpoint.close()

    def _give_back(self, state: Any, one: LostShards) -> tuple[Any, dict[str, Any]]:
        cut = self.checkpoint.partition
        sizes = np.asarray(cut.sizes[:-1], float)
        order = np.random.default_rng([one.seed, one.step]).permutation(cut.choices)
        # As many as make up the fraction, and one at least.
        count = max(1, int(np.searchsorted(np.cumsum(sizes[order]), one.fraction * sizes.sum() * (1 + 1e-9), "right")))
        lost = sorted(int(block) for block in order[:count])
        found = self.checkpoint.recover(lost, state, policy=one.recover)
        told = {
            "policy": one.recover, "lost": len(lost), "blocks": cut.choices,
            "bytes": int(sizes[lost].sum()), "read": found.bytes, "behind": found.age(one.step + 1),
            "initial": len(found.initial), "older": len(found.older),
            "perturbation": self.checkpoint.distance(state, found.state),
        }  # fmt: skip
        return found.state, told


def saved_step(folder: Path) -> int:
    """Steps done at the last sealed save of a run; 0 if there is none."""
    from etils import epath

    from sdc.checkpoints.store import last_save

    found = last_save(epath.Path(folder / FOLDER))
    return 0 if found is None else found.step
