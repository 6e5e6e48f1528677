"""The figure that leads a corrupt run: which layer and submodule mismatched at which step."""

from collections.abc import Sequence

import numpy as np

from .canvas import COLOURS, MARKERS, LeftOut, Picture, canvas, short, whole_numbers
from .series import Row, count
from .summary import SUBMODULES

MARKS = 1500
"""Most marks of the figure; in a longer run each column is of several steps."""


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
            here = [(step, layer, size) for (name, layer, _), (size, step) in cells.items() if name == site]
            x, y, sizes = (np.asarray(values, np.float64) for values in zip(*here, strict=True))
            shift = 0.6 * ((number + 0.5) / len(names) - 0.5)
            area = 10 + 50 * np.log1p(sizes) / np.log1p(largest)
            axes.scatter(x, y + shift, s=area, label=short(site), color=COLOURS[number % 6], marker=MARKERS[number % 6],
                         linewidth=0, alpha=None if len(here) < 200 else 0.8)  # fmt: skip
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
