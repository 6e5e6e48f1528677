"""What a record shows of the corruption in it: steps, places in the model, ranks, and the hardware of these."""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from sdc.records import Contents
from sdc.schema import Device, FlagRow, MismatchRow, Number, RankRow, RunManifest, StepRow

from .run_verdict import differs
from .series import whole

Course: TypeAlias = Literal["persistent", "intermittent", "transient"]
Rank: TypeAlias = tuple[int | None, int | None, int | None]
"""Twin, data rank and model rank; None where the record does not say."""
AXES = ("twin", "data", "model")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Where and when something was wrong."""

    steps: tuple[int, ...]  # with a finding, in order
    later: int  # steps on record after the first of them
    ranks: Counter[Rank]  # elements, or rows of products, that were wrong
    sites: tuple[str, ...]  # the most often hit first
    layers: tuple[int, ...]
    first: tuple[str, int | None] | None  # site and layer of the first finding in program order, where that is known

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
    hits = [row for row in run.mismatches if _apart(row)]
    ranks: Counter[Rank] = Counter()
    sites: Counter[str] = Counter()
    for row in hits:
        sites[str(row.site)] += _apart(row)
        for rank in row.ranks:
            if found := _apart(rank):
                ranks[_rank(rank)] += found
    steps = {row.step for row in hits} | {row.step for row in run.steps if differs(row)}
    early = [row for row in hits if row.step == min(steps)]
    first = min(early, key=_order, default=None)
    place = None if first is None else (str(first.site), whole(first.layer))
    return _evidence(run.steps, steps, ranks, sites, (row.layer for row in hits), place)


def _apart(row: MismatchRow | RankRow) -> int:
    """How often something differed: each element, and each digest of which the elements are not known."""
    return (whole(row.mismatched) or 0) + (whole(row.unrepeated) or 0)


def of_products(run: Contents) -> Evidence:
    """Flagged rows of matrix products."""
    ranks: Counter[Rank] = Counter()
    sites: Counter[str] = Counter()
    steps = {line.step for line in run.steps if line.abft is not None and whole(line.abft.flagged)}
    rows = [row for line in run.steps if line.step in steps and line.abft for row in line.abft.rows]
    for row in rows:
        ranks[_rank(row)] += whole(row.flagged) or 0
        sites[str(row.site)] += whole(row.flagged) or 0
    first = (str(rows[0].site), whole(rows[0].layer)) if rows else None
    return _evidence(run.steps, steps, ranks, sites, (row.layer for row in rows), first)


def _evidence(
    lines: Sequence[StepRow],
    steps: Collection[int],
    ranks: Counter[Rank],
    sites: Counter[str],
    layers: Iterable[Number],
    first: tuple[str, int | None] | None,
) -> Evidence:
    start = min(steps, default=math.inf)
    later = len({line.step for line in lines if line.step > start})
    numbers = {found for layer in layers if (found := whole(layer)) is not None}
    names = tuple(name for name, _ in sites.most_common())
    return Evidence(tuple(sorted(steps)), later, ranks, names, tuple(sorted(numbers)), first)


def _order(row: MismatchRow) -> tuple[int, bool, int, bool]:
    """Place in program order: the backward pass comes after the forward pass, from the last layer to the first."""
    site, layer = str(row.site), whole(row.layer) or 0
    backward, late = site.startswith("bwd/"), site.endswith("ffn")
    return whole(row.microstep) or 0, backward, -layer if backward else layer, late != backward


def _rank(row: RankRow | FlagRow) -> Rank:
    return whole(row.twin), whole(row.data), whole(row.model)


DETAILS = ("kind", "serial", "uuid", "bus", "coordinates", "core", "driver", "firmware")


def devices_of(manifest: RunManifest, rank: Rank) -> list[Device]:
    """Entries of `manifest["devices"]` that hold a rank; one without a twin holds that rank of every twin."""
    wanted = dict(zip(AXES, rank, strict=True))

    def holds(device: Device) -> bool:
        place = device.rank or {}
        return bool(place) and all(
            value is None or axis not in place or place[axis] == value for axis, value in wanted.items()
        )

    return list(filter(holds, manifest.devices))


def where(manifest: RunManifest, ranks: Iterable[Rank]) -> str:
    """The hardware of ranks of one twin in a few words; empty where the record says nothing that tells it apart."""
    known = list(ranks)
    found = {(str(device.host), str(device.id)) for rank in known for device in devices_of(manifest, rank)}
    hosts = sorted({host for host, _ in found})
    if len(hosts) == 1:
        return f"host {hosts[0]}, {_several('device', [number for _, number in found])}"
    if hosts:
        return _several("host", hosts)
    axes = [axis for axis in AXES[1:] if (manifest.mesh or {}).get(axis, 1) > 1]
    named = {tuple(dict(zip(AXES, rank, strict=True))[axis] for axis in axes) for rank in known}
    named = {place for place in named if None not in place}
    if not axes or not named:
        return ""
    if len(named) > 1:
        return f"{len(named)} ranks"
    return ", ".join(f"{axis} {number}" for axis, number in zip(axes, *named, strict=True))


def hardware(manifest: RunManifest, ranks: Iterable[Rank], limit: int = 2) -> str:
    """All that is known of the devices of some ranks, for whoever has to find them in a rack."""
    found = {msgspec.json.encode(device): device for rank in ranks for device in devices_of(manifest, rank)}
    known = [{name: getattr(device, name) for name in DETAILS} for device in found.values()]
    shown = [each for each in known if any(value is not None for value in each.values())]
    words = [
        ", ".join(f"{name} {_plain(value)}" for name, value in each.items() if value is not None)
        for each in shown[:limit]
    ]
    return "; ".join(words) + (f"; and {len(shown) - limit} more" if len(shown) > limit else "")


def listed(names: Sequence[object]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    words = list(map(str, names))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _several(noun: str, names: Sequence[str], limit: int = 4) -> str:
    unique = sorted(set(names), key=lambda name: (len(name), name))
    if len(unique) > limit:
        return f"{len(unique)} {noun}s"
    return f"{noun}{'s' if len(unique) > 1 else ''} {listed(unique)}"


def _plain(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
