"""What losing parts of a state would cost, and how to save: as a run with a running checkpoint told of itself."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sdc.checkpoints import Advice, Outlook, advise, daly_interval

from .canvas import LeftOut, Picture, canvas
from .figures import draw_curves
from .series import Row, count, mapping, number, sequence
from .tables import NOT_MEASURED, Table, show

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


def latest(lines: Sequence[Row]) -> Row | None:
    """The last outlook on record that tells a cost; None if there is none."""
    return next((found for row in reversed(lines) if _costs(found := mapping(row.get("outlook")))), None)


def sentence(lines: Sequence[Row]) -> str:
    """What to add to the headline of a run; empty if nothing is known."""
    found = latest(lines)
    costs = {} if found is None else _costs(found)
    if found is None or HALF not in costs:
        return ""
    steps, bound, _ = costs[HALF]
    most = "" if bound is None else f" (at most {show(bound)} by theorem 3.2)"
    rollback = _positive(found.get("rollback"))
    against = "" if rollback is None else f", a rollback of everything {show(rollback)}"
    when = f"after {show(count(found.get('step')))} steps"
    return f"losing half of the state {when} would cost about {show(steps)} steps{most}{against}"


def table(lines: Sequence[Row]) -> Table | None:
    """What a loss would cost at the last save."""
    found = latest(lines)
    if found is None:
        return None
    rollback = show(_positive(found.get("rollback")))
    names = {value: name for name, value in LOST.items()}
    rows = tuple(
        (names.get(fraction, show(fraction)), show(steps), show(bound), show(perturbation), rollback)
        for fraction, (steps, bound, perturbation) in sorted(_costs(found).items())
    )
    note = (
        f"After {show(count(found.get('step')))} steps, just before a save. Repair: what is lost is given back alone, "
        "any of the blocks; steps of the way that the parameters came since these were saved, exact where all move "
        "evenly along a line. At most: theorem 3.2 (Qiao et al., ICML 2019), whatever the direction, and for the time "
        "that suffices for an error; only where movements shrink from step to step as they do in linear convergence. "
    )
    if (c := _positive(found.get("c"))) is not None:
        low, high = (show(_positive(one), digits=4) for one in [*sequence(found.get("interval")), None, None][:2])
        far = show(_positive(found.get("distance")))
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


def picture(lines: Sequence[Row], *, mark: str) -> Picture | LeftOut:
    """Predicted cost at each save."""
    rows = [row for row in lines if _costs(mapping(row.get("outlook")))]
    if not rows:
        return LeftOut(FIGURE, UNKNOWN)
    found = [mapping(row.get("outlook")) for row in rows]
    curves = {
        f"{name} lost": np.asarray([_costs(one).get(part, (np.nan,))[0] for one in found], float)
        for name, part in LOST.items()
    }
    curves["rollback"] = np.asarray([_positive(one.get("rollback")) or np.nan for one in found], float)
    with canvas("outlooks", mark) as drawing:
        draw_curves(drawing, rows, curves, "steps", positive=False)
    caption = (
        "Steps that a loss would cost just before each save, if what is lost is given back alone; a rollback of "
        "everything to a full checkpoint loses half of their interval, on average."
    )
    return drawing.picture(FIGURE, caption)


class _Measured(NamedTuple):
    """What advice follows from."""

    outlook: Outlook
    seconds: float
    held: float
    whole: float
    bandwidth: float


def advised(manifest: Row, summary: Row, lines: Sequence[Row]) -> Table | None:
    """Fraction and interval that waste least, for failures of several kinds, beside full checkpoints as Daly has them.

    Args:
        manifest: contents of `manifest.json`.
        summary: contents of `summary.json`.
        lines: lines of `steps.jsonl`.

    Returns:
        None if the record does not tell all that they follow from.
    """
    found = latest(lines)
    measured = None if found is None else _measured(found, summary)
    if found is None or measured is None:
        return None
    fraction, every = _positive(mapping(manifest.get("running")).get("fraction")), count(found.get("every"))
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
    size = number(found.get("bytes")) or 0
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


def _measured(found: Row, summary: Row) -> _Measured | None:
    times, speeds = mapping(found.get("timings")), sequence(found.get("speeds"))
    if len(speeds) > MOST_PARTS:
        return None
    step = count(_positive(found.get("step")))
    size, seconds = _positive(found.get("bytes")), _positive(summary.get("seconds_per_step"))
    bandwidth = _positive(times.get("bandwidth"))
    held, whole = _least(times.get("held")), _least(times.get("whole"))
    if size is None or seconds is None or bandwidth is None or held is None or whole is None or not held + whole:
        return None
    if not step:
        return None
    known = [speed for one in speeds if (speed := _least(one)) is not None]
    if len(known) < len(speeds) or not 0 < sum(known) < math.inf or size < len(known):
        return None
    return _Measured(Outlook.of_profile(known, int(size), step), seconds, held, whole, bandwidth)


def _costs(found: Row) -> dict[float, tuple[float, float | None, float | None]]:
    """Steps, bound and perturbation by the fraction that is lost."""
    costs = {}
    for one in map(mapping, sequence(found.get("losses"))):
        fraction, steps = _positive(one.get("fraction")), _least(one.get("steps"))
        if fraction is not None and steps is not None:
            costs[fraction] = steps, _least(one.get("bound")), _least(one.get("perturbation"))
    return costs


def _checked(value: object, fits: Callable[[float], bool]) -> float | None:
    found = number(value)
    return found if found is not None and found <= LARGEST and fits(found) else None


def _positive(value: object) -> float | None:
    return _checked(value, lambda found: found >= SMALLEST)


def _least(value: object) -> float | None:
    return _checked(value, lambda found: found >= 0)


def _fraction(value: float) -> str:
    over = round(1 / value)
    return "all" if value == 1 else f"1/{over}" if math.isclose(value * over, 1) else show(value)


def _percent(value: float) -> str:
    return ALL if value >= 1 else f"{show(100 * value, digits=2)} %"
