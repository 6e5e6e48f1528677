"""Findings of the study of the simulated nodes: each published value next to the simulated one."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sdc.nodes import NODES, FittedValue, published_layers
from sdc.train.studies import Compared, NodesMeasured

from ..report import Chart, Check, Finding, Line, Table
from .intervals import every

MOST_OUTSIDE = 0.1  # maximum share of values outside of 95 % intervals; a larger share refutes the model
NEAR = 5.0  # maximum factor between the measured and the fitted response to changed last bits
TABLES = ("frequency", "severity")
OFTEN, SELDOM = "node14", 0.01  # the node that figure 10 shows as flagged often, and the share that seldom stands for
SILENT = [node for node in NODES if not published_layers(node)]
YES = {True: "yes", False: "NO", None: "undetermined"}


def findings(measured: NodesMeasured) -> Iterator[Finding]:
    """Yields the tables, figures and claims of the study."""
    yield _overview(measured)
    yield from _tables(measured)
    yield _chart(measured)
    yield from _checks(measured)


def _overview(measured: NodesMeasured) -> Table:
    names = (
        "frequency", "severity", "frequency by layer", "severity by layer", "time", "noise", "drift", "loss",
    )  # fmt: skip
    rows = []
    for node in measured.study.nodes:
        cells = []
        for name in names:
            said = [row.agrees for row in measured.rows if (row.node, row.quantity) == (node, name)]
            known = [agrees for agrees in said if agrees is not None]
            cells.append(f"{sum(known)} of {len(known)}" if known else "undetermined" if said else "-")
        rows.append((node, *cells))
    return Table(
        "Published values within the central 95 % of the simulated runs",
        ("node", *names),
        tuple(rows),
        "The published values come from tables 1, 2 and 6 to 9 (frequency, severity), figures 3, 4 and 6 and section "
        "9 (time), figure 5 (noise) and the description of figure 6 (drift, loss). The noise of each node is "
        "predicted from the other nodes. A dash means that the study has no such value. The rates by layer are inputs "
        "of the simulation, so the frequencies test only its implementation; the intervals of a node with few bursts "
        "include the value of a run without bursts. The severities were used in the fit of the tails, so they test "
        "only whether the model can describe them (posterior-predictive p-values). The noise and the drift test "
        "the model; the loss helped to choose the share of elements in severe steps.",
    )


def _tables(measured: NodesMeasured) -> Iterator[Table]:
    rows: list[tuple[Any, ...]] = [
        (f"{row.node}, {row.place}", row.quantity, row.published, row.simulated, _interval(row), row.p)
        for row in measured.rows
        if row.quantity in TABLES
    ]
    yield Table(
        "Tables 1 and 2: runs of 4,500 steps with a model of the study's size",
        ("node and submodule", "quantity", "published", "simulated", "95 % interval", "p"),
        tuple(rows),
        f"p: two-sided p-value of the published value among {measured.study.runs:,} simulated runs, each with "
        "parameters drawn from their posterior. A severity is the maximum over a run, so it varies between runs; the "
        "study reports a single run.",
    )
    small = {trained.node: float(trained.noise.max()) for trained in measured.trainings}
    rows = [
        (node, found.published, found.median, f"{found.low:.3g} to {found.high:.3g}",
         math.sqrt(found.high / found.low), YES[found.inside], small.get(node))
        for node, found in measured.predicted.items()
    ]  # fmt: skip
    yield Table(
        "Figure 5: worst noise-to-signal ratio of each node, predicted from the other fourteen nodes",
        ("node", "published", "predicted", "95 % interval", "times and divided by", "inside", "small model"),
        tuple(rows),
        "Fitted to the other nodes: the share of elements in severe steps, and the response of gradients to errors. "
        f"The last column is the largest ratio of a small model trained on the simulated node. {_rival(measured)} One "
        "in twenty trainings on a silent node (2, 3 and 12) has no noise at all under the model, so their intervals "
        "have no lower end. The ratio of node 3, 1.34e-15, is less than the average effect of one wrong last bit in a "
        "gradient of 8 billion elements, whereas any error before the last matrix products changes the rounding of "
        "all later results.",
    )
    rows = [
        (row.node, row.place or row.quantity, row.simulated, row.note, YES[row.agrees])
        for row in measured.rows
        if row.quantity in ("time", "drift", "loss")
    ]
    yield Table(
        "Qualitative claims of the study",
        ("node", "quantity", "simulated", "published", "agrees"),
        tuple(rows),
        "Drift is the distance between the parameters of a small model and those of a healthy run after the last step; "
        "this distance must grow from a quarter of the steps to half of them, and from there to the last step. Loss is "
        "the largest relative difference between the loss curves, which count as coincident if it is below 1 %.",
    )
    yield Table(
        "Bursts: correlation of the mismatch frequencies of the submodules over the steps",
        ("node", "simulated"),
        tuple(measured.together.items()),
        "If a node is corrupted in only a few steps, all of its submodules are corrupted in the same steps. For nodes "
        "that are corrupted in every step, the study shows only initial bursts.",
    )
    rows = [
        (f"{row.node}, {row.place}" if row.place else row.node, row.quantity, row.published, row.simulated,
         _interval(row), _why(row, measured.rows))
        for row in measured.rows
        if row.agrees is False
    ]  # fmt: skip
    seen = {node: share for node, share in measured.flagged.items() if share is not None}
    yield Table(
        "Figure 10: share of the products that equation 6 flags in float32, output projection of attention",
        ("node", "simulated", "published"),
        tuple((node, share, "often" if node == OFTEN else "little or none") for node, share in seen.items()),
        "Computed once, with the fitted tails, for eight layers, products of 4,096 terms and normally distributed "
        "factors. The paper names only node 14, and remarks that its flags conflict with the mismatches in bfloat16, "
        "from which the simulated node is made.",
    )
    yield Table(
        "Published values outside the intervals, and the reasons",
        ("node and place", "quantity", "published", "simulated", "95 % interval", "reason"),
        tuple(rows),
        "About 5 % of the published values are expected to be outside their intervals.",
    )
    rows = [
        (name, measured.used[name].value if name in measured.used else None, *_fitted(found))
        for name, found in measured.estimates.items()
    ]  # fmt: skip
    yield Table(
        "Parameters: values that the simulated nodes use, and values fitted in this study",
        ("parameter", "used", "fitted", "95 % interval"),
        tuple(rows),
        "tail: inverse index of the tail of the severities of a node in a direction. few: share of elements in severe "
        "steps; of its probable values, the nodes use one with which the losses of small models coincide. bursts: "
        "number of steps, out of 4,500, in which a rarely corrupted node is corrupted, at least one. response, "
        "rounding, scatter: parameters of the noise model, which the simulated nodes do not need.",
    )
    rounding, sites = measured.estimates["rounding"], sorted(measured.responses[0].linear)
    rows = [(found.model, found.rounding, *(found.linear[site] for site in sites)) for found in measured.responses]
    fitted = f"8B model, fitted to figure 5: {rounding.low:.3g} to {rounding.high:.3g}"
    rows.append((fitted, rounding.value, *[None] * len(sites)))
    yield Table(
        "Scale: response of the gradients of small bfloat16 models to errors",
        ("model", "response to last bits", *(f"response, {site}" for site in sites)),
        tuple(rows),
        "The response to last bits is the noise-to-signal ratio with 64 wrong last bits in every microstep. The "
        "response of a submodule is the squared noise-to-signal ratio divided by the mean square of the relative "
        "errors. Neither depends on the number of elements, so the values of a small model apply to a large one.",
    )


def _fitted(found: FittedValue) -> tuple[float | None, str]:
    """Returns the cells of a fitted value and its interval."""
    if _unlimited(found):
        return None, "not determined"
    return found.value, f"{found.low:.3g} to {found.high:.3g}"


def _unlimited(found: FittedValue) -> bool:
    """Returns whether the study leaves a parameter anywhere in its range."""
    return found.low == 0 and math.isinf(found.high)


def _rival(measured: NodesMeasured) -> str:
    """Returns a sentence that compares the errors of the predictions with those of the mean of the other nodes."""
    from scipy import stats

    loud = [node for node in measured.predicted if node not in SILENT]
    if len(loud) < 3:
        return ""
    known = np.log10([measured.predicted[node].published for node in loud])
    model = np.log10([measured.predicted[node].median for node in loud])
    mean = (known.sum() - known) / (len(known) - 1)
    errors = [f"{10 ** np.median(np.abs(known - each)):.1f}" for each in (model, mean)]
    sentence = (
        f"Among the {len(loud)} nodes that are not silent, half of the predictions are wrong by a factor of more than "
        f"{errors[0]}; if the mean of the other nodes is the prediction, the factor is {errors[1]}."
    )
    if not np.ptp(model):
        return sentence
    rank = stats.spearmanr(known, model)
    return (
        f"{sentence} Spearman's rank correlation of predicted and published ratios is {rank.statistic:.2f} "
        f"(two-sided p = {rank.pvalue:.2f})."
    )


def _plain(measured: NodesMeasured) -> list[str]:
    """Returns the nodes outside of the 95 % interval that follows from the mean and the scatter of the others alone."""
    from scipy import stats

    nodes = list(measured.predicted)
    known = np.log10([found.published for found in measured.predicted.values()])
    outside = []
    for place, node in enumerate(nodes):
        others = np.delete(known, place)
        reach = stats.t.ppf(0.975, len(others) - 1) * others.std(ddof=1) * math.sqrt(1 + 1 / len(others))
        outside += [node] if abs(known[place] - others.mean()) > reach else []
    return outside


def _why(row: Compared, rows: Sequence[Compared]) -> str:
    if row.quantity == "noise":
        return (
            "less than a last bit, so the error arose after the last matrix products"
            if row.node == "node3"
            else "scatter between nodes"
        )
    if row.published is None or row.low is None or not row.quantity.startswith("severity"):
        return "not known"
    site, _, layer = row.place.partition(", ")
    own, every = _scatter(rows, (row.node, site)), _scatter(rows, None)
    side = "milder" if row.published < row.low else "more severe"
    return (
        f"{'this layer' if layer else 'its most severe layer'} was {side} than the tail of the node allows; "
        f"the layers of this submodule scatter by a factor of {own:.1f}, and those of all nodes by a factor of "
        f"{every:.1f}"
    )


def _scatter(rows: Sequence[Compared], place: tuple[str, str] | None) -> float:
    """Returns the factor by which published severities scatter among the layers of a submodule, or among all layers if
    `place` is None."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.quantity == "severity by layer" and row.published:
            groups.setdefault((row.node, row.place.partition(", ")[0]), []).append(math.log(row.published))
    chosen = [group for key, group in groups.items() if place in (None, key) and len(group) > 1]
    squares = sum(sum((value - sum(group) / len(group)) ** 2 for value in group) for group in chosen)
    return math.exp(math.sqrt(squares / max(sum(len(group) - 1 for group in chosen), 1)))


