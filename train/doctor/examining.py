"""All checks of the doctor, and the verdict that follows from them."""

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence

from sdc.records import GPU_FLAGS, THREADS
from sdc.settings import SettingError

from .children import CHILD, SUITE, Request
from .hosts import describe_host
from .laboratory import Laboratory
from .layout import CODES, Asked, Check, Decided, Examined, Word
from .pairing import compare_hosts
from .repeating import examine_runs
from .settings import changed, settings_of
from .surroundings import Scene, look

RUNS = 3
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
    """Finds out whether an environment is fit for bitwise comparison. Everything runs in processes of its own.

    Args:
        config: configuration of the training step; None for a tiny one.
        devices: CPU devices to simulate; None for what there is.
        seconds: all that it may take; what was not found out until then is told.
        prepared: add what the commands of sdc set: flags of GPUs, size of the thread pool.
        against: what the doctor wrote on another host.
        named: the name of that file, for the record.
        environ: the environment; by default that of this process.
        suite: `MODULE:FUNCTION` of the operations to run, a function of options that returns a list of
            `sdc.train.doctor.operation.Operation`.
        command: what is started as a child process.
        tell: hears what is done next.

    Returns:
        Checks and verdict.

    Raises:
        SettingError: the time makes no sense.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise SettingError("seconds", seconds, f"expected a number above 0, at most {MOST_SECONDS:,.0f}")
    began, created = time.monotonic(), datetime.datetime.now(datetime.UTC)
    machine = describe_host()
    surroundings = dict(os.environ if environ is None else environ)
    if prepared:
        needed = {name: value for name, _, value in (flag.partition("=") for flag in GPU_FLAGS)}
        threads = max(machine.cores, 4, devices or 0)  # as for a run on one device of each twin
        surroundings = changed(surroundings, {**needed, THREADS: str(threads)})
    request = Request(suite=suite, options={"config": config}, devices=devices, runs=RUNS)
    lab = Laboratory(surroundings, request, seconds, tell=tell, command=command)
    checks, first = examine_runs(lab, machine)
    checks += look(Scene(surroundings, None if first is None else first.environment, machine))
    if against is not None:
        checks += compare_hosts(lab, first, against, machine)
    return Examined(
        created=created.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - began, 3),
        verdict=decide(checks),
        asked=Asked(config=config, devices=devices, runs=RUNS, prepared=prepared, against=named),
        checks=checks,
        operations=[] if first is None else first.operations,
        environment=None if first is None else first.environment,
        settings=settings_of(surroundings),
        machine=machine,
    )


def decide(checks: Sequence[Check]) -> Decided:
    """The verdict: a difference weighs more than what could not be found out, and that more than what was equal.

    Example:
        >>> from sdc.train.doctor.examining import decide
        >>> decide([]).word
        'INCONCLUSIVE'
    """
    names = {outcome: [check.name for check in checks if check.outcome == outcome] for outcome in OUTCOMES}
    if different := names["differs"]:
        return _decided("NOT FIT", f"bits differ: {', '.join(different)}")
    if failed := names["could not be run"]:
        return _decided("INCONCLUSIVE", f"could not be found out: {', '.join(failed)}")
    if risks := names["risk"]:
        return _decided(
            "INCONCLUSIVE", f"no bit differed here, but others may on another host or day: {', '.join(risks)}"
        )
    if not any(check.kind == "run" and check.outcome == "ok" for check in checks):
        return _decided("INCONCLUSIVE", "nothing was compared")
    equal = names["information"]
    kept = f"; between hosts keep equal what is told of: {', '.join(equal)}" if equal else ""
    return _decided("FIT", f"no bit differed{kept}")


OUTCOMES = ("differs", "could not be run", "risk", "information")


def _decided(word: Word, sentence: str) -> Decided:
    return Decided(word=word, code=CODES[word], sentence=sentence)
