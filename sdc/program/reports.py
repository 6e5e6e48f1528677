"""The interface of rules: places, rules, and reports keyed by site name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
from jaxtyping import Array, Int

from .selectors import Site, Skipped

Report: TypeAlias = Any


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


@jax.tree_util.register_pytree_with_keys_class
class Reports(Mapping[str, Any]):
    """Reports by site name, in program order; a pytree that passes through `jit` and keeps its sites.

    Attributes:
        sites: the sites (static); `sites[i].dims` holds the names of the leading axes of each leaf of report `i`.
        skipped: sites that the tool could not handle (static), in program order.
    """

    def __init__(self, sites: Sequence[Site], values: Sequence[Any], skipped: Sequence[Skipped] = ()) -> None:
        self.sites, self.skipped = tuple(sites), tuple(skipped)
        self._values = dict(zip((site.name for site in self.sites), values, strict=True))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        return f"Reports({dict(self)!r})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        values = [(jax.tree_util.DictKey(name), value) for name, value in self._values.items()]
        return values, (self.sites, self.skipped)

    @classmethod
    def tree_unflatten(cls, static: Any, values: Sequence[Any]) -> "Reports":
        sites, skipped = static
        return cls(sites, values, skipped)


def apart(out: Any) -> tuple[Any, tuple[Reports, ...]]:
    """Splits a result into the step's own output and the reports of inner transformations, outermost first."""
    reports = []
    while isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Reports):
        out, report = out
        reports.append(report)
    return out, tuple(reports)


def together(out: Any, reports: Sequence[Reports]) -> Any:
    for report in reversed(reports):
        out = (out, report)
    return out
