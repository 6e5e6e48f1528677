"""The canvas of every figure: SVG with selectable text, one look, and a mark where faults are simulated.

A figure takes its colours from the page that it stands in, so that one drawing is legible on light and on dark paper;
by itself it is one for light paper.
"""

import dataclasses
import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib.style
from markupsafe import escape
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[tuple[float, tuple[float, ...]], ...] = ((0, ()), (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))
INK, GRID, PAPER, ZERO, MARK, FULL = "#18212b", "#e3e6ea", "#fefefe", "#eceef0", "#8a3b00", "#6b1a6b"
HEAT = (
    "#c9def2", "#b6d3ed", "#a3c7e8", "#90bbe2", "#7eb0db", "#2f6fb0", "#24609f", "#1b4f8a", "#123e72", "#0a2d59"
)  # fmt: skip
"""Colours of a heat map from little to much; text on the upper half is of the colour of paper, else of ink."""
VARIABLES = {
    **{colour: f"h{place}" for place, colour in enumerate(HEAT)},
    **{colour: f"c{place}" for place, colour in enumerate(COLOURS, start=1)},
    INK: "ink", GRID: "grid", PAPER: "paper", ZERO: "zero", MARK: "mark", FULL: "full",
}  # fmt: skip
"""The page's variable for each colour; colours that are not here are the same on any paper."""
STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched, copied and read aloud
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
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
"""Inches; at this width the text is legible on a phone."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure: title, caption, and an `<svg>` element without prologue and with ids of its own."""

    title: str
    caption: str
    svg: str


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A figure that the record cannot give, and why."""

    title: str
    reason: str


class Drawing:
    """A figure under way, and its SVG once it is done."""

    def __init__(self, name: str, height: float, mark: str) -> None:
        self.name, self.mark = name, mark
        self.figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine())
        self.svg = ""

    def picture(self, title: str, caption: str) -> Picture:
        """The figure with its title and caption, which are also its name for those who cannot see it."""
        names = f"{self.name}-title", f"{self.name}-desc"
        texts = f'<title id="{names[0]}">{escape(title)}</title><desc id="{names[1]}">{escape(caption)}</desc>'
        opened = self.svg.replace("<svg ", f'<svg role="img" aria-labelledby="{" ".join(names)}" ', 1)
        return Picture(title, caption, re.sub(r"^(<svg [^>]*>)", lambda tag: tag[1] + texts, opened, count=1))

    def legend(self, axes: Axes) -> None:
        """Names the lines above the drawing, which grows by as much as they need."""
        handles, labels = axes.get_legend_handles_labels()
        columns = max(1, min(len(labels), int(70 / (max(map(len, labels), default=0) + 6))))
        self.figure.set_figheight(self.figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
        self.figure.legend(
            handles, labels, loc="outside upper left", ncols=columns, columnspacing=1.4, handlelength=1.8
        )

    def render(self) -> None:
        """Makes the SVG, with the colours of the page."""
        if self.mark:  # below the axes
            height = self.figure.get_figheight()
            self.figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0.19 / height, 1, 1 - 0.19 / height)))
            self.figure.text(0.995, 0.01, self.mark, ha="right", va="bottom", fontsize=9, color=MARK)
        file = io.StringIO()
        FigureCanvasSVG(self.figure).print_svg(file)
        svg = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue()[file.getvalue().index("<svg") :], flags=re.DOTALL)
        # The metadata held the date. All figures stand in one page, where an id must be unique.
        self.svg = rename(_coloured(svg), self.name).strip()


def rename(svg: str, name: str) -> str:
    """An SVG whose ids, and what refers to them, begin with a name."""
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return re.sub(r'aria-labelledby="(\S+) (\S+)"', rf'aria-labelledby="{name}-\1 {name}-\2"', svg)


def _coloured(svg: str) -> str:
    def paint(found: re.Match[str]) -> str:
        variable = VARIABLES.get(found[2])
        return f"{found[1]}var(--{variable}, {found[2]})" if variable else found[0]

    return re.sub(r"((?:fill|stroke): )(#[0-9a-f]{6})", paint, svg)


@contextmanager
def canvas(name: str, mark: str, height: float = 2.9) -> Iterator[Drawing]:
    """Figures are made and rendered under matplotlib's defaults, whatever the user's settings are."""
    with matplotlib.style.context(["default", {**STYLE, "svg.hashsalt": name}]):
        drawing = Drawing(name, height, mark)
        yield drawing
        drawing.render()


def whole_numbers(axis: Axis) -> None:
    """Ticks of what has no fractions, such as steps."""
    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def powers(axes: Axes, which: str) -> None:
    """Makes an axis (`x` or `y`) logarithmic, with labels in plain text."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
    axis.set_minor_formatter(NullFormatter())
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    if high < 100 * low:  # too few powers of ten to label
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def power(value: float) -> str:
    """A number on a logarithmic axis: `0.01`, `10⁻⁷`, `2e-07`."""
    text = f"{value:.0e}"
    if 1e-3 <= value < 1e5 or not text.startswith("1e") or not math.isclose(value, float(text)):
        return f"{value:g}"
    return "10" + str(int(text.partition("e")[2])).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def short(name: str, limit: int = 24) -> str:
    """A name that leaves room for the drawing."""
    return name if len(name) <= limit else f"{name[: limit - 1]}…"
