"""All checks of the doctor: the same operations in other processes and with other caches, device orders and thread
pools; explanations of differences; comparison with another host; and the verdict."""

import dataclasses
import datetime
import functools
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from sdc.records import GPU_FLAGS, MOST_DEVICES, THREADS, differences
from sdc.settings import SettingError, Within, check_fields
from sdc.verdict import Verdict

from ..programs import check, get_config
from .laboratory import CHILD, SUITE, ChildFailed, Laboratory, Request
from .results import (
    TRAINING,
    Answer,
    Asked,
    Check,
    Examined,
    HostPart,
    Outcome,
    by_name,
    different,
    digests_of,
    read_examined,
    steady,
)
from .surroundings import PLACES, Scene, candidates, changed, describe_host, lines, look, settings_of, shown

REPEAT, PROCESS, CACHE, ORDER = "twice in one process", "in two processes", "compilation cache", "order of devices"
THREAD_POOL, DECIDING = "other thread pool", "settings here"
ENVIRONMENTS, BITS, OTHER = "environments of both hosts", "bits of both hosts", "verdict of the other host"
OUTCOMES: Mapping[Verdict, Outcome] = {Verdict.CLEAN: "ok", Verdict.CORRUPT: "differs", Verdict.INCONCLUSIVE: "risk"}
FAULTY = "A faulty device is a possible cause; run sdc burnin"
TIMES = 3  # runs of each operation in a process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examination:
    """Settings of `sdc doctor`."""

    config: str | None = None
    """Model configuration of the training step: tiny, bench, smollm2_135m, ... (default: one that compiles in
    seconds)."""
    devices: Annotated[int | None, Within(1, MOST_DEVICES)] = None
    """Number of CPU devices to simulate (default: use the existing devices)."""
    prepared: bool = False
    """Examine the environment as the commands of sdc set it up (GPU flags, NPROC) instead of as it is."""
    against: Path | None = None
    """Output of sdc doctor --json from another host, to be compared with this host operation by operation."""
    seconds: Annotated[float, Within(0, 86_400, above=True)] = 300.0
    """Time limit in seconds; checks that are unfinished when it expires are reported as such."""

    def check(self) -> Examined | None:
        """Checks every setting that can be checked without a device, and reads the other host's file."""
        check_fields(self)
        if self.config is not None:
            check(get_config(self.config), 1, 1)
        if self.against is None:
            return None
        other = read_examined(self.against)
        for name in ("config", "devices"):
            if (theirs := getattr(other.asked, name)) != getattr(self, name):
                said = f"with --{name} {theirs}" if theirs is not None else f"without --{name}"
                raise SettingError("against", self.against, f"was written {said}; use the same flags on both hosts")
        return other


def examine(
    asked: Examination,
    *,
    environ: Mapping[str, str] | None = None,
    suite: str = SUITE,
    command: Sequence[str] = CHILD,
    report: Callable[[str], None] = lambda text: None,
) -> Examined:
    """Determines whether an environment is suitable for bitwise comparison. All operations run in separate
    processes."""
    other = asked.check()
    began, created = time.monotonic(), datetime.datetime.now(datetime.UTC)
    machine = describe_host()
    surroundings = dict(os.environ if environ is None else environ)
    if asked.prepared:
        needed = {name: value for name, _, value in (flag.partition("=") for flag in GPU_FLAGS)}
        threads = max(machine.cores, 4, asked.devices or 0)  # as in a run with one device per twin
        surroundings = changed(surroundings, {**needed, THREADS: str(threads)})
    request = Request(suite=suite, options={"config": asked.config}, devices=asked.devices, runs=TIMES)
    lab = Laboratory(surroundings, request, asked.seconds, report=report, command=command)
    checks, first = examine_runs(lab, machine)
    checks += look(Scene(surroundings, None if first is None else first.environment, machine))
    if other is not None:
        checks += compare_hosts(lab, first, other, machine)
    verdict, sentence = decide(checks)
    named = None if asked.against is None else str(asked.against)
    return Examined(
        created=created.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - began, 3),
        verdict=verdict,
        sentence=sentence,
        asked=Asked(config=asked.config, devices=asked.devices, runs=TIMES, prepared=asked.prepared, against=named),
        checks=checks,
        operations=[] if first is None else first.operations,
        environment=None if first is None else first.environment,
        settings=settings_of(surroundings),
        machine=machine,
    )


