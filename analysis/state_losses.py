"""What a run with a running checkpoint lost of its state and got back, what losing parts of it would cost, and how to
save: in tables, in words, and beside other runs.

What a loss cost is counted as its source has it (Qiao et al., ICML 2019): in steps, until training is where it was.
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

LOST_PARTS, COSTS = "Parts of the state that were lost", "What losing parts of the state would cost"
ADVICE, PREDICTED = "How often to save how much", "Predicted cost of a loss"
UNKNOWN = "too few saves were made, or nothing moved"
NEXT = 10
"""Steps after a loss of which the excess of the training loss is averaged."""
LEAST = 8
"""Steps that it needs."""
AROUND = 30
"""Steps before and after a loss in which it is seen how fast the training loss falls."""
FAILURES = {"1 hour": 3_600.0, "1 day": 86_400.0, "1 week": 604_800.0}
OR_MORE, ALL = " or more", "all of it"
LOST = {"1/8": 0.125, "1/2": 0.5, "all": 1.0}
SMALLEST, LARGEST = 1e-12, 1e18
"""Of seconds, bytes and steps: what is beyond is damaged."""
MOST_PARTS = 1_000
"""Of a list of speeds: a longer one is damaged."""


@dataclasses.dataclass(frozen=True)
class StateLoss:
    """A loss on record."""

    after: int  # the last step before it
    row: RecoveryRow
    kind: Literal["simulated", "real"]  # made on purpose, in a run that went on; or all processes started again

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
    def copied(self) -> int | None:
        """Bytes that processes had on their own hosts."""
        own = [one["own"] for one in self.row.processes or () if "own" in one]
        return sum(whole(one.bytes) or 0 for one in own) if self.row.processes else None

    @property
    def words(self) -> str:
        """In a sentence."""
        if self.kind == "simulated":
            return f"{self.blocks} were lost after step {self.after} (simulated), and recovered"
        steps = f" and {self.steps_lost:,} step{'s' * (self.steps_lost != 1)}"
        return f"started again at step {self.after + 1}: {self.blocks}{steps} were lost (real)"


def losses(lines: Sequence[StepRow]) -> list[StateLoss]:
    """All losses on record, in their order: what was there before a step first, then what was lost after it."""
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
    """All losses, and all restarts from a full checkpoint, after which steps were done again."""
    found, before = [], 0
    for row in lines:
        done = row.discarded or 0
        if done > before and row.restarted is None:
            again = RecoveryRow(policy="full checkpoint", steps_lost=done - before)
            found.append(StateLoss(row.step - 1, again, "real"))
        before = max(before, done)
    return sorted([*found, *losses(lines)], key=lambda one: one.after)


def sentences(lines: Sequence[StepRow]) -> tuple[str, str]:
    """What to add to the headline of a run: what was lost, and what a loss would cost; empty where nothing is known."""
    every = losses(lines)
    lost = "".join(one.words for one in every)
    if len(every) > 1:
        numbers: Counter[str] = Counter(one.kind for one in every)
        kinds = " and ".join(f"{numbers[kind]} {kind}" for kind in ("simulated", "real") if numbers[kind])
        lost = f"{len(every)} losses of parts of the state ({kinds}), all recovered; the last: {every[-1].words}"
    found = latest(lines)
    if found is None or 0.5 not in (costs := _costs(found)):
        return lost, ""
    steps, bound, _ = costs[0.5]
    most = "" if bound is None else f" (at most {show(bound)} by theorem 3.2)"
    rollback = _positive(found.rollback)
    against = "" if rollback is None else f", a rollback of everything {show(rollback)}"
    when = f"after {show(whole(found.step))} steps"
    return lost, f"losing half of the state {when} would cost about {show(steps)} steps{most}{against}"


def losses_table(lines: Sequence[StepRow]) -> Table | LeftOut:
    """Every loss of a run, and from where what was lost came back."""
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
        "Recovery: partial gives back what was lost, full reads the whole running checkpoint. Perturbation: L2 norm of "
        "the change of the parameters; after a real loss it is not known. Own copies: those that survivors had on "
        "their hosts. Blocks that were never saved come back as they were at the start."
    )
    return filled(Table(LOST_PARTS, header, rows, note), "nothing was lost")


def losses_compared(runs: Sequence[tuple[str, Sequence[StepRow]]]) -> Table | None:
    """What losses cost, beside a run that lost nothing: steps until its training loss of the next step is reached."""
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
            # Batches are the same in all runs, so that their scatter cancels.
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
                *([show(predicted.steps), show(predicted.bound)] if predicted else [NOT_MEASURED] * 2),
            ))  # fmt: skip
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
    return Table("What the losses cost", header, tuple(rows), note)


def _curve(lines: Sequence[StepRow]) -> dict[int, float]:
    """The loss of each step; that of the first twin, where there are several."""
    found = per_twin(lines, "loss")
    return {} if found is None else {row.step: float(loss) for row, loss in zip(lines, found[0], strict=True)}


def _fall(plain: dict[int, float], after: int) -> float | None:
    """How much the loss falls in a step; None unless it does with a certainty of 97.5 %."""
    near = [(step, loss) for step, loss in plain.items() if abs(step - after) <= AROUND and math.isfinite(loss)]
    if len(near) < LEAST:
        return None
    from scipy import stats

    fit = stats.linregress(*zip(*near, strict=True))
    reach = float(stats.t.ppf(0.975, len(near) - 2)) * fit.stderr
    return -fit.slope if fit.slope + reach < 0 else None


def latest(lines: Sequence[StepRow]) -> OutlookRow | None:
    """The last outlook on record that says what a loss costs; None if there is none."""
    return next((row.outlook for row in reversed(lines) if row.outlook and _costs(row.outlook)), None)


def outlook_table(lines: Sequence[StepRow]) -> Table | LeftOut:
    """What a loss would cost at the last save."""
    found = latest(lines)
    if found is None:
        return LeftOut(COSTS, UNKNOWN)
    rollback = show(_positive(found.rollback))
    names = {value: name for name, value in LOST.items()}
    rows = tuple(
        (names.get(fraction, show(fraction)), show(steps), show(bound), show(perturbation), rollback)
        for fraction, (steps, bound, perturbation) in sorted(_costs(found).items())
    )
    note = (
        f"After {show(whole(found.step))} steps, just before a save. Repair: what is lost is given back alone, "
        "any of the blocks; steps of the way that the parameters came since these were saved, exact where all move "
        "evenly along a line. At most: theorem 3.2 (Qiao et al., ICML 2019), whatever the direction, and for the time "
        "that suffices for an error; only where movements shrink from step to step as they do in linear convergence. "
    )
    if (c := _positive(found.c)) is not None:
        low, high = (show(_positive(one), digits=4) for one in [*(found.interval or ()), None, None][:2])
        far = show(_positive(found.distance))
        note += (
            f"They do here, by c = {show(c, digits=4)} ({low} to {high}) a step, as if {far} were left to go: where "
            "they shrink because the learning rate is lowered, c is that of the schedule, and what is left not the "
            "distance to an optimum. "
        )
    else:
        note += "They do not here, or too few saves were made: no bound is told. "
    note += (
        "Rollback: everything goes back to the last full checkpoint, had there been one after every checkpoint_every "
        "steps; half of them on average."
    )
    header = ("lost", "repair: steps", "at most", "perturbation", "rollback: steps")
    return Table(COSTS, header, rows, note)


def outlook_figure(lines: Sequence[StepRow]) -> Figure | LeftOut:
    """Predicted cost at each save."""
    rows = [(row, row.outlook) for row in lines if row.outlook and _costs(row.outlook)]
    if not rows:
        return LeftOut(PREDICTED, UNKNOWN)
    found = [one for _, one in rows]
    curves = {f"{name} lost": [_costs(one).get(part, (math.nan,))[0] for one in found] for name, part in LOST.items()}
    curves["rollback"] = [_positive(one.rollback) or math.nan for one in found]
    caption = (
        "Steps that a loss would cost just before each save, if what is lost is given back alone; a rollback of "
        "everything to a full checkpoint loses half of their interval, on average."
    )
    return over_steps(PREDICTED, caption, "steps", [row for row, _ in rows], curves)


def advice_table(manifest: RunManifest, summary: RunSummary, lines: Sequence[StepRow]) -> Table | LeftOut:
    """Fraction and interval that waste least, for several kinds of failures, beside full checkpoints (Daly)."""
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
        full = (held + more) / interval + (interval / 2 + written) / failure  # as of `advise`, but everything is lost
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
        "Waste: of the time, for saves that hold up the training and steps that are lost; restarts are not counted. "
        f"From what was measured: {show(seconds)} s a step, {show(held)} s held up by any save and "
        f"{show(more)} s more by one of everything, {show(size / 1e6)} MB written at "
        f"{show(bandwidth / 1e6)} MB/s. Assumed: blocks move as at the last save, those are saved that moved "
        "most, any block may be lost, at any time, and a save is written before the next begins. Daly (2006), equation "
        "37, with the time that a save of everything holds up, and at least the time that it is written in; after a "
        "failure everything goes back to it."
    )
    if any(OR_MORE in row[2] for row in rows):
        note += f" Or more: longer intervals may waste less, but the run has seen {show(outlook.step)} steps only."
    if any(ALL in row for row in rows):
        note += f" Waste of {ALL}: failures come, or saves are due, faster than what they cost is made up for."
    return Table(ADVICE, header, tuple(rows), note)


def _costs(found: OutlookRow) -> dict[float, tuple[float, float | None, float | None]]:
    """Steps, bound and perturbation by the fraction that is lost."""
    costs = {}
    for one in found.losses:
        fraction, steps = _positive(one.fraction), _positive(one.steps, 0)
        if fraction is not None and steps is not None:
            costs[fraction] = steps, _positive(one.bound, 0), _positive(one.perturbation, 0)
    return costs


def _positive(value: Number, least: float = SMALLEST) -> float | None:
    found = real(value)
    return found if found is not None and least <= found <= LARGEST else None


def _fraction(value: float) -> str:
    over = round(1 / value)
    return "all" if value == 1 else f"1/{over}" if math.isclose(value * over, 1) else show(value)


def _percent(value: float) -> str:
    return ALL if value >= 1 else f"{show(100 * value, digits=2)} %"
