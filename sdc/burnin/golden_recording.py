"""From what a burn-in saw to a register of golden digests."""

import datetime
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..records import Device, identify, package_version
from .golden import Agreed, Entry, Recording, Register, Seen, mark_of, parse_key
from .observed import Result


def doubtful(result: Result) -> list[str]:
    """Workloads whose digests are not to be recorded although all of their runs agree, each with the reason.

    Rows that checksums flag, and that come out the same again, are a false alarm or a fault that repeats itself.
    """
    return sorted(
        {
            f"{name}: checksums flag rows that come out the same again"
            for (name, _), tally in result.tallies.items()
            if tally.checks.flagged > tally.checks.confirmed
        }
    )


def repeated_only(result: Result, register: Register) -> int:
    """How many digests rest on repetition alone: neither another device nor the host has computed the same.

    Args:
        result: what was seen.
        register: what was recorded of it.
    """
    keys = {entry.subject.key for entry in register.entries}
    confirmed = {
        result.keys[place]
        for place, tally in result.tallies.items()
        if place in result.keys and (tally.voted or tally.referred)
    }
    return len(keys - confirmed)


def register_of(
    result: Result,
    described: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str],
    *,
    level: str,
    dtypes: Sequence[str],
) -> Register:
    """The digests of a burn-in in which runs or devices agreed.

    Args:
        result: what was seen. Of a simulation nothing is recorded, nor of workloads in which anything differed.
        described: what `sdc.records.describe_devices` says of the devices, in their order.
        environment: what `surroundings` returned.
        level: name of the level.
        dtypes: types of floating-point numbers.

    Returns:
        A register, without entries where nothing agreed.

    Raises:
        ValueError: the burn-in ran in another environment.
    """
    name, mark = uuid.uuid4().hex, mark_of(environment)
    doubts = {each.partition(":")[0] for each in doubtful(result)}
    names = {key: workload for (workload, _), key in result.keys.items()}
    entries = []
    for key, digest in sorted(result.recorded().items()):
        subject = parse_key(key)
        if subject.environment != mark:
            raise ValueError(f"the burn-in ran in environment {subject.environment}, expected {mark}")
        if names[key] in doubts:
            continue
        places = sorted(
            place
            for place, tally in result.tallies.items()
            if result.keys.get(place) == key and tally.baseline == digest
        )
        tallies = [result.tallies[place] for place in places]
        agreed: list[Agreed] = []
        if any(tally.repeated for tally in tallies):
            agreed.append("repeat")
        if any(tally.voted for tally in tallies):
            agreed.append("vote")
        seen = Seen(
            recording=name,
            devices=tuple(index for _, index in places),
            runs=sum(tally.runs for tally in tallies),
            agreed=tuple(agreed),
        )
        entries.append(Entry(subject=subject, digest=digest, seen=(seen,)))
    recording = Recording(
        host=identify(),
        devices=msgspec.convert(list(described), list[Device]),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        version=package_version("jax-sdc"),
        level=level,
        dtypes=list(dtypes),
        rounds=result.rounds,
    )
    return Register(environments={mark: dict(environment)}, recordings={name: recording}, entries=entries)
