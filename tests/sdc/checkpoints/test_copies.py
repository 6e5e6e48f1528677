"""Copies on a host: as the devices held them, of this run and whole, or none."""

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from sdc.checkpoints import copies as module
from sdc.checkpoints.copies import DESCRIPTIONS, Copies, Copy, copies_folder

ODD = np.array([0x80000000, 0x7FC01234, 0xFF812345, 1], np.uint32).view(np.float32)
"""-0.0, NaNs with payloads, and a subnormal number."""


def state(step: int) -> Any:
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("x", "y"))
    numbers = np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)
    half = numbers.astype(jnp.bfloat16)
    numbers[:, :4] = ODD
    half[:, ::4] = np.uint16(0x7FC1).view(jnp.bfloat16)
    return {
        "w": jax.device_put(numbers, NamedSharding(mesh, P("x"))),
        "half": jax.device_put(half, NamedSharding(mesh, P(None, "y"))),
        "key": jax.random.key(step), "count": jnp.int32(step),
    }  # fmt: skip


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Copies]:
    made = Copies(tmp_path / "run", "a", state(0))
    yield made
    made.close()


def found(copy: Copy | None) -> list[Any]:
    assert copy is not None
    return sorted((name, box, array.tobytes()) for name, box, array in copy.parts)


def expected(step: int) -> list[Any]:
    parts = {}
    for name, leaf in state(step).items():
        bits = jax.random.key_data(leaf) if name == "key" else leaf
        for shard in bits.addressable_shards:
            box = tuple(part.indices(size)[:2] for part, size in zip(shard.index, bits.shape, strict=True))
            parts[name, box or ((0, 1),)] = np.asarray(shard.data).tobytes()
    return sorted((*place, content) for place, content in parts.items())


def test_a_copy_is_what_the_devices_held(copies: Copies) -> None:
    """Each shard once, bit for bit, although the next step takes the state over; the last two copies stay."""
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    for number in (2, 4, 6):
        now = state(number)
        copies.save(now, number, {"next_index": number})
        step({name: now[name] for name in ("w", "half", "count")})
    assert copies.wait()
    assert copies.steps == [4, 6]
    for number in copies.steps:
        copy = copies.read(number)
        assert found(copy) == expected(number)
        assert copy is not None
        assert (copy.step, copy.note) == (number, {"next_index": number})
    copies.drop(5)
    assert copies.steps == [4]
    copies.remove()
    assert not copies.folder.exists()


def test_a_copy_of_another_run_process_or_state_is_none(
    copies: Copies, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies.save(state(2), 2)
    copies.wait()
    wide = {**state(0), "w": jnp.zeros((8, 16))}
    others = [Copies(copies.folder, "b", state(0)), Copies(copies.folder, "a", wide)]
    with monkeypatch.context() as patched:
        patched.setattr(jax, "process_index", lambda: 1)
        others.append(Copies(copies.folder, "a", state(0)))
    for other in others:
        assert other.steps == []
        assert other.read(2) is None
        assert "of another run or state" in caplog.text
        caplog.clear()
        other.close()


def test_no_flipped_byte_is_taken(copies: Copies) -> None:
    copies.save(state(2), 2)
    copies.wait()
    for path in sorted((copies.folder / "2").iterdir()):
        content = path.read_bytes()
        for place in range(0, len(content), 97):
            path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
            assert copies.read(2) is None, (path, place)
        path.write_bytes(content[:-1])
        assert copies.read(2) is None
        assert path.name != "pieces" or copies.steps == []
        path.write_bytes(content)
    assert found(copies.read(2)) == expected(2)


def test_a_full_disk_is_told_and_what_was_there_stays(
    copies: Copies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies.save(state(2), 2)
    copies.wait()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(type(module.DESCRIPTIONS), "write", full)
        copies.save(state(4), 4)
        assert not copies.wait()
    assert "No space left on device" in caplog.text
    assert [path.name for path in copies.folder.iterdir()] == ["2"]
    (copies.folder / "4.new").mkdir()  # by a process that was killed while it wrote
    copies.save(state(4), 4)
    assert copies.wait()
    assert sorted(path.name for path in copies.folder.iterdir()) == ["2", "4"]


def test_a_forged_copy_is_none(copies: Copies, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever lacks the key of the run cannot make a copy, even from all that a true one contains."""
    copies.save(state(2), 2)
    copies.wait()
    path = copies.folder / "2" / "copy.json"
    about = DESCRIPTIONS.read(path)
    for forged in (about.coded("b"), module.msgspec.structs.replace(about, note={"next_index": 9})):
        DESCRIPTIONS.write(path, forged)
        assert copies.read(2) is None
        assert "of another run or state (key)" in caplog.text
        caplog.clear()
    DESCRIPTIONS.write(path, about)
    assert found(copies.read(2)) == expected(2)


@pytest.mark.parametrize("plant", ["link", "open"])
def test_a_folder_that_others_planted_is_neither_used_nor_emptied(
    tmp_path: Path, plant: str, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / "2").mkdir()
    (tmp_path / "copies").symlink_to(home) if plant == "link" else (tmp_path / "copies").mkdir()
    if plant == "open":
        (tmp_path / "copies").chmod(0o777)
    copies = Copies(tmp_path / "copies", "a", state(0))
    copies.save(state(4), 4)
    assert not copies.wait()
    assert "expected a folder" in caplog.text
    assert copies.steps == []
    copies.drop(0)
    copies.remove()
    copies.close()
    assert sorted(path.name for path in home.iterdir()) == [".ssh", "2"]


def test_a_process_that_restarts_finds_its_folder(tmp_path: Path) -> None:
    record, parent = tmp_path / "copies.json", tmp_path / "local"
    first = copies_folder(record, parent)
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    copies = Copies(first.folder, first.key, state(0))
    copies.save(state(2), 2)
    assert copies.wait()
    copies.close()
    assert stat.S_IMODE(Path(first.folder).stat().st_mode) == 0o700
    assert copies_folder(record, parent) == first
    shutil.rmtree(first.folder)  # another host, or the folder was cleared
    second = copies_folder(record, parent)
    assert (second.key, second.folder == first.folder) == (first.key, False)
    third = copies_folder(record, tmp_path / "elsewhere")
    assert Path(third.folder).parent == tmp_path / "elsewhere"
    record.write_text("{")
    assert copies_folder(record, parent).key != first.key
    (tmp_path / "file").write_text("")
    copies = Copies(copies_folder(record, tmp_path / "file").folder, "a", state(0))
    copies.save(state(2), 2)
    assert not copies.wait()  # and the training continues
    copies.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_can_neither_read_nor_forge_nor_block(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/tmp") and folder.stat().st_uid == os.geteuid() and folder.name:
            folder.chmod(folder.stat().st_mode | 0o055)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    place = copies_folder(tmp_path / "copies.json", shared)
    copies = Copies(place.folder, place.key, state(0))
    copies.save(state(2), 2)
    assert copies.wait()
    folder, record = place.folder, tmp_path / "copies.json"
    for attempt in (
        f"ls {folder}", f"cat {folder}/2/copy.json", f"cat {record}", f"rmdir {folder}", f"mkdir {folder}/3",
        f"mv {folder} {folder}x", f"chmod 777 {folder}", f"rm -rf {folder}/2", f"ln {record} {shared}/record",
    ):  # fmt: skip
        command = ["/bin/sh", "-c", attempt]
        done = subprocess.run(
            command, cwd="/", user=65534, group=65534, extra_groups=[], capture_output=True, check=False
        )
        assert done.returncode, attempt
    assert found(copies.read(2)) == expected(2)
    copies.close()
