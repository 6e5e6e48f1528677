"""The figures of a report as SVG text: no global state, no raster, the same bytes for the same record.

Colours are Okabe and Ito's, and every line has a marker or a dash pattern of its own, so no figure relies on colour.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .canvas import (
    COLOURS,
    DASHES,
    HEAT,
    INK,
    MARKERS,
    PAPER,
    ZERO,
    Drawing,
    LeftOut,
    Picture,
    canvas,
    powers,
    short,
    whole_numbers,
)
from .series import Line, PerTwin, Row, mapping, number, per_site, per_twin, step_numbers, thin
from .tables import show


def frequency_over_time(summary: Row, steps: Sequence[Row], *, mark: str) -> Picture | LeftOut:
    """Mismatch frequency (2) of every site at each step, logarithmic where above zero.

    Args:
        summary: contents of `summary.json`.
        steps: lines of `steps.jsonl`.
        mark: text drawn into the figure, such as that faults are simulated; may be empty.
    """
    title = "Mismatch frequency over time"
    sites = [*mapping(summary.get("submodules")), *mapping(summary.get("other_sites"))]
    measured = {site: values for site in sites if np.isfinite(values := per_site(steps, site, "frequency")).any()}
    if not measured:
        return LeftOut(title, "no submodule was compared (that needs --sync compute)")
    if not any((values > 0).any() for values in measured.values()):
        return LeftOut(title, "no submodule mismatched at any step")
    with canvas("frequency", mark) as drawing:
        axes = drawing.figure.subplots()
        for place, (site, values) in enumerate(measured.items()):
            x, y = thin(step_numbers(steps), np.where(np.isfinite(values) & (values > 0), values, np.nan))
            colour, few = COLOURS[place % 6], np.isfinite(y).sum() < 200  # more markers would cover each other
            axes.plot(
                x, y, label=short(site), color=colour, linewidth=1, marker=MARKERS[place % 6] if few else "",
                markersize=3.5,
            )  # fmt: skip
            known = number(mapping(mapping(summary.get("published")).get(site)).get("frequency"))
            if known is not None and np.isfinite(known) and known > 0:
                axes.axhline(known, color=colour, linewidth=1, linestyle=DASHES[2])
        _finish(drawing, axes, steps, "mismatch frequency", logarithmic=True)
    dotted = " Dotted: published mean of the simulated node." if mapping(summary.get("published")) else ""
    return drawing.picture(title, f"Equation (2) per step. A step without a mismatch has no point.{dotted}")


def layers_heat_map(summary: Row, *, mark: str) -> Picture | LeftOut:
    """Frequency and severity of every layer and site, the one above the other."""
    title = "Mismatches by layer"
    layers = mapping(summary.get("layers"))
    sites = [site for site, row in layers.items() if any(number(value) is not None for value in row["frequency"])]
    if not sites:
        return LeftOut(title, "no submodule was compared layer by layer (that needs --sync compute)")
    if not any(sum(layers[site]["mismatched"]) for site in sites):
        return LeftOut(title, "no layer mismatched")
    with canvas("layers", mark, height=1.5 + 0.5 * len(sites)) as drawing:
        panels = drawing.figure.subplots(2, 1)
        for axes, quantity in zip(panels, ("frequency", "severity"), strict=True):
            lists = [layers[site][quantity] for site in sites]
            table = np.asarray([[np.nan if (v := number(x)) is None else v for x in values] for values in lists])
            _heat_map(drawing.figure, axes, sites, table, quantity)
    return drawing.picture(
        title,
        "Above: frequency (1) over all steps. Below: severity (3), largest of all steps. Layer 0 is the first. "
        "Grey: measured, zero. Empty: nothing to measure.",
    )


def gradients(steps: Sequence[Row], *, mark: str) -> Picture | LeftOut:
    """Norm of the gradient beside the norm of its difference from the reference's."""
    title = "Gradient difference beside gradient norm"
    norm, difference = per_twin(steps, "gradient_norm"), per_twin(steps, "gradient_difference")
    if norm is None:
        return LeftOut(title, "the record holds no gradient norms")
    lines = {"norm, twin 0 (reference)": norm[0]} if difference is not None else {"norm": norm[0]}
    if difference is not None:
        lines |= {f"difference, twin {twin}": difference[twin] for twin in range(1, len(difference))}
    if not _drawable(lines, positive=True):
        return LeftOut(title, "no gradient norm is finite and above zero")
    with canvas("gradients", mark) as drawing:
        draw_curves(drawing, steps, lines, "L2 norm", positive=True)
    caption = "L2 norms of the gradient of each optimizer step."
    if difference is None:
        return drawing.picture("Gradient norm", caption + _not_finite({"gradient norm": norm}))
    zero = "" if (difference[1:] > 0).any() else " No difference above zero was measured."
    finite = _not_finite({"gradient norm": norm, "gradient difference": difference})
    return drawing.picture(title, f"{caption} A difference of zero has no point.{zero}{finite}")