def decide(checks: Sequence[Check]) -> tuple[Verdict, str]:
    """Returns the verdict and its reason. Differences take precedence over failed checks, failed checks over risks, and
    risks over equal bits."""

    def named(outcome: str) -> str:
        return ", ".join(check.name for check in checks if check.outcome == outcome)

    if apart := named("differs"):
        return Verdict.CORRUPT, f"bits differ: {apart}"
    if failed := named("could not be run"):
        return Verdict.INCONCLUSIVE, f"these checks could not be run: {failed}"
    if risks := named("risk"):
        return (
            Verdict.INCONCLUSIVE,
            f"no bit differed on this host, but bits may differ on another host or in another run (risks: {risks})",
        )
    if not any(check.kind == "run" and check.outcome == "ok" for check in checks):
        return Verdict.INCONCLUSIVE, "nothing was compared"
    equal = named("information")
    return Verdict.CLEAN, "no bit differed" + (f"; keep these equal on all hosts: {equal}" if equal else "")


def examine_runs(lab: Laboratory, machine: HostPart) -> tuple[list[Check], Answer | None]:
    """Runs all operations and narrows down the causes of differences. Returns the checks, and the answer of the first
    process (None if that process failed)."""
    with tempfile.TemporaryDirectory(prefix="sdc-doctor-") as folder:
        try:
            first = lab.ask("first process, empty cache", {}, cache=folder)
        except ChildFailed as failed:
            names = (REPEAT, PROCESS, CACHE, ORDER, THREAD_POOL)
            return [Check(name, "run", "could not be run", str(failed)) for name in names], None
        scene = Scene(lab.environ, first.environment, machine)
        ran = by_name(first)
        small = [name for name, row in ran.items() if row.devices == 1 and name != TRAINING]
        size = scene.pool
        # A number of threads with which matrix products are known to be split differently.
        threads = 1 if scene.devices == 1 and size > 1 else 2 * size
        jobs: list[Callable[[], Answer]] = [
            lambda: lab.ask("second process, without a cache", {}),
            lambda: lab.ask("third process, warm cache", {}, cache=folder),
        ]
        if scene.platform == "cpu":  # other devices allow only one process at a time
            lab.workers = 2
            if small:
                jobs.append(lambda: lab.ask(f"with {THREADS}={threads}", {THREADS: str(threads)}, only=small))
        second, warm, *pool = lab.together(jobs)
    rows = [row for each in (first, second, warm) if isinstance(each, Answer) for row in by_name(each).values()]
    within = list(dict.fromkeys(row.operation for row in rows if len(set(row.digests)) > 1))
    turned = list(dict.fromkeys(row.operation for row in rows if row.permuted not in (None, row.digests[0])))
    apart = [] if isinstance(second, ChildFailed) else different(first, second)
    explain = narrow_down(lab, scene, list(dict.fromkeys([*within, *apart, *turned])))

    def judged(name: str, operations: list[str], same: str) -> Check:
        if not operations:
            return Check(name, "run", "ok", same)
        said, causes, to_set = explain(operations)
        sentence = f"{', '.join(operations)} gave different bits. {said}"
        return Check(name, "run", "differs", sentence, operations, causes, to_set)

    same = f"{len(ran)} operations gave the same bits in"
    checks = [judged(REPEAT, within, f"{same} each of {lab.request.runs} runs")]
    if isinstance(second, ChildFailed):
        checks.append(Check(PROCESS, "run", "could not be run", str(second)))
    else:
        checks.append(judged(PROCESS, apart, f"{same} another process"))
    if isinstance(warm, ChildFailed) or not warm.hits:
        what = (
            warm
            if isinstance(warm, ChildFailed)
            else "no program was read from the cache that the first process filled"
        )
        checks.append(Check(CACHE, "run", "could not be run", str(what)))
    elif stale := [name for name in different(first, warm) if name not in apart]:
        said = (
            f"{', '.join(stale)}: programs read from the cache and newly compiled programs gave different "
            "bits. Clear the cache, or "
        )
        mend = lines({}, {"JAX_ENABLE_COMPILATION_CACHE": "false"})
        sentence, causes = f"{said}do not use it. {FAULTY}", ["the persistent compilation cache"]
        checks.append(Check(CACHE, "run", "differs", sentence, stale, causes, mend))
    else:
        said = f"the bits were the same with an empty and with a warm cache ({warm.hits} programs read)"
        checks.append(Check(CACHE, "run", "ok", said))
    if several := [row.devices for row in ran.values() if row.permuted is not None]:
        said = f"{len(several)} operations gave the same bits with the {max(several)} devices in reverse order"
        checks.append(judged(ORDER, turned, said))
    else:
        checks.append(Check(ORDER, "run", "not applicable", "there is only one device; --devices 2 simulates two"))
    checks += [_pool(first, pool[0] if pool else None, size, threads), _deciding(lab, first, small)]
    broken = {row.operation: row.problem for row in first.operations if row.problem or not row.digests}
    if broken or not first.operations:
        said = "; ".join(f"{name}: {problem}" for name, problem in broken.items()) or "there were no operations to run"
        checks.append(Check("all operations", "run", "could not be run", said, list(broken)))
    return checks, first


