"""All checks: the same operations in other processes, caches, orders and thread pools; and the verdict."""

import datetime
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from sdc.records import GPU_FLAGS, THREADS
from sdc.settings import SettingError
from sdc.verdict import Verdict

from .causes import FAULTY, Reasons, explanations, narrow_down
from .host_comparison import compare_hosts
from .laboratory import CHILD, SUITE, ChildFailed, Laboratory, Request
from .results import (
    TRAINING,
    Answer,
    Asked,
    Check,
    Examined,
    HostPart,
    Outcome,
    between,
    by_name,
    turned,
    unsteady,
)
from .surroundings import PLACES, Scene, changed, describe_host, lines, look, pool_size, settings_of, shown

REPEAT, PROCESS, CACHE, ORDER = "twice in one process", "in two processes", "compilation cache", "order of devices"
THREAD_POOL, DECIDING = "other thread pool", "settings here"
RUNS = (REPEAT, PROCESS, CACHE, ORDER, THREAD_POOL)


def examine_runs(lab: Laboratory, machine: HostPart) -> tuple[list[Check], Answer | None]:
    """Runs everything, and narrows down what differs."""
    with tempfile.TemporaryDirectory(prefix="sdc-doctor-") as folder:
        try:
            first = lab.ask("first process, empty cache", {}, cache=folder)
        except ChildFailed as failed:
            return [_check(name, "could not be run", str(failed)) for name in RUNS], None
        scene = Scene(lab.environ, first.environment, machine)
        if scene.platform == "cpu":  # other devices belong to one process at a time
            lab.workers = 2
        small = [name for name, row in by_name(first).items() if row.devices == 1 and name != TRAINING]
        other = other_pool(lab.environ, machine, scene.devices)
        jobs: list[Callable[[], Answer]] = [
            lambda: lab.ask("second process, without a cache", {}),
            lambda: lab.ask("third process, warm cache", {}, cache=folder),
        ]
        if scene.platform == "cpu" and small:
            jobs.append(lambda: lab.ask(f"with {THREADS}={other}", {THREADS: str(other)}, only=small))
        second, warm, *pool = lab.together(jobs)
    told = [each for each in (first, second, warm) if isinstance(each, Answer)]
    within, order = unsteady(told), turned(told)
    apart = between(first, second) if isinstance(second, Answer) else []
    reasons = narrow_down(lab, scene, list(dict.fromkeys([*within, *apart, *order])))
    checks = [
        _judged(REPEAT, within, f"{_count(first)} gave the same bits in each of {lab.request.runs} runs", reasons),
        _check(PROCESS, "could not be run", str(second))
        if isinstance(second, ChildFailed)
        else _judged(PROCESS, apart, f"{_count(first)} gave the same bits in another process", reasons),
        _cache(first, warm, apart),
        _order(first, order, reasons),
        _pool(first, pool[0] if pool else None, other, lab.environ, scene),
        _deciding(lab, first, small),
    ]
    broken = {row.operation: row.problem for row in first.operations if row.problem or not row.digests}
    if broken or not first.operations:
        said = "; ".join(f"{name}: {problem}" for name, problem in broken.items()) or "there was nothing to run"
        checks.append(_check("all operations", "could not be run", said, operations=list(broken)))
    return checks, first


def other_pool(environ: Mapping[str, str], machine: HostPart, devices: int) -> int:
    """Another number of threads, with which matrix products are known to be split otherwise."""
    size = pool_size(environ, machine.allowed, devices)
    return 1 if devices == 1 and size > 1 else 2 * size


def _check(
    name: str,
    outcome: Outcome,
    sentence: str,
    *,
    operations: Sequence[str] = (),
    causes: Sequence[str] = (),
    to_set: Sequence[str] = (),
) -> Check:
    return Check(
        name=name,
        kind="run",
        outcome=outcome,
        sentence=sentence,
        operations=list(operations),
        causes=list(causes),
        lines=list(to_set),
    )


def _count(answer: Answer) -> str:
    return f"{len(by_name(answer))} operations"


def _judged(name: str, different: Sequence[str], same: str, reasons: Reasons) -> Check:
    if not different:
        return _check(name, "ok", same)
    said, causes, to_set = reasons.tell(different)
    sentence = f"{', '.join(different)} gave other bits. {said}"
    return _check(name, "differs", sentence, operations=different, causes=causes, to_set=to_set)


def _cache(first: Answer, warm: Answer | ChildFailed, apart: Sequence[str]) -> Check:
    if isinstance(warm, ChildFailed):
        return _check(CACHE, "could not be run", str(warm))
    if not warm.hits:
        return _check(CACHE, "could not be run", "nothing was read from the cache that the first process filled")
    different = [name for name in between(first, warm) if name not in apart]
    if not different:
        return _check(CACHE, "ok", f"the same bits from an empty cache and from a warm one ({warm.hits} programs read)")
    return _check(
        CACHE,
        "differs",
        f"{', '.join(different)}: what was read from the cache gave other bits than what was compiled. Clear it, or do "
        f"without. {FAULTY}",
        operations=different,
        causes=["the persistent compilation cache"],
        to_set=lines({}, {"JAX_ENABLE_COMPILATION_CACHE": "false"}),
    )


def _order(first: Answer, different: Sequence[str], reasons: Reasons) -> Check:
    several = [row for row in by_name(first).values() if row.permuted is not None]
    if not several:
        return _check(ORDER, "not applicable", "there is one device; --devices 2 simulates more")
    count = max(row.devices for row in several)
    same = f"{len(several)} operations on {count} devices gave the same bits in the opposite order"
    return _judged(ORDER, different, same, reasons)


