"""What a record shows of the corruption in it: the steps, the places in the model and the ranks that were hit."""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from sdc.records import Contents

from .equality import differs
from .series import Row, count, mapping, sequence

Course: TypeAlias = Literal["persistent", "intermittent", "transient"]
Rank: TypeAlias = tuple[int | None, int | None, int | None]
"""Twin, data rank and model rank; None where the record does not say."""
AXES = ("twin", "data", "model")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Where and when something was wrong.

    Attributes:
        steps: numbers of the steps with a finding, in order.
        later: number of the steps on record after the first of them.
        ranks: elements, or rows of products, that were wrong by rank.
        sites: names of the sites that were hit, the most often hit first.
        layers: numbers of the layers that were hit, in order.
        first: site and layer of the first finding in program order, where that is known.
    """

    steps: tuple[int, ...]
    later: int
    ranks: Counter[Rank]
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    first: tuple[str, int | None] | None

    @property
    def course(self) -> Course | None:
        """How the fault went on: persistent if each later step has a finding, transient if none has one, else
        intermittent. None where nothing was found, or no step followed."""
        again = len(self.steps) - 1
        if again < 0 or not self.later:
            return None
        return "persistent" if again == self.later else "intermittent" if again else "transient"


def of_twins(run: Contents) -> Evidence:
    """Mismatches of twins: at submodules where those were compared, else of gradient and state."""
    hits = [row for row in run.details if _apart(row)]
    ranks: Counter[Rank] = Counter()
    sites: Counter[str] = Counter()
    for row in hits:
        sites[str(row.get("site"))] += _apart(row)
        for rank in map(mapping, sequence(row.get("ranks"))):
            if found := _apart(rank):
                ranks[_rank(rank)] += found
    steps = {row["step"] for row in hits}
    steps |= {row["step"] for row in run.lines if differs(row)}
    start = min(steps, default=None)
    early = [row for row in hits if row["step"] == start]
    first = min(early, key=_order, default=None)
    return _evidence(
        run.lines, steps, ranks, sites, (row.get("layer") for row in hits),
        None if first is None else (str(first.get("site")), count(first.get("layer"))),
    )  # fmt: skip


def _apart(row: Row) -> int:
    """How often something differed: each element, and each digest of which the elements are not known."""
    return (count(row.get("mismatched")) or 0) + (count(row.get("unrepeated")) or 0)


def of_products(run: Contents) -> Evidence:
    """Flagged rows of matrix products."""
    ranks: Counter[Rank] = Counter()
    sites: Counter[str] = Counter()
    layers, steps = set(), set()
    first: tuple[str, int | None] | None = None
    for line in run.lines:
        found = mapping(line.get("abft"))
        if not count(found.get("flagged")):
            continue
        steps.add(line["step"])
        for row in map(mapping, sequence(found.get("rows"))):
            flagged = count(row.get("flagged")) or 0
            ranks[_rank(row)] += flagged
            sites[str(row.get("site"))] += flagged
            layers.add(row.get("layer"))
            first = first or (str(row.get("site")), count(row.get("layer")))
    return _evidence(run.lines, steps, ranks, sites, layers, first)


def _evidence(
    lines: Sequence[Row],
    steps: Collection[int],
    ranks: Counter[Rank],
    sites: Counter[str],
    layers: Iterable[Any],
    first: tuple[str, int | None] | None,
) -> Evidence:
    start = min(steps, default=math.inf)
    later = len({line["step"] for line in lines if line["step"] > start})
    numbers = {found for layer in layers if (found := count(layer)) is not None}
    names = tuple(name for name, _ in sites.most_common())
    return Evidence(tuple(sorted(steps)), later, ranks, names, tuple(sorted(numbers)), first)


def _order(row: Row) -> tuple[int, bool, int, bool]:
    """Place in program order: the backward pass comes after the forward pass, from the last layer to the first."""
    backward = str(row.get("site")).startswith("bwd/")
    layer = count(row.get("layer")) or 0
    late = str(row.get("site")).endswith("ffn")
    return count(row.get("microstep")) or 0, backward, -layer if backward else layer, late != backward


def _rank(row: Row) -> Rank:
    twin, data, model = (count(row.get(axis)) for axis in AXES)
    return twin, data, model
