"""Findings of the study of SCAR, compared with the paper (Qiao, Aragam, Zhang, Xing, ICML 2019)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

from sdc.records import Contents
from sdc.schema import Criterion, Failures, Overhead, PartRow, Perturbed

from ..report import Chart, Check, Finding, Findings, Line, StudyFindings, Table, summarize_findings
from .intervals import Interval, every, exceeds, mean_interval, ratio_interval, stays_below

STUDY = "scar study"
# Ranges of the published reductions of the iteration cost by partial recovery (figure 7), by fraction lost.
PARTIAL = {0.25: (0.59, 0.89), 0.5: (0.31, 0.62), 0.75: (0.12, 0.42)}
# Published number of iterations by which SCAR reaches a likelihood sooner (figure 9), and the averaging window.
SOONER, AFTERWARDS = 3, 8
LEAST_STARTS = 5  # minimum number of starts for an interval
# A prediction is good if it is within `FACTOR` of the cost, or if both are below `LEAST_COST` iterations. At least the
# share `SHARE` of the predictions should be good.
FACTOR, SHARE, LEAST_COST = 2.0, 0.8, 0.5


Predicted: TypeAlias = Float[np.ndarray, "starts trials"]  # 1: a good prediction, 0: a bad one, NaN: no prediction


class Workload(NamedTuple):
    """Costs of all failures of a workload, in one row for each case and start."""

    name: str
    criterion: Criterion
    full: Float[np.ndarray, "starts trials"]
    full_sizes: Float[np.ndarray, "starts trials"]
    cases: Mapping[tuple[str, float, float, str], "CaseCosts"]
    failed: int  # number of starts that did not converge
    busiest: float


class CaseCosts(NamedTuple):
    """The costs of one save policy with one kind of lost blocks; most of these combinations have no prediction."""

    costs: Float[np.ndarray, "starts trials"]
    sizes: Float[np.ndarray, "starts trials"]
    predicted: Float[np.ndarray, "starts trials"]
    one_rate: Float[np.ndarray, "starts trials"]

    @property
    def failed(self) -> int:
        """Number of trials that did not converge again and so have no cost."""
        return int((~np.isfinite(self.costs)).sum())


def summary_of(record: Contents) -> StudyFindings:
    """Returns the summary of a study, made from its recorded parts."""
    rows = sorted(record.parts, key=lambda row: row.part)
    summary = summarize_findings("scar", findings(rows))
    summary.complete = len(rows) == record.study.parts
    return summary


def findings(rows: Sequence[PartRow]) -> Findings:
    """Returns the tables, figures and claims of the recorded parts."""
    return Findings.of(_found(rows))


def _found(rows: Sequence[PartRow]) -> Iterator[Finding]:
    workloads = dict.fromkeys(row.workload for row in rows)
    # Training runs that did not converge and so have no cost.
    said = [
        (row.what, row.workload, "all" if row.start is None else row.start, row.failed)
        for row in rows
        if row.failed is not None
    ]
    for name in workloads:
        starts = [row for row in rows if (row.what, row.workload) == ("failures", name)]
        if 0 < (good := sum(row.failed is None for row in starts)) < LEAST_STARTS:
            said.append(
                ("failures", name, "all", f"only {good} starts converged; an interval needs at least {LEAST_STARTS}")
            )
    if said:
        header = ("part", "workload", "start", "reason")
        yield Table("Training runs that did not converge", header, tuple(said), "These runs have no cost.")
    for row in rows:
        if row.failed is not None:
            continue
        if row.what == "quadratic":
            yield from _bounds("Figure 3: a quadratic program", {"random": row.read(Perturbed)}, always=True)
        elif row.what == "perturbations":
            yield from _bounds(f"Figure 5: {row.workload}", row.read(dict[str, Perturbed]), always=False)
        elif row.what == "resets":
            title = f"Figure 6: {row.workload}, blocks reset"
            yield from _bounds(title, {"resets": row.read(Perturbed)}, always=False)
        elif row.what == "overhead":
            yield from _overhead(row.workload, row.read(Overhead))
    if known := [one for name in workloads if (one := _workload(name, rows))]:
        yield _converged(known)
        yield from _partial(known)
        yield from _saving(known)
        yield from _advice(known)


def _workload(name: str, rows: Sequence[PartRow]) -> Workload | None:
    good = [row for row in rows if row.workload == name and row.failed is None]
    criterion = next((row.read(Criterion) for row in good if row.what == "criterion"), None)
    starts = [row.read(Failures) for row in good if row.what == "failures"]
    if criterion is None or len(starts) < LEAST_STARTS:
        return None
    cases = {}
    for each in zip(*(one.cases for one in starts), strict=True):  # all starts of one case
        key = (each[0].policy, each[0].fraction, each[0].lost, each[0].how)
        cases[key] = CaseCosts(*(np.asarray([getattr(one, name) for one in each], float) for name in CaseCosts._fields))
    full, sizes = (np.asarray([getattr(one.full, key) for one in starts], float) for key in ("costs", "sizes"))
    failed = sum((row.workload, row.what) == (name, "failures") for row in rows) - len(starts)
    return Workload(name, criterion, full, sizes, cases, failed, float(np.mean([one.busiest for one in starts])))


def reduction(workload: Workload, key: tuple[str, float, float, str]) -> Interval:
    """Returns the fraction by which a case costs less than a full restore."""
    ratio = ratio_interval(workload.cases[key].costs, workload.full)
    return Interval(1 - ratio.value, 1 - ratio.high, 1 - ratio.low, ratio.note)


def _converged(workloads: Sequence[Workload]) -> Table:
    rows = tuple(
        (
            one.name, one.criterion.source, one.criterion.blocks, one.criterion.iterations, one.criterion.criteria[-1],
            len(one.full), one.failed, int(one.full.size), f"{one.busiest:.0%}",
        )
        for one in workloads
    )  # fmt: skip
    header = (
        "workload", "data", "blocks", "iterations", "criterion (loss)", "starts", "starts that did not converge",
        "failures per case", "squared movement in the most active 1/8 of the blocks",
    )  # fmt: skip
    note = (
        "The convergence criteria are the mean losses of all starts in the last quarter of the iterations. The cost of "
        "a failure is the number of additional iterations until a criterion is met, compared with the same start "
        "without a failure, interpolated linearly and averaged over the criteria. A full restore, which includes data "
        "and random numbers, costs as many iterations as it goes back. The times of failures are geometrically "
        "distributed, with a mean of half of the training run. Whatever fraction each save writes, the saves in 8 "
        "iterations together write as much as one full checkpoint. All intervals are 95 % confidence intervals over "
        "the starts."
    )
    return Table("Training runs", header, rows, note)


def _partial(workloads: Sequence[Workload]) -> Iterator[Finding]:
    rows: list[tuple[Any, ...]] = []
    squares_agree: dict[str, bool | None] = {}
    for one in workloads:
        full = mean_interval(one.full)
        good: list[bool | None] = []
        seen = []
        lines: dict[str, list[Interval]] = {}
        for (policy, fraction, lost, how), case in one.cases.items():
            if fraction != 1.0 or policy != "priority":
                continue
            less, cost = reduction(one, (policy, fraction, lost, how)), mean_interval(case.costs)
            squares = ratio_interval(case.sizes**2, one.full_sizes**2)
            low, high = PARTIAL[lost]
            rows.append(
                (
                    one.name, f"{lost:g}", how, full.text(), cost.text(), less.text(percent=True),
                    f"{100 * low:.0f} to {100 * high:.0f} %", squares.text(), case.failed,
                )
            )  # fmt: skip
            lines.setdefault(how, []).append(cost)
            if how == "random":
                good.append(exceeds(less, low) and not case.failed)
                seen.append(f"{lost:g}: {less.text(percent=True)}")
                agrees = every((exceeds(squares, 0.85 * lost), stays_below(squares, 1.15 * lost)))
                squares_agree[f"{one.name} with {lost:g} lost ({squares.text()})"] = agrees
        yield Check(
            f"{one.name}: on average, partial recovery costs at least 12, 31 and 59 % less than a full restore if 3/4, "
            "1/2 and 1/4 of the blocks are lost, respectively",
            every(good), "; ".join(reversed(seen)),
        )  # fmt: skip
        yield Chart(
            f"Figure 7: {one.name}", "Cost of a failure in iterations, with a full checkpoint every 8 iterations.",
            "fraction lost", "iterations",
            (
                Line("full restore", list(PARTIAL), [full.value] * 3, dashed=True),
                *(_with_error(f"partial, {how}", list(PARTIAL), several) for how, several in lines.items()),
            ),
        )  # fmt: skip
    yield Check(
        "theorem 4.2: if a random fraction p of the blocks is lost, the squared perturbation is p times that of a full "
        "restore, within 15 %",
        every(squares_agree.values()),
        "; ".join(
            f"{'differs' if agrees is False else 'undecided'}: {case}"
            for case, agrees in squares_agree.items()
            if agrees is not True
        )
        or "all cases agree",
    )
    header = (
        "workload", "lost", "which blocks", "full restore", "partial recovery", "reduction", "published reduction",
        "squared perturbation / full", "did not converge",
    )  # fmt: skip
    note = (
        "According to theorem 4.2, the squared perturbation of a partial recovery from a random loss is the lost "
        "fraction times that of a full restore. The theorem does not cover the loss of adjacent blocks, such as "
        "those on one host."
    )
    yield Table("Figure 7: partial recovery compared with full recovery", header, tuple(rows), note)


def _with_error(label: str, x: Sequence[float], several: Sequence[Interval]) -> Line:
    return Line(label, x, [one.value for one in several], error=[one.high - one.value for one in several])


def _saving(workloads: Sequence[Workload]) -> Iterator[Finding]:
    rows: list[tuple[Any, ...]] = []
    for one in workloads:
        lines: dict[str, dict[float, Interval]] = {}
        first = one.cases["priority", 1.0, 0.5, "random"]
        for (policy, fraction, lost, _), case in one.cases.items():
            if lost != 0.5 or fraction == 1.0:
                continue
            cost, less = mean_interval(case.costs), reduction(one, (policy, fraction, lost, "random"))
            published = "78 to 95 %" if policy == "priority" and fraction == 0.125 else None
            rows.append(
                (one.name, f"1/{1 / fraction:g}", policy, cost.text(), less.text(percent=True), published, case.failed)
            )
            lines.setdefault(policy, {1.0: mean_interval(first.costs)})[1 / fraction] = cost
        best, chance = (one.cases[policy, 0.125, 0.5, "random"] for policy in ("priority", "random"))
        less = reduction(one, ("priority", 0.125, 0.5, "random"))
        yield Check(
            f"{one.name}: with 1/8 checkpoints by priority, losing half of the blocks costs on average at least 78 % "
            "less than a full restore",
            exceeds(less, 0.78) and not best.failed,
            less.text(percent=True),
        )
        gain = mean_interval(chance.costs - best.costs)
        claim = f"{one.name}: failures cost less with 1/8 checkpoints by priority than with random 1/8 checkpoints"
        yield Check(claim, exceeds(gain), f"by {gain.text()} iterations")
        yield Chart(
            f"Figure 8: {one.name}",
            "Half of the blocks, chosen at random, are lost. The number of bytes written does not depend on the "
            "fraction.",
            "number of saves per full checkpoint", "iterations",
            (
                Line("full restore", [1, 2, 4, 8], [mean_interval(one.full).value] * 4, dashed=True),
                *(_with_error(policy, list(found), list(found.values())) for policy, found in lines.items()),
            ),
        )  # fmt: skip
    header = (
        "workload", "fraction of a save", "policy", "cost", "reduction from a full restore", "published",
        "did not converge",
    )  # fmt: skip
    note = "Half of the blocks, chosen at random, are lost. Saves of a fraction r are r times 8 iterations apart."
    yield Table("Figure 8: selection of the blocks to save", header, tuple(rows), note)


def _bounds(title: str, perturbed: Mapping[str, Perturbed], *, always: bool) -> Iterator[Finding]:
    """Yields a table and a figure that compare the costs of perturbations with their bounds; `always` means that each
    iteration shrinks every error by the factor c."""
    rows, lines, cost = [], [], {}
    for kind, one in perturbed.items():
        bounds, costs, beyond = (np.asarray(values, float) for values in (one.bounds, one.costs, one.beyond))
        known = np.isfinite(costs)
        # A run that did not converge was given up after three times the iterations, so it cost at least twice as many.
        least = np.where(known, costs, 2 * one.iterations)
        cost[kind] = least[:, None]
        mean = mean_interval(costs[:, None]).text() if known.all() else f"at least {least.mean():.3g}"
        above = int((least > bounds + 1e-3).sum())
        rows.append(
            (
                kind, len(costs), one.c, mean, float(bounds.mean()), above, int((beyond > bounds + 1e-3).sum()),
                int((~known).sum()),
            )
        )  # fmt: skip
        lines.append(Line(kind, np.asarray(bounds)[known].tolist(), costs[known].tolist(), points=True))
    most = max(max(one.bounds) for one in perturbed.values())
    lines.append(Line("bound", [0.0, most], [0.0, most], dashed=True))
    header = (
        "perturbations", "trials", "c", "mean cost", "mean bound", "measured costs above the bound",
        "iterations beyond kappa(x) above the bound", "did not converge",
    )  # fmt: skip
    note = (
        "The theorem bounds the difference between two upper bounds, kappa(y) and kappa(x). If every iteration shrinks "
        "every error by the factor c, the number of iterations beyond kappa(x) never exceeds the theorem's bound, "
        "although the measured difference between two training runs may exceed it. All perturbations, over which the "
        "intervals are computed, are of one training run. A run that did not converge within three times the "
        "iterations costs at least twice the iterations."
    )
    yield Table(f"{title}, compared with theorem 3.2", header, tuple(rows), note)
    yield Chart(f"{title}: cost against bound", note, "bound (iterations)", "cost (iterations)", tuple(lines))
    if always:
        over = sum(row[6] for row in rows)
        claim = f"{title}: no perturbation costs more iterations beyond kappa(x) than theorem 3.2 allows"
        yield Check(claim, not over, f"{over} exceed the bound")
    if "adversarial" in perturbed:
        worst, chance = mean_interval(cost["adversarial"]), mean_interval(cost["random"])
        share = ratio_interval(cost["adversarial"], np.asarray(perturbed["adversarial"].bounds, float)[:, None])
        lost = any(row[-1] for row in rows)
        apart = Interval(worst.value - chance.value, worst.low - chance.high, worst.high - chance.low)
        yield Check(
            f"{title}: perturbations away from the optimum cost more than random ones, and their cost is close to the "
            "bound",
            # Costs that are only known to be large leave it undecided.
            every(
                (exceeds(apart), exceeds(worst), exceeds(share, 0.5), stays_below(share, 1.5), None if lost else True)
            ),
            f"{worst.text()} iterations, {share.text(percent=True)} of the bound, and {chance.text()} iterations for "
            "random perturbations",
        )


def _overhead(workload: str, overhead: Overhead) -> Iterator[Finding]:
    goal = {name: _behind(way.losses, overhead.undisturbed, overhead.after) for name, way in overhead.ways.items()}
    rows = tuple(
        (
            name, f"{way.fraction:g} every {way.saved_every}", goal[name], 1e3 * way.step_seconds,
            1e3 * way.save_seconds, f"{way.save_seconds / way.saved_every / way.step_seconds:.0%}",
        )
        for name, way in overhead.ways.items()
    )  # fmt: skip
    header = ("recovery", "saves", "iterations behind", "ms of an iteration", "ms of a save", "overhead")
    note = (
        f"Half of the blocks are lost in iteration {overhead.after} of a single training run. The number of "
        "iterations behind states how many iterations earlier the undisturbed run reached the same loss, averaged over "
        f"the {AFTERWARDS} iterations after the failure. The overhead is the time for which saves block training "
        "(including waits for the previous save), divided by the time of the iterations, which take milliseconds "
        "here; the published overhead is 5.3 % (13 s of 243 s)."
    )
    yield Table(f"Figure 9: {workload}, cost of a failure and of saves", header, rows, note)
    lines = [Line("undisturbed", range(len(overhead.undisturbed)), overhead.undisturbed, dashed=True)]
    lines += [Line(name, range(len(way.losses)), way.losses) for name, way in overhead.ways.items()]
    yield Chart(f"Figure 9: {workload}, loss before and after a failure", note, "iteration", "loss", tuple(lines))
    sooner = goal["traditional"] - goal["SCAR"]
    yield Check(
        f"Figure 9: after a failure in {workload}, training with SCAR is ahead of training with a full restore (once)",
        sooner > 0,
        f"by {sooner:.2g} iterations here, and by about {SOONER} iterations in the paper",
    )  # fmt: skip


def _behind(losses: Sequence[float], undisturbed: Sequence[float], after: int) -> float:
    """Returns the mean number of iterations by which a training run lags behind the undisturbed run after a failure."""
    found = []
    for k in range(after, after + AFTERWARDS):
        at = next((other for other, one in enumerate(undisturbed) if one <= losses[k]), len(undisturbed) - 1)
        before, loss = undisturbed[max(0, at - 1)], undisturbed[at]
        found.append(k - (at - (losses[k] - loss) / (before - loss) if before > loss else at))
    return float(np.mean(found))


def _advice(workloads: Sequence[Workload]) -> Iterator[Finding]:
    rows, good, strictly = list[tuple[Any, ...]](), dict[str, list[Predicted]](), list[Predicted]()
    for one in workloads:
        for (policy, fraction, lost, _), case in one.cases.items():
            if not case.predicted.size:
                continue
            predicted, costs = case.predicted, case.costs.ravel()
            known = np.isfinite(predicted)
            right, strict = (
                np.where(known, within_factor(predicted, case.costs, least), np.nan) for least in (LEAST_COST, 0.0)
            )
            good.setdefault(one.name, []).append(right)
            strictly.append(strict)
            one_rate = case.one_rate.ravel()
            given = np.isfinite(one_rate)
            rows.append(
                (
                    one.name, f"{policy} 1/{1 / fraction:g}", f"{lost:g}", int(known.sum()),
                    float(np.mean(predicted[known])) if known.any() else None,
                    mean_interval(np.where(np.isfinite(case.predicted), case.costs, np.nan)).text(),
                    f"{np.nanmean(right):.0%}" if known.any() else None,
                    f"{int((costs[given] <= one_rate[given]).sum())} of {int(given.sum())}",
                )
            )  # fmt: skip
    header = (
        "workload", "saves", "lost", "failures", "predicted cost", "measured cost", "within a factor of two",
        "measured cost at most that of one rate",
    )  # fmt: skip
    note = (
        "The cost of each loss of blocks is predicted at the last save before the loss, from the distances by which "
        "the blocks had moved. If both costs are below half an iteration, the prediction counts as correct. The cost "
        "of one rate is that of theorem 3.2 if the whole error shrinks at the rate at which updates shrink; it is "
        "predicted if they clearly do."
    )
    yield Table("Predicted and measured costs of lost blocks", header, tuple(rows), note)
    if good:
        shares = {name: mean_interval(np.hstack(several)) for name, several in good.items()}
        whole, strict = (
            _by_start(several) for several in ([one for found in good.values() for one in found], strictly)
        )
        yield Check(
            "criterion of this project: for at least 80 % of the failures, the predicted cost is within a factor of "
            "two of the measured cost, or both are below half an iteration",
            exceeds(mean_interval(whole), SHARE),
            f"{mean_interval(whole).text(percent=True)} of {int(np.isfinite(whole).sum())} failures "
            f"({', '.join(f'{name} {share.text(percent=True)}' for name, share in shares.items())}); "
            f"{mean_interval(strict).text(percent=True)} are within a factor of two",
        )


def _by_start(several: Sequence[Predicted]) -> Predicted:
    """Joins the failures of all workloads, start by start; workloads with fewer starts are padded with NaN."""
    starts = max(map(len, several))
    return np.hstack([np.pad(one, ((0, starts - len(one)), (0, 0)), constant_values=np.nan) for one in several])


def within_factor(predicted: Float[np.ndarray, "*n"], costs: Float[np.ndarray, "*n"], least: float = LEAST_COST) -> Any:
    """Returns for each prediction whether it is within a factor of two of the cost, or whether both are below `least`
    iterations."""
    costs = np.where(np.isfinite(costs), costs, np.inf)
    near = (predicted <= FACTOR * costs) & (costs <= FACTOR * predicted)
    return near | ((predicted < least) & (costs < least))
