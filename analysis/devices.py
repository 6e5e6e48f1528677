"""Which piece of hardware a rank is, in words: host and device where the manifest lists them, else ranks."""

from collections.abc import Iterable, Sequence

from .evidence import AXES, Rank
from .series import Row, count, mapping, sequence

DETAILS = ("kind", "serial", "uuid", "bus", "coordinates", "core", "driver", "firmware")


def devices_of(manifest: Row, rank: Rank) -> list[Row]:
    """Entries of `manifest["devices"]` that hold a rank; one without a twin holds that rank of every twin."""
    wanted = dict(zip(AXES, rank, strict=True))

    def holds(device: Row) -> bool:
        place = mapping(device.get("rank"))
        return bool(place) and all(
            value is None or axis not in place or place[axis] == value for axis, value in wanted.items()
        )

    return [device for device in map(mapping, sequence(manifest.get("devices"))) if holds(device)]


def where(manifest: Row, ranks: Iterable[Rank]) -> str:
    """The hardware of ranks of one twin in a few words; empty where the record says nothing that tells it apart."""
    known = list(ranks)
    found = {
        (str(device.get("host")), str(device.get("id"))) for rank in known for device in devices_of(manifest, rank)
    }
    hosts = sorted({host for host, _ in found})
    if len(hosts) == 1:
        return f"host {hosts[0]}, {_several('device', [number for _, number in found])}"
    if hosts:
        return _several("host", hosts)
    mesh = mapping(manifest.get("mesh"))
    axes = [axis for axis in AXES[1:] if (count(mesh.get(axis)) or 1) > 1]
    named = {tuple(dict(zip(AXES, rank, strict=True))[axis] for axis in axes) for rank in known}
    named = {place for place in named if None not in place}
    if not axes or not named:
        return ""
    if len(named) > 1:
        return f"{len(named)} ranks"
    return ", ".join(f"{axis} {number}" for axis, number in zip(axes, *named, strict=True))


def whole(manifest: Row, ranks: Iterable[Rank], limit: int = 2) -> str:
    """All that is known of the devices of some ranks, for whoever has to find them in a rack."""
    found = {str(sorted(device.items(), key=str)): device for rank in ranks for device in devices_of(manifest, rank)}
    shown = [device for device in found.values() if any(device.get(name) is not None for name in DETAILS)]
    words = [
        ", ".join(f"{name} {_plain(device[name])}" for name in DETAILS if device.get(name) is not None)
        for device in shown[:limit]
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
