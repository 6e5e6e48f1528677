"""The figures of a run: differences by place and time, by step and by layer.

Every line has its own marker or dash pattern, so no figure relies on color alone.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from sdc.schema import MismatchRow, ProductRow, RunSummary, StepRow
from sdc.train.studies import pair_drift

from . import report
from .report import COLOURS, MARKERS, Chart, Drawing, Figure, LeftOut, Line, line_figure, short, whole_numbers
from .series import Floats, PerTwin, per_method, per_site, per_twin, real, step_numbers, whole
from .summary import SUBMODULES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHED = ("expected now", "random walk")
"""Names of the lines that show theoretical values; they are dashed to distinguish them from measured values."""
MARKS = 1500
"""Maximum number of columns in the figure "Where and when"; in a longer run, each column covers several steps."""
SIZES = (4.0, 5.5, 7.0)
"""Sizes of the marks, in points."""


def where_and_when(lines: Sequence[StepRow], mismatches: Sequence[MismatchRow], layers: int) -> Figure | LeftOut:
    """Draws a mark for each submodule, layer and step with a mismatch; larger marks mean that more elements differ."""
    title = "Where and when"
    hits = [
        (str(row.site), layer, row.step, found)
        for row in mismatches
        if (found := whole(row.mismatched)) and (layer := whole(row.layer)) is not None
    ]
    if not hits:
        return LeftOut(title, "no mismatch in a layer was recorded")
    others = sorted({site for site, *_ in hits} - set(SUBMODULES))
    names = [*(site for site in SUBMODULES if any(hit[0] == site for hit in hits)), *others]
    layers = max(layers, *(layer + 1 for _, layer, *_ in hits))
    last = max([line.step for line in lines] + [step for *_, step, _ in hits])
    rows = len({(site, layer) for site, layer, *_ in hits})
    column = max(1, -(-(last + 1) * rows // MARKS))
    cells: dict[tuple[str, int, int], tuple[int, int]] = {}
    for site, layer, step, found in hits:  # keep the largest value of each column, so that no spike is lost
        place = site, layer, step // column
        if found > cells.get(place, (0, 0))[0]:
            cells[place] = found, step
    largest = math.log1p(max(found for found, _ in cells.values()))

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes
        for index, site in enumerate(names):
            mark = functools.partial(axes.plot, marker=MARKERS[index % 6], color=COLOURS[index % 6], linestyle="none")
            shift = 0.6 * ((index + 0.5) / len(names) - 0.5)
            for place, size in enumerate(SIZES):  # use only a few sizes, so that the marks share a few shapes
                here = [
                    (step, layer + shift)
                    for (name, layer, _), (found, step) in cells.items()
                    if name == site and min(int(math.log1p(found) / largest * len(SIZES)), len(SIZES) - 1) == place
                ]
                x, y = zip(*here, strict=True) if here else ((), ())
                mark(x, y, markersize=size, markeredgewidth=0)
            mark([], [], markersize=SIZES[-1], label=short(site))  # the legend shows one size for all marks
        margin = max(0.5, 0.02 * last)
        axes.set(xlabel="step", ylabel="layer", ylim=(layers - 0.5, -0.5), xlim=(-margin, last + margin))
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis)
        drawing.legend()

    joined = f" Each column covers {column:,} steps and shows the largest value." if column > 1 else ""
    caption = (
        "Each mark is a step with a mismatch; larger marks mean that more elements differ. Layer 0 is the first "
        f"layer.{joined}"
    )
    return Figure(title, caption, draw, height=2.2 + 0.16 * min(layers, 12))


def frequency_over_time(summary: RunSummary, steps: Sequence[StepRow]) -> Figure | LeftOut:
    """Draws the mismatch frequency (equation 2) of every site at each step, on a logarithmic axis."""
    title = "Mismatch frequency over time"
    measured = {
        site: values for site in summary.sites if np.isfinite(values := per_site(steps, site, "frequency")).any()
    }
    if not measured:
        return LeftOut(title, "no submodule was compared (this requires --sync compute)")
    if not any((values > 0).any() for values in measured.values()):
        return LeftOut(title, "no submodule mismatched at any step")
    x = step_numbers(steps)
    lines = [Line(short(site), x, values) for site, values in measured.items()]
    published = summary.published or {}
    for place, site in enumerate(measured):
        if site in published and (mean := real(published[site].frequency)):
            lines.append(Line("", x, [mean] * len(x), dashed=True, colour=place))
    dotted = " Dotted lines are the published means for the simulated node." if published else ""
    caption = f"Equation (2) per step. Steps without a mismatch have no point.{dotted}"
    return line_figure(Chart(title, caption, "step", "mismatch frequency", tuple(lines), log="y"))


def layers_heat_map(summary: RunSummary) -> Figure | LeftOut:
    """Draws two heat maps, one above the other: the frequency and the severity of every layer and site."""
    title = "Mismatches by layer"
    layers = summary.layers
    sites = [site for site, row in layers.items() if any(value is not None for value in row.frequency)]
    if not sites:
        return LeftOut(title, "no submodule was compared layer by layer (this requires --sync compute)")
    if not any(sum(layers[site].mismatched) for site in sites):
        return LeftOut(title, "no layer mismatched")

    def draw(drawing: Drawing) -> None:
        panels = drawing.figure.subplots(2, 1)
        for axes, quantity in zip(panels, ("frequency", "severity"), strict=True):
            lists = [getattr(layers[site], quantity) for site in sites]
            table = np.asarray([[np.nan if value is None else value for value in values] for values in lists], float)
            _heat_map(drawing, axes, sites, table, quantity)

    caption = (
        "Top: frequency (1) over all steps. Bottom: maximum severity (3) over all steps. Layer 0 is the first layer. "
        "Gray cells were measured as zero; empty cells were not measured."
    )
    return Figure(title, caption, draw, height=1.5 + 0.5 * len(sites))


def gradients(steps: Sequence[StepRow]) -> Figure | LeftOut:
    """Draws the norm of the gradient and the norm of its difference from the reference."""
    title = "Gradient difference beside gradient norm"
    norm, difference = per_twin(steps, "gradient_norm"), per_twin(steps, "gradient_difference")
    if norm is None:
        return LeftOut(title, "the record holds no gradient norms")
    if not (np.isfinite(norm) & (norm > 0)).any():
        return LeftOut(title, "no gradient norm is finite and above zero")
    caption = "L2 norms at each optimizer step."
    if difference is None:
        caption += _not_finite({"gradient norm": norm})
        return over_steps("Gradient norm", caption, "L2 norm", steps, {"norm": norm[0]}, "y")
    zero = "" if (difference[1:] > 0).any() else " No difference above zero was measured."
    finite = _not_finite({"gradient norm": norm, "gradient difference": difference})
    caption += f" Differences of zero have no point.{zero}{finite}"
    return over_steps(title, caption, "L2 norm", steps, _beside(norm, difference), "y")


def parameter_difference(steps: Sequence[StepRow]) -> Figure | LeftOut:
    """Draws the norm of the difference between the parameters and those of the reference."""
    title, difference = "Parameter difference", per_twin(steps, "parameter_difference")
    if difference is None or len(difference) < 2:
        return LeftOut(title, "the record holds no parameter differences")
    if not (difference[1:] != 0).any():
        return LeftOut(title, "the parameters of the twins never differed")
    if not (np.isfinite(difference[1:]) & (difference[1:] > 0)).any():
        return LeftOut(title, "no finite difference above zero was measured")
    caption = "L2 norms over all parameters after each step, before the parameters are synchronized."
    caption += _not_finite({"parameter difference": difference})
    lines = _beside(per_twin(steps, "parameter_norm"), difference)
    return over_steps(title, caption, "L2 norm", steps, lines, "y")


def _beside(norm: PerTwin | None, difference: PerTwin) -> dict[str, Floats]:
    lines = {"norm, twin 0 (reference)": norm[0]} if norm is not None else {}
    return lines | {f"difference, twin {twin}": difference[twin] for twin in range(1, len(difference))}


def losses(steps: Sequence[StepRow]) -> Figure | LeftOut:
    """Draws the training loss of every twin."""
    loss = per_twin(steps, "loss")
    if loss is None:
        return LeftOut("Loss", "the record holds no losses")
    if not np.isfinite(loss).any():
        return LeftOut("Loss", "no recorded loss is finite")
    title, caption, lines = "Loss", "Training loss of each step.", {"loss": loss[0]}
    if len(loss) > 1:
        title, caption = "Losses of the twins", f"{caption} Overlapping lines are equal."
        lines = {f"twin {twin}{'' if twin else ' (reference)'}": values for twin, values in enumerate(loss)}
    return over_steps(title, caption + _not_finite({"loss": loss}), "loss", steps, lines)


def flags_over_time(steps: Sequence[StepRow]) -> Figure | LeftOut:
    """Draws the share of the rows of matrix products that were flagged at each step, by pass (figure 10 of the
    study)."""
    title, checked = "Flagged rows over time", [row.abft or ProductRow() for row in steps]
    if all(row.abft is None for row in steps):
        return LeftOut(title, "no matrix product was checked (this requires --abft)")
    if not any(whole(line.flagged) for line in checked):
        return LeftOut(title, "no row of a matrix product was flagged at any step")
    lines: dict[str, list[float]] = {"fwd": [], "remat": [], "bwd": []}
    for row in checked:
        for way, shares in lines.items():
            found = [site for name, site in row.sites.items() if name.startswith(f"{way}/")]
            flagged, of = (sum(getattr(site, name) or 0 for site in found) for name in ("flagged", "checked"))
            shares.append(flagged / of if of else 0.0)
    caption = "Forward, recomputed and backward matrix products of all ranks. Steps without a flag have no point."
    return over_steps(title, caption, "flagged / checked rows", steps, lines, "y")


def aggregation(steps: Sequence[StepRow]) -> Iterator[Figure | LeftOut]:
    """Yields figures that show the quantities of the aggregation methods at every step."""
    if (divergence := per_method(steps, "divergence")) is not None:
        caption = "Maximum over the data ranks. Not measured before the first synchronization."
        lines = {"measured at the last synchronization": divergence}
        lines["expected now"] = per_method(steps, "expected_divergence") or []
        yield over_steps("Divergence of replicas", caption, "‖mean θ - θ_m‖", steps, lines)
    if (period := per_method(steps, "period")) is not None:
        caption = "The signal-to-noise ratio determines the period."
        yield over_steps("Period of synchronization", caption, "steps", steps, {"H": period})
    if (least := per_method(steps, "completed", min)) is not None:
        lines = {"least": least, "most": per_method(steps, "completed") or []}
        caption = "Numbers of micro-batches that the slowest and the fastest rank completed."
        yield over_steps("Completed micro-batches", caption, "micro-batches", steps, lines)
    if (drift := per_method(steps, "pair_drift")) is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            lines = {"measured": (np.asarray(drift) / np.asarray(per_method(steps, "move") or np.nan)).tolist()}
        rate = float(np.nanmean(per_method(steps, "parameter_loss") or np.nan))
        lines["random walk"] = [pair_drift(rate)] * len(steps) if 0 <= rate < 1 else []
        caption = "The unit is an owner's squared mean update; the theory assumes the mean loss rate."
        yield over_steps("Drift between copies", caption, "drift / move²", steps, lines)
    if (differed := per_method(steps, "differed")) is not None:
        lines = {"found": list(itertools.accumulate(float(each > 0) for each in differed))}
        caption = "Cumulative number of comparisons that found a difference."
        yield over_steps("Differences found by the shadow", caption, "differences", steps, lines)


def over_steps(
    title: str,
    caption: str,
    quantity: str,
    steps: Sequence[StepRow],
    lines: Mapping[str, Sequence[float] | Floats],
    log: Literal["", "y"] = "",
) -> Figure | LeftOut:
    """Draws quantities at every step; omits lines without points."""
    x = step_numbers(steps)
    drawn = tuple(Line(name, x, y, dashed=name in DASHED) for name, y in lines.items() if len(y))
    return line_figure(Chart(title, caption, "step", quantity, drawn, log))


def _heat_map(drawing: Drawing, axes: "Axes", sites: Sequence[str], table: PerTwin, quantity: str) -> None:
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    cells = np.where(np.isinf(table), np.nanmax(table[np.isfinite(table)], initial=1), table)
    positive = cells[np.isfinite(cells) & (cells > 0)]
    axes.set(title=quantity, xlabel="layer")
    axes.grid(visible=False)
    axes.pcolormesh(
        np.where(cells == 0, 0.5, np.nan), cmap=ListedColormap([report.ZERO]), edgecolors=report.PAPER, linewidth=0.6
    )
    if positive.size:
        low, high = positive.min(), positive.max()
        low = low if low < high else low / 10
        colours = ListedColormap(
            report.HEAT
        )  # with few colours the colour bar is a drawing; with 50 or more it would be an image
        mesh = axes.pcolormesh(
            np.where(cells > 0, cells, np.nan),
            cmap=colours,
            norm=LogNorm(low, high),
            edgecolors=report.PAPER,
            linewidth=0.6,
        )
        bar = drawing.figure.colorbar(mesh, ax=axes, format=FuncFormatter(lambda value, _: f"{value:.3g}"), pad=0.02)
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
        bar.ax.yaxis.set_major_locator(LogLocator(numticks=5))
        if high / low < 100:  # too few powers of ten to label
            bar.set_ticks([low, np.sqrt(low * high), high])
    axes.set_xticks([layer + 0.5 for layer in range(0, table.shape[1], 1 + table.shape[1] // 9)])
    axes.set_xticklabels([f"{tick - 0.5:.0f}" for tick in axes.get_xticks()])
    axes.set_yticks(np.arange(len(sites)) + 0.5, [short(site) for site in sites])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    if table.shape[1] <= 4:
        for (row, column), value in np.ndenumerate(table):
            if value > 0:
                colour = report.PAPER if value > np.sqrt(low * high) else report.INK
                axes.text(
                    column + 0.5, row + 0.5, report.show(float(value)), ha="center", va="center", size=9, color=colour
                )


def _not_finite(quantities: dict[str, PerTwin]) -> str:
    """Describes values that cannot be drawn because they are NaN, infinite or missing."""
    parts = [
        f"{name} of twin {twin} at {int((~np.isfinite(values)).sum()):,} steps"
        for name, table in quantities.items()
        for twin, values in enumerate(table)
        if not np.isfinite(values).all()
    ]
    return f" Values that are not finite or not recorded are not drawn: {', '.join(parts)}." if parts else ""
