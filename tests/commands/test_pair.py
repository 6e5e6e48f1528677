"""`sdc pair` and `sdc pool` in real processes that find a fault, lose each other, or are not comparable."""

import json
import signal
import time
from pathlib import Path

import pytest

from sdc.burnin.pair import PAIR_FORMAT
from sdc.records import identify
from sdc.standing import Ledger
from sdc.tools import cli
from sdc.verdict import Exit
from tests.reports import make_finding, make_report
from tests.tools.command import several, start, wait

PAIR = ("pair", "--config", "mini", "--steps", 2)
FAULT = ("--fault", "bitflip,rate=1e-3,site=fwd/ffn")
ENDLESS = 100_000


def begun(folder: Path) -> bool:
    steps = folder / "1-step" / "steps.jsonl"
    return steps.is_file() and steps.stat().st_size > 0


def test_two_processes_go_through_all_stages(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    ends = [process.end() for process in several(2, *PAIR, *FAULT, "--run", folder, "--json")]
    assert [code for code, _, _ in ends] == [1, 1], [err[-2000:] for _, _, err in ends]
    pair = PAIR_FORMAT.read(folder)
    assert json.loads(ends[0][1])["id"] == pair.id
    assert ends[1][1] == ""
    assert [stage.name for stage in pair.stages] == ["step", "probes", "operations"]
    assert pair.simulated
    assert [row.processes for row in pair.hosts] == [[0], [1]]
    assert pair.undecided == [row.host for row in pair.hosts]
    assert pair.difference is not None
    assert pair.difference.operation is not None
    model = Path(__file__).parents[2] / "train" / "programs" / "model.py"
    assert pair.difference.operation.source.startswith(str(model))
    assert "SIMULATED: hosts " in pair.sentences[0]
    assert "sdc pool --config mini --steps 2 --run " in pair.next[0]
    assert not [*folder.rglob("checkpoints")]


def test_a_silent_host_ends_a_clean_pair_as_inconclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ledger = tmp_path / "pair", tmp_path / "ledger.sqlite"
    monkeypatch.setenv("SDC_LEDGER", str(ledger))
    with Ledger(ledger, write=True) as entries:
        entries.add(make_report(machine=identify().machine, findings=[make_finding()]), begun="x")
    processes = several(2, *PAIR[:-1], ENDLESS, "--run", folder, "--timeout", 10)
    wait(processes[0], lambda: begun(folder))
    processes[1].send(signal.SIGSTOP)
    sent = time.monotonic()
    code, out, err = processes[0].end()
    assert time.monotonic() - sent < 15
    processes[1].kill()
    assert (code, out) == (3, ""), err[-2000:]
    pair = PAIR_FORMAT.read(folder)
    assert pair.verdict.acceptance == "INCONCLUSIVE"
    assert pair.lost is not None
    assert pair.lost.startswith("process 1 was lost")
    assert pair.stages[0].steps > 0
    assert not pair.stages[0].ended
    assert "until then, the hosts agreed in " in err
    with Ledger(ledger) as entries:
        found = [(entry.kind, entry.verdict, entry.level) for entry in entries.entries() if entry.level == "pair"]
    assert pair.sentences[-1].startswith(f"on record for host {pair.host.name}: FAIL, serial SN-host-0-0: ")
    assert found == [("begun", None, "pair"), ("begun", None, "pair"), ("result", "inconclusive", "pair")]
    assert f"elements). The result is in {folder / 'pair.json'}" in err


def test_a_pool_that_loses_the_coordinator_keeps_what_it_saw(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    processes = several(3, "pool", *PAIR[1:-1], ENDLESS, *FAULT, "--run", folder, "--timeout", 10)
    wait(processes[0], lambda: begun(folder))
    processes[0].send(signal.SIGKILL)
    sent = time.monotonic()
    ends = [process.end() for process in processes[1:]]
    assert time.monotonic() - sent < 15
    assert [code for code, _, _ in ends] == [1, 1], [err[-2000:] for _, _, err in ends]
    pool = PAIR_FORMAT.read(folder)
    assert pool.verdict.acceptance == "FAIL"
    assert pool.suspects == [pool.hosts[2].host]
    assert pool.undecided == []
    assert pool.lost is not None
    assert "sdc: corrupt: process 0 was lost" in ends[0][2]


def test_processes_that_do_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    processes = several(2, *PAIR, "--run", folder)
    processes[1].kill()
    processes[1] = start(*processes[1].arguments, "--dtype", "bfloat16")
    for process in processes:
        code, _, err = process.end()
        assert code == 3, err[-2000:]
        assert "config.model.dtype: process 0 has float32, process 1 has bfloat16" in err
    pair = PAIR_FORMAT.read(folder)
    assert pair.verdict.acceptance == "INCONCLUSIVE"
    assert "not comparable" in pair.sentences[0]
    assert pair.stages == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pool", "--twins: expected the number of hosts; give --twins or --processes"),
        ("pool --twins 2", "--twins 2: expected at least three hosts; compare two with sdc pair"),
        ("pair --coordinator 127.0.0.1:1 --processes 3 --process 0", "--processes 3: expected a multiple of 2"),
        ("pair --resolve {there}/none", "there is no {there}/none; give a file that sdc pair or sdc pool wrote"),
        (
            "pair --resolve {there}",
            "{there} is a folder without pair.json or pool.json; give a file that sdc pair or sdc pool wrote",
        ),
        ("pair --resolve a --steps 3", "--steps 3: has no effect with --resolve"),
        ("pair --run {there}", "exists already; choose another folder"),
        ("pair --suspect node99", "--suspect node99: unknown suspect"),
    ],
)
def test_flags_that_make_no_sense(words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.run(words.format(there=tmp_path).split()) == Exit.USAGE
    assert message.format(there=tmp_path) in capsys.readouterr().err