def _pool(first: Answer, answer: Answer | ChildFailed | None, size: int, other: int) -> Check:
    """Checks whether a different size of the thread pool changes bits."""
    if answer is None:
        return Check(THREAD_POOL, "run", "not applicable", "the devices are not CPUs")
    if isinstance(answer, ChildFailed):
        return Check(THREAD_POOL, "run", "could not be run", str(answer))
    if not (apart := different(first, answer)):
        same = f"{len(by_name(answer))} operations gave the same bits with {other} threads as with {size}"
        return Check(THREAD_POOL, "run", "information", f"{same}; the bits of larger operations may differ")
    said = f"{', '.join(apart)}: bits differ between {size} and {other} threads"
    sentence, mend = f"{said}; compare only hosts with equal {THREADS}", lines({}, {THREADS: str(size)})
    return Check(THREAD_POOL, "run", "information", sentence, apart, [THREADS], mend)


def _deciding(lab: Laboratory, first: Answer, names: Sequence[str]) -> Check:
    """Finds the settings that change bits on this host, by running operations without them."""
    values = settings_of(lab.environ)
    given = [name for name in values if name not in PLACES and name != THREADS]
    if not given or not names:
        return Check(DECIDING, "run", "not applicable", "no variable or flag that could affect bits is set")

    def other_without(some: frozenset[str]) -> frozenset[str]:
        what = f"without {len(some)} of the settings"
        return frozenset(different(first, lab.ask(what, dict.fromkeys(some, None), only=names)) if some else ())

    left, causes, operations = given, list[str](), list[str]()
    try:
        while left and (found := explanations(left, names, other_without)):
            operations += [name for name in found if name not in operations]
            new = {cause for each in found.values() for cause in each}
            causes += [name for name in left if name in new]
            left = [name for name in left if name not in new]
    except ChildFailed as failed:
        return Check(DECIDING, "run", "could not be run", str(failed))
    if not causes:
        return Check(DECIDING, "run", "ok", f"{', '.join(given)}: the bits are the same without these settings")
    said = ", ".join(shown(name, values[name]) for name in causes)
    sentence = (
        f"{said}: without these settings, the bits of {', '.join(operations)} differ. Compare only hosts with "
        "equal settings"
    )
    return Check(DECIDING, "run", "information", sentence, operations, causes)


# Maximum number of settings that are first tried one by one, because usually a single setting is the cause and each
# trial tests all operations
FEW = 8
# Function that returns the operations for which a property holds under a given subset of the settings
Holding: TypeAlias = Callable[[frozenset[str]], frozenset[str]]


def minimal(names: Sequence[str], holds: Callable[[frozenset[str]], bool]) -> list[str]:
    """Returns a minimal subset of settings for which a property holds: none of its settings can be omitted.

    The property must hold for the full set, and is assumed to be monotonic. The method is the bisection of U. Junker,
    *QuickXplain: Preferred explanations and relaxations for over-constrained problems*, AAAI 2004.

    Example:
        >>> from sdc.train.doctor.diagnosis import minimal
        >>> minimal("abcdefgh", lambda some: {"b", "g"} <= some)
        ['b', 'g']
    """

    def go(given: frozenset[str], more: bool, rest: Sequence[str]) -> list[str]:
        if more and holds(given):
            return []
        if len(rest) == 1:
            return list(rest)
        left, right = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        of_right = go(given | set(left), True, right)
        return [*go(given | set(of_right), bool(of_right), left), *of_right]

    return [] if not names or holds(frozenset()) else go(frozenset(), False, names)


