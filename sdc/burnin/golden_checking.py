"""Golden digests recorded and confirmed by the devices of this host."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from sdc.records import describe_devices

from .golden import Register, lookup
from .golden_recording import doubtful, register_of, repeated_only
from .golden_using import foreign
from .levels import find_level
from .observed import Result
from .registry import workloads
from .report import Settings
from .rounds import burn_in
from .sensors import Monitor, driver_errors
from .surroundings import surroundings
from .verdict import judge


@dataclasses.dataclass
class Confirmed:
    """What became of it.

    Attributes:
        differs: whether anything differed.
        problem: whether something stands against relying on it.
        sentences: what there is to say, the gravest first.
        confirmed: digests that this host computed too.
        elsewhere: digests that are of nothing that ran here.
        repeated_only: recorded digests that only repetition on one device agreed on.
    """

    differs: bool = False
    problem: bool = False
    sentences: list[str] = dataclasses.field(default_factory=list)
    confirmed: int = 0
    elsewhere: int = 0
    repeated_only: int = 0


Tell = Callable[[Mapping[str, Any]], None]


def record(
    settings: Settings, devices: Sequence[jax.Device], *, on_event: Tell | None = None
) -> tuple[Register | None, Confirmed]:
    """Runs the workloads of a level, and records what runs or devices agree on.

    Args:
        settings: level, length, families, types and seed.
        devices: of this process.
        on_event: is told what `burn_in` tells.

    Returns:
        A register, or None where anything differed, did not run to its end, or nothing agreed; and what there is to
        say.

    Example:
        >>> import jax
        >>> from sdc.burnin.golden_checking import record, verify
        >>> from sdc.burnin.report import Settings
        >>> devices = jax.local_devices()[:1]
        >>> settings = Settings(level="quick", rounds=2, only=["ordering"], dtypes=["float32"])
        >>> register, found = record(settings, devices)
        >>> verify(register, devices).confirmed == len(register.entries)
        True
    """
    described = describe_devices(devices)
    found = workloads(settings.level, devices, settings.dtypes, only=settings.only, seed=settings.seed)
    with Monitor(described) as monitor:
        result = burn_in(
            found,
            devices,
            minutes=settings.minutes,
            rounds=settings.rounds,
            on_event=on_event,
            pauses=find_level(settings.level).pauses,
        )
    told = _looked_at(result, described, monitor)
    left_out = doubtful(result)
    told.sentences += [f"not recorded: {each}" for each in left_out]
    if told.differs or told.problem:
        return None, told
    register = register_of(result, described, surroundings(devices), level=settings.level, dtypes=settings.dtypes)
    if not register.entries:
        told.problem = True
        told.sentences.append("no workload ran twice on a device, or on two devices of a kind")
        return None, told
    told.repeated_only = repeated_only(result, register)
    if told.repeated_only:
        told.sentences.append(
            f"warning: {told.repeated_only} of {len(register.entries)} digests rest on repetition on one device alone: "
            "a fault that repeats itself would be recorded too; record on other hosts, and merge their registers"
        )
    return register, told


def verify(
    register: Register, devices: Sequence[jax.Device], *, rounds: int = 2, on_event: Tell | None = None
) -> Confirmed:
    """Runs the workloads of a register, and compares what comes of it.

    Args:
        register: what was read.
        devices: of this process.
        rounds: how often.
        on_event: is told what `burn_in` tells.

    Returns:
        What became of it: a problem where no digest applies here, or some that should do not.
    """
    described, golden, environment = describe_devices(devices), lookup(register), surroundings(devices)
    told, used, wrong, missing = Confirmed(), set[str](), set[str](), set[str]()
    for level, dtypes, seed, names in _asked(register):
        every = workloads(level, devices, dtypes, seed=seed)
        found = [workload for workload in every if workload.name in names]
        if not found:
            continue
        with Monitor(described) as monitor:
            result = burn_in(
                found, devices, rounds=rounds, golden=golden, on_event=on_event, pauses=find_level(level).pauses
            )
        part = _looked_at(result, described, monitor)
        told.differs |= part.differs
        told.problem |= part.problem
        told.sentences += part.sentences
        compared = {place for place, tally in result.tallies.items() if tally.golden}
        used |= {key for place, key in result.keys.items() if place in compared}
        wrong |= {result.keys[place] for place, tally in result.tallies.items() if tally.differences}
        missing |= {key for key in result.keys.values() if key not in golden}
    if missing or not used:
        told.problem = True
        told.sentences += foreign(register, missing, environment)
    if not used and not missing:
        told.sentences.append("none of its workloads can run on the devices of this host")
    told.confirmed, told.elsewhere = len(used - wrong), len(golden) - len(used)
    return told


def _asked(register: Register) -> Iterator[tuple[str, tuple[str, ...], int, set[str]]]:
    """Level, types and seed of each kind of burn-in that was recorded, and the workloads that are known of it."""
    found: dict[tuple[str, tuple[str, ...], int], set[str]] = {}
    for entry in register.entries:
        for seen in entry.seen:
            recording = register.recordings[seen.recording]
            asked = (recording.level, tuple(recording.dtypes), entry.subject.seed)
            found.setdefault(asked, set()).add(entry.subject.workload)
    for (level, dtypes, seed), names in found.items():
        yield level, dtypes, seed, names


def _looked_at(result: Result, described: Sequence[Mapping[str, Any]], monitor: Monitor) -> Confirmed:
    """What is to be said of a burn-in. How fast it was does not matter."""
    verdict = judge(result, described)
    told = Confirmed(differs=verdict.word == "FAIL")
    if told.differs:
        told.sentences += verdict.sentences
    for end in result.ended:
        told.problem = True
        where = "all devices" if end.device is None else f"device {end.device}"
        told.sentences.append(f"{end.workload or 'all workloads'} on {where} did not run to the end: {end.reason}")
    for index, course in enumerate(monitor.courses()):
        for error in driver_errors(course) if course is not None else ():
            told.problem = True
            told.sentences.append(f"device {index}: {error}")
    told.problem |= result.stopped
    return told
