"""Draws every figure as SVG with selectable text, in one style, and with a mark if faults are simulated.

A figure takes its colors from the page, so the same drawing is legible in light mode and in dark mode. A figure that is
shown outside a page has the colors of light mode.
"""

import io
import math
import re
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from .sections import Chart, Figure, LeftOut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Points = Float[np.ndarray, " points"]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[tuple[float, tuple[float, ...]], ...] = ((0, ()), (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))
INK, GRID, PAPER, ZERO, MARK, FULL = "#18212b", "#e3e6ea", "#fefefe", "#eceef0", "#8a3b00", "#6b1a6b"
HEAT = (
    "#c9def2", "#b6d3ed", "#a3c7e8", "#90bbe2", "#7eb0db", "#2f6fb0", "#24609f", "#1b4f8a", "#123e72", "#0a2d59"
)  # fmt: skip
"""Colors of a heat map, from low to high values. Text has the paper color on the upper half of the scale, and the ink
color on the lower half."""
VARIABLES = {
    **{colour: f"h{place}" for place, colour in enumerate(HEAT)},
    **{colour: f"c{place}" for place, colour in enumerate(COLOURS, start=1)},
    INK: "ink", GRID: "grid", PAPER: "paper", ZERO: "zero", MARK: "mark", FULL: "full",
}  # fmt: skip
"""The page's CSS variable for each color. Colors that are not listed here are the same in light mode and in dark
mode."""
STYLE = {
    "svg.fonttype": "none",  # keep text as text, which can be searched, copied and read aloud
    "text.parse_math": False,  # do not interpret a dollar sign in a name
    "font.size": 10.0,
    "axes.titlesize": 10.0,
    "legend.fontsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "grid.color": GRID,
    "hatch.linewidth": 0.6,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
WIDTH = 5.4
"""Width of a figure in inches, at which its text is legible on a phone."""


class Drawing:
    """A figure under construction."""

    def __init__(self, height: float, mark: str) -> None:
        from matplotlib.figure import Figure as Canvas
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        self.mark = mark
        self.figure = Canvas(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine())

    @property
    def axes(self) -> "Axes":
        """The only axes of the figure."""
        return self.figure.axes[0] if self.figure.axes else self.figure.subplots()

    def legend(self) -> None:
        """Adds a legend above the drawing and increases the figure's height by the height of the legend."""
        handles, labels = self.axes.get_legend_handles_labels()
        columns = max(1, min(len(labels), int(70 / (max(map(len, labels), default=0) + 6))))
        self.figure.set_figheight(self.figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
        self.figure.legend(
            handles, labels, loc="outside upper left", ncols=columns, columnspacing=1.4, handlelength=1.8
        )

    def to_svg(self) -> str:
        """Returns the figure as SVG, without matplotlib's preamble and metadata."""
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        if self.mark:  # below the axes
            height = self.figure.get_figheight()
            self.figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0.19 / height, 1, 1 - 0.19 / height)))
            self.figure.text(0.995, 0.01, self.mark, ha="right", va="bottom", fontsize=9, color=MARK)
        file = io.StringIO()
        FigureCanvasSVG(self.figure).print_svg(file)
        text = file.getvalue()
        return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def svg(figure: Figure, name: str) -> str:
    """Renders a figure as an `<svg>` element that has the colors of the page and ids that begin with `name`.

    The figure is drawn with matplotlib's defaults, regardless of the user's settings.
    """
    import matplotlib.style
    from markupsafe import escape

    with matplotlib.style.context(["default", {**STYLE, "svg.hashsalt": name}]):
        drawing = Drawing(figure.height, figure.mark)
        figure.draw(drawing)
        text = drawing.to_svg()

    def paint(found: re.Match[str]) -> str:
        variable = VARIABLES.get(found[2])
        return f"{found[1]}var(--{variable}, {found[2]})" if variable else found[0]

    text = re.sub(r'<rect ([^>]*)fill="(#[0-9a-f]{6})"', r'<rect \1style="fill: \2"', text)  # behind a hatch
    text = re.sub(r"((?:fill|stroke): )(#[0-9a-f]{6})", paint, text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text).strip()
    title, described = f"{name}-title", f"{name}-desc"  # its accessible name
    texts = f'<title id="{title}">{escape(figure.title)}</title><desc id="{described}">{escape(figure.caption)}</desc>'
    opened = text.replace("<svg ", f'<svg role="img" aria-labelledby="{title} {described}" ', 1)
    return re.sub(r"^(<svg [^>]*>)", lambda tag: tag[1] + texts, opened, count=1)


