"""A run that is killed while a policy deletes a checkpoint leaves remains, and no damaged checkpoint."""

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from etils import epath
from orbax.checkpoint import v1 as ocp

from sdc.checkpoints import Certified, Damaged, audit, certify, checkpoints_in
from sdc.checkpoints.certificate import Statuses
from tests.storms.bits import quiet

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(12.0) + jnp.float32(step)}


def opened(folder: Path, **options: Any) -> Certified:
    policy = ocp.training.preservation_policies.LatestN(2)
    return certify(ocp.training.Checkpointer(folder, preservation_policy=policy, **options))


def killed_while_deleting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are saved and verified, and a fourth; what was to be deleted then is half there."""
    with opened(folder) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
            checkpointer.load(step, state(0))
    assert sorted(checkpoints_in(str(folder))) == [2, 3]
    shutil.copytree(folder / "2", folder.parent / "copy")
    shutil.copytree(folder / "certificates" / "2", folder.parent / "certificate")
    with opened(folder) as checkpointer:
        marked: list[int] = []
        leaving = type(checkpointer._statuses).leaving

        def mark(ledger: Any, step: int) -> None:
            leaving(ledger, step)
            marked.append(step)
            shutil.copytree(folder / "certificates" / str(step), folder.parent / "marked", dirs_exist_ok=True)

        monkeypatch.setattr(type(checkpointer._statuses), "leaving", mark)
        checkpointer.save(4, state(4))
        monkeypatch.undo()
    assert marked == [2]  # said before it is gone
    shutil.copytree(folder.parent / "copy", folder / "2")
    shutil.copytree(folder.parent / "marked", folder / "certificates" / "2", dirs_exist_ok=True)


def test_remains_are_passed_over_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    killed_while_deleting(folder, monkeypatch)
    shutil.rmtree(folder / "2" / "state")
    (folder / "2" / "_CHECKPOINT_METADATA").unlink()
    with quiet():
        found = audit(str(folder), 2)
        assert found.remains
        assert not found.compared
        with opened(folder) as checkpointer:
            with pytest.raises(Damaged, match="was being deleted when a run ended") as raised:
                checkpointer.load(2, state(0))
            assert raised.value.remains
            assert checkpointer.restore_verified(state(0))[1] == 4
            checkpointer.save(5, state(5))
    assert sorted(checkpoints_in(str(folder))) == [4, 5]


def test_one_that_is_whole_all_the_same_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the mark and the deletion: nothing is lost that was not meant to be."""
    folder = tmp_path / "run"
    killed_while_deleting(folder, monkeypatch)
    assert audit(str(folder), 2).problem == ""
    for newer in ("3", "4"):
        shutil.rmtree(folder / newer)
    with opened(folder) as checkpointer:
        assert checkpointer.restore_verified(state(0))[1] == 2
        checkpointer.save(6, state(6))
        checkpointer.save(7, state(7))
        assert 2 in {one.step for one in checkpointer.checkpoints}  # the newest that is verified


def test_what_was_being_deleted_is_told_again_and_keeps_nothing(tmp_path: Path) -> None:
    """However often it is tried, and also where all newer ones turn out to be damaged."""
    ledger = Statuses(epath.Path(tmp_path))
    for step in (1, 2, 3):
        (tmp_path / "certificates" / str(step)).mkdir(parents=True)
        ledger.vouch(step, "digest")
    for step, note in ((1, ledger.doubt), (2, ledger.revoke)):
        ledger.leaving(step)
        note(step)
        note(step)
        assert ledger.left(step)
    assert ledger.kept([1, 2, 3]) == {3}
    ledger.revoke(3)
    assert not ledger.left(3)
    assert ledger.kept([1, 2, 3]) == set()


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state(1))
    monkeypatch.chdir(tmp_path)
    assert checkpoints_in("run") == [1]
    assert audit("run", 1).problem == audit("./run", 1).problem == ""
