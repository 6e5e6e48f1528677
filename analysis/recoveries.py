"""What a run lost of its state and got back: in a table, in words, and beside other runs.

What it cost is told as its source has it (Qiao et al., ICML 2019): in steps, until training is where it was.
"""

import dataclasses
import math
from collections.abc import Sequence

from sdc.schema import RecoveryRow, StepRow

from .report import NOT_MEASURED, LeftOut, Table, show
from .series import per_twin, whole

CAPTION = "Parts of the state that were lost"
BESIDE = "What the losses cost"
NEXT = 10
"""Steps after a loss of which the excess of the training loss is averaged."""
LEAST = 8
"""Steps that it needs."""
AROUND = 30
"""Steps before and after a loss in which it is seen how fast the training loss falls."""


@dataclasses.dataclass(frozen=True)
class StateLoss:
    """A loss on record."""

    after: int  # the last step before it
    row: RecoveryRow
    simulated: bool  # whether it was made on purpose, in a run that went on; if not, all processes started again

    @property
    def kind(self) -> str:
        """Simulated or real."""
        return "simulated" if self.simulated else "real"

    @property
    def blocks(self) -> str:
        """How many blocks of how many."""
        if self.row.blocks is None:
            return "everything"
        return f"{show(self.row.lost)} of {show(self.row.blocks)} blocks"

    @property
    def steps_lost(self) -> int:
        """Steps that were done again, for they were lost as well."""
        return whole(self.row.steps_lost) or 0

    @property
    def words(self) -> str:
        """In a sentence."""
        if self.simulated:
            return f"{self.blocks} were lost after step {self.after} (simulated), and recovered"
        steps = f" and {self.steps_lost:,} step{'s' * (self.steps_lost != 1)}"
        return f"started again at step {self.after + 1}: {self.blocks}{steps} were lost (real)"


def losses(lines: Sequence[StepRow]) -> list[StateLoss]:
    """All losses on record, in their order: what was there before a step first, then what was lost after it."""
    found = []
    for row in lines:
        if row.restarted is not None:
            found.append(StateLoss(row.step - 1, row.restarted, simulated=False))
        if row.recovered is not None:
            found.append(StateLoss(row.step, row.recovered, simulated=row.recovered.simulated is not False))
    return found


def _interruptions(lines: Sequence[StepRow]) -> list[StateLoss]:
    """All losses, and all restarts from a full checkpoint, after which steps were done again."""
    found, before = [], 0
    for row in lines:
        done = row.discarded or 0
        if done > before and row.restarted is None:
            again = RecoveryRow(policy="full checkpoint", steps_lost=done - before)
            found.append(StateLoss(row.step - 1, again, simulated=False))
        before = max(before, done)
    return sorted([*found, *losses(lines)], key=lambda one: one.after)


def sentence(lines: Sequence[StepRow]) -> str:
    """What to add to the headline of a run; empty if nothing was lost."""
    found = losses(lines)
    if len(found) < 2:
        return "".join(one.words for one in found)
    simulated = sum(one.simulated for one in found)
    kinds = [f"{number} {kind}" for number, kind in ((simulated, "simulated"), (len(found) - simulated, "real"))]
    told = " and ".join(kind for kind in kinds if not kind.startswith("0 "))
    return f"{len(found)} losses of parts of the state ({told}), all recovered; the last: {found[-1].words}"


def table(lines: Sequence[StepRow]) -> Table | LeftOut:
    """Every loss of a run, and from where what was lost came back."""
    rows = tuple(
        (
            f"after step {one.after}", one.kind, str(one.row.policy or NOT_MEASURED),
            f"{show(one.row.lost)} of {show(one.row.blocks)}", show(one.row.bytes),
            show(one.row.read), _copied(one.row), show(one.row.initial), show(one.row.behind),
            show(one.row.perturbation), show(one.steps_lost),
        )
        for one in losses(lines)
    )  # fmt: skip
    header = (
        "loss", "kind", "recovery", "blocks lost", "bytes lost", "bytes read", "bytes of own copies", "never saved",
        "oldest block: steps behind", "perturbation", "steps lost",
    )  # fmt: skip
    note = (
        "Recovery: partial gives back what was lost, full reads the whole running checkpoint. Perturbation: L2 norm of "
        "the change of the parameters; after a real loss it is not known. Own copies: those that survivors had on "
        "their hosts. Blocks that were never saved come back as they were at the start."
    )
    return Table(CAPTION, header, rows, note) if rows else LeftOut(CAPTION, "nothing was lost")