def line_figure(chart: Chart) -> Figure | LeftOut:
    """Draws a chart as a figure."""
    xs = [np.asarray(line.x, np.float64) for line in chart.lines]
    ys = [np.asarray(line.y, np.float64) for line in chart.lines]
    drawable = [np.isfinite(y) & ((y > 0) | ("y" not in chart.log)) for y in ys]
    if not any(shown.any() for shown in drawable):
        return LeftOut(chart.title, "nothing finite was measured")

    left = [line.label for line, shown in zip(chart.lines, drawable, strict=True) if line.label and not shown.any()]
    lacking = "above zero" if "y" in chart.log else "finite"
    caption = f"{chart.caption} Not drawn, because nothing {lacking} was measured: {', '.join(left)}." * bool(left)

    def draw(drawing: Drawing) -> None:
        axes = drawing.axes
        for place, (line, x, y, shown) in enumerate(zip(chart.lines, xs, ys, drawable, strict=True)):
            if not shown.any():
                continue
            few = shown.sum() <= 40 and not line.dashed  # a marker shows each point, even between gaps
            colour = COLOURS[(place if line.colour is None else line.colour) % 6]
            if len(line.error):
                reach = np.asarray(line.error, np.float64)[shown]
                axes.errorbar(x[shown], y[shown], reach, fmt="none", ecolor=colour, elinewidth=0.8)
            dash = DASHES[2] if line.dashed else (DASHES[0], DASHES[1], DASHES[3])[place % 3]
            axes.plot(
                *thin(x, np.where(shown, y, np.nan)), label=line.label, color=colour, linewidth=1.2,
                marker=MARKERS[place % 6] if few or line.points else None, markersize=2 if line.points else 3.5,
                linestyle="none" if line.points else dash,
            )  # fmt: skip
        axes.set(xlabel=chart.x, ylabel=chart.y)
        if chart.x == "step":
            every = np.concatenate(xs)
            margin = max(0.5, 0.02 * (every.max() - every.min()))
            axes.set_xlim(every.min() - margin, every.max() + margin)  # let the axis include steps without a point
            whole_numbers(axes.xaxis)
        for which in chart.log:
            powers(axes, which)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            drawing.legend()

    return Figure(chart.title, caption or chart.caption, draw, height=3.0)


def thin(x: Points, y: Points, limit: int = 2000) -> tuple[Points, Points]:
    """Thins a long line, but keeps the minimum and maximum of each group of neighboring points, so that spikes remain
    visible."""
    if len(x) <= limit:
        return x, y
    keep = []
    for block in np.array_split(np.flatnonzero(np.isfinite(y)), limit // 2):
        if len(block):
            keep += sorted({int(block[y[block].argmin()]), int(block[y[block].argmax()])})
    return x[keep], y[keep]


def whole_numbers(axis: "Axis") -> None:
    """Restricts the ticks of an axis to integers, for example if the axis shows steps."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def powers(axes: "Axes", which: str) -> None:
    """Makes an axis (`x` or `y`) logarithmic and labels it in plain text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
    axis.set_minor_formatter(NullFormatter())
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    if high < 100 * low:  # too few powers of ten to label
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def power(value: float) -> str:
    """Formats a number on a logarithmic axis: `0.01`, `10⁻⁷`, `2e-07`."""
    text = f"{value:.0e}"
    if 1e-3 <= value < 1e5 or not text.startswith("1e") or not math.isclose(value, float(text)):
        return f"{value:g}"
    return "10" + str(int(text.partition("e")[2])).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def short(name: str, limit: int = 24) -> str:
    """Shortens a name to leave room for the drawing."""
    return name if len(name) <= limit else f"{name[: limit - 1]}…"
