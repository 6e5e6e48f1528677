"""What a register of golden digests is worth here: which digests apply, why others do not, and who else saw them."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..records import Device
from .golden import Register, Subject, lookup, parse_key

SHOWN = 3
"""Reasons that are told one by one."""


def usable(
    register: Register, keys: Iterable[str], environment: Mapping[str, str] | None = None
) -> tuple[dict[str, str], str | None]:
    """The digests that apply to what runs here, and what stands against a PASS that rests on them.

    Args:
        register: what was read.
        keys: of what ran here, as `Result.keys` has them.
        environment: that of this process (`surroundings`), so that it can be said what differs.

    Returns:
        Digests by key, and None where everything that runs here has one; else what is missing and why.

    Example:
        >>> from sdc.burnin.golden import Register
        >>> from sdc.burnin.golden_using import usable
        >>> usable(Register(environments={}, recordings={}, entries=[]), [])
        ({}, 'nothing ran that a digest could be of')
    """
    here, known = sorted(set(keys)), lookup(register)
    found = {key: known[key] for key in here if key in known}
    if not here:
        return found, "nothing ran that a digest could be of"
    if len(found) == len(here):
        return found, None
    reasons = foreign(register, here, environment)
    told = "; ".join(reasons[:SHOWN]) + (f"; and {len(reasons) - SHOWN} more reasons" if len(reasons) > SHOWN else "")
    what = "none" if not found else f"only {len(found)}"
    return found, f"{what} of {len(here)} digests that are needed here are in it: {told}"


def left_over(keys: Iterable[str], workloads: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Why digests were not compared: of another program or device, or of a workload that was not to run.

    A register of all families is no worse for a burn-in of one: what it has of the others is not needed.

    Args:
        keys: of these digests.
        workloads: names of those that were to run.

    Returns:
        Keys of the first kind, and of the second.

    Example:
        >>> from sdc.burnin.golden_using import left_over
        >>> rest = "seed 0 | 5feb | one | cpu cpu | e3b0c442"
        >>> left_over([f"a/1 | {rest}", f"b/1 | {rest}"], {"a/1"})
        (('a/1 | seed 0 | 5feb | one | cpu cpu | e3b0c442',), ('b/1 | seed 0 | 5feb | one | cpu cpu | e3b0c442',))
    """
    other: list[str] = []
    unneeded: list[str] = []
    for key in sorted(keys):
        try:
            needed = parse_key(key).workload in workloads
        except ValueError:  # whoever calls `burn_in` may give anything
            needed = True
        (other if needed else unneeded).append(key)
    return tuple(other), tuple(unneeded)


def foreign(register: Register, keys: Iterable[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Why there are no digests of what runs here, in words, the most frequent reason first.

    Args:
        register: what was read.
        keys: of what ran here.
        environment: that of this process; without it only the names of environments can be told.
    """
    known, disputed = lookup(register), {each.subject.key for each in register.disputed}
    recorded: dict[tuple[str, int | None], list[Subject]] = {}
    for entry in register.entries:
        recorded.setdefault((entry.subject.workload, entry.subject.shard), []).append(entry.subject)
    reasons: Counter[str] = Counter()
    for key in set(keys) - set(known):
        if key in disputed:
            reasons["hosts disagree on it"] += 1
            continue
        subject = parse_key(key)
        near = [
            _differences(register, subject, other, environment)
            for other in recorded.get((subject.workload, subject.shard), [])
        ]
        reasons["is not in the file" if not near else min(near, key=lambda each: (len(each), each))[0]] += 1
    ranked = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return [f"{reason} ({count} {'workload' if count == 1 else 'workloads'})" for reason, count in ranked]


def _differences(
    register: Register, here: Subject, there: Subject, environment: Mapping[str, str] | None
) -> tuple[str, ...]:
    """What differs, in words: all of it as the first text, which is what is told."""
    named = {"kind": "device", "algorithm": "digest algorithm", "seed": "seed"}
    pairs = [(words, getattr(here, name), getattr(there, name)) for name, words in named.items()]
    if here.environment != there.environment:
        theirs = register.environments[there.environment]
        if environment is None:
            pairs.append(("environment", here.environment, there.environment))
        else:
            pairs += [
                (name, environment.get(name, "nothing"), theirs.get(name, "nothing"))
                for name in sorted({*environment, *theirs})
            ]
    texts = [f"{words} {mine} here, {other} there" for words, mine, other in pairs if mine != other]
    if not texts and here.program != there.program:
        texts = [f"program {here.program[:12]} here, {there.program[:12]} there"]
    return (", ".join(texts), *texts)


def itself_alone(
    register: Register, keys: Mapping[tuple[str, int], str], described: Sequence[Mapping[str, Any]]
) -> str | None:
    """What to say where digests were recorded by the very device that is tested.

    A fault that repeats itself would be in such a digest too: it proves no more than repetition does.

    Args:
        register: what was read.
        keys: of what ran here, by workload and index of the device, as `Result.keys` has them.
        described: what `sdc.records.describe_devices` says of the devices, in the order of the burn-in.
    """
    entries = {entry.subject.key: entry for entry in register.entries}
    here = [_identity(msgspec.convert(device, Device)) for device in described]
    alone = set()
    for (_, index), key in keys.items():
        seen = {
            _identity(register.recordings[each.recording].devices[place])
            for each in (entries[key].seen if key in entries else ())
            for place in each.devices
        }
        if seen == {here[index]}:
            alone.add(key)
    if not alone:
        return None
    return (
        f"{len(alone)} of the golden digests were recorded on the tested device itself and on no other: a fault that "
        "repeats itself would be in them"
    )


def _identity(device: Device) -> tuple[object, ...]:
    """What stays the same of a device. Those that a process makes of one processor are one."""
    place = tuple(device.coordinates or ())
    return (device.machine, device.kind, device.serial, device.uuid, device.bus, place, device.core)
