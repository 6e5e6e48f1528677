"""What results of tools have in common: a verdict, a table, and their form in terminals, notebooks and Treescope."""

import abc
import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from .verdict import Judgement

__all__ = ["Result", "ResultTable", "counted", "total"]

SHOWN = 20  # rows of a table in a terminal or notebook


@dataclasses.dataclass(frozen=True)
class ResultTable:
    """A table of a result.

    Attributes:
        header: names of the columns.
        rows: rows; the first column is text.
        first: numbers of the rows that are shown first, because something was found there.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    first: tuple[int, ...] = ()

    def records(self) -> list[dict[str, Any]]:
        """Returns one dictionary for each row, as `pandas.DataFrame` accepts them."""
        return [dict(zip(self.header, row, strict=True)) for row in self.rows]

    def __str__(self) -> str:
        lines = [self.header, *self._shown()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(cell.ljust(width) if not place else cell.rjust(width)
                      for place, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
            for line in lines
        ]  # fmt: skip
        return "\n".join([*text, *self._more()])

    def _repr_html_(self) -> str:
        def row(tag: str, cells: Sequence[str]) -> str:
            left = ' style="text-align: left"'
            return "".join(
                f"<{tag}{'' if place else left}>{html.escape(cell)}</{tag}>" for place, cell in enumerate(cells)
            )

        body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in self._shown())
        more = "".join(f"<p>{html.escape(line)}</p>" for line in self._more())
        return f"<table><thead><tr>{row('th', self.header)}</tr></thead><tbody>{body}</tbody></table>{more}"

    def _shown(self) -> list[tuple[str, ...]]:
        others = [number for number in range(len(self.rows)) if number not in {*self.first}]
        return [tuple(map(_cell, self.rows[number])) for number in [*self.first, *others][:SHOWN]]

    def _more(self) -> list[str]:
        return [f"and {counted(len(self.rows) - SHOWN, 'more row')}"] if len(self.rows) > SHOWN else []


class Result(abc.ABC):
    """A result that has a verdict and a table."""

    @abc.abstractmethod
    def verdict(self) -> Judgement:
        """Returns the verdict with its reason; waits for the arrays of the result."""

    @abc.abstractmethod
    def table(self) -> ResultTable:
        """Returns the details as a table; waits for the arrays of the result."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.verdict()})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self.verdict()))}</p>{self.table()._repr_html_()}"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from treescope import rendering_parts, repr_lib

        given: dict[str, Any] = {"object_type": type(self), "path": path, "subtree_renderer": subtree_renderer}
        if isinstance(self, Mapping):
            shown = repr_lib.render_dictionary_wrapper(wrapped_dict=self, **given)
        else:
            fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(cast(Any, self))}
            shown = repr_lib.render_object_constructor(attributes=fields, roundtrippable=False, **given)
        try:
            verdict = str(self.verdict())
        except ValueError as error:  # inside jit, for example
            verdict = str(error)
        said = rendering_parts.comment_color(rendering_parts.text(f" # {verdict}"))
        return rendering_parts.RenderableAndLineAnnotations(
            shown.renderable, rendering_parts.siblings(shown.annotations, said)
        )


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if math.isfinite(value) else str(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, as in `1 host`, `1,200 hosts`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def total(counts: Any) -> int:
    """Returns the sum of counts, which are 32-bit numbers on the device, and whose sum may need more."""
    return int(np.sum(np.asarray(counts), dtype=np.uint64))
