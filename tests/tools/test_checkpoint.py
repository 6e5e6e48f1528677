"""`sdc checkpoint`: inspects checkpoints of another program without that program."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import sdc
from sdc.tools import cli
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "nowhere"), "nowhere is not a folder; expected one that an Orbax checkpointer wrote"),
        (("verify", "FOLDER/model"), "is not a folder"),
        (("verify", "FOLDER/1"), "there are no complete checkpoints in"),
        (("verify", "FOLDER", "--step", "7"), "--step 7: "),
        (("look", "FOLDER"), "look"),
    ],
)
def test_wrong_words(run: Run, folder: Path, words: tuple[str, ...], message: str) -> None:
    printed = run(*(word.replace("FOLDER", str(folder)) for word in words), code=2)
    assert message in printed.err
