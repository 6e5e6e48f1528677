"""Reports losses of parts of the state in a run with a running checkpoint, their recovery, the predicted cost of
further losses, and advice on saving. Losses are listed in tables and described in words, and their costs are measured
by comparing runs.

The cost of a loss is defined as in Qiao et al., ICML 2019: the number of steps that training needs to catch up.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from sdc.checkpoints import Outlook, advise, daly_interval
from sdc.schema import Number, OutlookRow, RecoveryRow, RunManifest, RunSummary, StepRow

from .figures import over_steps
from .report import NOT_MEASURED, Figure, LeftOut, Table, filled, show
from .series import per_twin, real, whole

LOST_PARTS, COSTS = "Parts of the state that were lost", "Predicted cost of losing parts of the state"
ADVICE, PREDICTED = "Recommended saving interval and fraction", "Predicted cost of a loss"
UNKNOWN = "too few saves were made, or no parameter changed"
NEXT = 10
"""Number of steps after a loss over which the excess of the training loss is averaged."""
LEAST = 8
"""Minimum number of steps from which the slope of the training loss is estimated."""
AROUND = 30
"""Number of steps on either side of a loss from which the slope of the training loss is estimated."""
FAILURES = {"1 hour": 3_600.0, "1 day": 86_400.0, "1 week": 604_800.0}
OR_MORE, ALL = " or more", "all of it"
LOST = {"1/8": 0.125, "1/2": 0.5, "all": 1.0}
SMALLEST, LARGEST = 1e-12, 1e18
"""Smallest and largest plausible number of seconds, bytes or steps; a value outside this range means that the record is
damaged."""
MOST_PARTS = 1_000
"""Maximum plausible length of a list of speeds; a longer list means that the record is damaged."""


@dataclasses.dataclass(frozen=True)
class StateLoss:
    """A recorded loss of parts of the state."""

    after: int  # the last step before the loss
    row: RecoveryRow
    kind: Literal[
        "simulated", "real"
    ]  # deliberate, in a continuing run; or real, followed by a restart of all processes

    @property
    def blocks(self) -> str:
        """The number of lost blocks and the total number of blocks, in words."""
        if self.row.blocks is None:
            return "everything"
        return f"{show(self.row.lost)} of {show(self.row.blocks)} blocks"

    @property
    def steps_lost(self) -> int:
        """Number of steps that were lost together with the blocks and had to be repeated."""
        return whole(self.row.steps_lost) or 0

    @property
    def copied(self) -> int | None:
        """Number of bytes that processes read from copies on their own hosts; None if the record lists no processes."""
        own = [one["own"] for one in self.row.processes or () if "own" in one]
        return sum(whole(one.bytes) or 0 for one in own) if self.row.processes else None

    @property
    def words(self) -> str:
        """The loss, in a sentence."""
        if self.kind == "simulated":
            return f"{self.blocks} were lost after step {self.after} (simulated), and recovered"
        steps = f" and {self.steps_lost:,} step{'s' * (self.steps_lost != 1)}"
        return f"restarted at step {self.after + 1}: {self.blocks}{steps} were lost (real)"


def losses(lines: Sequence[StepRow]) -> list[StateLoss]:
    """Returns all recorded losses in the order in which they were detected: for each step, the loss that was detected
    before the step, and then the loss that was detected after it."""
    found = []
    for row in lines:
        if row.restarted is not None:
            found.append(StateLoss(row.step - 1, row.restarted, "real"))
        if row.recovered is not None:
            found.append(
                StateLoss(row.step, row.recovered, "real" if row.recovered.simulated is False else "simulated")
            )
    return found


def _interruptions(lines: Sequence[StepRow]) -> list[StateLoss]:
    """Returns all losses, and all restarts from a full checkpoint after which steps were repeated."""
    found, before = [], 0
    for row in lines:
        done = row.discarded or 0
        if done > before and row.restarted is None:
            again = RecoveryRow(policy="full checkpoint", steps_lost=done - before)
            found.append(StateLoss(row.step - 1, again, "real"))
        before = max(before, done)
    return sorted([*found, *losses(lines)], key=lambda one: one.after)


def sentences(lines: Sequence[StepRow]) -> tuple[str, str]:
    """Returns two additions to the headline of a run: a description of its losses and the predicted cost of a loss. An
    addition is empty if there is nothing to report."""
    every = losses(lines)
    lost = "".join(one.words for one in every)
    if len(every) > 1:
        numbers: Counter[str] = Counter(one.kind for one in every)
        kinds = " and ".join(f"{numbers[kind]} {kind}" for kind in ("simulated", "real") if numbers[kind])
        lost = f"{len(every)} losses of parts of the state ({kinds}), all recovered; the last one: {every[-1].words}"
    found = latest(lines)
    if found is None or 0.5 not in (costs := _costs(found)):
        return lost, ""
    steps, one_rate, _ = costs[0.5]
    otherwise = "" if one_rate is None else f" ({show(one_rate)} in any direction, if everything converges at one rate)"
    rollback = _positive(found.rollback)
    against = "" if rollback is None else f", and a full rollback would cost {show(rollback)}"
    when = f"after {show(whole(found.step))} steps"
    return lost, f"losing half of the state {when} would cost about {show(steps)} steps{otherwise}{against}"


def losses_table(lines: Sequence[StepRow]) -> Table | LeftOut:
    """Returns a table of all losses of a run and of the sources from which the state was recovered."""
    rows = tuple(
        (
            f"after step {one.after}", one.kind, str(one.row.policy or NOT_MEASURED),
            f"{show(one.row.lost)} of {show(one.row.blocks)}", show(one.row.bytes),
            show(one.row.read), show(one.copied), show(one.row.initial), show(one.row.behind),
            show(one.row.perturbation), show(one.steps_lost),
        )
        for one in losses(lines)
    )  # fmt: skip
    header = (
        "loss", "kind", "recovery", "blocks lost", "bytes lost", "bytes read", "bytes of own copies", "never saved",
        "oldest block: steps behind", "perturbation", "steps lost",
    )  # fmt: skip
    note = (
        "Recovery: a partial recovery restores the lost blocks; a full recovery reads the whole running checkpoint. "
        "Perturbation: L2 norm of the change in the parameters; unknown after a real loss. Own copies: copies that "
        "surviving processes have on their own hosts. Blocks that were never saved return to their initial values."
    )
    return filled(Table(LOST_PARTS, header, rows, note), "nothing was lost")


def losses_compared(runs: Sequence[tuple[str, Sequence[StepRow]]]) -> Table | None:
    """Compares runs in which parts of the state were lost with an uninterrupted run. The cost of a loss is the number
    of steps until the interrupted run reaches the training loss that the uninterrupted run has one step after the
    interruption."""
    if not any(losses(lines) for _, lines in runs):
        return None
    plain = next((_curve(lines) for _, lines in runs if not _interruptions(lines)), {})
    rows = []
    for title, lines in runs:
        curve, found = _curve(lines), _interruptions(lines)
        end = show(curve[max(curve)], digits=5) if curve else NOT_MEASURED
        if not found:
            rows.append((title, end, "nothing", *[NOT_MEASURED] * 8))
        for one in found:
            target = plain.get(one.after + 1)
            later = sorted(step for step in curve if step > one.after)
            reached = (step for step in later if target is not None and curve[step] <= target)
            took = None if (step := next(reached, None)) is None else step - one.after
            # All runs train on the same batches, so the scatter between batches cancels.
            next_steps = [
                step for step in range(one.after + 1, one.after + 1 + NEXT) if step in curve and step in plain
            ]
            more = [curve[step] - plain[step] for step in next_steps]
            excess, fall = sum(more) / len(more) if more else None, _fall(plain, one.after)
            predicted = one.row.predicted
            rows.append((
                title, end, f"{one.blocks} after step {one.after}, {one.row.policy} ({one.kind})",
                show(target, digits=5), show(excess), show(None if excess is None or fall is None else excess / fall),
                "never" if took is None and target is not None else show(took), show(one.steps_lost),
                show(None if took is None else took - 1 + one.steps_lost),
                *([show(predicted.steps), show(predicted.one_rate)] if predicted else [NOT_MEASURED] * 2),
            ))  # fmt: skip
    header = (
        "run", "loss at the end", "lost", "next loss, uninterrupted", f"excess of {NEXT} steps", "excess in steps",
        "steps to reach that loss", "steps lost", "rework", "predicted", "one rate",
    )  # fmt: skip
    note = (
        "Excess: training loss minus the uninterrupted run's training loss on the same batches, averaged over the "
        f"{NEXT} steps after parts of the state were lost. Excess in steps: the excess divided by the decrease in the "
        "uninterrupted run's training loss per step, if that decrease is significant; the decrease is fitted to the "
        f"{AROUND} steps before and after. Next loss, uninterrupted: the uninterrupted run's training loss one step "
        "after parts of the state were lost. Steps to reach that loss: the number of steps until the training loss is "
        "first at or below it. Rework: the number of these steps minus one, plus the number of lost steps. Training "
        "losses of single batches scatter, so a difference of a few steps may be due to chance. Predicted: the excess "
        "in steps, predicted from how far the restored blocks had moved. One rate: the same from the perturbation by "
        "theorem 3.2, if the whole error shrinks at the rate at which updates shrink."
    )
    return Table("Cost of the losses", header, tuple(rows), note)


def _curve(lines: Sequence[StepRow]) -> dict[int, float]:
    """Returns the training loss of each step; if there are several twins, returns that of the first one."""
    found = per_twin(lines, "loss")
    return {} if found is None else {row.step: float(loss) for row, loss in zip(lines, found[0], strict=True)}


def _fall(plain: dict[int, float], after: int) -> float | None:
    """Returns the decrease in training loss per step, or None if the decrease is not significant at the 97.5 %
    level."""
    near = [(step, loss) for step, loss in plain.items() if abs(step - after) <= AROUND and math.isfinite(loss)]
    if len(near) < LEAST:
        return None
    from scipy import stats

    fit = stats.linregress(*zip(*near, strict=True))
    reach = float(stats.t.ppf(0.975, len(near) - 2)) * fit.stderr
    return -fit.slope if fit.slope + reach < 0 else None


def latest(lines: Sequence[StepRow]) -> OutlookRow | None:
    """Returns the last recorded outlook that contains the cost of a loss, or None if none was recorded."""
    return next((row.outlook for row in reversed(lines) if row.outlook and _costs(row.outlook)), None)


def outlook_table(lines: Sequence[StepRow]) -> Table | LeftOut:
    """Returns a table of the predicted cost of a loss that occurs just before the last save."""
    found = latest(lines)
    if found is None:
        return LeftOut(COSTS, UNKNOWN)
    rollback = show(_positive(found.rollback))
    names = {value: name for name, value in LOST.items()}
    rows = tuple(
        (names.get(fraction, show(fraction)), show(steps), show(one_rate), show(perturbation), rollback)
        for fraction, (steps, one_rate, perturbation) in sorted(_costs(found).items())
    )
    note = (
        f"All costs are those of a loss after {show(whole(found.step))} steps, just before a save. Repair: only the "
        "lost blocks are restored. The cost is the number of steps in which the parameters moved as far as the lost "
        "blocks are set back; it is exact if all blocks move uniformly along a line. One rate: the number of steps by "
        "theorem 3.2 (Qiao et al., ICML 2019) for a perturbation of this size in any direction, if the whole error "
        "shrinks at the rate at which updates shrink. This is an estimate, not a bound: if some directions converge "
        "more slowly, a perturbation in them costs more. "
    )
    if (c := _positive(found.c)) is not None:
        far = show(_positive(found.distance))
        note += (
            f"In this run, updates shrink by a factor c = {show(c, digits=4)} per step, as if a "
            f"distance of {far} to an optimum remained. If updates shrink because the learning rate decays, "
            "c reflects the schedule, and the stated distance is not the distance to an optimum. "
        )
    else:
        note += (
            "In this run, updates do not shrink in this way, or too few saves were made, so this estimate is missing. "
        )
    note += (
        "Rollback: the whole state returns to the last full checkpoint. If a full checkpoint is saved every "
        "checkpoint_every steps, a rollback loses half of these steps on average."
    )
    header = ("lost", "repair: steps", "at most", "perturbation", "rollback: steps")
    return Table(COSTS, header, rows, note)


def outlook_figure(lines: Sequence[StepRow]) -> Figure | LeftOut:
    """Returns a figure of the predicted cost of a loss that occurs just before each save."""
    rows = [(row, row.outlook) for row in lines if row.outlook and _costs(row.outlook)]
    if not rows:
        return LeftOut(PREDICTED, UNKNOWN)
    found = [one for _, one in rows]
    curves = {f"{name} lost": [_costs(one).get(part, (math.nan,))[0] for one in found] for name, part in LOST.items()}
    curves["rollback"] = [_positive(one.rollback) or math.nan for one in found]
    caption = (
        "Predicted cost, in steps, of a loss just before each save, with partial recovery. A rollback to a full "
        "checkpoint loses half of the interval between full checkpoints on average."
    )
    return over_steps(PREDICTED, caption, "steps", [row for row, _ in rows], curves)


def advice_table(manifest: RunManifest, summary: RunSummary, lines: Sequence[StepRow]) -> Table | LeftOut:
    """Returns a table of the fraction to save and the interval between saves that waste the least time, for several
    failure rates and lost fractions, compared with full checkpoints at Daly's interval."""
    found, unknown = latest(lines), LeftOut(ADVICE, UNKNOWN)
    if found is None or (times := found.timings) is None or len(found.speeds) > MOST_PARTS:
        return unknown
    steps, size, bandwidth = whole(_positive(found.step)), _positive(found.bytes), _positive(times.bandwidth)
    seconds, held, more = _positive(summary.seconds_per_step), _positive(times.held, 0), _positive(times.whole, 0)
    speeds = [speed for one in found.speeds if (speed := _positive(one, 0)) is not None]
    if not (steps and size and bandwidth and seconds) or held is None or more is None or not held + more:
        return unknown
    if len(speeds) < len(found.speeds) or not 0 < sum(speeds) < math.inf or size < len(speeds):
        return unknown
    outlook = Outlook.of_profile(speeds, int(size), steps)
    advice = functools.partial(advise, outlook, step_seconds=seconds, save_seconds=(held, more), bandwidth=bandwidth)
    fraction = _positive(manifest.running.fraction) if manifest.running else None
    every = whole(found.every)
    used = (fraction, every) if fraction and fraction <= 1 and every else None
    written = sum(outlook.sizes) / bandwidth
    rows = []
    for name, failure in FAILURES.items():
        interval = max(daly_interval(held + more, failure), written)
        full = (held + more) / interval + (interval / 2 + written) / failure  # as in `advise`, if everything is lost
        for part, lost in LOST.items():
            best = advice(failure_every=failure, lost=lost)
            here = NOT_MEASURED
            if used is not None:
                here = _percent(advice(failure_every=failure, lost=lost, fraction=used[0], every=used[1]).waste)
            minutes, capped = best.every * seconds / 60, OR_MORE if best.capped else ""
            rows.append((
                f"every {name}, {part}", _fraction(best.fraction), show(best.every) + capped, show(minutes) + capped,
                show(best.steps), _percent(best.waste), here, show(interval / 60),
                _percent(full),
            ))  # fmt: skip
    run = "" if used is None else f" ({_fraction(used[0])}, every {used[1]} steps)"
    header = (
        "failures, lost", "save", "every: steps", "every: minutes", "a failure: steps", "waste",
        f"waste of this run{run}", "full checkpoint: minutes (Daly)", "its waste",
    )  # fmt: skip
    note = (
        "Waste: share of the time in which training is blocked by saves or repeats lost steps; restarts are not "
        f"counted. Measured: {show(seconds)} s per step; {show(held)} s for which any save blocks training, and "
        f"{show(more)} s more for a full save; {show(size / 1e6)} MB written at {show(bandwidth / 1e6)} MB/s. Assumed: "
        "blocks move as they did at the last save, the blocks that moved most are saved, any block may be lost at any "
        "time, and a save completes before the next one starts. Full checkpoint: the interval is that of Daly (2006), "
        "equation 37, for the time for which a full save blocks training, and is at least the time that writing takes; "
        "after a failure, the whole state returns to the last full checkpoint."
    )
    if any(OR_MORE in row[2] for row in rows):
        note += f" Or more: longer intervals may waste less, but the run has only {show(outlook.step)} steps."
    if any(ALL in row for row in rows):
        note += f" Waste of {ALL}: failures occur, or saves are due, faster than their cost can be recovered."
    return Table(ADVICE, header, tuple(rows), note)


def _costs(found: OutlookRow) -> dict[float, tuple[float, float | None, float | None]]:
    """Returns, for each lost fraction, the number of steps that the loss costs, that number if everything converges at
    one rate, and the perturbation."""
    costs = {}
    for one in found.losses:
        fraction, steps = _positive(one.fraction), _positive(one.steps, 0)
        if fraction is not None and steps is not None:
            costs[fraction] = steps, _positive(one.one_rate, 0), _positive(one.perturbation, 0)
    return costs


def _positive(value: Number, least: float = SMALLEST) -> float | None:
    found = real(value)
    return found if found is not None and least <= found <= LARGEST else None


def _fraction(value: float) -> str:
    over = round(1 / value)
    return "all" if value == 1 else f"1/{over}" if math.isclose(value * over, 1) else show(value)


def _percent(value: float) -> str:
    return ALL if value >= 1 else f"{show(100 * value, digits=2)} %"