def parameter_difference(steps: Sequence[Row], *, mark: str) -> Picture | LeftOut:
    """Norm of the difference of the parameters from the reference's."""
    title = "Parameter difference"
    difference = per_twin(steps, "parameter_difference")
    if difference is None or len(difference) < 2:
        return LeftOut(title, "the record holds no parameter differences")
    if not (difference[1:] != 0).any():
        return LeftOut(title, "the parameters of the twins never differed")
    if not (np.isfinite(difference[1:]) & (difference[1:] > 0)).any():
        return LeftOut(title, "no finite difference above zero was measured")
    norm = per_twin(steps, "parameter_norm")
    lines = {"norm, twin 0 (reference)": norm[0]} if norm is not None else {}
    lines |= {f"difference, twin {twin}": difference[twin] for twin in range(1, len(difference))}
    with canvas("parameters", mark) as drawing:
        draw_curves(drawing, steps, lines, "L2 norm", positive=True)
    caption = "L2 norm over all parameters after each step, before any synchronization of them."
    return drawing.picture(title, caption + _not_finite({"parameter difference": difference}))


def losses(steps: Sequence[Row], *, mark: str) -> Picture | LeftOut:
    """Training loss of every twin."""
    loss = per_twin(steps, "loss")
    if loss is None:
        return LeftOut("Loss", "the record holds no losses")
    names = [f"twin {twin}{'' if twin else ' (reference)'}" for twin in range(len(loss))]
    lines = dict(zip(names, loss, strict=True)) if len(loss) > 1 else {"loss": loss[0]}
    if not _drawable(lines, positive=False):
        return LeftOut("Loss", "no loss on record is finite")
    with canvas("losses", mark) as drawing:
        draw_curves(drawing, steps, lines, "loss", positive=False)
    caption = "Training loss of each step." + (" Lines that cover each other are equal." if len(loss) > 1 else "")
    return drawing.picture("Losses of the twins" if len(loss) > 1 else "Loss", caption + _not_finite({"loss": loss}))


def _shown(values: Line, positive: bool) -> Bool[np.ndarray, " steps"]:
    return np.isfinite(values) & ((values > 0) | (not positive))


def _drawable(lines: dict[str, Line], *, positive: bool) -> bool:
    return any(_shown(values, positive).any() for values in lines.values())


def draw_curves(drawing: Drawing, steps: Sequence[Row], lines: dict[str, Line], label: str, *, positive: bool) -> None:
    """Draws lines that differ in colour and dash; on a logarithmic scale where they are `positive`."""
    axes = drawing.figure.subplots()
    for place, (name, values) in enumerate(lines.items()):
        shown = _shown(values, positive)
        if not shown.any():
            continue
        few = shown.sum() < 40  # then a marker shows where the points are, even beside gaps
        axes.plot(
            *thin(step_numbers(steps), np.where(shown, values, np.nan)),
            label=name,
            color=COLOURS[place % 6],
            linestyle=DASHES[place % 4],
            linewidth=1.4,
            marker=MARKERS[place % 6] if few else "",
            markersize=3,
        )
    _finish(drawing, axes, steps, label, logarithmic=positive)


def _finish(drawing: Drawing, axes: Axes, steps: Sequence[Row], label: str, *, logarithmic: bool) -> None:
    axes.set(xlabel="step", ylabel=label)
    first, last = steps[0]["step"], steps[-1]["step"]  # those without a point too
    axes.set_xlim(first - max(0.5, 0.02 * (last - first)), last + max(0.5, 0.02 * (last - first)))
    whole_numbers(axes.xaxis)
    if logarithmic:
        powers(axes, "y")
    if len(axes.get_legend_handles_labels()[1]) > 1:
        drawing.legend(axes)


def _heat_map(figure: Figure, axes: Axes, sites: Sequence[str], table: PerTwin, quantity: str) -> None:
    cells = np.where(np.isinf(table), np.nanmax(table[np.isfinite(table)], initial=1), table)
    positive = cells[np.isfinite(cells) & (cells > 0)]
    axes.set(title=quantity, xlabel="layer")
    axes.grid(visible=False)
    axes.pcolormesh(np.where(cells == 0, 0.5, np.nan), cmap=ListedColormap([ZERO]), edgecolors=PAPER, linewidth=0.6)
    if positive.size:
        low, high = positive.min(), positive.max()
        low = low if low < high else low / 10
        colours = ListedColormap(HEAT)  # few of them keep the colour bar a drawing; 50 or more would be an image
        mesh = axes.pcolormesh(
            np.where(cells > 0, cells, np.nan), cmap=colours, norm=LogNorm(low, high), edgecolors=PAPER, linewidth=0.6
        )
        bar = figure.colorbar(mesh, ax=axes, format=FuncFormatter(lambda value, _: f"{value:.3g}"), pad=0.02)
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
                dark = value > np.sqrt(low * high)
                colour = PAPER if dark else INK
                axes.text(column + 0.5, row + 0.5, show(float(value)), ha="center", va="center", size=9, color=colour)


def _not_finite(quantities: dict[str, PerTwin]) -> str:
    """Says what cannot be drawn, be it NaN, infinite or absent."""
    parts = [
        f"{name} of twin {twin} at {int((~np.isfinite(values)).sum()):,} steps"
        for name, table in quantities.items()
        for twin, values in enumerate(table)
        if not np.isfinite(values).all()
    ]
    return f" Not finite or not recorded, and so not drawn: {', '.join(parts)}." if parts else ""
