"""A scrub marks damaged checkpoints, and none that a run replaces or deletes meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from etils import epath
from orbax.checkpoint import v1 as ocp

from sdc.checkpoints import Audit, Certified, audit, certify
from sdc.checkpoints.certificate import DAMAGED, VERIFIED, Statuses, certified_steps
from sdc.train.checkpoints import Checkpoints
from tests.storms.bits import quiet


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(12.0) + jnp.float32(step)}


def opened(folder: Path, keep: int = 5) -> Certified:
    policy = ocp.training.preservation_policies.LatestN(keep)
    return certify(ocp.training.Checkpointer(folder, preservation_policy=policy))


def spoil(folder: Path, step: int) -> None:
    with ocp.training.Checkpointer(folder) as plain:
        plain.save(step, state(77), force=True, overwrite=True)


def scrub(folder: Path, step: int) -> str:
    return audit(str(folder), step).mark(str(folder))


def test_a_mark_takes_the_evidence_away_until_the_checkpoint_is_repaired(tmp_path: Path) -> None:
    with opened(tmp_path, keep=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
            checkpointer.load(step, state(0))
        spoil(tmp_path, 2)
        assert [scrub(tmp_path, step) for step in (1, 2)] == ["clean", "damaged"]
        assert checkpointer.status(2).state == DAMAGED
        assert checkpointer.status(2).reasons == ()
        for step in (3, 4, 5):  # the newest checkpoint that is verified is 1 now
            checkpointer.save(step, state(step))
        assert certified_steps(epath.Path(tmp_path)) == [1, 4, 5]
    assert list((tmp_path / "certificates" / "damaged").iterdir()) == []


@pytest.mark.parametrize("by", ["a scrub", "a restore"])
def test_a_repaired_checkpoint_loses_its_mark(tmp_path: Path, by: str) -> None:
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, state(1))
        spoil(tmp_path, 1)
        assert scrub(tmp_path, 1) == "damaged"
        with ocp.training.Checkpointer(tmp_path) as plain:
            plain.save(1, state(1), force=True, overwrite=True)
        if by == "a scrub":
            assert scrub(tmp_path, 1) == "repaired"
        else:
            assert checkpointer.restore_verified(state(0))[1] == 1
            assert checkpointer.status(1).state == VERIFIED
        assert scrub(tmp_path, 1) == "clean"


@pytest.mark.parametrize("what", ["replaced", "deleted"])
def test_what_a_run_replaces_or_deletes_after_the_comparison_is_gone(tmp_path: Path, what: str) -> None:
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, state(1))
        spoil(tmp_path, 1)
        found = audit(str(tmp_path), 1)
        assert found.wrong
        if what == "replaced":
            checkpointer.save(1, state(2), force=True, overwrite=True)
        else:
            checkpointer.delete(1)
        assert found.mark(str(tmp_path)) == "gone"
        # Written just afterwards, the mark names another certificate, and does not count.
        Statuses(epath.Path(tmp_path)).mark(1, found.certificate, "differs")
        assert Statuses(epath.Path(tmp_path)).mark_of(1) is None


def during(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, act: Callable[[], None]) -> None:
    """Calls a function before and after each call of a method."""
    whole = getattr(where, name)

    def called(*args: Any, **options: Any) -> Any:
        act()
        result = whole(*args, **options)
        if name == "save_async":
            result.result()  # the files may be there before the certificate changes
        act()
        return result

    monkeypatch.setattr(where, name, called)


def test_at_no_moment_of_a_save_or_deletion_is_a_checkpoint_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrub begins at one moment and marks at any later one, and between these the files change."""
    begun: list[Audit] = []
    results: list[str] = []

    def moment() -> None:
        results.extend(found.mark(str(tmp_path)) for found in begun)
        if (tmp_path / "1").exists():
            begun.append(audit(str(tmp_path), 1))

    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, state(1))
        during(monkeypatch, checkpointer._orbax, "save_async", moment)
        during(monkeypatch, checkpointer._orbax, "delete", moment)
        for name in ("leaving", "forget", "discard"):
            during(monkeypatch, checkpointer._statuses, name, moment)
        for name in ("unlink", "rmtree"):
            during(monkeypatch, type(epath.Path(tmp_path)), name, moment)
        checkpointer.save(1, state(2), force=True, overwrite=True)
        moment()
        checkpointer.delete(1)
        moment()
    assert len(results) > 50
    assert "damaged" not in results
    assert "gone" in results


def test_what_is_half_deleted_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[str] = []
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, state(1))
        whole = checkpointer._orbax.delete

        def delete(step: int) -> Any:
            (tmp_path / "1" / "state" / "manifest.ocdbt").unlink()
            with quiet():
                results.append(scrub(tmp_path, 1))
            return whole(step)

        monkeypatch.setattr(checkpointer._orbax, "delete", delete)
        checkpointer.delete(1)
    assert results == ["gone"]


def test_reads_are_announced(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.zeros(1 << 20), "b": jnp.zeros(1 << 22), "c": jnp.zeros(8)})
    sizes: list[int] = []
    assert audit(str(tmp_path), 1, pace=sizes.append).problem == ""
    assert sizes == [1 << 22, 1 << 24, 32]


def test_damaged_checkpoints_of_a_run_do_not_count(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=1, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step), {})
        assert checkpoints.steps == [1, 2]
        Statuses(checkpoints.folder).mark(2, audit(str(tmp_path), 2).certificate, "differs")
        checkpoints.save(3, state(3), {})
        assert checkpoints.steps == [1, 2, 3]
        checkpoints.save(4, state(4), {})
        assert checkpoints.steps == [3, 4]
