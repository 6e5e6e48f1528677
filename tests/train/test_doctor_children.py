"""Children that crash, hang, print garbage or have no time: told as such, and never taken for an answer."""

import os
import sys
import time
from pathlib import Path

import pytest

from sdc.train.doctor.diagnosis import Examination, decide, examine
from sdc.train.doctor.laboratory import ChildFailed, Laboratory, Request, ask
from sdc.train.doctor.results import Check

BARE = (sys.executable, "-S", "-c")


def failure(code: str, *, limit: float = 20.0) -> str:
    with pytest.raises(ChildFailed) as caught:
        ask(Request(), os.environ, limit=limit, command=(*BARE, code))
    return str(caught.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.abort()", "ended with SIGABRT"),
        ("import sys; sys.exit(7)", "ended with exit code 7"),
        ("raise OSError('no device')", "exit code 1: OSError: no device"),
        ("print('hello')", "printed b'hello\\n' instead of a result"),
        ("pass", "printed b'' instead of a result"),
        ('print(\'{"format": "jax-sdc doctor child"}\')', "missing required field"),
        ("import os; os.write(1, bytes(range(128, 256)))", "instead of a result"),
    ],
)
def test_what_a_child_does_instead_of_answering(code: str, said: str) -> None:
    assert said in failure(code)


def test_one_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """It has started a process itself, which holds the pipe."""
    place = tmp_path / "pid"
    code = f"import os, time; os.fork(); open({str(place)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    began = time.monotonic()
    assert "gave no answer within 1 s and was killed" in failure(code, limit=0.6)
    assert time.monotonic() - began < 10
    for number in place.read_text().split():
        for _ in range(100):
            status = Path(f"/proc/{number}/stat")
            if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"process {number} lives on")


def test_no_answer_is_no_verdict() -> None:
    found = examine(Examination(seconds=0.5), environ=os.environ, command=(*BARE, "import time; time.sleep(60)"))
    assert (found.verdict.fitness, found.verdict.code) == ("INCONCLUSIVE", 3)
    runs = [check for check in found.checks if check.kind == "run"]
    assert {check.outcome for check in runs} == {"could not be run"}
    assert "killed" in runs[0].sentence
    assert (found.environment, found.operations) == (None, [])


STUB = """
import json, os, sys
sys.stdin.read()
folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") if os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "true" else None
warm = folder is not None and bool(os.listdir(folder))
if folder is not None:
    open(os.path.join(folder, "program"), "w").close()
if "--xla_new=1" in os.environ.get("XLA_FLAGS", ""):
    sys.exit("F0000 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_new=1")
digest = os.environ.get("WARM", "a") if warm else os.environ.get("XLA_FLAGS", "") or "a"
row = {"operation": "sum", "digests": [digest] * 3}
environment = {"platform": "tpu", "local_devices": 1}
answer = {"format": "jax-sdc doctor child", "environment": environment, "operations": [row], "seconds": 0.1}
print(json.dumps({**answer, "hits": int(os.environ.get("HITS", "1")) * warm}))
"""
"""Answers at once, by what its environment says."""


def of_stub(**environ: str) -> dict[str, Check]:
    found = examine(Examination(seconds=60.0), environ={**environ, "PATH": os.environ["PATH"]}, command=(*BARE, STUB))
    return {each.name: each for each in found.checks}


def test_a_cache_that_gives_other_programs_is_named() -> None:
    cache = of_stub(WARM="b")["compilation cache"]
    assert (cache.outcome, cache.operations) == ("differs", ["sum"])
    assert cache.causes == ["the persistent compilation cache"]
    assert cache.lines == ["export JAX_ENABLE_COMPILATION_CACHE=false"]


def test_a_cache_from_which_nothing_was_read_was_not_checked() -> None:
    assert of_stub()["compilation cache"].outcome == "ok"
    cache = of_stub(HITS="0")["compilation cache"]
    assert cache.outcome == "could not be run"
    assert "no program was read" in cache.sentence


def test_a_flag_that_xla_does_not_know_is_left_out_of_a_trial() -> None:
    environ = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    lab = Laboratory(environ, Request(), 60, command=(*BARE, STUB))
    assert lab.ask("a trial", {"--xla_new": "1", "--xla_old": "2"}).operations[0].digests[0] == "--xla_old=2"
    with pytest.raises(ChildFailed, match="Unknown flag"):  # where it is the user's own, it is told
        Laboratory({**environ, "XLA_FLAGS": "--xla_new=1"}, Request(), 60, command=(*BARE, STUB)).ask("as it is", {})


def check(outcome: str, kind: str = "run") -> Check:
    return Check(name=outcome, kind=kind, outcome=outcome, sentence="")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ((), 3),
        (("not applicable",), 3),
        (("information",), 3),
        (("ok",), 0),
        (("ok", "information", "not applicable"), 0),
        (("ok", "risk"), 3),
        (("ok", "could not be run"), 3),
        (("ok", "could not be run", "risk", "differs"), 1),
    ],
)
def test_the_gravest_decides_and_nothing_is_fit_by_default(outcomes: tuple[str, ...], code: int) -> None:
    assert decide([check(outcome) for outcome in outcomes])[0].code == code
    assert decide([check("ok", "environment")])[0].code == 3