def _chart(measured: NodesMeasured) -> Chart:
    x = [float(NODES.index(node) + 1) for node in measured.predicted]
    found = list(measured.predicted.values())
    lines = (
        Line("published", x, [one.published if one.published > 1e-6 else math.nan for one in found], points=True),
        Line("predicted from the other nodes", x, [one.median for one in found], points=True),
        Line("95 %, lower end", x, [one.low for one in found], dashed=True),
        Line("95 %, upper end", x, [one.high for one in found], dashed=True),
    )
    caption = "Node 3 (1.34e-15) is far below the range of the figure."
    return Chart("Worst noise-to-signal ratio of the gradients", caption, "node", "ratio", lines, log="y")


def _checks(measured: NodesMeasured) -> Iterator[Check]:
    for name in ("frequency", "severity", "frequency by layer", "severity by layer"):
        said = _said(measured.rows, name)
        if said:
            yield Check(
                f"{name}: at most {MOST_OUTSIDE:.0%} of the published values are outside the 95 % intervals",
                said.count(False) <= MOST_OUTSIDE * len(said),
                f"{said.count(False)} of {len(said)} outside",
            )
    seen = {node: share for node, share in measured.flagged.items() if share is not None}
    if others := {node: share for node, share in seen.items() if node != OFTEN}:
        yield Check(
            f"figure 10: equation 6 flags less than {SELDOM:.0%} of the products on every node but {OFTEN} (once)",
            max(others.values()) < SELDOM,
            f"at most {max(others.values()):.2g}, on {max(others, key=others.__getitem__)}",
        )
        if OFTEN in seen:
            yield Check(
                f"figure 10: equation 6 flags {OFTEN} more often than any other node (once)",
                seen[OFTEN] > max(others.values()),
                f"{seen[OFTEN]:.2g} of the products",
            )
    outside = [node for node, found in measured.predicted.items() if not found.inside]
    reaches = [math.sqrt(found.high / found.low) for found in measured.predicted.values()]
    reach = float(np.median(reaches)) if reaches else math.nan
    yield Check(
        "noise: at most two of fifteen nodes are outside the interval predicted from the other nodes",
        len(outside) <= 2,
        f"outside: {', '.join(outside) or 'none'} (median interval: a factor of {reach:.3g} up and down); of the "
        f"interval by the mean and the scatter of the other nodes alone: {', '.join(_plain(measured)) or 'none'}",
    )
    within = {
        name: None if _unlimited(now) else now.low <= used.value <= now.high
        for name, used in measured.used.items()
        if (now := measured.estimates.get(name)) is not None
    }
    named = {answer: ", ".join(name for name, each in within.items() if each is answer) for answer in (False, None)}
    yield Check(
        "the parameters of the simulated nodes are within the fitted ranges",
        every(within.values()),
        f"outside: {named[False] or 'none'}; not determined: {named[None] or 'none'}",
    )
    drifts = sorted(float(trained.distances[-1]) for trained in measured.trainings if trained.distances.any())
    if len(drifts) > 2:
        middle = drifts[len(drifts) // 2]
        near = [drift for drift in drifts if middle / 2 < drift < middle * 2]
        yield Check(
            "the parameters drift at similar rates on most nodes, whatever the mismatch frequencies of the nodes "
            "(section 6.2)",
            len(near) >= 0.75 * len(drifts),
            f"{len(near)} of {len(drifts)} within a factor of two of the median",
        )
    inside = [
        measured.predicted[trained.node].low <= trained.noise.max() <= measured.predicted[trained.node].high
        for trained in measured.trainings
    ]
    if inside:
        yield Check(
            "the noise of small models on the simulated nodes is within the interval that the other nodes predict for "
            "the 8B model",
            sum(inside) >= 0.75 * len(inside),
            f"{sum(inside)} of {len(inside)}",
        )
    rounding = measured.estimates["rounding"].value
    factors = [found.rounding / rounding for found in measured.responses]
    yield Check(
        f"small models respond to wrong last bits as the fitted 8B model does, within a factor of {NEAR:g}",
        all(1 / NEAR < factor < NEAR for factor in factors),
        ", ".join(f"{factor:.2g} times" for factor in factors),
    )
    for name, claim in (("time", "behavior over time is"), ("drift", "drift grows"), ("loss", "loss curves coincide")):
        said = _said(measured.rows, name)
        if said:
            unknown = sum(row.quantity == name for row in measured.rows) - len(said)
            yield Check(f"{claim} as in the study", all(said), f"{sum(said)} of {len(said)}; {unknown} undetermined")


def _said(rows: Sequence[Compared], quantity: str) -> list[bool]:
    return [row.agrees for row in rows if row.quantity == quantity and row.agrees is not None]


def _interval(row: Compared) -> str:
    return "-" if row.low is None or row.high is None else f"{row.low:.3g} to {row.high:.3g}"
