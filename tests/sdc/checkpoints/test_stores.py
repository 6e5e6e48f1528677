"""Stores of running checkpoints that are full, damaged, foreign, or of which parts are missing."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from sdc.checkpoints import RunningCheckpoint, StoreError, partition
from sdc.checkpoints.partitions import Fragment, digest_text
from sdc.checkpoints.store import SEAL, SEALS, Seal, Store, StoreLayout, last_save
from sdc.records.lock import RecordBusy
from sdc.settings import SettingError
from sdc.twins import digest

from .states import Model, moved, nothing, opened, start


@pytest.mark.parametrize("victim", ["block", "manifest", "seal"])
def test_what_is_damaged_has_one_before(
    running: RunningCheckpoint, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    block = running.partition.of(["params/w"])[0]
    first = moved(start(), [0], 1)
    second = moved(first, [1], 2)
    third = moved(second, [2], 3)
    for step, state in ((1, first), (2, second), (3, third)):
        assert block in running.save(state, step)
    running.wait()
    place = Path(str(running.folder)) / "process-0"
    path = {"block": place / "blocks" / f"{block}.3", "manifest": place / "manifests" / "3.json",
            "seal": place.parent / "seal.json"}[victim]  # fmt: skip
    content = path.read_bytes()
    path.write_bytes(content[:50] + bytes([content[50] ^ 16]) + content[51:])
    with caplog.at_level(logging.WARNING, "sdc.checkpoints"):
        found = running.recover([block], nothing(third))
    expected = {"block": second, "manifest": second, "seal": third}[victim]
    np.testing.assert_array_equal(found.state["params"]["w"][:4], expected["params"]["w"][:4])
    assert found.steps == {block: 3 if victim == "seal" else 2}
    assert found.older == ([] if victim == "seal" else [block])
    assert caplog.text
    if victim == "block":
        path.unlink()
        os.mkfifo(path)  # which TensorStore would wait for
        assert running.recover([block], nothing(third)).steps == {block: 2}
        (place / "blocks" / f"{block}.2").unlink()
        with pytest.raises(StoreError, match=f"block {block} of .* has no undamaged version"):
            running.recover([block], nothing(third))


def test_a_full_disk(running: RunningCheckpoint, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The training goes on, and what could not be written is what is saved next."""
    model = Model(running)
    first = moved(start(), [0], 1)
    model.save(running.save(first, 1), first, 1)
    running.wait()
    with monkeypatch.context() as full:

        def write(*_: object, **__: object) -> None:
            raise StoreError("cannot write (No space left on device)")

        full.setattr(Store, "write", write)
        second = moved(first, [8], 2)
        missed = running.save(second, 2)
        with caplog.at_level(logging.ERROR, "sdc.checkpoints"):
            assert not running.wait()
        assert "No space left" in caplog.text
    model.agrees(running)
    third = moved(second, [15], 3)
    chosen = running.save(third, 3)
    assert missed[0] in chosen
    assert running.wait()
    model.save(chosen, third, 3)
    model.agrees(running)


def test_a_store_takes_three_times_the_state_at_most(running: RunningCheckpoint) -> None:
    state = start()
    place = Path(str(running.folder)) / "process-0" / "blocks"
    for step in range(1, 40):
        state = moved(state, [step % 16], step)
        running.save(state, step)
    running.wait()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.dtype != state["key"].dtype)
    assert sum(path.stat().st_size for path in place.iterdir()) <= 3 * size


