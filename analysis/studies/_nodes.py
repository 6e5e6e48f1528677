"""Findings of the study of the simulated nodes: each published value next to the simulated one."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from sdc.nodes import NODES
from sdc.train.studies import Compared, NodesMeasured

from ..report import Chart, Check, Finding, Line, Table

STUDY = "nodes study"
MOST_OUTSIDE = 0.1  # maximum share of values outside of 95 % intervals; a larger share refutes the model
NEAR = 5.0  # maximum factor between the measured and the fitted response to changed last bits
TABLES = ("frequency", "severity")
YES = {True: "yes", False: "NO", None: "undetermined"}


def findings(measured: NodesMeasured) -> Iterator[Finding]:
    """Returns tables, figures and claims."""
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
        "Published values within the 95 % intervals of the simulated nodes",
        ("node", *names),
        tuple(rows),
        "Frequency and severity: tables 1, 2 and 6 to 9. Time: figures 3, 4, 6 and section 9. Noise: figure 5, "
        "predicted from the other nodes. Drift and loss: the description of figure 6. Dashes: not in the study. Rates "
        "by layer are inputs of the simulation, so frequencies test its implementation; for a node with a few bursts, "
        "each interval includes a run without bursts. Severities by layer, noise, drift and loss test the model.",
    )


def _tables(measured: NodesMeasured) -> Iterator[Table]:
    rows: list[tuple[Any, ...]] = [
        (f"{row.node}, {row.place}", row.quantity, row.published, row.simulated, _interval(row), YES[row.agrees])
        for row in measured.rows
        if row.quantity in TABLES
    ]
    yield Table(
        "Tables 1 and 2: runs of 4,500 steps at the study's size",
        ("node and submodule", "quantity", "published", "simulated", "95 % interval", "inside"),
        tuple(rows),
        "Severities are the maximum of a run and scatter between runs: the study reports a single run.",
    )
    small = {trained.node: float(trained.noise.max()) for trained in measured.trainings}
    rows = [
        (node, found.published, found.median, f"{found.low:.3g} to {found.high:.3g}",
         math.sqrt(found.high / found.low), YES[found.inside], small.get(node))
        for node, found in measured.predicted.items()
    ]  # fmt: skip
    yield Table(
        "Figure 5: worst noise-to-signal ratio, each node predicted from the other fourteen",
        ("node", "published", "predicted", "95 % interval", "times and divided by", "inside", "small model"),
        tuple(rows),
        "Fitted to the other nodes: the share of elements in severe steps, and the response of gradients to errors. "
        "The last "
        f"column is the largest ratio of a small model trained on the simulated node. {_rival(measured)} "
        "Node 3 is outside for every fit: 1.34e-15 is less than the average effect of the last bit of one element of a "
        "gradient of 8 billion, while any error before the last products changes the rounding of all that "
        "follows.",
    )
    rows = [
        (row.node, row.place or row.quantity, row.simulated, row.note, YES[row.agrees])
        for row in measured.rows
        if row.quantity in ("time", "drift", "loss")
    ]
    yield Table(
        "Qualitative claims of the study",
        ("node", "what", "simulated", "published", "agrees"),
        tuple(rows),
        "Drift: distance of the parameters from the healthy ones after the last step of a small model; it must grow "
        "from a quarter of the steps to half of them and to the last. Loss: largest relative difference; below 1 % two "
        "curves coincide.",
    )
    yield Table(
        "Bursts: correlation of the submodules' frequencies from step to step",
        ("node", "simulated"),
        tuple(measured.together.items()),
        "Nodes hit in few steps are hit in all submodules at once; for nodes hit in every step the study shows only "
        "initial bursts.",
    )
    rows = [
        (f"{row.node}, {row.place}" if row.place else row.node, row.quantity, row.published, row.simulated,
         _interval(row), _why(row, measured.rows))
        for row in measured.rows
        if row.agrees is False
    ]  # fmt: skip
    yield Table(
        "Published values outside of the intervals, and the reasons",
        ("node and place", "quantity", "published", "simulated", "95 % interval", "why"),
        tuple(rows),
        "About 5 % are expected.",
    )
    rows = [
        (name, measured.used[name].value if name in measured.used else None, found.value,
         f"{found.low:.3g} to {found.high:.3g}")
        for name, found in measured.estimates.items()
    ]  # fmt: skip
    yield Table(
        "Parameters: values of the simulated nodes, and values fitted now",
        ("parameter", "used", "fitted", "95 % interval"),
        tuple(rows),
        "tail: inverse index of the severities' tail; few: share of elements in severe steps; bursts: steps of "
        "4,500 in which a rare node is hit; response, rounding, scatter: of the noise model, which simulated nodes do "
        "not need.",
    )
    rounding, sites = measured.estimates["rounding"], sorted(measured.responses[0].linear)
    rows = [(found.model, found.rounding, *(found.linear[site] for site in sites)) for found in measured.responses]
    fitted = f"8B model, fitted to figure 5: {rounding.low:.3g} to {rounding.high:.3g}"
    rows.append((fitted, rounding.value, *[None] * len(sites)))
    yield Table(
        "Scale: response of the gradients of small models in bfloat16 to errors",
        ("model", "response to last bits", *(f"response, {site}" for site in sites)),
        tuple(rows),
        "Response to last bits: noise-to-signal ratio with 64 wrong last bits in every microstep. Response: "
        "squared ratio over the mean square of relative errors. Neither contains the number of elements, so values of "
        "a small model apply to a large one.",
    )


def _rival(measured: NodesMeasured) -> str:
    """Compares the predictions with the mean of the other nodes."""
    known = {node: math.log10(found.published) for node, found in measured.predicted.items() if node != "node3"}
    if len(known) < 3:
        return ""
    total = sum(known.values())
    own = [known[node] - math.log10(measured.predicted[node].median) for node in known]
    mean = [value - (total - value) / (len(known) - 1) for value in known.values()]
    errors = (math.sqrt(sum(error**2 for error in each) / len(each)) for each in (own, mean))
    model, rival = (f"{10**error:.1f}" for error in errors)
    return f"Typical error: a factor of {model}; using the mean of the other nodes, {rival} (both without node 3)."


def _why(row: Compared, rows: Sequence[Compared]) -> str:
    if row.quantity == "noise":
        return "less than a last bit: an error after the last products" if row.node == "node3" else "scatter of nodes"
    if row.published is None or row.low is None or not row.quantity.startswith("severity"):
        return "not known"
    site, _, layer = row.place.partition(", ")
    own, every = _scatter(rows, (row.node, site)), _scatter(rows, None)
    side = "milder" if row.published < row.low else "more severe"
    return (
        f"{'this layer' if layer else 'its most severe layer'} was {side} than a common tail for all nodes allows: its "
        f"layers scatter by a factor of {own:.1f}, those of all nodes by {every:.1f}"
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
        Line("predicted from the others", x, [one.median for one in found], points=True),
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
                f"{name}: at most {MOST_OUTSIDE:.0%} of the published values are outside of the 95 % intervals",
                said.count(False) <= MOST_OUTSIDE * len(said),
                f"{said.count(False)} of {len(said)} outside",
            )
    outside = [node for node, found in measured.predicted.items() if not found.inside]
    yield Check(
        "noise: at most two of fifteen nodes are outside of the prediction from the others",
        len(outside) <= 2,
        f"outside: {', '.join(outside) or 'none'}",
    )
    wrong = [
        name for name, used in measured.used.items()
        if (now := measured.estimates.get(name)) is not None and not now.low <= used.value <= now.high
    ]  # fmt: skip
    yield Check(
        "the parameters of the simulated nodes are within the fitted ranges",
        not wrong,
        f"outside: {', '.join(wrong) or 'none'}",
    )
    drifts = sorted(float(trained.distances[-1]) for trained in measured.trainings if trained.distances.any())
    if len(drifts) > 2:
        middle = drifts[len(drifts) // 2]
        near = [drift for drift in drifts if middle / 2 < drift < middle * 2]
        yield Check(
            "the parameters drift at similar rates on most nodes, whatever their frequencies (section 6.2)",
            len(near) >= 0.75 * len(drifts),
            f"{len(near)} of {len(drifts)} within a factor of two of the median",
        )
    inside = [
        measured.predicted[trained.node].low <= trained.noise.max() <= measured.predicted[trained.node].high
        for trained in measured.trainings
    ]
    if inside:
        yield Check(
            "noise of small models on the simulated nodes: within the other nodes' prediction for the 8B model",
            sum(inside) >= 0.75 * len(inside),
            f"{sum(inside)} of {len(inside)}",
        )
    rounding = measured.estimates["rounding"].value
    factors = [found.rounding / rounding for found in measured.responses]
    yield Check(
        f"small models respond to last bits like the fitted 8B model, within a factor of {NEAR:g}",
        all(1 / NEAR < factor < NEAR for factor in factors),
        ", ".join(f"{factor:.2g} times" for factor in factors),
    )
    for name, claim in (("time", "behaviour in time"), ("drift", "drift grows"), ("loss", "loss curves coincide")):
        said = _said(measured.rows, name)
        if said:
            yield Check(f"{claim}, as in the study", all(said), f"{sum(said)} of {len(said)}")


def _said(rows: Sequence[Compared], quantity: str) -> list[bool]:
    return [row.agrees for row in rows if row.quantity == quantity and row.agrees is not None]


def _interval(row: Compared) -> str:
    return "-" if row.low is None or row.high is None else f"{row.low:.3g} to {row.high:.3g}"