def explanations(names: Sequence[str], operations: Sequence[str], holding: Holding) -> dict[str, list[str]]:
    """Returns, for each operation whose difference can be explained by settings, a minimal set of settings that
    explains it."""
    ask = functools.cache(holding)
    alone = [[name] for name in names] if len(names) <= FEW else []
    found: dict[str, list[str]] = {}

    def explained(operation: str) -> list[str]:
        before = next((some for some in [*found.values(), *alone] if operation in ask(frozenset(some))), None)
        return before or minimal(names, lambda some: operation in ask(some))

    for operation in operations if names else ():
        if operation in ask(frozenset(names)):
            found[operation] = explained(operation)
    return found


def narrow_down(
    lab: Laboratory, scene: Scene, names: Sequence[str]
) -> Callable[[Sequence[str]], tuple[str, list[str], list[str]]]:
    """Reruns operations that differed, in two processes at a time, with settings that may make them deterministic.

    The returned function takes operations and returns sentences about them, the settings that matter, and shell lines
    that change these settings.
    """
    tried = candidates(scene)
    again: list[str] = []
    found: dict[str, list[str]] = {}
    problem: ChildFailed | None = None

    @functools.cache
    def holding(some: frozenset[str]) -> frozenset[str]:
        changes = {name: tried[name] for name in tried if name in some}
        what = f"narrowing down: {len(changes)} settings changed"
        answers = lab.together([lambda: lab.ask(what, changes, only=names)] * 2)
        for each in answers:
            if isinstance(each, ChildFailed):
                raise each
        return steady([each for each in answers if isinstance(each, Answer)], order=True)

    if names:
        try:
            again = [name for name in names if name not in holding(frozenset())]
            found = explanations(list(tried), again, holding)
        except ChildFailed as failed:
            problem = failed

    def explain(names: Sequence[str]) -> tuple[str, list[str], list[str]]:
        if problem is not None:
            return f"The cause could not be narrowed down ({problem}). {FAULTY}", [], []
        said: list[str] = []
        causes: dict[str, None] = {}
        to_set: dict[str, None] = {}
        for settings in dict.fromkeys(tuple(found[name]) for name in names if name in found):
            changes = {name: tried[name] for name in settings}
            those = [name for name in names if tuple(found.get(name, ())) == settings]
            remedy = " and ".join(shown(*each) for each in changes.items())
            said.append(f"{', '.join(those)}: the difference disappears with {remedy}")
            causes |= dict.fromkeys(settings)
            to_set |= dict.fromkeys(lines(lab.environ, changes))
        if once := [name for name in names if name not in again]:
            said.append(f"{', '.join(once)}: the difference did not recur in two more processes. {FAULTY}")
        if rest := [name for name in names if name in again and name not in found]:
            said.append(
                f"{', '.join(rest)}: the {len(tried)} settings tried do not explain the difference. The program itself "
                f"may change each time (counters, clocks, callbacks), or a library may be nondeterministic. {FAULTY}"
            )
        return ". ".join(said), list(causes), list(to_set)

    return explain


WORDS = ("this host has", "the other has")
# Properties that no setting can change
FIXED = ("python", "packages", "platform_version", "device_kind", "machine", "processor", "features")


def compare_hosts(lab: Laboratory, first: Answer | None, other: Examined, machine: HostPart) -> list[Check]:
    """Compares all measurements of this host with those of another host, whose verdict counts too."""
    said = f"{other.host.name} is {other.verdict.fitness}: {other.sentence}"
    theirs = Check(OTHER, "host", OUTCOMES[other.verdict], said)
    if first is None:
        said = "no operation could be run on this host"
        return [*(Check(name, "host", "could not be run", said) for name in (ENVIRONMENTS, BITS)), theirs]
    return [*_compare_answers(lab, first, other, machine), theirs]


