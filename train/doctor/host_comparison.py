"""Two hosts side by side: which settings and bits differ, and which setting explains it."""

import functools
from collections.abc import Mapping, Sequence

import msgspec

from sdc.records import THREADS, differences

from .causes import FAULTY, explanations
from .laboratory import ChildFailed, Laboratory
from .results import TRAINING, Answer, Check, Examined, HostPart, Outcome, by_name, steady
from .surroundings import PLACES, Scene, lines, pool_size, settings_of, shown

ENVIRONMENTS, BITS = "environments of both hosts", "bits of both hosts"
WORDS = ("here", "there")
FIXED = ("python", "packages", "platform_version", "device_kind", "machine", "processor", "features")
"""What no setting changes."""


def compare_hosts(lab: Laboratory, first: Answer | None, other: Examined, machine: HostPart) -> list[Check]:
    """Compares what was measured here with what the doctor wrote on another host."""
    if first is None:
        return [_check(name, "could not be run", "nothing could be run here") for name in (ENVIRONMENTS, BITS)]
    scene = Scene(lab.environ, first.environment, machine)
    apart = _apart(scene, other)
    said = "; ".join(each.describe(WORDS) for each in differences(apart))
    environments = _check(ENVIRONMENTS, "information" if said else "ok", said or "equal in everything that is known")
    return [environments, _bits(lab, first, other, scene, apart)]


def check_alike(other: Examined, *, config: str | None, devices: int | None) -> str | None:
    """Why the other host's digests cannot be compared with those that would be made here; None if they can."""
    for flag, theirs, own in (("config", other.asked.config, config), ("devices", other.asked.devices, devices)):
        if theirs != own:
            return (
                f"was written {f'with --{flag} {theirs}' if theirs is not None else f'without --{flag}'}; give the same"
            )
    return None


def adoptable(scene: Scene, other: Examined) -> dict[str, str | None]:
    """Settings of the other host that differ from those here, so that they can be tried."""
    own = settings_of(scene.environ)
    found = {
        name: other.settings.get(name)
        for name in sorted({*own, *other.settings})
        if own.get(name) != other.settings.get(name) and name not in PLACES
    }
    found.pop(THREADS, None)
    if scene.platform == "cpu":
        theirs = pool_size(other.settings, other.machine.allowed, _devices(other))
        if theirs != pool_size(scene.environ, scene.machine.allowed, scene.devices):
            found[THREADS] = str(theirs)
    return found


def _check(name: str, outcome: Outcome, sentence: str) -> Check:
    return Check(name=name, kind="host", outcome=outcome, sentence=sentence)


def _devices(other: Examined) -> int:
    return (other.environment and other.environment.local_devices) or 1


def _apart(scene: Scene, other: Examined) -> list[Mapping[str, object]]:
    """What is known of both, in the same layout."""

    def described(
        environment: object, settings: Mapping[str, str], machine: HostPart, threads: int
    ) -> Mapping[str, object]:
        found = msgspec.to_builtins(environment)
        found = {name: found.get(name) for name in (*FIXED[:-1], "platform", "local_devices", "options")}
        pool = threads if found["platform"] == "cpu" else None
        # A feature that one of them lacks is told by itself.
        features = dict.fromkeys(machine.features, "yes")
        return {**found, "settings": dict(settings), "features": features, "threads of the pool": pool}

    here = pool_size(scene.environ, scene.machine.allowed, scene.devices)
    there = pool_size(other.settings, other.machine.allowed, _devices(other))
    return [
        described(scene.environment, settings_of(scene.environ), scene.machine, here),
        described(other.environment, other.settings, other.machine, there),
    ]


def _bits(
    lab: Laboratory, first: Answer, other: Examined, scene: Scene, apart: Sequence[Mapping[str, object]]
) -> Check:
    here = by_name(first)
    there = {row.operation: row for row in other.operations if row.digests and row.problem is None}
    both = [name for name in here if name in there]
    alone = [name for name in both if here[name].devices != there[name].devices]
    comparable = [name for name in both if name not in alone]
    if not comparable:
        return _check(BITS, "could not be run", "no operation ran on both hosts on equally many devices")
    different = [name for name in comparable if here[name].digests[0] != there[name].digests[0]]
    aside = f" ({', '.join(alone)}: not compared, on other numbers of devices)" if alone else ""
    if not different:
        return _check(BITS, "ok", f"{len(comparable)} operations gave the same bits on {other.host.name}{aside}")
    adopt = adoptable(scene, other)

    def reasons_of(operations: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
        @functools.cache
        def equal_with(some: frozenset[str]) -> frozenset[str]:
            if not some:
                return frozenset()
            changes = {name: adopt[name] for name in adopt if name in some}
            answer = lab.ask(f"with {len(changes)} settings of {other.host.name}", changes, only=operations)
            found = by_name(answer)
            return frozenset(
                name for name in steady([answer], order=False) if found[name].digests[0] == there[name].digests[0]
            )

        return explanations(names, operations, equal_with)

    check = _check(BITS, "differs", "")
    check.operations = different
    said = [f"{', '.join(different)} gave other bits on {other.host.name}{aside}"]
    try:
        # The training step takes longest: it is tried with what decides the bits of others.
        reasons = reasons_of([name for name in different if name != TRAINING], list(adopt))
        if TRAINING in different:
            found = [name for name in adopt if any(name in each for each in reasons.values())]
            reasons |= reasons_of([TRAINING], found) or reasons_of([TRAINING], list(adopt))
    except ChildFailed as failed:
        check.sentence = f"{said[0]}. It could not be narrowed down ({failed})"
        return check
    own = {**settings_of(scene.environ)}
    if THREADS in adopt:
        own[THREADS] = str(pool_size(scene.environ, scene.machine.allowed, scene.devices))
    for settings in {tuple(each): None for each in reasons.values()}:
        names = [name for name in different if tuple(reasons.get(name, ())) == settings]
        told = " and ".join(f"{shown(name, adopt[name])} there, {shown(name, own.get(name))} here" for name in settings)
        said.append(f"{', '.join(names)}: decided by {told}")
        check.causes += [name for name in settings if name not in check.causes]
    check.lines = lines(scene.environ, {name: adopt[name] for name in check.causes})
    if rest := [name for name in different if name not in reasons]:
        said.append(f"{', '.join(rest)}: {_unexplained(rest, first, other, apart)}")
    check.sentence = ". ".join(said)
    return check


def _unexplained(rest: Sequence[str], first: Answer, other: Examined, apart: Sequence[Mapping[str, object]]) -> str:
    """What may be the reason, where no setting is."""
    here, there = by_name(first), {row.operation: row for row in other.operations}
    if any(here[name].inputs != there[name].inputs for name in rest):
        return "not even the inputs are the same: NumPy, or the processor, computes otherwise"
    fixed = [each for each in differences(apart) if each.key.partition(".")[0] in FIXED]
    programs = [name for name in rest if here[name].program != there[name].program]
    what = "the programs differ" if len(programs) == len(rest) else "of the same program" if not programs else ""
    begin = f"no setting explains it{f' ({what})' if what else ''}"
    if not fixed:
        return f"{begin}, and libraries and processors are the same. {FAULTY}"
    told = "; ".join(each.describe(WORDS) for each in fixed[:6])
    return f"{begin}; what no setting changes differs: {told}. Make that equal first"
