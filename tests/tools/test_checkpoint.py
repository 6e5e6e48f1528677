"""`sdc checkpoint`: inspects checkpoints of another program without that program."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import sdc
from sdc.tools import cli
from sdc.tools.commands import reports
from tests.storms.bits import quiet


class Run:
    """Runs the command, and returns its output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int) -> Any:
        assert cli.run(["checkpoint", *map(str, words)]) == code
        return self._capsys.readouterr()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def state(step: int) -> dict[str, Any]:
    whole = {"w": jnp.full((300, 100), float(step)), "key": jax.random.key(step)}
    return whole | {"list": [np.arange(3), step, "word"], "half": jnp.ones(3, jnp.bfloat16)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with sdc.certify(ocp.training.Checkpointer(tmp_path)) as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpointables(step, {"model": state(step), "text": {"name": "run"}})
        checkpointer.vouch(2, "twins")
    return tmp_path


def test_checkpoints_as_they_were_saved(run: Run, folder: Path) -> None:
    printed = run("show", folder, code=0).out
    assert "CANDIDATE" in printed
    assert "twins" in printed
    assert "not compared" in printed
    found = json.loads(run("verify", folder, "--json", code=0).out)
    assert found["verdict"] == "clean"
    assert [(row["step"], row["covered"], row["compared"], row["wrong"]) for row in found["checkpoints"]] == [
        (1, 7, True, []),
        (2, 7, True, []),
    ]
    assert found["checkpoints"][0]["bytes"] == 300 * 100 * 4 + 8 + 6
    assert "CLEAN" in run("verify", folder, "--step", 2, code=0).out


def test_what_differs_and_what_cannot_be_compared(run: Run, folder: Path) -> None:
    with ocp.training.Checkpointer(folder) as plain:
        other = state(2)
        plain.save_checkpointables(
            2, {"model": other | {"w": other["w"].at[200, 0].set(0.0)}, "text": {"name": "run"}}, overwrite=True
        )
        plain.save(3, state(3), force=True)
    printed = run("verify", folder, code=1).out
    assert "step 2: model/w differs in rows 0:256" in printed
    assert "step 3: there is no certificate" in printed
    assert "step 3: step 3" not in printed
    assert "CORRUPT" in printed
    assert "INCONCLUSIVE" in run("verify", folder, "--step", 3, code=3).out
    assert "history not verified" in run("certify", folder, "--step", 3, code=0).out
    assert "as saved" in run("verify", folder, "--step", 3, code=0).out
    run("show", folder, code=0)


def test_files_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    """This is not a comparison, so the verdict is inconclusive.

    There is only one array: when a read fails, Orbax does not wait for the others, and they log errors at any later
    time.
    """
    with sdc.certify(ocp.training.Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save_checkpointables(2, {"model": {"w": jnp.ones((300, 100))}})
    (tmp_path / "2" / "model" / "manifest.ocdbt").write_bytes(b"")
    with quiet():
        printed = run("verify", tmp_path, "--step", 2, code=3).out
    assert "step 2: it cannot be read (" in printed
    assert "INCONCLUSIVE" in printed


def test_a_scrub_marks_what_is_damaged_until_it_is_repaired(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "SETTLE", 0.0)
    printed = run("scrub", folder, "--rate", 2.0**20, code=0).out
    assert "at 1 MiB per second" in printed
    assert "step 2: clean (7 arrays, 117.2 KiB)" in printed
    assert "CLEAN  2 clean" in printed

    sound = shutil.copytree(folder / "2", folder.parent / "sound")
    with ocp.training.Checkpointer(folder) as plain:
        spoilt = state(2) | {"w": jnp.zeros((300, 100))}
        plain.save_checkpointables(2, {"model": spoilt, "text": {"name": "run"}}, overwrite=True)
    assert "step 2: damaged (model/w differs in rows 0:256, 256:300)" in run("scrub", folder, code=1).out
    assert "DAMAGED" in run("show", folder, code=0).out
    shutil.rmtree(folder / "2")
    shutil.copytree(sound, folder / "2")
    assert "step 2: repaired" in run("scrub", folder, "--step", 2, code=0).out
    assert "DAMAGED" not in run("show", folder, code=0).out
    found = json.loads(run("scrub", folder, "--json", code=0).out)
    assert [row["result"] for row in found["checkpoints"]] == ["clean", "clean"]


def test_a_round_that_cannot_list_the_checkpoints_is_not_clean(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of earlier rounds may no longer be true."""
    whole, rounds = reports._Scrub._round, []

    def then(scrub: reports._Scrub) -> bool:
        found = whole(scrub)
        rounds.append(found)
        if len(rounds) == 1:
            os.mkfifo(folder / "2" / "pipe")
        else:
            scrub._ended.set()
        return found

    monkeypatch.setattr(reports._Scrub, "_round", then)
    printed = run("scrub", folder, "--every", "0.001s", code=3).out
    assert "pipe is a pipe, not a file" in printed
    assert printed.splitlines()[-1].startswith("INCONCLUSIVE  ")


def test_a_scrub_of_what_cannot_be_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is marked: the storage may be at fault. What has no certificate cannot be compared either."""
    monkeypatch.setattr(reports, "SETTLE", 0.0)
    with sdc.certify(ocp.training.Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save_checkpointables(2, {"model": {"w": jnp.ones((300, 100))}})
        checkpointer.save_checkpointables(3, {"model": {"w": jnp.ones((300, 100))}})
    shutil.rmtree(tmp_path / "certificates" / "3")
    (tmp_path / "2" / "model" / "manifest.ocdbt").unlink()
    (tmp_path / "2" / "model" / "manifest.ocdbt").mkdir()
    with quiet():
        printed = run("scrub", tmp_path, code=3).out
    assert "step 2: unreadable (it cannot be read (" in printed
    assert "step 3: unreadable (there is no certificate (" in printed
    assert "INCONCLUSIVE  2 unreadable" in printed
    assert "DAMAGED" not in run("show", tmp_path, "--step", 2, code=0).out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "nowhere"), "nowhere is not a folder; expected one that an Orbax checkpointer wrote"),
        (("verify", "FOLDER/model"), "is not a folder"),
        (("verify", "FOLDER/1"), "there are no complete checkpoints in"),
        (("verify", "FOLDER", "--step", "7"), "--step 7: "),
        (("look", "FOLDER"), "look"),
        (("verify", "FOLDER", "--every", "1h"), "--every 1h: only scrub repeats"),
        (("scrub", "FOLDER", "--every", "soon"), "--every soon: expected a time above 0"),
        (("scrub", "FOLDER", "--rate", "0"), "--rate 0.0: expected 1 to 1099511627776 bytes per second"),
        (("scrub", "FOLDER", "--step", "7"), "--step 7: "),
        (("scrub", "nowhere"), "nowhere is not a folder"),
    ],
)
def test_wrong_words(run: Run, folder: Path, words: tuple[str, ...], message: str) -> None:
    printed = run(*(word.replace("FOLDER", str(folder)) for word in words), code=2)
    assert message in printed.err
