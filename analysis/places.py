"""The figure that leads a corrupt run: which layer and submodule mismatched at which step."""

import math
from collections.abc import Sequence

from .canvas import COLOURS, MARKERS, LeftOut, Picture, canvas, short, whole_numbers
from .series import Row, count
from .summary import SUBMODULES

MARKS = 1500
"""Most marks of the figure; in a longer run each column is of several steps."""


SIZES = (4.0, 5.5, 7.0)
"""Sizes of the marks, in points."""


def where_and_when(lines: Sequence[Row], mismatches: Sequence[Row], layers: int, *, mark: str) -> Picture | LeftOut:
    """A mark for each submodule, layer and step with a mismatch, larger where more elements differ.

    Args:
        lines: lines of `steps.jsonl`.
        mismatches: lines of `mismatches.jsonl`.
        layers: number of layers of the model.
        mark: text drawn into the figure, such as that faults are simulated; may be empty.
    """
    title = "Where and when"
    hits = [
        (str(row.get("site")), layer, row["step"], found)
        for row in mismatches
        if (found := count(row.get("mismatched"))) and (layer := count(row.get("layer"))) is not None
    ]
    if not hits:
        return LeftOut(title, "no mismatch of a layer was recorded")
    others = sorted({site for site, *_ in hits} - set(SUBMODULES))
    names = [*(site for site in SUBMODULES if any(hit[0] == site for hit in hits)), *others]
    layers = max(layers, *(layer + 1 for _, layer, *_ in hits))
    last = max([line["step"] for line in lines] + [step for *_, step, _ in hits])
    rows = len({(site, layer) for site, layer, *_ in hits})
    column = max(1, -(-(last + 1) * rows // MARKS))
    cells: dict[tuple[str, int, int], tuple[int, int]] = {}
    for site, layer, step, found in hits:  # of each column the largest stays, so that no spike is lost
        place = site, layer, step // column
        if found > cells.get(place, (0, 0))[0]:
            cells[place] = found, step
    largest = float(max(found for found, _ in cells.values()))
    with canvas("where", mark, height=2.2 + 0.16 * min(layers, 12)) as drawing:
        axes = drawing.figure.subplots()
        for number, site in enumerate(names):
            shift = 0.6 * ((number + 0.5) / len(names) - 0.5)
            for size in SIZES:  # few sizes, so that a mark is a reference to one of few shapes
                here = [
                    (step, layer + shift)
                    for (name, layer, _), (found, step) in cells.items()
                    if name == site and _size(found, largest) == size
                ]
                x, y = zip(*here, strict=True) if here else ((), ())
                axes.plot(x, y, MARKERS[number % 6], color=COLOURS[number % 6], markersize=size, markeredgewidth=0)
            # The legend has one size for all.
            axes.plot([], [], MARKERS[number % 6], color=COLOURS[number % 6], markersize=SIZES[-1], label=short(site))
        axes.set(xlabel="step", ylabel="layer", ylim=(layers - 0.5, -0.5))
        margin = max(0.5, 0.02 * last)
        axes.set_xlim(-margin, last + margin)
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis)
        drawing.legend(axes)
    joined = f" Each column is of {column:,} steps, of which the largest is shown." if column > 1 else ""
    return drawing.picture(
        title, f"A mark for each step with a mismatch, larger where more elements differ; layer 0 is the first.{joined}"
    )


def _size(found: int, largest: float) -> float:
    """The size of a mark, by the logarithm of the elements that differ."""
    share = math.log1p(found) / math.log1p(largest)
    return SIZES[min(int(share * len(SIZES)), len(SIZES) - 1)]
