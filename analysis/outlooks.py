"""What losing parts of a state would cost, and how to save: as a run with a running checkpoint told of itself."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from sdc.checkpoints import Advice, Outlook, advise, daly_interval
from sdc.schema import Number, OutlookRow, RunManifest, RunSummary, StepRow

from .report import NOT_MEASURED, Chart, Figure, LeftOut, Line, Table, line_figure, show
from .series import real, step_numbers, whole

CAPTION = "What losing parts of the state would cost"
ADVICE = "How often to save how much"
FIGURE = "Predicted cost of a loss"
UNKNOWN = "too few saves were made, or nothing moved"
FAILURES = {"1 hour": 3_600.0, "1 day": 86_400.0, "1 week": 604_800.0}
OR_MORE, ALL = " or more", "all of it"
LOST = {"1/8": 0.125, "1/2": 0.5, "all": 1.0}
HALF = 0.5
SMALLEST, LARGEST = 1e-12, 1e18
"""Of seconds, bytes and steps: what is beyond is damaged."""
MOST_PARTS = 1_000
"""Of a list of speeds: a longer one is damaged."""


def latest(lines: Sequence[StepRow]) -> OutlookRow | None:
    """The last outlook on record that tells a cost; None if there is none."""
    return next((row.outlook for row in reversed(lines) if row.outlook and _costs(row.outlook)), None)


def sentence(lines: Sequence[StepRow]) -> str:
    """What to add to the headline of a run; empty if nothing is known."""
    found = latest(lines)
    costs = {} if found is None else _costs(found)
    if found is None or HALF not in costs:
        return ""
    steps, bound, _ = costs[HALF]
    most = "" if bound is None else f" (at most {show(bound)} by theorem 3.2)"
    rollback = _positive(found.rollback)
    against = "" if rollback is None else f", a rollback of everything {show(rollback)}"
    when = f"after {show(whole(found.step))} steps"
    return f"losing half of the state {when} would cost about {show(steps)} steps{most}{against}"


def table(lines: Sequence[StepRow]) -> Table | LeftOut:
    """What a loss would cost at the last save."""
    found = latest(lines)
    if found is None:
        return LeftOut(CAPTION, UNKNOWN)
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
    return Table(CAPTION, header, rows, note)


def figure(lines: Sequence[StepRow]) -> Figure | LeftOut:
    """Predicted cost at each save."""
    rows = [(row, row.outlook) for row in lines if row.outlook and _costs(row.outlook)]
    if not rows:
        return LeftOut(FIGURE, UNKNOWN)
    found = [one for _, one in rows]
    curves = {f"{name} lost": [_costs(one).get(part, (math.nan,))[0] for one in found] for name, part in LOST.items()}
    curves["rollback"] = [_positive(one.rollback) or math.nan for one in found]
    caption = (
        "Steps that a loss would cost just before each save, if what is lost is given back alone; a rollback of "
        "everything to a full checkpoint loses half of their interval, on average."
    )
    drawn = tuple(Line(name, step_numbers([row for row, _ in rows]), values) for name, values in curves.items())
    return line_figure(Chart(FIGURE, caption, "step", "steps", drawn))


class _Measured(NamedTuple):
    """What advice follows from."""

    outlook: Outlook
    seconds: float
    held: float
    whole: float
    bandwidth: float


def advised(manifest: RunManifest, summary: RunSummary, lines: Sequence[StepRow]) -> Table | LeftOut:
    """Fraction and interval that waste least, for several kinds of failures, beside full checkpoints (Daly)."""
    found = latest(lines)
    measured = None if found is None else _measured(found, summary)
    if found is None or measured is None:
        return LeftOut(ADVICE, UNKNOWN)
    fraction = _positive(manifest.running.fraction) if manifest.running else None
    every = whole(found.every)
    used = (fraction, every) if fraction and fraction <= 1 and every else None
    rows = []
    for name, failure in FAILURES.items():
        interval, full = _full(measured, failure)
        for part, lost in LOST.items():
            best = _advice(measured, failure, lost)
            here = NOT_MEASURED if used is None else _percent(_advice(measured, failure, lost, *used).waste)
            minutes, more = best.every * measured.seconds / 60, OR_MORE if best.capped else ""
            rows.append((
                f"every {name}, {part}", _fraction(best.fraction), show(best.every) + more, show(minutes) + more,
                show(best.steps), _percent(best.waste), here, show(interval / 60),
                _percent(full),
            ))  # fmt: skip
    run = "" if used is None else f" ({_fraction(used[0])}, every {used[1]} steps)"
    header = (
        "failures, lost", "save", "every: steps", "every: minutes", "a failure: steps", "waste",
        f"waste of this run{run}", "full checkpoint: minutes (Daly)", "its waste",
    )  # fmt: skip
    size = real(found.bytes) or 0
    note = (
        "Waste: of the time, for saves that hold up the training and steps that are lost; restarts are not counted. "
        f"From what was measured: {show(measured.seconds)} s a step, {show(measured.held)} s held up by any save and "
        f"{show(measured.whole)} s more by one of everything, {show(size / 1e6)} MB written at "
        f"{show(measured.bandwidth / 1e6)} MB/s. Assumed: blocks move as at the last save, those are saved that moved "
        "most, any block may be lost, at any time, and a save is written before the next begins. Daly (2006), equation "
        "37, with the time that a save of everything holds up, and at least the time that it is written in; after a "
        "failure everything goes back to it."
    )
    if any(OR_MORE in row[2] for row in rows):
        note += (
            f" Or more: longer intervals may waste less, but the run has seen {show(measured.outlook.step)} steps only."
        )
    if any(ALL in row for row in rows):
        note += f" Waste of {ALL}: failures come, or saves are due, faster than what they cost is made up for."
    return Table(ADVICE, header, tuple(rows), note)


def _advice(
    measured: _Measured, failure: float, lost: float, fraction: float | None = None, every: int | None = None
) -> Advice:
    return advise(
        measured.outlook, step_seconds=measured.seconds, save_seconds=(measured.held, measured.whole),
        bandwidth=measured.bandwidth, failure_every=failure, lost=lost, fraction=fraction, every=every,
    )  # fmt: skip


def _full(measured: _Measured, failure: float) -> tuple[float, float]:
    """Seconds between full checkpoints, and the waste: as that of `advise`, but that everything is lost."""
    held, written = measured.held + measured.whole, sum(measured.outlook.sizes) / measured.bandwidth
    interval = max(daly_interval(held, failure), written)
    return interval, held / interval + (interval / 2 + written) / failure


def _measured(found: OutlookRow, summary: RunSummary) -> _Measured | None:
    times, speeds = found.timings, found.speeds
    if times is None or len(speeds) > MOST_PARTS:
        return None
    step, size, seconds = whole(_positive(found.step)), _positive(found.bytes), _positive(summary.seconds_per_step)
    bandwidth, held, more = _positive(times.bandwidth), _least(times.held), _least(times.whole)
    if size is None or seconds is None or bandwidth is None or held is None or more is None or not held + more:
        return None
    if not step:
        return None
    known = [speed for one in speeds if (speed := _least(one)) is not None]
    if len(known) < len(speeds) or not 0 < sum(known) < math.inf or size < len(known):
        return None
    return _Measured(Outlook.of_profile(known, int(size), step), seconds, held, more, bandwidth)


def _costs(found: OutlookRow) -> dict[float, tuple[float, float | None, float | None]]:
    """Steps, bound and perturbation by the fraction that is lost."""
    costs = {}
    for one in found.losses:
        fraction, steps = _positive(one.fraction), _least(one.steps)
        if fraction is not None and steps is not None:
            costs[fraction] = steps, _least(one.bound), _least(one.perturbation)
    return costs


def _positive(value: Number, least: float = SMALLEST) -> float | None:
    found = real(value)
    return found if found is not None and least <= found <= LARGEST else None


def _least(value: Number) -> float | None:
    return _positive(value, 0)


def _fraction(value: float) -> str:
    over = round(1 / value)
    return "all" if value == 1 else f"1/{over}" if math.isclose(value * over, 1) else show(value)


def _percent(value: float) -> str:
    return ALL if value >= 1 else f"{show(100 * value, digits=2)} %"