def test_one_writer_of_one_state(running: RunningCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(RecordBusy, match="is being written by process"):
        opened(tmp_path / "store")
    running.save(start(), 1)
    running.close()
    other = start() | {"params": {"w": jnp.zeros((16, 9))}}
    with pytest.raises(StoreError, match=r"is a running checkpoint of another state \(partition differs\)"):
        RunningCheckpoint(tmp_path / "store", other, moving="params")
    again = opened(tmp_path / "store")  # the lock was let go
    with pytest.raises(StoreError, match="params/b is nothing, but the running checkpoint has"):
        again.save(other, 2)
    with pytest.raises(SettingError, match="not found in the state; its arrays include"):
        again.recover(["params/x"], start())
    for wrong in (8, 0.5, None):
        with pytest.raises(SettingError, match="a block number below 8"):
            again.recover([wrong], start())  # type: ignore[list-item]
    with pytest.raises(StoreError, match=r"params/w is \('float32', \(16, 9\)\), but the running checkpoint has"):
        again.recover([0], start() | {"params": start()["params"] | {"w": jnp.zeros((16, 9))}})
    again.close()


@pytest.mark.parametrize("name", ["a b", "a%20b", "a#b?c", "100%"])
def test_any_name_of_a_folder(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / name) as running:
        (block, *_) = running.save(moved(start(), [0], 1), 1)
        assert running.wait()
        assert running.recover([block], start()).steps == {block: 1}
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_store_whose_seal_is_gone_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And is not begun anew over what it holds."""
    model, state = None, start()
    for first in (1, 4):
        with opened(tmp_path) as running:
            model = model or Model(running)
            for step in range(first, first + 3):
                state = moved(state, [step], step)
                model.save(running.save(state, step), state, step)
            running.wait()
            model.agrees(running)
        (tmp_path / "seal.json").unlink()
    with caplog.at_level(logging.WARNING, "sdc.checkpoints"), opened(tmp_path) as running:
        assert model is not None
        model.agrees(running)
    assert "no readable seal; using save 6" in caplog.text
    for manifest in (tmp_path / "process-0" / "manifests").iterdir():
        manifest.write_text("{}")
    with pytest.raises(StoreError, match="neither a readable seal nor a readable save of all processes"):
        opened(tmp_path)


def test_a_damaged_layout_is_written_anew_by_who_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as running:
        model, state = Model(running), moved(start(), [0], 1)
        model.save(running.save(state, 1), state, 1)
        running.wait()
    layout = tmp_path / "process-0" / "layout.json"
    layout.write_bytes(layout.read_bytes().replace(b'"partition"', b'"partitiom"'))
    with pytest.raises(StoreError, match=r"layout\.json"):
        RunningCheckpoint.read(tmp_path, start(), moving="params", rows=4)
    with caplog.at_level(logging.WARNING, "sdc.checkpoints"), opened(tmp_path) as running:
        model.agrees(running)
    assert "rewriting it" in caplog.text


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write to"):
        opened(tmp_path / "file")


def test_a_first_save_that_was_cut_off_is_none(tmp_path: Path) -> None:
    """One of two processes had its part, and nothing was sealed: there is nothing to go on from, and nothing lost."""
    folder = epath.Path(tmp_path)
    stores = [Store(folder, process) for process in (0, 1)]
    for store in stores:
        store.create(StoreLayout(partition="", processes=2, blocks={}))
    SEALS.write(folder / SEAL, Seal(save=0, step=0, processes=2))
    stores[0].write(1, 7, {})
    assert last_save(folder) is None
    (folder / SEAL).unlink()
    with pytest.raises(StoreError, match="neither a readable seal nor a readable save"):  # it may have been sealed
        last_save(folder)
    stores[1].write(1, 7, {})
    saved = last_save(folder)
    assert saved is not None
    assert (saved.save, saved.oldest.step, saved.behind) == (1, 7, set())
    for path in (stores[1].place / "manifests" / "1.json", stores[1].place / "layout.json"):
        path.unlink()
        with pytest.raises(StoreError, match="neither a readable seal nor a readable save"):
            last_save(folder)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_store_whose_manifests_are_gone_is_not_begun_anew(tmp_path: Path, sealed: bool) -> None:
    with opened(tmp_path) as running:
        assert last_save(running.folder) is None
        for step in (1, 2):
            running.save(moved(start(), [step], step), step)
    blocks = sorted((tmp_path / "process-0" / "blocks").iterdir())
    assert blocks
    for manifest in (tmp_path / "process-0" / "manifests").iterdir():
        manifest.unlink()
    if not sealed:
        (tmp_path / "seal.json").unlink()
    with pytest.raises(StoreError, match=r"no readable manifest|neither a readable seal nor a readable save"):
        opened(tmp_path)
    assert sorted((tmp_path / "process-0" / "blocks").iterdir()) == blocks


@pytest.mark.parametrize("sealed", [True, False])
def test_a_missing_manifest_is_reported_as_a_damaged_one_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sealed: bool
) -> None:
    """Recovery says how old it is, and the blocks of the missing manifest are kept."""
    states = [start()]
    with opened(tmp_path) as running:
        block = running.partition.of(["params/w"])[0]
        for step in (1, 2, 3):
            states.append(moved(states[-1], [step], step))
            running.save(states[-1], step, note={"batch": step})
    place = tmp_path / "process-0"
    (place / "manifests" / "3.json").unlink()
    orphans = {path: path.read_bytes() for path in (place / "blocks").glob("*.3")}
    if not sealed:
        (tmp_path / "seal.json").unlink()
    with caplog.at_level(logging.WARNING, "sdc.checkpoints"):
        reader = RunningCheckpoint.read(tmp_path, start(), moving="params", rows=4)
        found = reader.recover([block], nothing(states[3]))
    assert ("3.json" if sealed else "no readable seal") in caplog.text
    assert (reader.step, reader.note) == (2, {"batch": 2})
    assert found.steps == {block: 2}
    assert found.older == [block] * sealed
    np.testing.assert_array_equal(found.state["params"]["w"][:4], states[2]["params"]["w"][:4])
    with opened(tmp_path) as running:
        model = Model(running)
        state = moved(states[3], [5], 4)
        model.save(running.save(state, 4), state, 4)
        assert running.wait()
        state = moved(state, [6], 5)
        model.save(running.save(state, 5), state, 5)
    assert {path: path.read_bytes() for path in orphans} == orphans


def test_what_is_not_there_is_not_initial(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no running checkpoint in"):
        RunningCheckpoint.read(tmp_path / "nowhere", start(), moving="params", rows=4)
    with opened(tmp_path) as running:
        running.save(moved(start(), [0], 1), 1)
    for manifest in (tmp_path / "process-0" / "manifests").iterdir():
        manifest.unlink()
    with pytest.raises(StoreError, match="has no readable manifest of save 1 or an earlier save"):
        RunningCheckpoint.read(tmp_path, start(), moving="params", rows=4)


def test_a_block_of_which_a_process_lacks_its_part(tmp_path: Path) -> None:
    """Each of two processes has half of the columns; one has saved nothing of a block."""
    whole = {"w": jnp.arange(32.0).reshape(4, 8)}
    cut = partition(whole, rows=4)
    folder = epath.Path(tmp_path)
    for process in (0, 1):
        held = Fragment("w", ((0, 4), (4 * process, 4 * process + 4)), "float32")
        store = Store(folder, process)
        store.create(StoreLayout(partition=cut.schema, processes=2, blocks={"0": [held]}))
        half = whole["w"][:, 4 * process : 4 * process + 4]
        content = np.asarray(half).tobytes(), (digest_text(digest(half)),)
        store.write(1, 7, {0: content} if process == 0 else {})
    SEALS.write(folder / SEAL, Seal(save=1, step=7, processes=2))
    with pytest.raises(StoreError, match="block 0 is incomplete: the part of a process is missing"):
        RunningCheckpoint.read(tmp_path, whole, rows=4).recover([0], whole)
    Store(folder, 1).write(1, 7, {0: content})
    found = RunningCheckpoint.read(tmp_path, whole, rows=4).recover([0], {"w": jnp.zeros((4, 8))})
    np.testing.assert_array_equal(found.state["w"], whole["w"])


def test_a_reader_takes_what_was_saved_since(running: RunningCheckpoint) -> None:
    state = moved(start(), [0], 1)
    running.save(state, 1)
    reader = running.reader()
    for step in range(2, 8):
        state = moved(state, [0], step)
        running.save(state, step)
    running.wait()
    block = running.partition.of(["params/w"])[0]
    assert reader.recover([block], start()).steps == {block: 7}


@pytest.mark.parametrize("what", ["pipe", "self"])
def test_blocks_that_cannot_be_listed(tmp_path: Path, what: str) -> None:
    with opened(tmp_path) as running:
        running.save(start(), 1)
    blocks = tmp_path / "process-0" / "blocks"
    shutil.rmtree(blocks)
    os.mkfifo(blocks) if what == "pipe" else blocks.symlink_to(blocks)
    with pytest.raises(StoreError, match=r"cannot be listed .*; restore the file, or delete the running checkpoint"):
        opened(tmp_path)
