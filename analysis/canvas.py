"""The canvas of every figure: SVG with selectable text, one look, and a mark where faults are simulated."""

import dataclasses
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib.style
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[tuple[float, tuple[float, ...]], ...] = ((0, ()), (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))
STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched, copied and read aloud
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


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
        self.name = name
        band = 0.17 / height if mark else 0.0  # below the axes, for the mark
        self.figure = Figure(figsize=(7.6, height), layout=ConstrainedLayoutEngine(rect=(0, band, 1, 1 - band)))
        self.figure.text(0.995, 0.01, mark, ha="right", va="bottom", fontsize=7.5, color="#8a3b00")
        self.svg = ""

    def picture(self, title: str, caption: str) -> Picture:
        return Picture(title, caption, self.svg)

    def render(self) -> None:
        file = io.StringIO()
        FigureCanvasSVG(self.figure).print_svg(file)
        svg = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue()[file.getvalue().index("<svg") :], flags=re.DOTALL)
        # The metadata held the date. All figures stand in one page, where an id must be unique.
        svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", svg)
        self.svg = svg.replace("<svg ", '<svg role="img" ', 1).strip()


@contextmanager
def canvas(name: str, mark: str, height: float = 2.9) -> Iterator[Drawing]:
    """Figures are made and rendered under matplotlib's defaults, whatever the user's settings are."""
    with matplotlib.style.context(["default", {**STYLE, "svg.hashsalt": name}]):
        drawing = Drawing(name, height, mark)
        yield drawing
        drawing.render()


def short(name: str, limit: int = 24) -> str:
    """A name that leaves room for the drawing."""
    return name if len(name) <= limit else f"{name[: limit - 1]}…"
