"""Running checkpoints of a training run (SCAR), copies on each host, and losses of parts of the run's state.

A loss is either real or simulated. A run continues after a simulated loss. After a real loss, all processes are
restarted; each process then reads its state from the last copy on its own host, and reads any blocks that no host holds
from the running checkpoint.
"""

import dataclasses
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from sdc._lazy import np
from sdc.settings import Flag, SettingError
from sdc.text import Form, form, read_term, write_term

if TYPE_CHECKING:
    from sdc.checkpoints import Outlook, Recovered

LOG = logging.getLogger("sdc.checkpoints")
FOLDER = "running"
LOST = (0.125, 0.5, 1.0)  # fractions of the state for which the cost of a loss is recorded
LOGGED = 0.5  # the fraction for which the cost of a loss is logged
TIMES = 2.0  # factor by which that cost must change to be logged again
DIGITS = 4  # digits of the speeds in the record


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LostShards:
    """`shards`: simulates the loss and recovery of some blocks of the state after a step, before anything is saved."""

    step: int  # step number, from 0
    fraction: float = 0.5  # lost share of the parameters' bytes, in (0, 1]; the blocks are drawn at random
    # `partial` reads only the lost blocks from the running checkpoint, `full` reads all blocks
    recover: Literal["partial", "full"] = "partial"
    # State of the optimizer for lost parameters: `saved` restores it, `zeroed` sets it to zero
    optimizer: Literal["saved", "zeroed"] = "saved"
    seed: int = 0  # seed of the random draw

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"step={self.step}: expected at least 0")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction}: expected more than 0 and at most 1")

    def __repr__(self) -> str:
        return write_term(self, LOSSES)


LOSSES: Mapping[str, Form] = {"shards": form(LostShards)}
EXAMPLE = 'shards(step=30, fraction=0.5, recover="partial")'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """Settings of a running checkpoint, which frequently saves the blocks that changed most, instead of the full
    state."""

    fraction: Annotated[float, Flag("checkpoint_fraction")] = 0.125
    """Fraction of the state's bytes that each save of --checkpoint scar writes. The interval between saves is the
    same fraction of --checkpoint-every."""
    local_copies: Annotated[str | os.PathLike[str] | None, Flag(type=Path)] = None
    """Local folder for copies of this host's part of the state, taken every --checkpoint-every steps; if a process is
    lost, the run resumes from these copies (default: the system's temporary folder). Needs --checkpoint scar."""
    losses: Annotated[Sequence[str], Flag("lose_shards", repeated=True)] = ()
    """Simulated loss, such as shards,step=30,fraction=0.5,recover=partial (or full); may be repeated. Needs
    --checkpoint scar."""

    @property
    def lost(self) -> list[LostShards]:
        return [read_term("loss", text, LOSSES, noun="loss", example=EXAMPLE).value for text in self.losses]

    def check(self, steps: int) -> None:
        """Checks every setting that can be checked without a device."""
        if not 0 < self.fraction <= 1:
            raise SettingError("checkpoint_fraction", self.fraction, "expected more than 0 and at most 1")
        if self.local_copies is not None and Path(self.local_copies).is_file():
            raise SettingError("local_copies", str(self.local_copies), "is a file; expected a folder on this host")
        for one in self.lost:
            if one.step >= steps:
                raise SettingError("lose_shards", f"step={one.step}", f"expected a step from 0 to {steps - 1}")

    def describe(self) -> dict[str, Any]:
        """Returns the manifest fields, without the folder of copies, which is local to each host."""
        return {"fraction": self.fraction, "losses": [str(loss) for loss in self.lost]}


class Restart(NamedTuple):
    state: Any
    step: int  # number of completed steps
    position: Mapping[str, Any]  # position of the data iterator


