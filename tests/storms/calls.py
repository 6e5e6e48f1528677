"""Calls: makes each file call of a small run fail, or the last one before a kill; then the run is started again.

`calls.c`, preloaded, counts libc's file calls below the folder of a run, and strikes one of them. The next start must
end with the result of an undisturbed run, or say in one line why it cannot. `starts.py` holds the runs.
"""

import ctypes
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from .tally import Tally

KINDS = (
    "open", "create", "list", "read", "write", "fsync", "ftruncate", "chmod", "close", "rename", "link", "unlink",
    "mkdir", "rmdir",
)  # fmt: skip
"""Kinds of calls, in the order of `calls.c`."""
FAILURES = {
    "ENOSPC": ("create", "write", "rename", "link", "mkdir", "ftruncate"),
    "EIO": ("open", "create", "read", "write", "fsync", "close", "rename", "unlink", "rmdir"),
    "EINTR": ("open", "create", "read", "write", "fsync", "close"),
    "EACCES": ("open", "create", "rename", "link", "unlink", "mkdir", "rmdir"),
}
"""Errors, and the kinds of calls that fail with them."""
KILLS = {"kill": 1, "torn": 2}
"""Kills: after the call, or after half of a write."""
LIMIT = 60.0
"""Time limit in seconds for one start; the first of a process compiles, and imports what it needs."""
SERVE = "import sys; from tests.storms.calls import serve; serve(*sys.argv[1:])"


class Trial(NamedTuple):
    """The strike of one call of a run: the kind of run, the number and kind of the call, and what happens to it."""

    run: str
    call: int
    kind: str
    how: str

    def __str__(self) -> str:
        return f"{self.run}: {self.how} at call {self.call} ({self.kind})"


class Outcome(NamedTuple):
    """How a start ended: `result`, `line` (an error of one line), `traceback`, `killed` or `hang`; and its text."""

    how: str
    text: str
    struck: bool = True


