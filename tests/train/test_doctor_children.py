"""Children that crash, hang, print garbage or have no time: told as such, and never taken for an answer."""

import os
import sys
import time
from pathlib import Path

import pytest

from sdc.train.doctor.children import ChildFailed, Request, ask
from sdc.train.doctor.examining import decide, examine
from sdc.train.doctor.layout import Check

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
        ("print('hello')", "answered b'hello\\n', which is no result"),
        ("pass", "answered b'', which is no result"),
        ('print(\'{"format": "jax-sdc doctor child"}\')', "missing required field"),
        ("import os; os.write(1, bytes(range(128, 256)))", "which is no result"),
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
    found = examine(environ=os.environ, seconds=0.5, command=(*BARE, "import time; time.sleep(60)"))
    assert (found.verdict.word, found.verdict.code) == ("INCONCLUSIVE", 3)
    runs = [check for check in found.checks if check.kind == "run"]
    assert {check.outcome for check in runs} == {"could not be run"}
    assert "killed" in runs[0].sentence
    assert (found.environment, found.operations) == (None, [])


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
    assert decide([check(outcome) for outcome in outcomes]).code == code
    assert decide([check("ok", "environment")]).code == 3
