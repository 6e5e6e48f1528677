"""The interface of rules: places, rules, and reports keyed by site name."""

import difflib
import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import jax
import numpy as np
from jaxtyping import Array, Int

from sdc.results import Result, ResultTable, counted
from sdc.verdict import Judgement, Verdict

from .selectors import Site, Skipped

Report: TypeAlias = Any
NUMBERS = (jax.Array, np.ndarray, np.generic, int, float, complex)  # leaves of reports that can be read


Values: TypeAlias = list[Any]


class Place(NamedTuple):
    """The site and the iteration at which a rule is called.

    Attributes:
        site: the site.
        iteration: scalar arrays with the index in each enclosing `scan` and `while`, outermost first.
        params: parameters of the site's primitive.
        marked: whether another transformation has already rewritten the equation.
        stored: for each input, whether it is read from memory as it is: an input of a loop's body, or a part of one.
            XLA may compute any other input more than once, and round it differently.
    """

    site: Site
    iteration: tuple[Int[Array, ""], ...]
    params: Mapping[str, Any] = MappingProxyType({})
    marked: bool = False
    stored: tuple[bool, ...] = ()


class Rule(Protocol):
    """The action of a transformation at a site."""

    def __call__(self, place: Place, bind: Callable[..., Values], *inputs: Any) -> tuple[Values, Report]:
        """Returns the equation's outputs and a report; `bind(*inputs)` evaluates the equation itself.

        A rule may change outputs, but not inputs: if another transformation has already rewritten the equation, `bind`
        returns the rewritten outputs regardless of its inputs.
        """

    def merge(self, total: Report, new: Report) -> Report:
        """Merges the reports of two iterations of a `while`; merging with zeros changes nothing."""


class SiteReport(Protocol):
    """A report that states a verdict; reports without these methods, such as digests, have none."""

    def summary(self, site: Site | None = None) -> Mapping[str, Any]:
        """Returns the totals over all iterations and devices, by the name of a column; what was found is second."""

    @staticmethod
    def judge(reports: "Reports[Any]") -> Judgement:
        """Returns the verdict of the reports of a step, of which there is at least one."""


T_co = TypeVar("T_co", covariant=True)


@jax.tree_util.register_pytree_with_keys_class
class Reports(Result, Mapping[str, T_co], Generic[T_co]):
    """Reports by site name, in program order; a pytree that passes through `jit` and keeps its sites.

    Attributes:
        sites: the sites (static); `sites[i].dims` holds the names of the leading axes of each leaf of report `i`.
        skipped: sites that the tool could not handle (static), in program order.
        simulated: whether the step also returned events of simulated faults (static).
    """

    def __init__(
        self, sites: Sequence[Site], values: Sequence[T_co], skipped: Sequence[Skipped] = (), simulated: bool = False
    ) -> None:
        self.sites, self.skipped, self.simulated = tuple(sites), tuple(skipped), simulated
        self._values = dict(zip((site.name for site in self.sites), values, strict=True))

    def __getitem__(self, name: str) -> T_co:
        try:
            return self._values[name]
        except KeyError:
            near = difflib.get_close_matches(str(name), self._values, n=3, cutoff=0.4) or list(self._values)[:3]
            more = f"; near it: {', '.join(near)}" if near else "; there are no sites"
            raise KeyError(f"no report is named {name!r}{more}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        some = ", ".join([*self._values][:3]) + (", ..." if len(self) > 3 else "")
        left = f", {len(self.skipped)} skipped" if self.skipped else ""
        return f"Reports[{self._kinds()}]({counted(len(self), 'site')}{some and ': '}{some}{left})"

    def _repr_html_(self) -> str:
        try:
            return super()._repr_html_()
        except ValueError as error:  # inside jit, for example
            return f"<p>{html.escape(f'{self!r}: {error}')}</p>"

    def _kinds(self) -> str:
        kinds = {"Array" if isinstance(value, jax.Array) else type(value).__name__ for value in self._values.values()}
        return " | ".join(sorted(kinds)) or "nothing"

    def verdict(self) -> Judgement:
        """Returns the verdict, which rests on all reports; None for digests and simulated faults.

        Raises:
            ValueError: the function is called inside `jit`, or the reports are arrays of several processes.
        """
        if not self:
            why = f"; {self.skipped[0].site.name}: {self.skipped[0].reason}" if self.skipped else ""
            return Judgement(Verdict.INCONCLUSIVE, f"no operation was checked{why}")
        kinds = {type(value) for value in self.values()}
        judge = getattr(kinds.pop(), "judge", None) if len(kinds) == 1 else None
        if not callable(judge):
            about = f"reports of {counted(len(self), 'operation')} state no verdict"
            return Judgement(None, f"{about}; digests are compared with those of another run")
        self._check_readable()
        found = cast(Judgement, judge(self))
        return found.marked() if self.simulated else found

    def table(self) -> ResultTable:
        """Returns a row for each site, with its totals over all iterations and devices; see `verdict` for errors."""
        self._check_readable()
        totals = [_summary(site, self._values[site.name]) for site in self.sites]
        columns = list(dict.fromkeys(column for each in totals for column in each))
        # What only some forms of a tool count is shown if there is any.
        columns = [
            column for place, column in enumerate(columns) if place < 3 or any(each.get(column) for each in totals)
        ]
        rows = tuple(
            (site.name, *(each.get(column) for column in columns), site.source)
            for site, each in zip(self.sites, totals, strict=True)
        )
        found = tuple(number for number, row in enumerate(rows) if len(columns) > 1 and np.any(row[2]))
        return ResultTable(("site", *columns, "line"), rows, found)

    def _check_readable(self) -> None:
        leaves = jax.tree.leaves(self)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise ValueError(
                "inside jit, the values of reports are unknown; return the reports, and call this function outside"
            )
        if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves):
            raise ValueError(
                "the reports are on devices of several processes; in all processes, first call "
                "jax.experimental.multihost_utils.process_allgather(reports, tiled=True)"
            )
        if odd := [leaf for leaf in leaves if not isinstance(leaf, NUMBERS)]:
            raise ValueError(f"the reports hold a {type(odd[0]).__name__}; expected the arrays that the step returned")

    @staticmethod
    def simulated_in(out: Any) -> bool:
        """Returns whether there are events of simulated faults among the results of a step."""
        leaves = jax.tree.leaves(out, is_leaf=lambda each: isinstance(each, Reports))
        reports = (each for each in leaves if isinstance(each, Reports))
        return any(
            each.simulated or any(getattr(value, "simulates", False) for value in each.values()) for each in reports
        )

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        values = [(jax.tree_util.DictKey(name), value) for name, value in self._values.items()]
        return values, (self.sites, self.skipped, self.simulated)

    @classmethod
    def tree_unflatten(cls, static: Any, values: Sequence[Any]) -> "Reports[Any]":
        sites, skipped, simulated = static
        return cls(sites, values, skipped, simulated)


def _summary(site: Site, value: Any) -> Mapping[str, Any]:
    summary = getattr(type(value), "summary", None)
    return cast(Mapping[str, Any], summary(value, site)) if callable(summary) else {}


def apart(out: Any) -> tuple[Any, tuple[Reports[Any], ...]]:
    """Splits a result into the step's own output and the reports of inner transformations, outermost first."""
    reports = []
    while isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Reports):
        out, report = out
        reports.append(report)
    return out, tuple(reports)


def together(out: Any, reports: Sequence[Reports[Any]]) -> Any:
    for report in reversed(reports):
        out = (out, report)
    return out
