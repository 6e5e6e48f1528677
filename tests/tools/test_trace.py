"""`sdc trace`, `sdc diff` and `sdc campaign` as people run them, and what they say to wrong input."""

import json
import shutil
from pathlib import Path

import pytest

from sdc.program.selectors import primitive
from sdc.tools import cli
from sdc.tools.errors import Exit
from sdc.twins.traces import read_trace

from .command import end, kill_when, lines, sdc, start, summary

PRODUCTS = 'primitive("dot_general")'
TRACE = ("--steps", 3, "--model", 2, "--where", PRODUCTS)
CAMPAIGN = ("--injections", 60, "--steps", 5, "--follow", 1, "--where", PRODUCTS, "--faults", "bitflip", "nan")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "golden"
    code, _, err = sdc("trace", folder, *TRACE, "--simulate", "none")
    assert code == 0, err
    return folder


def test_a_struck_run_parts_from_the_golden_trace(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Live against the record, and afterwards by `sdc diff`: the same place, marked as simulated."""
    target = next(s for s in read_trace(golden).sites if s.direction == "bwd" and "ffn" in s.scope and s.loops == 2)
    folder = golden.parent / "struck"
    fault = f"bitflip,bits=30,step=1,site={target.name},iteration=1+2,element=7,model=1"
    result = summary("trace", folder, *TRACE, "--simulate", fault, "--against", golden, code=1)
    assert result["simulated"]
    assert result["verdict"] == "corrupt"
    assert f"parts from {golden} at step 1: {target.name}, iteration 1, 2, on data=0 model=1" in result["reason"]
    assert len(lines(folder)) == 2  # it stopped there
    assert "SIMULATED" in (folder / "report.html").read_text()

    assert cli.run(["diff", str(golden), str(folder), "--json"]) == Exit.CORRUPT
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"]
    assert found["first"] | {"source": ""} == {
        "step": 1, "site": target.name, "operation": "dot_general", "direction": "bwd", "scope": target.scope,
        "source": "", "iteration": [1, 2], "layer": 2, "devices": [{"data": 0, "model": 1}], "outputs": [0],
    }  # fmt: skip
    assert found["first"]["source"] == target.source
    assert cli.run(["diff", str(golden), str(folder)]) == Exit.CORRUPT
    shown = capsys.readouterr().out
    assert "CORRUPT  (simulated fault)  the traces part at step 1" in shown
    assert "model.py" in shown
    assert cli.run(["diff", str(golden), str(golden)]) == Exit.CLEAN


def test_traces_of_different_programs_are_inconclusive(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = golden.parent / "other"
    shutil.copytree(golden, other)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "program": {"step": "another"}}))
    assert cli.run(["diff", str(golden), str(other)]) == Exit.INCONCLUSIVE
    assert "program.step" in capsys.readouterr().err


def test_a_killed_campaign_ends_with_the_same_table(tmp_path: Path) -> None:
    through, killed = tmp_path / "through", tmp_path / "killed"
    process = start("campaign", *CAMPAIGN, "--run", killed)
    record = killed / "injections.jsonl"
    kill_when(process, lambda: record.is_file() and record.read_text().count("\n") >= 20)
    end(process)  # closes its pipes
    assert not (killed / "summary.json").exists()
    with record.open("a") as file:
        file.write('{"injection": 59, "cut o')  # what a crash can leave
    code, out, err = sdc("campaign", *CAMPAIGN, "--run", killed, "--resume")
    assert code == 0, err
    assert "simulated faults" in out
    other = start("campaign", *CAMPAIGN, "--run", through, "--json")
    code, out, err = end(other)
    assert code == 0, err
    assert (killed / "summary.json").read_bytes() == (through / "summary.json").read_bytes()
    assert record.read_bytes() == (through / "injections.jsonl").read_bytes()
    result = json.loads(out)
    assert result["complete"]
    assert result["done"] == result["reached"] == 60
    assert result["groups"]["fault"]["nan"]["harm"]["share"] > 0.5
    assert (through / "report.md").read_text().count("SIMULATED FAULTS") == 1
    code, _, err = sdc("campaign", *CAMPAIGN, "--run", killed, "--resume", "--seed", 1)
    assert code == 2
    assert "is another campaign" in err
    assert primitive("dot_general").text in (killed / "manifest.json").read_text().replace('\\"', '"')


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["trace", "{new}", "--where", "dot_general"], "'dot_general' is no selector"),
        (["trace", "{new}", "--simulate", "bitflip,step=1"], "'site' is missing, as in"),
        (["trace", "{new}", "--simulate", "meteor,step=1,site=*"], "unknown kind 'meteor'"),
        (["trace", "{new}", "--against", "{new}"], "is no run folder"),
        (["diff", "{new}", "{new}"], "is no run folder"),
        (["campaign", "--injections", "0"], "--injections 0: expected a number of at least 1"),
        (["campaign", "--follow", "16"], "--follow 16: expected a number from 0 to 15"),
        (["campaign", "--faults", "bitflip,rate=1"], "unknown key 'rate'"),
        (["campaign", "--where", "primitive()"], "expected one pattern or more"),
        (["campaign", "--resume"], "give --run DIR"),
    ],
)
def test_bad_input_is_one_line(
    command: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([word.replace("{new}", str(tmp_path / "new")) for word in command]) == Exit.USAGE
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("sdc: error: ")
    assert message in line
    assert captured.out == ""
    assert not list(tmp_path.iterdir())