def _compare_answers(lab: Laboratory, first: Answer, other: Examined, machine: HostPart) -> list[Check]:
    here = Scene(lab.environ, first.environment, machine)
    there = Scene(other.settings, other.environment, other.machine)
    own = settings_of(lab.environ)
    apart = differences([_described(here, own), _described(there, other.settings)])
    said = "; ".join(each.describe(WORDS) for each in apart)
    environments = Check(
        ENVIRONMENTS, "host", "information" if said else "ok", said or "equal in all recorded properties"
    )

    mine, theirs = by_name(first), by_name(other)
    missing: dict[str, list[str]] = {}  # operations that cannot be compared, by reason
    comparable = []
    for name in dict.fromkeys(row.operation for row in (*first.operations, *other.operations)):
        if name not in mine or name not in theirs:
            where = [host for host, ran in (("this host", mine), (other.host.name, theirs)) if name not in ran]
            missing.setdefault(f"did not run on {' and '.join(where)}", []).append(name)
        elif mine[name].devices != theirs[name].devices:
            numbers = f"{mine[name].devices} devices here, {theirs[name].devices} there"
            missing.setdefault(f"ran on different numbers of devices ({numbers})", []).append(name)
        else:
            comparable.append(name)
    operations = [name for name in comparable if len(digests_of(mine[name]) | digests_of(theirs[name])) > 1]
    left_out = "; ".join(f"not compared: {', '.join(names)} {why}" for why, names in missing.items())
    aside = f" ({left_out})" if left_out else ""
    if not operations:
        said = f"{len(comparable)} operations gave the same bits as on {other.host.name}{aside}"
        outcome: Outcome = "could not be run" if missing else "ok"
        return [
            environments,
            Check(BITS, "host", outcome, said, [name for names in missing.values() for name in names]),
        ]

    # Settings of the other host that differ from those of this host and can be tried here.
    adopt = {
        name: other.settings.get(name)
        for name in sorted({*own, *other.settings} - {*PLACES, THREADS})
        if own.get(name) != other.settings.get(name)
    }
    if here.platform == "cpu" and here.pool != there.pool:
        adopt[THREADS], own[THREADS] = str(there.pool), str(here.pool)

    def reasons_of(operations: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
        def equal_with(some: frozenset[str]) -> frozenset[str]:
            if not some:
                return frozenset()
            changes = {name: adopt[name] for name in adopt if name in some}
            answer = lab.ask(f"with {len(changes)} settings of {other.host.name}", changes, only=operations)
            found = by_name(answer)
            return frozenset(
                name for name in steady([answer], order=False) if found[name].digests[0] == theirs[name].digests[0]
            )

        return explanations(names, operations, equal_with)

    whole = f"{', '.join(operations)}: the bits differ from those on {other.host.name}{aside}"
    if unsteady := [name for name in operations if len(digests_of(theirs[name])) > 1]:
        whole += f". {', '.join(unsteady)}: the bits differed between the runs on {other.host.name}"
    check = Check(BITS, "host", "differs", whole, operations)
    operations = [name for name in operations if name not in unsteady]
    try:
        # The training step takes longest, so it is rerun only with settings that affect other operations.
        reasons = reasons_of([name for name in operations if name != TRAINING], list(adopt))
        if TRAINING in operations:
            found = [name for name in adopt if any(name in each for each in reasons.values())]
            reasons |= reasons_of([TRAINING], found) or reasons_of([TRAINING], list(adopt))
    except ChildFailed as failed:
        check.sentence = f"{whole}. The cause could not be narrowed down ({failed})"
        return [environments, check]
    causes: dict[str, None] = {}
    for settings in {tuple(each): None for each in reasons.values()}:
        names = [name for name in operations if tuple(reasons.get(name, ())) == settings]
        cause = " and ".join(
            f"{shown(name, adopt[name])} on the other host, {shown(name, own.get(name))} on this host"
            for name in settings
        )
        check.sentence += f". {', '.join(names)}: caused by {cause}"
        causes |= dict.fromkeys(settings)
    check.causes, check.lines = list(causes), lines(lab.environ, {name: adopt[name] for name in causes})
    if rest := [name for name in operations if name not in reasons]:
        fixed = [each.describe(WORDS) for each in apart if each.key.partition(".")[0] in FIXED]
        programs = [name for name in rest if mine[name].program != theirs[name].program]
        what = " (the programs differ)" if len(programs) == len(rest) else "" if programs else " (with equal programs)"
        why = f"no setting explains the difference{what}, and libraries and processors are equal. {FAULTY}"
        if any(mine[name].inputs != theirs[name].inputs for name in rest):
            why = "even the inputs differ, because NumPy or the processor computes them differently"
        elif fixed:
            why = (
                f"no setting explains the difference{what}; the hosts differ in properties that no setting changes: "
                f"{'; '.join(fixed[:6])}. Make these "
            )
            why += "equal first"
        check.sentence += f". {', '.join(rest)}: {why}"
    return [environments, check]


def _described(scene: Scene, settings: Mapping[str, str]) -> Mapping[str, object]:
    found = msgspec.to_builtins(scene.environment)
    found = {name: found.get(name) for name in (*FIXED[:-1], "platform", "local_devices", "options")}
    pool = scene.pool if found["platform"] == "cpu" else None
    # A feature that one host lacks is reported separately.
    features = dict.fromkeys(scene.machine.features, "yes")
    return {**found, "settings": dict(settings), "features": features, "threads of the pool": pool}
