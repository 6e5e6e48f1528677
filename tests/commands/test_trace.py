"""`sdc trace`, `sdc diff` and `sdc campaign` in real processes, and their messages on wrong input."""

import json
import shutil
from pathlib import Path

import pytest

from sdc.records import read_manifest
from sdc.records.format import write_sealed
from sdc.tools import cli
from sdc.twins.traces import read_trace
from sdc.verdict import Exit
from tests.tools.command import sdc, summary

TRACE = ("--config", "mini", "--steps", 2, "--model", 2, "--where", 'probes | primitive("tanh")')


def test_traces_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden, struck = tmp_path / "golden", tmp_path / "struck"
    code, _, err = sdc("trace", golden, *TRACE, "--fault", "none")
    assert code == 0, err
    target = next(site for site in read_trace(golden).sites if site.name == "bwd/ffn")
    fault = f"bitflip,bits=30,step=1,site={target.name},iteration=1+1,element=7,model=1"
    result = summary("trace", struck, *TRACE, "--fault", fault, "--against", golden, code=1)
    assert result["simulated"]
    assert result["verdict"] == "corrupt"

    assert cli.run(["diff", str(golden), str(struck), "--json"]) == Exit.CORRUPT
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"]
    assert found["first"] | {"source": ""} == {
        "step": 1, "site": target.name, "operation": "probe", "direction": "bwd", "scope": target.scope, "source": "",
        "iteration": [1, 1], "layer": 1, "devices": [{"data": 0, "model": 1}], "outputs": [0],
    }  # fmt: skip
    assert found["first"]["source"] == target.source
    assert cli.run(["diff", str(golden), str(struck)]) == Exit.CORRUPT
    shown = capsys.readouterr().out
    assert "CORRUPT (simulated faults)" in shown
    assert "first difference at step 1" in shown
    assert "model.py" in shown
    assert cli.run(["diff", str(golden), str(golden)]) == Exit.INCONCLUSIVE
    assert "would be compared with itself" in capsys.readouterr().err
    shutil.copytree(golden, tmp_path / "copy")
    assert cli.run(["diff", str(golden), str(tmp_path / "copy")]) == Exit.CLEAN
    manifest = read_manifest(struck)
    write_sealed(struck / "manifest.json", {**manifest, "program": {"step": "another"}})
    assert cli.run(["diff", str(golden), str(struck)]) == Exit.INCONCLUSIVE
    assert "program.step" in capsys.readouterr().err


def test_a_campaign_from_the_command_line(tmp_path: Path) -> None:
    flags = (
        "--config",
        "mini",
        "--injections",
        6,
        "--steps",
        3,
        "--follow",
        1,
        "--where",
        "probes",
        "--run",
        tmp_path / "run",
    )
    code, out, err = sdc("campaign", *flags)
    assert code == 0, err
    assert "[simulated faults] Outcomes" in out
    assert "injections changed training" in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["trace", "{new}", "--where", "dot_general"], "'dot_general' is not a selector"),
        (["trace", "{new}", "--fault", "bitflip,step=1"], "'site' is missing; expected none or a fault"),
        (["trace", "{new}", "--fault", "meteor,step=1,site=*"], "unknown kind 'meteor'"),
        (["trace", "{new}", "--against", "{new}"], "is not a run folder"),
        (["diff", "{new}", "{new}"], "is not a run folder"),
        (["campaign", "--injections", "0"], "--injections 0: expected a whole number from 1 to"),
        (["campaign", "--follow", "16"], "--follow 16: expected an integer from 0 to 15"),
        (["campaign", "--fault", "bitflip,rate=1"], "unknown key 'rate'"),
        (["campaign", "--where", "primitive()"], "expected at least one pattern"),
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