class Keeper:
    """The running checkpoint of a run, and the copies on each host. Every process creates a keeper and calls the same
    methods in the same order."""

    def __init__(
        self,
        settings: Running,
        folder: Path,
        initial: Any,
        *,
        again: Callable[[], Any],
        checkpoint_every: int,
    ) -> None:
        """Opens the running checkpoint and the copies. Calling `again` recreates the initial state."""
        import jax

        from sdc.checkpoints import Copies, RunningCheckpoint

        self.checkpoint: RunningCheckpoint = RunningCheckpoint(
            folder / FOLDER, initial, fraction=settings.fraction, moving="params", again=again
        )
        record = folder / FOLDER / f"process-{jax.process_index()}" / "copies.json"
        parent = Path(settings.local_copies or tempfile.gettempdir()).absolute()
        self.copies = Copies.recorded(record, parent, initial)
        self._every, self._copied = max(1, round(checkpoint_every * settings.fraction)), checkpoint_every
        self._lost = settings.lost
        self._restarted: dict[str, Any] = {}
        self._newest: dict[str, Any] | None = None
        self._said: dict[str, Any] | None = None
        self._cost = math.nan

    def due(self, step: int) -> bool:
        """Returns whether a save or a copy is due after `step` steps."""
        return step % self._every == 0 or step % self._copied == 0

    def recovered(self, state: Any, number: int) -> tuple[Any, dict[str, Any]]:
        """Returns the state after a step, with lost blocks recovered, and entries for the record.

        The entries describe the losses that occurred and, if a save follows, the expected cost of the next loss.
        """
        entries, self._restarted = self._restarted, {}
        for one in self._lost:
            if one.step == number:
                state, entries["recovered"] = self._give_back(state, one)
        if (number + 1) % self._every == 0:
            found = self.checkpoint.look(state, number + 1)
            if found is not None:
                entries["outlook"] = self._row(found)
        return state, entries

    def save(self, state: Any, step: int, position: Mapping[str, Any]) -> None:
        if step % self._every == 0:
            self.checkpoint.save(state, step, note=position)
        if step % self._copied == 0:
            self.copies.save(state, step, position)

    def restart(self, state: Any, *, after: int, lines: int) -> Restart | None:
        """Returns the state and the data position from which a restarted run resumes. Both come from the copies of
        surviving hosts or, if there are none, from the running checkpoint alone.

        Survivors resume with the exact bits that they had after a step, so counters and data match the parameters.
        Blocks that no survivor holds are read from the running checkpoint, and may be older or newer than that step.
        `lines` is the number of lines in the record. Returns None if nothing is newer than the full checkpoint of step
        `after`.
        """
        from sdc.checkpoints import agree, gather

        self.copies.drop(lines)  # deletes copies of steps that will be repeated
        reader = self.checkpoint.reader()
        survivors = agree(self.copies, after=after, until=lines)
        if survivors is None:
            if reader.step <= after:
                return None
            # The blocks in the checkpoint, which may be from different steps.
            whole = reader.recover([], state, policy="full")
            step, blocks = reader.step, len(self.checkpoint.partition.blocks)
            entry = {"policy": "full", "lost": blocks, "bytes": sum(self.checkpoint.partition.sizes)}
            self._report(step, lines, whole, entry)
            self.checkpoint.went_back(range(blocks), step)
            return Restart(whole.state, step, reader.note)
        step, position = survivors.step, survivors.note
        found = gather(state, survivors, self.checkpoint.partition, reader)
        entry = {"policy": "partial", "lost": len(found.lost), "bytes": found.bytes, "processes": found.shares}
        self._report(step, lines, found.recovered, entry)
        self.checkpoint.went_back(found.lost, step)
        self.copies.drop(step)
        # The running checkpoint may be from a later step, whose line is about to be removed from the record.
        state = found.recovered.state
        self.checkpoint.save(state, step, note=position)
        self.checkpoint.wait()
        if survivors.mine is None:
            self.copies.save(state, step, position)
        return Restart(state, step, position)

    def _report(self, step: int, lines: int, found: "Recovered[Any]", entry: Mapping[str, Any]) -> None:
        """Logs and records the outcome of a restart."""
        import jax

        blocks = len(self.checkpoint.partition.blocks)
        entry = {
            "simulated": False, "step": step, "steps_lost": lines - step, "blocks": blocks,
            **_read(found, step), **entry,
        }  # fmt: skip
        self._restarted["restarted"] = entry
        ways = {"own": "its own copy", "peers": "survivors", "running": "the running checkpoint"}
        shares = entry["processes"][jax.process_index()] if "processes" in entry else {}
        mine = [f"{shares[way]['bytes']:,} bytes from {source}" for way, source in ways.items() if way in shares]
        LOG.warning(
            "the run resumes from step %d, so %d steps are lost; %d of %d blocks were read from the running checkpoint "
            "(the oldest is %d steps behind, and %d were never saved)%s",
            step, lines - step, entry["lost"], blocks, entry["behind"], entry["initial"],
            f"; this process read {', '.join(mine)}" if mine else "",
        )  # fmt: skip

    def close(self, *, done: bool = False) -> None:
        """Waits for pending saves, and deletes the copies if the run is complete."""
        if self._newest is not None and self._newest["losses"] and self._newest is not self._said:
            self._log(self._newest)  # the final state
        self.checkpoint.close()
        if done:
            self.copies.remove()
        self.copies.close()

    def _give_back(self, state: Any, one: LostShards) -> tuple[Any, dict[str, Any]]:
        cut = self.checkpoint.partition
        sizes = np.asarray(cut.sizes[:-1], float)
        order = np.random.default_rng([one.seed, one.step]).permutation(cut.choices)
        # Enough blocks to make up the fraction, and at least one.
        count = max(1, int(np.searchsorted(np.cumsum(sizes[order]), one.fraction * sizes.sum() * (1 + 1e-9), "right")))
        lost = sorted(int(block) for block in order[:count])
        back = lost if one.recover == "partial" else list(range(cut.choices))
        outlook = self.checkpoint.outlook
        now = None if outlook is None else outlook.later(one.step + 1, self.checkpoint.saved())
        found = self.checkpoint.recover(lost, state, policy=one.recover, zeroed=one.optimizer == "zeroed")
        self.checkpoint.went_back(back, one.step + 1)
        perturbation = self.checkpoint.distance(state, found.state)
        entry: dict[str, Any] = {
            "simulated": True, "policy": one.recover, "lost": len(lost), "blocks": cut.choices,
            "bytes": int(sizes[lost].sum()), **_read(found, one.step + 1), "perturbation": perturbation,
        }  # fmt: skip
        if now is not None:
            entry["predicted"] = {"steps": now.behind(back), "one_rate": now.one_rate(perturbation)}
        return found.state, entry

    def _row(self, outlook: "Outlook") -> dict[str, Any]:
        """Returns the record fields of an outlook, as plain numbers. Logs the outlook if the cost of a loss has changed
        enough."""
        converging, timings = outlook.convergence, self.checkpoint.timings
        moving = bool(outlook.speeds.any())
        found: dict[str, Any] = {
            "step": outlook.step, "every": outlook.every,
            "c": None if converging is None else converging.c,
            "distance": None if converging is None else converging.distance,
            "losses": [outlook.loss(fraction)._asdict() for fraction in LOST] if moving else [],
            # On average, a rollback to a full checkpoint loses half of the steps between two checkpoints.
            "rollback": self._copied / 2, "bytes": sum(outlook.sizes),
            "speeds": [float(f"{speed:.{DIGITS}g}") for speed in outlook.profile()] if moving else [],
            "timings": None if timings is None else timings._asdict(),
        }  # fmt: skip
        self._newest = found
        cost = outlook.loss(LOGGED).steps
        if moving and not self._cost / TIMES < cost < self._cost * TIMES:
            self._log(found)
        return found

    def _log(self, found: dict[str, Any]) -> None:
        import jax

        cost = next(one for one in found["losses"] if one["fraction"] == LOGGED)
        self._cost, self._said = cost["steps"], found
        if jax.process_index() == 0:
            rate = cost["one_rate"]
            otherwise = "" if rate is None else f" ({rate:.3g} in any direction, if everything converges at one rate)"
            LOG.info(
                "after %d steps, losing half of the state would cost on average %.3g steps with partial recovery%s, "
                "and %.3g with a full rollback",
                found["step"], cost["steps"], otherwise, found["rollback"],
            )  # fmt: skip


def _read(found: "Recovered[Any]", step: int) -> dict[str, int]:
    """Returns the record fields that describe blocks read from the running checkpoint, relative to a state after `step`
    steps."""
    return {
        "read": found.bytes, "behind": found.age(step), "initial": len(found.initial), "older": len(found.older),
    }  # fmt: skip


def saved_step(folder: Path) -> int:
    """Returns the number of steps that a run had completed at its last sealed save, or 0 if no save was sealed."""
    from etils import epath

    from sdc.checkpoints import last_save

    found = last_save(epath.Path(folder / FOLDER))
    return 0 if found is None else found.oldest.step
