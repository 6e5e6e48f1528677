"""What studies claim, from numbers that are given: claims hold or fail by them, and misprints are rejected."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sdc.analysis import write_report
from sdc.analysis.report import Chart, Findings, LeftOut, Line, Table, line_figure
from sdc.analysis.studies import findings_of, write_study
from sdc.analysis.studies._paft import _difference, printed_divergence
from sdc.analysis.studies._scar import _bounds
from sdc.analysis.studies.dropcompute import RATIOS
from sdc.analysis.studies.intervals import every, exceeds, mean_interval, ratio_interval, stays_below
from sdc.analysis.studies.lossy import printed_pair_drift
from sdc.records import stamp
from sdc.records.format import RecordError
from sdc.records.record import read_record
from sdc.schema import Perturbed
from sdc.train.finetuning import HEALTHY, OTHER, FineTuned, FinetuneMeasured, FinetuneStudy
from sdc.train.studies import DropComputeStudy, LossyStudy, PaftStudy, ShadowStudy
from sdc.train.studies.measurements import (
    Burst,
    ClockedSpeedup,
    Distributions,
    Drifted,
    DropComputeMeasured,
    DroppedRun,
    DroppedTraining,
    LocalSpeedup,
    LossyMeasured,
    LossyTraining,
    NoisySpeedup,
    NoisyTraining,
    PaftMeasured,
    PredictedSpeedup,
    ShadowMeasured,
    Watched,
    WatchedTraining,
)
from sdc.train.studies.theory import divergence_over_time, pair_drift

SCALE = {"workers": 4, "steps": 20}
SOURCES = {"linear": "points"}
WALKS = (0.1, 0.2, 0.4)


def cells(findings: Findings, caption: str) -> dict[str, tuple[Any, ...]]:
    """Rows of a table by their names."""
    (grid,) = [grid for grid in findings.grids if caption in grid.caption]
    assert all(len(row) == len(grid.header) for row in grid.rows)
    return {row[0]: row[1:] for row in grid.rows}


def held(findings: Findings) -> dict[str, bool | None]:
    return {check.claim: check.holds for check in findings.checks}


def seeds(*means: float, spread: float = 0.0) -> np.ndarray:
    """Values of three seeds around each mean."""
    return np.asarray(means)[..., None] + np.asarray([-spread, 0.0, spread])


def lossy(
    walks: dict[float, float], perplexities: tuple[float, ...] = (10.0, 10.2, 10.5), spread: float = 0.0
) -> LossyMeasured:
    rates = (0.0, 0.2, 0.4)
    scores = {
        "per shard": dict(zip(rates, seeds(*perplexities), strict=True)),
        "in bursts": dict(zip((0.0, 0.2), seeds(10.0, 10.25), strict=True)),
    }
    scores["per shard"][0.2] += spread * np.asarray([-1, 0, 1])
    losses = dict(zip(rates, seeds(1.0, 1.0, 1.1), strict=True))
    curves = dict(zip(rates, np.linspace(2.0, 1.0, 5) + np.zeros((3, 5)), strict=True))
    training = LossyTraining("text", "perplexity", 20, scores, losses, curves, {0.0: 0.0, 0.2: 0.5, 0.4: 1.2})
    return LossyMeasured(study=LossyStudy(**SCALE, rates=rates), sources=SOURCES, trainings=(training,), walks=walks)


def paft(
    squares: np.ndarray, noisy: float = 0.75, mended: tuple[float, float] = (0.9, 0.8), spread: float = 0.0
) -> PaftMeasured:
    training = NoisyTraining(
        "images",
        "accuracy",
        {
            "clean": seeds(0.9, 0.9),
            "noisy": seeds(0.9, noisy),
            "paft": seeds(*mended, spread=spread),
            "paft, algorithm 2": seeds(0.9, 0.8),
        },
        {"paft": seeds(2, 7, spread=1.0)},
        (
            Burst("noisy", 1.0, np.array([1, 2, 3]), seeds(0.5, np.nan, 0.4).T),
            Burst("paft", 1.0, np.array([1, 2, 3]), seeds(0.9, 0.5, 0.8).T),
        ),
    )
    return PaftMeasured(
        study=PaftStudy(**SCALE, variances=(1e-3, 0.5), burst_every=2),
        sources=SOURCES,
        trainings=(training,),
        drifting="images",
        drifts=(Drifted(None, 1000, squares),),
    )


EXACT = divergence_over_time(0.03, [0.02] * 20, workers=4, dimension=1000)


def test_drift_follows_the_exact_form() -> None:
    claim = "drift follows the exact form, not the printed one (once)"
    right = findings_of(lossy({p: pair_drift(p) for p in WALKS}))
    assert held(right)[claim]
    assert cells(right, "Drift")["40%"] == pytest.approx((0.952, 0.952, 0.571, 1), abs=5e-4)
    assert not held(findings_of(lossy({p: printed_pair_drift(p) for p in WALKS})))[claim]
    # At small rates, the two forms hardly differ.
    assert not held(findings_of(lossy({p: pair_drift(p) for p in (0.01, 0.04)})))[claim]


def test_divergence_follows_the_exact_form() -> None:
    claim = "divergence follows the exact form, not the printed one (once)"
    right = findings_of(paft(EXACT))
    assert held(right)[claim]
    ((found, exact, printed, ratio),) = cells(right, "divergence").values()
    assert (found, ratio) == (exact, pytest.approx(1))
    assert printed / exact == pytest.approx(5 / 3)  # (M + 1) / (M - 1)
    assert not held(findings_of(paft(printed_divergence(EXACT, 4))))[claim]


def test_paft() -> None:
    found = findings_of(paft(EXACT))
    rows = cells(found, "images: accuracy")
    # Published figures stand where the same method had the same noise.
    assert rows["noisy"] == ("90 ± 0", "75 ± 0")
    assert rows["noisy, published"] == (91.1, None)
    assert rows["paft, algorithm 2, published"] == (93.4, None)
    assert "paft, published" not in rows
    assert rows["paft: synchronizations"] == ("2 ± 2.5", "7 ± 2.5")  # Student's t of two degrees of freedom, 4.303
    (claim,) = (name for name in held(found) if "PAFT" in name)
    assert held(found)[claim]
    assert held(findings_of(paft(EXACT, spread=0.008)))[claim]
    for wrong in ({"noisy": 0.85}, {"mended": (0.85, 0.8)}, {"mended": (0.95, 0.8)}):
        assert held(findings_of(paft(EXACT, **wrong)))[claim] is False, wrong
    assert held(findings_of(paft(EXACT, spread=0.1)))[claim] is None, "the seeds scatter too much"
    said = next(check.seen for check in findings_of(paft(EXACT, mended=(0.95, 0.7))).checks if check.claim == claim)
    assert said.endswith("Significantly above 0: 0.001; below 0: 0.5; PAFT above clean: 0.001.")
    for diverged in ({"noisy": np.nan}, {"mended": (0.9, np.nan)}):
        assert held(findings_of(paft(EXACT, **diverged)))[claim] is None, "three seeds decide no sign test"
    assert cells(found, "bursts of noise every 2 of 20 steps") == {
        "noisy": (1.0, "50 ± 0", "nan (3 of 3 not finite)", "40 ± 0"), "paft": (1.0, "90 ± 0", "50 ± 0", "80 ± 0"),
    }  # fmt: skip
    fine, lost = np.ones(8), np.full(8, np.nan)
    assert (_difference(fine, lost, 1, 0.95).low, _difference(lost, fine, 1, 0.95).high) == (math.inf, -math.inf)
    one = np.where(np.arange(8) == 0, np.nan, 1.0)
    assert (_difference(fine, one, 1, 0.95).low, _difference(one, fine, 1, 0.95).high) == (-math.inf, math.inf)
    assert [chart.title for chart in found.charts] == [
        "images: accuracy against noise", "images: occasional large noise", "images: model divergence over time",
    ]  # fmt: skip


def test_lossy() -> None:
    found = findings_of(lossy({}))
    rows = cells(found, "text: perplexity")
    assert rows["per shard"] == ("10 ± 0", "10.2 ± 0", "10.5 ± 0", "2 ± 0", "5 ± 0")
    assert rows["in bursts"] == ("10 ± 0", "10.25 ± 0", None, "2.5 ± 0", None)
    assert rows["published, validation"][:3] == (10.653, 10.934, 11.362)
    assert rows["published, training"][:3] == (5.183, 5.325, 5.531)
    assert rows["training perplexity, per shard"] == ("2.718 ± 0", "2.718 ± 0", "3.004 ± 0", "0 ± 0", "10.52 ± 0")
    assert held(found) == {
        "perplexity at a loss rate of 20 % is less than 3 % higher than without losses": True,
        "perplexity rises with the loss rate": True,
    }
    assert set(held(findings_of(lossy({}, (10.0, 10.4, 9.9)))).values()) == {False}
    assert list(held(findings_of(lossy({}, spread=0.1))).values()) == [None, True]  # 2 % ± 2.5 %
    lossless = lossy({})
    lossless.trainings[0].scores["per shard"][0.0][:] = np.inf
    assert next(iter(held(findings_of(lossless)).values())) is None, "nothing to compare with"
    diverged = lossy({})
    diverged.trainings[0].scores["per shard"][0.2][1] = np.inf  # one of three
    found = findings_of(diverged)
    assert cells(found, "text: perplexity")["per shard"][1] == "10.2 (1 of 3 not finite)"
    assert list(held(found).values()) == [False, None]
    [fitted] = [check.seen for check in found.checks if check.claim == "perplexity rises with the loss rate"]
    assert fitted.endswith("1.25 [-inf, inf] (1 of 3 not finite)")


def test_dropcompute() -> None:
    def dropped(
        rate: float, *, extra: int = 0, way: str = "none", correction: str = "none", loss: float = 1.0,
        end: float = 8.0, spread: float = 0,
    ) -> Any:  # fmt: skip
        steps = DropComputeStudy(**SCALE).steps + extra
        losses = np.stack([np.array([np.nan, *[loss + more] * (steps - 1)]) for more in (-spread, 0.0, spread)])
        ends = np.stack([np.linspace(0.4, end, steps)] * 3)
        way = "extra steps" if extra else way
        return DroppedRun(rate, way, correction, rate, seeds(0.9)[0], losses, ends)

    def local(server: bool, gain: float, stopped: float) -> LocalSpeedup:
        return LocalSpeedup(4, server, *seeds(0.06, gain, stopped, spread=0.01))

    def measured(
        loss: float = 1.0, gain: float = 1.15, spread: float = 0.0, *, off: float = 0.0, kept: float = 0.9,
        stopped: float = 3.0,
    ) -> DropComputeMeasured:  # fmt: skip
        runs = (
            dropped(0.0, end=10.0),
            dropped(0.1),
            dropped(0.1, extra=3, loss=loss, end=9.0, spread=spread),
            dropped(0.1, way="repetition"),
            dropped(0.1, correction="rate"),
        )
        noisy = tuple(
            NoisySpeedup(
                name,
                "normal(mu=1, sigma=1)",
                (512, 1024),
                *(seeds(value, value) for value in (ratio + off, 0.1, ratio * (1 - 2 * off))),
            )
            for name, ratio in RATIOS.items()
        )
        shares = {"none": {0.0: seeds(0.9)[0], 0.1: seeds(kept)[0]}, "count": {0.1: seeds(0.91)[0]}}
        return DropComputeMeasured(
            study=DropComputeStudy(**SCALE, drops=(0.1,)), sources=SOURCES,
            predicted=tuple(PredictedSpeedup(n, 9.0, 8.0, 0.1, 1 + n / 100, (0.0, 0.1), (1.0, 1.1)) for n in (8, 32)),
            distributions=Distributions(
                200, (0.0, 0.1), np.arange(4.0), np.asarray([[3.0, 5.0], [2.9, stopped]]),
                np.asarray([[1.0, 1.0], [0.8, 0.9]]),
            ),
            noisy=noisy,
            local=(local(False, 1.5 - off, 2.0 - off), local(True, 1.2, 1.9 - off)),
            clocked=(ClockedSpeedup(2, 4, 1.0, 0.8, gain, 1.15),),
            trainings=(DroppedTraining("text", "accuracy", runs, shares),),
        )  # fmt: skip

    found = findings_of(measured())
    rows = cells(found, "training with dropped")
    assert rows["10% dropped"] == (0.1, "0.9 ± 0", "1 ± 0", "8 ± 0", "1.25 ± 0", "91.19 ± 0.02")
    assert rows["10% dropped, 3 extra steps"][-1] == "91.40 ± 0.08"
    assert rows["10% dropped, repetition"][-1] == "91.19 ± 0.11"
    assert rows["10% dropped, correction by rate"][-1] is None
    assert cells(found, "probability")["0.1"] == ("0.9 ± 0", "0.91 ± 0")
    assert cells(found, "figures 13 and 14")["13b"][1:4] == ("1.302 ± 0", "1.302 ± 0", 1.302)
    assert list(held(found).values()) == [True] * 9
    slower = held(findings_of(measured(stopped=9.0)))
    assert [claim for claim, holds in slower.items() if not holds] == [
        "a threshold reduces the mean and the variance of the time of a step (once)"
    ]
    (chart,) = [chart for chart in found.charts if "Figure 8" in chart.title]
    assert [line.label for line in chart.lines] == ["10.0% dropped"]
    assert sum(chart.lines[0].y) == pytest.approx(1)
    assert (
        "its loss stays below that after -95 % [-95, -95] more steps, in 3 of 3 seeds (as many samples take 15.0% more)"
        in found.checks[7].seen
    )
    assert list(held(findings_of(measured(1.1, gain=1.0))).values()) == [True] * 6 + [False, False, True]
    assert list(held(findings_of(measured(spread=0.02))).values()) == [True] * 7 + [None, True]
    assert list(held(findings_of(measured(off=0.8, kept=0.87))).values()) == [True, True] + [False] * 4 + [
        True,
        True,
        False,
    ]
    # Corrected runs are in the table and not in the figures.
    assert [len(chart.lines) for chart in found.charts] == [2, 2, 3, 1, 10, 4, 4, 4, 2]


def test_shadow() -> None:
    none, seen = np.zeros(3, bool), np.array([False, True, True])
    compared = np.array([[0, 1], [1, 2], [2, 3]])

    def measured(named: tuple[int, ...]) -> ShadowMeasured:
        runs = (
            Watched("healthy", 0, None, none, none, compared, "clean", (), ()),
            Watched("wrong", 0, 2, np.ones(3, bool), seen, compared, "corrupt", named, ((1, 2),)),
            Watched("wrong", 1, 2, np.ones(3, bool), seen, compared, "corrupt", (2,), ()),
        )
        return ShadowMeasured(
            study=ShadowStudy(**SCALE), sources=SOURCES, trainings=(WatchedTraining("text", "perplexity", runs),)
        )

    found = findings_of(measured((2,)))
    assert cells(found, "watches")["healthy"] == (1, 0, 0, 0, None, "clean (1)", "none (1)")
    assert cells(found, "watches")["wrong"] == (2, 6, 4, 4, "1 (1 to 1)", "corrupt (2)", "2, 1 or 2 (1); 2 (1)")
    assert list(held(found).values()) == [True]
    assert cells(findings_of(measured(())), "watches")["wrong"][-1] == "1 or 2 (1); 2 (1)"
    assert list(held(findings_of(measured((1,)))).values()) == [False]


def test_the_record_and_the_report_hold_what_was_found(tmp_path: Path) -> None:
    measured = lossy({0.4: pair_drift(0.4)}, (10.0, 10.4, 9.9))
    summary = write_study(tmp_path / "run", measured, command=["sdc", "study", "lossy"], seconds=3)
    run = read_record(tmp_path / "run")
    assert (run.manifest["study"], run.manifest["workers"], run.manifest["workloads"]) == ("lossy", 4, SOURCES)
    added = ("sentence", "run", "report")
    told = json.loads(json.dumps({key: value for key, value in summary.items() if key not in added}))
    assert run.summary == {**stamp("jax-sdc record summary", lasting=True), **told}
    page, text = Path(summary["report"]).read_text(), (tmp_path / "run" / "report.md").read_text()
    assert "1 of 3 claims hold" in text
    assert "0.9524" in text
    assert "simulated errors, delays and losses" in page
    assert page.count("<svg") == 3
    assert write_report(tmp_path / "run").read_text() == page
    with pytest.raises(RecordError, match="already exists"):
        write_study(tmp_path / "run", measured)


def finetune(
    accuracy: float = 0.6, apart: float = 0.1, *, other: float = 0.15, untuned: float = 0.5, loss: float = 1.0
) -> FinetuneMeasured:
    """Runs of three seeds on two nodes, of which the second agrees with the healthy one, and disagrees more and more.

    Args:
        accuracy: accuracy on the first node; it is 0.6 on the healthy one.
        apart: share of its choices that differ from those of the healthy node.
        other: the same with another order of the questions.
        untuned: accuracy without fine-tuning.
        loss: last loss on the first node.
    """
    answers = np.zeros(200, int)

    def choices(right: float, from_first: float, seed: int) -> np.ndarray:
        found = np.zeros(200, int)
        found[round(200 * right) + seed :] = 1
        found[200 - round(200 * from_first) :] = 2  # among the wrong ones
        return found

    def runs(node: str, right: float, away: float, last: float = 1.0) -> list[FineTuned]:
        losses = np.asarray([2.0 + ord(node[-1]) / 1e3] * 10 + [last])
        return [FineTuned(node, seed, losses, choices(right, away, seed)) for seed in range(3)]

    every_run = (
        *runs(HEALTHY, 0.6, 0.0), *runs(OTHER, 0.6, other), *runs("node1", accuracy, apart, loss),
        *runs("node5", 0.6, 0.01), *runs("node6", 0.6, 0.15), *runs("node7", 0.6, 0.02),
    )  # fmt: skip
    nodes = ("node1", "node5", "node6", "node7")
    return FinetuneMeasured(
        study=FinetuneStudy(nodes=nodes, seeds=3), model="a small decoder", answers=answers,
        untuned=choices(untuned, 0.0, 0), runs=every_run,
    )  # fmt: skip


def test_finetune() -> None:
    found = findings_of(finetune())
    rows = cells(found, "fine-tuning")
    assert rows["without fine-tuning"][0] == "50.0"
    assert rows[HEALTHY] == ("60.5 ± 1.2", None, None, 0, "78.9", None)
    assert rows[OTHER][2:] == ("15 ± 0", 0, "80.1", "18.7")
    assert rows["node6"][4:] == ("49.3", "43.1")
    names = ("fine-tuning raises", "less accurate", "on which faults strike", "differ more from", "nodes whose")

    def answers(*given: Any, **changed: Any) -> list[bool | None]:
        checks = held(findings_of(finetune(*given, **changed)))
        assert all(name in claim for name, claim in zip(names, checks, strict=True))
        return list(checks.values())

    assert answers() == [True, True, True, True, None]
    assert answers(untuned=0.7)[0] is False
    assert answers(untuned=0.605)[0] is None
    assert answers(accuracy=0.5)[1] is False
    assert answers(accuracy=0.5, loss=math.nan)[1] is True, "diverged nodes are counted apart"
    assert answers(apart=0.0)[2] is None
    assert answers(apart=0.3)[3] is False
    assert cells(findings_of(finetune(loss=4.0)), "fine-tuning")["node1"][3] == 3, "a spike in each of three runs"


def test_a_run_that_does_not_converge_counts_against_the_bound() -> None:
    """It was given up after three times the iterations: it cost twice as many or more."""

    def row(bound: float) -> tuple[Any, ...]:
        given = Perturbed(
            c=0.9, distance=1.0, iterations=64.0, kappa=60.0, after=[1, 2], sizes=[1.0, 1.0], bounds=[bound, bound],
            costs=[10.0, None], beyond=[12.0, None],
        )  # fmt: skip
        table = next(_bounds("resets", {"resets": given}, always=False))
        assert isinstance(table, Table)
        return table.rows[0][3:]

    assert row(70.0) == ("at least 69", 70.0, 1, 0, 1)
    assert row(130.0)[2] == 0


def test_a_figure_of_nothing_is_left_out() -> None:
    empty = Chart("An empty figure", "A caption.", "x", "y", (Line("a", [1], [float("nan")]),))
    assert line_figure(empty) == LeftOut("An empty figure", "nothing finite was measured")


def test_intervals_of_ratios_and_outliers() -> None:
    """Fieller's interval has the ends at which Student's t of ``top - r * bottom`` is critical."""
    draw = np.random.default_rng(5)
    bottom = draw.normal(4.0, 1.0, 12)
    top = 0.5 * bottom + draw.normal(0.0, 0.3, 12)
    found = ratio_interval(top[:, None], bottom[:, None])
    for end in (found.low, found.high):
        assert abs(stats.ttest_1samp(top - end * bottom, 0.0).pvalue - 0.05) < 1e-9
    assert found.low < found.value < found.high
    assert not found.note
    top[3] += 9.0
    assert ratio_interval(top[:, None], bottom[:, None]).note == mean_interval(top).note == " (an outlier)"
    assert math.isinf(ratio_interval(top[:, None], bottom[:, None] - 4.0).high), "the bottom may be zero"
    assert not mean_interval(np.asarray([1.0, 1.0, 9.0])).note, "too few values for an outlier"
    bottom[:2] = np.inf
    for short in (ratio_interval(top[:, None], bottom[:, None]), mean_interval(bottom[:, None])):
        assert short.note.startswith(" (2 of 12 not finite)")
        assert math.isfinite(short.high)
    assert (exceeds(found, 0.9), exceeds(found, 0.1), exceeds(found, found.value)) == (False, True, None)
    assert (stays_below(found, 0.9), stays_below(found, 0.1), stays_below(found, found.value)) == (True, False, None)
    assert (every([True, None]), every([None, False]), every([True])) == (None, False, True)