def run(count: int, seed: int, names: Sequence[str] = ()) -> Tally:
    """Makes `count` strikes, drawn from all calls and failures of all kinds of runs, or of some.

    Makes every one if there are not more.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        sys.exit("the storm of calls needs a C compiler named cc; install one (Debian: apt-get install gcc)")
    with tempfile.TemporaryDirectory() as place:
        shim, found = Path(place) / "calls.so", Path(place) / "tally.json"
        source = Path(__file__).with_suffix(".c")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
        words = [sys.executable, "-c", SERVE, place, str(count), str(seed), *names]
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        environment |= {
            "LD_PRELOAD": str(shim),
            "JAX_PLATFORMS": "cpu",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        environment |= {"JAX_COMPILATION_CACHE_DIR": f"{place}/cache", "XDG_RUNTIME_DIR": place}
        subprocess.run(words, env=environment, check=True)
        tally = Tally("calls")
        vars(tally).update(json.loads(found.read_text()))
        tally.seen = type(Tally("").seen)(tally.seen)
        return tally


def serve(where: str, count: str, seed: str, *names: str) -> None:
    """Runs the trials, in the process that has the shim and imports everything, so that its children need not."""
    import tests.tools.warm  # noqa: F401 - imports modules, starts no device

    from . import bits, saves  # noqa: F401 - as above
    from .starts import STARTS

    tally, place = Tally("calls"), Path(where)
    trials: list[Trial] = []
    wanted = {}
    names = names or tuple(STARTS)
    for name in names:
        wanted[name], kinds = _undisturbed(name, place)
        trials += [Trial(name, call, kind, how) for call, kind in enumerate(kinds, start=1) for how in _ways(kind)]
        print(f"  calls: {name}: {len(kinds)} calls", flush=True)
    drawn = sorted(random.Random(int(seed)).sample(range(len(trials)), min(int(count), len(trials))))
    for name in names:
        for some in _portions([trials[each] for each in drawn if trials[each].run == name], 25):
            _judge(tally, place, some, wanted[name])
            print(f"  calls: {tally.trials} of {len(drawn)}", flush=True)
    (place / "tally.json").write_text(
        json.dumps({name: value for name, value in vars(tally).items() if name != "name"})
    )


def _ways(kind: str) -> list[str]:
    """Returns what can happen to a kind of call."""
    return [
        *(name for name, kinds in FAILURES.items() if kind in kinds),
        "kill",
        *(["torn"] if kind == "write" else []),
    ]


def _portions(trials: Sequence[Trial], size: int) -> list[Sequence[Trial]]:
    return [trials[first : first + size] for first in range(0, len(trials), size)]


def _undisturbed(name: str, place: Path) -> tuple[str, list[str]]:
    """Returns the result of a kind of run, and the kinds of its calls."""
    for turn in range(2):  # the first run compiles
        folder = place / f"whole-{turn}"
        folder.mkdir()
        (outcome,) = _starts([folder], [Trial(name, 0, "", "none")], place)
        assert outcome.how == "result", f"{name} without a strike: {outcome}"
        counted = json.loads((place / "counted.json").read_text())
        shutil.rmtree(folder)
    return outcome.text, [KINDS[each] for each in counted]


def _judge(tally: Tally, place: Path, trials: Sequence[Trial], wanted: str) -> None:
    """Runs trials of one kind of run, each in a folder of its own, and then starts each run again."""
    folders = [place / f"trial-{number}" for number in range(len(trials))]
    for folder in folders:
        folder.mkdir()
    struck = _starts(folders, trials, place)
    again = _starts(folders, [Trial(trial.run, 0, "", "none") for trial in trials], place)
    for trial, first, second in zip(trials, struck, again, strict=True):
        tally.trials += 1
        where = f"{trial}: first start: {first.how} {first.text[-1500:]}; second: {second.how} {second.text[-1500:]}"
        if not first.struck:
            tally.note(f"{trial.run}: had ended before")
            continue
        for outcome in (first, second):
            if outcome.how in ("hang", "traceback"):
                tally.fail(outcome.how, where)
        if first.how == "result" and first.text != wanted:
            tally.fail("other bits", where)
        if second.how == "result":
            if second.text != wanted:
                tally.fail("other bits", where)
            tally.note(f"{trial.run}: went on")
        elif second.how == "line":
            tally.note(f"{trial.run}: one line")
            print(f"  calls: one line: {where}", flush=True)
    for folder in folders:
        shutil.rmtree(folder)


def _starts(folders: Sequence[Path], trials: Sequence[Trial], place: Path) -> list[Outcome]:
    """Starts one run after the other in a child, and the rest in another child if a run ends the first."""
    outcomes: list[Outcome] = []
    file = place / "outcomes"
    while len(outcomes) < len(trials):
        file.write_text("")
        rest = list(zip(folders, trials, strict=True))[len(outcomes) :]
        ended = _child(lambda rest=rest: _work(rest, file, place), file)
        outcomes += [Outcome(*json.loads(line)) for line in file.read_text().splitlines()]
        if len(outcomes) < len(trials):
            trial = trials[len(outcomes)]
            if ended == 137 and trial.how in KILLS:
                outcomes.append(Outcome("killed", ""))
            else:
                outcomes.append(Outcome("hang" if ended is None else "traceback", f"exit code {ended}"))
    return outcomes


def _child(work: Callable[[], None], file: Path) -> int | None:
    """Runs a function in a forked process; returns its exit code, or None if it hangs."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    size, deadline = 0, time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if (now := file.stat().st_size) != size:
            size, deadline = now, time.monotonic() + LIMIT
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


def _work(rest: Sequence[tuple[Path, Trial]], file: Path, place: Path) -> None:
    """Starts runs, and writes the outcome of each."""
    from .starts import STARTS

    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    shim.calls_disarm.restype = ctypes.c_long
    kinds = (ctypes.c_ubyte * 65536)()
    err = place / "err"
    written = os.open(err, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(written, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for folder, trial in rest:
        os.ftruncate(2, 0)
        number = getattr(errno, trial.how, 0)
        errors = [number if kind in FAILURES.get(trial.how, ()) else 0 for kind in KINDS]
        mode = KILLS.get(trial.how, 0)
        shim.calls_arm(os.fsencode(folder), ctypes.c_long(trial.call), mode, (ctypes.c_int * len(KINDS))(*errors))
        how, text = _start(lambda trial=trial, folder=folder: str(STARTS[trial.run](folder)))
        struck = shim.calls_struck() >= 0
        count = shim.calls_disarm(kinds)
        said = err.read_text()
        if "Traceback" in said:
            how, text = "traceback", f"{text}\n{said[-3000:]}"
        elif how == "line":
            text = f"{text} {said[-500:]}".strip()
        with file.open("a") as out:
            out.write(json.dumps(Outcome(how, text, struck)) + "\n")
        if trial.how == "none":
            (place / "counted.json").write_text(json.dumps(list(kinds[:count])))


def _start(action: Callable[[], str]) -> tuple[str, str]:
    from .starts import Ended

    try:
        return "result", action()
    except (OSError, ValueError, Ended) as error:
        text = str(error)
        one = len(text.splitlines()) <= 1 or type(error).__module__.partition(".")[0] != "sdc"
        return "line" if one else "traceback", f"{type(error).__name__}: {text}"
    except Exception:
        return "traceback", traceback.format_exc()