def compared(runs: Sequence[tuple[str, Sequence[StepRow]]]) -> Table | None:
    """What losses cost, beside a run that lost nothing: steps until its training loss of the next step is reached."""
    if not any(losses(lines) for _, lines in runs):
        return None
    plain = next((_curve(lines) for _, lines in runs if not _interruptions(lines)), {})
    rows = []
    for title, lines in runs:
        curve = _curve(lines)
        end = show(curve[max(curve)], digits=5) if curve else NOT_MEASURED
        found = _interruptions(lines)
        if not found:
            rows.append((title, end, "nothing", *[NOT_MEASURED] * 8))
        for one in found:
            target = plain.get(one.after + 1)
            found_at = _reached(curve, one.after, target)
            rework = None if found_at is None else found_at - 1 + one.steps_lost
            what = f"{one.blocks} after step {one.after}, {one.row.policy} ({one.kind})"
            excess, fall = _excess(curve, plain, one.after), _fall(plain, one.after)
            costs = (
                show(excess),
                show(None if excess is None or fall is None else excess / fall),
                _steps(found_at, target),
                show(one.steps_lost),
                show(rework),
                *_predicted(one.row),
            )
            rows.append((title, end, what, show(target, digits=5), *costs))
    header = (
        "run", "loss at the end", "lost", "next loss, uninterrupted", f"excess of {NEXT} steps", "excess in steps",
        "steps to reach that", "steps lost", "rework", "predicted", "at most",
    )  # fmt: skip
    note = (
        f"Excess: how far the training loss is above that of the uninterrupted run, on the same batches, on average of "
        f"the {NEXT} steps after a loss of shards; in steps: divided by how much the uninterrupted run's falls in a "
        f"step, by a line through the {AROUND} before and after, where it does for certain. Steps to reach that: until "
        "it is first at or below that of the uninterrupted run one step after. Rework: so many more than that one, and "
        "the steps that were lost. Training losses of single batches scatter: a difference of a few steps may be "
        "chance. Predicted: the excess in steps, by how far the blocks that went back had moved; at most: by theorem "
        "3.2 and the perturbation, where it is known how the training converges."
    )
    return Table(BESIDE, header, tuple(rows), note)


def _predicted(row: RecoveryRow) -> tuple[str, str]:
    """What a loss was to cost, and the most."""
    return (
        (NOT_MEASURED, NOT_MEASURED)
        if row.predicted is None
        else (show(row.predicted.steps), show(row.predicted.bound))
    )


def _copied(row: RecoveryRow) -> str:
    """Bytes that processes had on their own hosts."""
    if not row.processes:
        return NOT_MEASURED
    return show(sum(whole(one["own"].bytes) or 0 for one in row.processes if "own" in one))


def _curve(lines: Sequence[StepRow]) -> dict[int, float]:
    """The loss of each step; that of the first twin, where there are several."""
    found = per_twin(lines, "loss")
    return {} if found is None else {row.step: float(loss) for row, loss in zip(lines, found[0], strict=True)}


def _reached(curve: dict[int, float], after: int, target: float | None) -> int | None:
    """Steps after one until the loss is at a target or below."""
    if target is None or math.isnan(target):
        return None
    return next((step - after for step, loss in sorted(curve.items()) if step > after and loss <= target), None)


def _excess(curve: dict[int, float], plain: dict[int, float], after: int) -> float | None:
    """Batches are the same in all runs, so that their scatter cancels."""
    both = [curve[step] - plain[step] for step in range(after + 1, after + 1 + NEXT) if step in curve and step in plain]
    return sum(both) / len(both) if both else None


def _fall(plain: dict[int, float], after: int) -> float | None:
    """How much the loss falls in a step; None unless it does with a certainty of 97.5 %."""
    near = [(step, loss) for step, loss in plain.items() if abs(step - after) <= AROUND and math.isfinite(loss)]
    if len(near) < LEAST:
        return None
    from scipy import stats

    fit = stats.linregress(*zip(*near, strict=True))
    reach = float(stats.t.ppf(0.975, len(near) - 2)) * fit.stderr
    return -fit.slope if fit.slope + reach < 0 else None


def _steps(found: int | None, target: float | None) -> str:
    return show(found) if found is not None or target is None else "never"