def _pool(
    first: Answer, answer: Answer | ChildFailed | None, other: int, environ: Mapping[str, str], scene: Scene
) -> Check:
    if answer is None:
        return _check(THREAD_POOL, "not applicable", "the devices are not CPUs")
    if isinstance(answer, ChildFailed):
        return _check(THREAD_POOL, "could not be run", str(answer))
    size = pool_size(environ, scene.machine.allowed, scene.devices)
    different = between(first, answer)
    if not different:
        said = f"{_count(answer)} gave the same bits with {other} threads as with {size}; larger ones may not"
        return _check(THREAD_POOL, "information", said)
    said = f"thread pool size decides the bits of {', '.join(different)} ({size} threads, and {other})"
    return _check(
        THREAD_POOL,
        "information",
        f"{said}: compare only hosts with equal {THREADS}",
        operations=different,
        causes=[THREADS],
        to_set=lines({}, {THREADS: str(size)}),
    )


def _deciding(lab: Laboratory, first: Answer, names: Sequence[str]) -> Check:
    """Which of the settings that are set change bits here, by taking them away."""
    given = [name for name in settings_of(lab.environ) if name not in PLACES and name != THREADS]
    if not given or not names:
        return _check(DECIDING, "not applicable", "no variable or flag is set that could decide bits")

    def other_without(some: frozenset[str]) -> frozenset[str]:
        if not some:
            return frozenset()
        changes = dict.fromkeys(some, None)
        return frozenset(between(first, lab.ask(f"without {len(some)} of the settings", changes, only=names)))

    left, causes, different = list(given), [], []
    try:
        while left and (found := explanations(left, names, other_without)):
            different += [name for name in found if name not in different]
            new = {cause for each in found.values() for cause in each}
            causes += [name for name in left if name in new]
            left = [name for name in left if name not in new]
    except ChildFailed as failed:
        return _check(DECIDING, "could not be run", str(failed))
    if not causes:
        return _check(DECIDING, "ok", f"{', '.join(given)}: without them the bits are the same")
    values = settings_of(lab.environ)
    said = ", ".join(shown(name, values[name]) for name in causes)
    sentence = f"{said}: without, {', '.join(different)} gives other bits. Compare only hosts where this is equal"
    return _check(DECIDING, "information", sentence, operations=different, causes=causes)


TIMES = 3
"""Runs of each operation in a process."""
SECONDS = 300.0
MOST_SECONDS = 86_400.0


def examine(
    *,
    config: str | None = None,
    devices: int | None = None,
    seconds: float = SECONDS,
    prepared: bool = False,
    against: Examined | None = None,
    named: str | None = None,
    environ: Mapping[str, str] | None = None,
    suite: str = SUITE,
    command: Sequence[str] = CHILD,
    tell: Callable[[str], None] = lambda text: None,
) -> Examined:
    """Finds out whether an environment is fit for bitwise comparison. Everything runs in processes of its own."""
    if not 0 < seconds <= MOST_SECONDS:
        raise SettingError("seconds", seconds, f"expected a number above 0, at most {MOST_SECONDS:,.0f}")
    began, created = time.monotonic(), datetime.datetime.now(datetime.UTC)
    machine = describe_host()
    surroundings = dict(os.environ if environ is None else environ)
    if prepared:
        needed = {name: value for name, _, value in (flag.partition("=") for flag in GPU_FLAGS)}
        threads = max(machine.cores, 4, devices or 0)  # as for a run on one device of each twin
        surroundings = changed(surroundings, {**needed, THREADS: str(threads)})
    request = Request(suite=suite, options={"config": config}, devices=devices, runs=TIMES)
    lab = Laboratory(surroundings, request, seconds, tell=tell, command=command)
    checks, first = examine_runs(lab, machine)
    checks += look(Scene(surroundings, None if first is None else first.environment, machine))
    if against is not None:
        checks += compare_hosts(lab, first, against, machine)
    verdict, sentence = decide(checks)
    return Examined(
        created=created.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - began, 3),
        verdict=verdict,
        sentence=sentence,
        asked=Asked(config=config, devices=devices, runs=TIMES, prepared=prepared, against=named),
        checks=checks,
        operations=[] if first is None else first.operations,
        environment=None if first is None else first.environment,
        settings=settings_of(surroundings),
        machine=machine,
    )


OUTCOMES = ("differs", "could not be run", "risk", "information")


def decide(checks: Sequence[Check]) -> tuple[Verdict, str]:
    """The verdict: a difference weighs more than what could not be found out, and that more than what was equal."""
    names = {outcome: [check.name for check in checks if check.outcome == outcome] for outcome in OUTCOMES}
    if different := names["differs"]:
        return Verdict.CORRUPT, f"bits differ: {', '.join(different)}"
    if failed := names["could not be run"]:
        return Verdict.INCONCLUSIVE, f"could not be found out: {', '.join(failed)}"
    if risks := names["risk"]:
        return Verdict.INCONCLUSIVE, f"no bit differed here, but others may on another host or day: {', '.join(risks)}"
    if not any(check.kind == "run" and check.outcome == "ok" for check in checks):
        return Verdict.INCONCLUSIVE, "nothing was compared"
    equal = names["information"]
    kept = f"; between hosts keep equal: {', '.join(equal)}" if equal else ""
    return Verdict.CLEAN, f"no bit differed{kept}"
