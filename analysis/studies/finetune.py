"""Findings of the study of fine-tuning on simulated nodes, next to tables 3 and 5 and figure 7 of Ma et al. 2025
(arXiv:2502.12340)."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from sdc.nodes import published_accuracy, published_disagreement
from sdc.train.finetuning import HEALTHY, OTHER, FineTuned, FinetuneMeasured

from ..report import Chart, Check, Finding, Line, Table
from .intervals import Interval, every, exceeds, mean_interval

BEFORE, SPIKE = 9, 1.5  # number of steps with whose median a loss is compared, and the factor from which it is a spike
SIGNIFICANT = 0.05


def findings(measured: FinetuneMeasured) -> Iterator[Finding]:
    """Yields the tables, figures and claims of the study."""
    runs: dict[str, list[FineTuned]] = {}
    for run in measured.runs:
        runs.setdefault(run.node, []).append(run)
    accuracy = {node: _accuracy(measured, each) for node, each in runs.items()}
    differs = {
        node: np.asarray([np.mean(a.choices != b.choices) for a, b in zip(each, runs[HEALTHY], strict=True)])
        for node, each in runs.items()
        if node != HEALTHY
    }
    yield _table(measured, runs, accuracy, differs)
    yield _published(differs)
    yield _losses(runs, differs)
    yield from _checks(measured, runs, accuracy, differs)


def _accuracy(measured: FinetuneMeasured, runs: list[FineTuned]) -> Float[np.ndarray, "seeds"]:
    return np.asarray([np.mean(run.choices == measured.answers) for run in runs])


def _table(
    measured: FinetuneMeasured,
    runs: Mapping[str, list[FineTuned]],
    accuracy: Mapping[str, Float[np.ndarray, "seeds"]],
    differs: Mapping[str, Float[np.ndarray, "seeds"]],
) -> Table:
    untuned = float(np.mean(measured.untuned == measured.answers))
    rows: list[tuple[Any, ...]] = [("without fine-tuning", f"{100 * untuned:.1f}", None, None, None, None, None)]
    for node, each in runs.items():
        change = None if node == HEALTHY else mean_interval(accuracy[node] - accuracy[HEALTHY]).short(100)
        apart = mean_interval(differs[node]).short(100) if node in differs else None
        name = {OTHER: "another order"}.get(node, node)
        known = _mean(published_accuracy(name)), None if node == HEALTHY else _mean(published_disagreement(name))
        spikes = sum(_spikes(run.losses) for run in each)
        rows.append((node, mean_interval(accuracy[node]).short(100), change, apart, spikes, *known))
    seeds = measured.study.seeds
    return Table(
        f"Tables 3 and 5: {measured.study.task} after {measured.study.steps} steps of fine-tuning",
        (
            "node", "accuracy, %", "change from healthy", "predictions that differ, %", "loss spikes",
            "published accuracy, %", "published difference, %",
        ),
        tuple(rows),
        f"{measured.model}. Means over {seeds} seeds of the order of the questions and of the faults ± half of the "
        "95 % interval (Student's t); a node is compared with the healthy node of the same seed. Another order is a "
        "healthy node with the questions in another order, the study's other seed. Published figures are means over "
        f"six tasks of one run each, with another model. A spike is a loss of more than {SPIKE:g} times the median of "
        f"the {BEFORE} losses before it, summed over the seeds. The study has no rates for nodes 2, 3 and 12, which "
        "therefore cannot be simulated here. SIMULATED faults.",
    )  # fmt: skip


def _mean(published: Mapping[str, float]) -> str:
    return f"{100 * np.mean([*published.values()]):.1f}"


def _published(differs: Mapping[str, Float[np.ndarray, "seeds"]]) -> Chart:
    nodes = [node for node in differs if node != OTHER]
    x = [100 * float(np.mean([*published_disagreement(node).values()])) for node in nodes]
    means = [mean_interval(differs[node]) for node in nodes]
    reach = [100 * (mean.high - mean.value) for mean in means]
    title = "Disagreement with the healthy node, by node"
    caption = "Each point is a node: the mean over six tasks in table 5, and the mean over the seeds here."
    line = Line("nodes", x, [100 * mean.value for mean in means], points=True, error=reach)
    return Chart(title, caption, "published, %", "simulated, %", (line,))


def _losses(runs: Mapping[str, list[FineTuned]], differs: Mapping[str, Float[np.ndarray, "seeds"]]) -> Chart:
    """Draws the losses of a healthy run, and of those runs whose losses stray farthest from it."""
    healthy = runs[HEALTHY][0].losses

    def strays(node: str) -> float:
        gap = np.abs(np.nan_to_num(runs[node][0].losses, nan=np.inf) - healthy)
        return float(gap.max())

    worst = sorted((node for node in differs if node != OTHER), key=strays, reverse=True)[:4]
    lines = [Line(node, range(len(healthy)), runs[node][0].losses.tolist()) for node in worst]
    lines.append(Line(HEALTHY, range(len(healthy)), healthy.tolist(), dashed=True))
    caption = "The first seed of the healthy node, and of the four nodes whose losses stray farthest from it."
    return Chart("Figure 7: loss of fine-tuning", caption, "step", "loss", tuple(lines))


def _spikes(losses: Float[np.ndarray, "steps"]) -> int:
    """Returns the number of losses far above those before them, or that are no numbers."""
    found = int((~np.isfinite(losses)).sum())
    for step in range(BEFORE, len(losses)):
        found += bool(losses[step] > SPIKE * np.median(losses[step - BEFORE : step]))
    return found


def _checks(
    measured: FinetuneMeasured,
    runs: Mapping[str, list[FineTuned]],
    accuracy: Mapping[str, Float[np.ndarray, "seeds"]],
    differs: Mapping[str, Float[np.ndarray, "seeds"]],
) -> Iterator[Check]:
    nodes = [node for node in runs if node not in (HEALTHY, OTHER)]
    confidence = 1 - SIGNIFICANT / max(len(nodes), 1)  # of each node, so that all hold together

    def each_of(values: Mapping[str, Float[np.ndarray, "seeds"]]) -> dict[str, Interval]:
        return {node: mean_interval(found, confidence) for node, found in values.items()}

    gain = mean_interval(accuracy[HEALTHY] - np.mean(measured.untuned == measured.answers))
    yield Check("fine-tuning raises the accuracy", exceeds(gain), f"by {gain.text(percent=True)} on the healthy node")
    finite = [node for node in nodes if all(np.isfinite(run.losses).all() for run in runs[node])]

    def none_is(claim: str, excess: Mapping[str, Interval]) -> Check:
        shown = [f"{node} by {found.text(percent=True)}" for node, found in excess.items() if exceeds(found)]
        seen = "; ".join(shown) or f"none of {len(excess)}, at {confidence:.4g} confidence each"
        return Check(f"no node whose losses are finite is shown to {claim}", not shown, seen)

    lost = each_of({node: accuracy[HEALTHY] - accuracy[node] for node in finite})
    yield none_is("be less accurate than the healthy node", lost)
    # A node without any effect has the losses of the healthy node.
    healthy = [run.losses for run in runs[HEALTHY]]
    silent = {node for node in nodes if all(map(np.array_equal, (run.losses for run in runs[node]), healthy))}
    struck = each_of({node: differs[node] for node in nodes if node not in silent})
    agree = [node for node, found in struck.items() if not exceeds(found)]
    yield Check(
        "predictions of every node on which faults strike differ from those of the healthy node",
        every(exceeds(found) for found in struck.values()),
        (f"not shown for {', '.join(agree)}" if agree else f"all {len(struck)}")
        + (f"; the losses of {', '.join(sorted(silent))} are those of the healthy node" if silent else ""),
    )
    more = each_of({node: differs[node] - differs[OTHER] for node in finite})
    yield none_is("differ more from the healthy node than another order does", more)
    yield from _ranking({node: float(differs[node].mean()) for node in nodes})


def _ranking(differs: Mapping[str, float]) -> Iterator[Check]:
    """Compares the order of the nodes with that of table 5."""
    from scipy import stats

    published = [float(np.mean([*published_disagreement(node).values()])) for node in differs]
    if len(differs) < 4 or not np.ptp([*differs.values()]) or not np.ptp(published):
        return
    found = stats.spearmanr(published, [*differs.values()])
    sure = found.pvalue < SIGNIFICANT and not math.isnan(found.statistic)
    yield Check(
        "nodes whose predictions differ more in table 5 also differ more here",
        bool(found.statistic > 0) if sure else None,
        f"Spearman's rank correlation of {len(differs)} nodes: {found.statistic:.2f} "
        f"(two-sided p = {found.pvalue:.2f})",
    )
