"""Damaged checkpoints of a run, and parts of sound ones."""

import gc
import logging
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from hypothesis import HealthCheck, given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from sdc.checkpoints import audit, checkpoints_in
from sdc.checkpoints.certificate import PARTS
from sdc.settings import SettingError
from sdc.train.checkpoints import CheckpointError, Checkpoints
from tests.storms.bits import quiet
from tests.train.test_checkpoints import assert_bitwise, describe, small

# Coroutines that Orbax creates and never awaits if a read fails.
pytestmark = pytest.mark.filterwarnings(
    "ignore:coroutine .*:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def two(folder: Path) -> Checkpoints:
    with Checkpoints(folder, every=1) as checkpoints:
        checkpoints.save(1, small(1.0), {"batch": 1})
        checkpoints.save(2, small(2.0), {"batch": 2})
    return checkpoints


@pytest.mark.parametrize("damage", ["flip", "cut", "emptied", "delete", "seal", "position", "pipe", "device", "deep"])
def test_damage_is_found(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = two(tmp_path)
    data = max((tmp_path / "2").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    certificate = tmp_path / "certificates" / "2" / "process-0.json"
    content = bytearray(data.read_bytes())
    if damage == "flip":  # of one bit in the array data, which Orbax would restore as another number
        content[random.Random(0).randrange(len(content))] ^= 16
        data.write_bytes(content)
    elif damage == "cut":
        data.write_bytes(content[: len(content) // 2])
    elif damage == "emptied":
        (tmp_path / "2" / "state" / "manifest.ocdbt").write_bytes(b"")
    elif damage == "delete":
        data.unlink()
    elif damage == "seal":
        certificate.write_bytes(certificate.read_bytes().replace(b'"history": true', b'"history": false'))
    elif damage in ("pipe", "device"):
        victim = certificate if damage == "pipe" else tmp_path / "2" / "state" / "_METADATA"
        victim.unlink()
        os.mkfifo(victim) if damage == "pipe" else victim.symlink_to("/dev/zero")
    elif damage == "deep":
        certificate.write_text("[" * 100_000)
    else:
        shutil.rmtree(tmp_path / "2" / "position")
        shutil.copytree(tmp_path / "1" / "position", tmp_path / "2" / "position")
    with pytest.raises(CheckpointError, match=r"2 is damaged \(.*\)$") as error:
        checkpoints.restore(describe(small()), step=2)
    assert "\n" not in str(error.value)
    assert "incompatible handler" not in str(error.value)
    with caplog.at_level(logging.WARNING, "sdc.checkpoints"):
        restored, position, step = checkpoints.restore_newest(describe(small()))
    assert_bitwise(restored, small(1.0))
    assert (position, step) == ({"batch": 1}, 1)
    assert "2 is damaged" in caplog.text
    gc.collect()
    assert not capfd.readouterr().err  # Orbax prints a traceback for each unfinished read
    assert "asyncio" not in {entry.name for entry in caplog.records}  # or logs one
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(CheckpointError, match=r"2 is damaged \(.*\); start a new run"):
        checkpoints.restore(describe(small()))


def test_commands_say_once_what_is_wrong(tmp_path: Path) -> None:
    """Orbax logs errors that it also raises."""
    two(tmp_path)
    (tmp_path / "2" / "state" / "_METADATA").write_text("{")
    words = [Path(sys.executable).with_name("sdc"), "checkpoint", "verify", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, "step 2: it cannot be read" in done.stdout) == (3, "", True)


@pytest.mark.parametrize("where", ["_CHECKPOINT_METADATA", "commit_success.txt", "more", "devices"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_pipe_in_one_checkpoint_is_in_the_way_of_no_other(tmp_path: Path, step: int, where: str) -> None:
    """Orbax would open the metadata of all checkpoints, and wait for ever."""
    checkpoints = two(tmp_path)
    victim = tmp_path / str(step) / where
    victim.unlink(missing_ok=True)
    victim.symlink_to("/dev") if where == "devices" else os.mkfifo(victim)
    (tmp_path / "more").symlink_to("/dev/zero")
    found = r"devices is a link to a \w+; delete this link" if where == "devices" else f"{where} is a pipe, not a file"
    with pytest.raises(CheckpointError, match=found):
        checkpoints.restore(describe(small()), step=step)
    assert audit(str(tmp_path), 3 - step).problem == ""
    assert re.search(found, audit(str(tmp_path), step).problem)
    assert checkpoints_in(str(tmp_path)) == [1, 2]
    assert checkpoints.restore(describe(small()))[1] == {"batch": 3 - step}
    with checkpoints:
        for later in (2, 3):
            checkpoints.save(later, small(float(later)), {"batch": later})
    assert checkpoints.restore_newest(describe(small()))[2] == 3
    assert (tmp_path / "1").exists() == (step == 2)  # the newest one that was restored stays


@pytest.mark.parametrize("what", ["pipe", "self", "file"])
@pytest.mark.parametrize(
    "where", ["2", "3", "certificates/2", "certificates/3", "certificates/9", "4.orbax-checkpoint-tmp"]
)
def test_what_is_no_folder_is_not_deleted_as_one(tmp_path: Path, where: str, what: str) -> None:
    """Deleting a pipe as a folder would wait for ever."""
    checkpoints = two(tmp_path)
    place = tmp_path / where
    if place.exists():
        shutil.rmtree(place)
    {"pipe": os.mkfifo, "self": lambda path: path.symlink_to(path.name), "file": Path.touch}[what](place)
    assert checkpoints.restore_newest(describe(small()))[2] == (1 if "2" in where else 2)
    if where == "2":
        assert checkpoints_in(str(tmp_path)) == [1, 2]
        assert "cannot be read" in audit(str(tmp_path), 2).problem or audit(str(tmp_path), 2).status is None
    with checkpoints:
        for step in (2, 3):
            checkpoints.save(step, small(float(step)), {"batch": step})
    assert checkpoints.restore_newest(describe(small()))[2] == 3
    assert not place.exists() or place.is_dir()


@pytest.mark.parametrize("more", ["stray", "loose", "circle", "loop", "through a file"])
def test_files_that_nobody_reads_do_no_harm(tmp_path: Path, more: str) -> None:
    checkpoints = two(tmp_path)
    if more == "circle":
        for name in ("one", "two"):  # each leads to both, at forty levels
            (tmp_path / "2" / "state" / name).symlink_to(".")
    elif more in ("loop", "through a file"):
        target = {"loop": "loop", "through a file": "_CHECKPOINT_METADATA/x"}[more]
        for folder in (tmp_path / "2", tmp_path / "2" / "state"):
            (folder / "loop").symlink_to(target)
    elif more == "stray":
        (tmp_path / "2" / "state" / "more").write_bytes(b"")
    else:
        (tmp_path / "2" / "more").mkdir()
    restored, position = checkpoints.restore(describe(small()))
    assert_bitwise(restored, small(2.0))
    assert position == {"batch": 2}


def test_a_checkpoint_that_ended_before_its_certificate_does_not_count(tmp_path: Path) -> None:
    checkpoints = two(tmp_path)
    (tmp_path / "certificates" / "2" / "process-0.json").unlink()
    assert checkpoints.latest == 1
    assert_bitwise(checkpoints.restore(describe(small()))[0], small(1.0))
    with checkpoints:
        for step in (2, 3):
            checkpoints.save(step, small(step), {"batch": step})
        assert checkpoints.steps == [1, 2, 3]  # 1 was restored, and stays


def test_what_the_host_spoils_on_the_way_to_the_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = ocp.handlers.PyTreeHandler.save

    async def spoiled(self: Any, directory: Any, tree: Any) -> Any:
        if "weights" in tree:
            tree = {**tree, "weights": tree["weights"].at[5, 7].multiply(2)}
        return await save(self, directory, tree)

    monkeypatch.setattr(ocp.handlers.PyTreeHandler, "save", spoiled)
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, small(), {})
    with pytest.raises(CheckpointError, match=r"1 is damaged \(.*state/weights differs in rows 0:64"):
        checkpoints.restore(describe(small()))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    with Checkpoints(folder, every=1) as checkpoints:
        checkpoints.save(1, laid_out(("data", "model")), {"batch": 1})
    return folder


def laid_out(*specs: Any) -> dict[str, Any]:
    """A state on eight devices, its weights under the given axes."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    values = {**small(), "half": jnp.arange(24, dtype=jnp.bfloat16).reshape(8, 3), "key": jax.random.key(7)}
    axes = dict(zip(("weights", "half"), specs, strict=False))
    return {
        name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*axes.get(name, ()))))
        for name, leaf in values.items()
    }


@given(where=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_in_any_file_is_found_or_harmless(sound: Path, tmp_path: Path, where: st.DataObject) -> None:
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    file = where.draw(st.sampled_from(files), label="file")
    content = bytearray(file.read_bytes())
    byte = where.draw(st.integers(0, len(content) - 1), label="byte")
    content[byte] ^= 1 << where.draw(st.integers(0, 7), label="bit")
    file.write_bytes(content)
    like = laid_out(("model",), ("data",))
    try:
        with quiet():
            restored, position = Checkpoints(folder, every=1).restore(describe(like))
    except CheckpointError as error:
        outcome = str(error)
    else:
        outcome = "restored"
        assert_bitwise(restored, like)
        assert position == {"batch": 1}
    assert any(words in outcome for words in ("is damaged", "does not match", "restored"))


@pytest.mark.parametrize("name", ["weights", "half", "key", "step"])
def test_arrays_are_compared_with_their_digests_under_any_sharding(
    sound: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ocp.training.Checkpointer.load_checkpointables

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        trees = load(*args, **kwargs)
        leaf = trees["state"][name]
        if name == "key":
            trees["state"][name] = jax.device_put(jax.random.key(8), leaf.sharding)
        else:  # one element on one device
            shards = [np.array(shard.data) for shard in leaf.addressable_shards]
            shards[-1].reshape(-1)[-1:] += np.ones((), leaf.dtype)
            devices = [shard.device for shard in leaf.addressable_shards]
            parts = [jax.device_put(part, device) for part, device in zip(shards, devices, strict=True)]
            trees["state"][name] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
        return trees

    monkeypatch.setattr(ocp.training.Checkpointer, "load_checkpointables", spoiled)
    for specs in [(("data", "model"),), ((None, ("data", "model")), ("data",)), ((("model", "data"),),), ((), ())]:
        with pytest.raises(CheckpointError, match=rf"1 is damaged \(.*state/{name} differs (in rows|between)"):
            Checkpoints(sound, every=1).restore(describe(laid_out(*specs)))


def test_another_algorithm_and_arrays_without_digests_are_refused(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    path = epath.Path(tmp_path / "certificates" / "1" / "process-0.json")
    for spoil, words in (
        (lambda part: setattr(part, "algorithm", "other"), "has digests of the algorithm 'other'"),
        (lambda part: part.arrays.pop("state/step"), "it has state/step, which was not saved"),
        (lambda part: part.arrays["state/weights"].blocks.popitem(), "covers only part of state/weights"),
    ):
        part = PARTS.read(sound / "certificates" / "1" / "process-0.json")
        spoil(part)
        PARTS.write(path, part)
        with pytest.raises(CheckpointError, match=words):
            Checkpoints(tmp_path, every=1).restore(describe(laid_out()))


def test_a_part_is_read_and_the_rest_stays(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    checkpoints = Checkpoints(tmp_path, every=1)
    given = {**laid_out(("model",)), "weights": jnp.zeros((2, 2)), "step": jnp.int32(9)}  # of other types
    for only in ("half", ["half"], lambda name: name == "half"):
        restored, position = checkpoints.restore({**given, "half": describe(laid_out())["half"]}, only=only)
        assert_bitwise(restored["half"], laid_out()["half"])
        assert all(restored[name] is given[name] for name in ("weights", "step", "key"))
        assert position == {"batch": 1}
    with pytest.raises(CheckpointError, match=r"state/weights was certified with shape \[64, 64\], not \[2, 2\]"):
        checkpoints.restore(given, step=1, only=["weights", "half"])
    nested = {"params": {"layer": small(), "layers": small(2.0)}}
    with checkpoints:
        checkpoints.save(2, nested, {})
    other = jax.tree.map(jnp.zeros_like, nested)
    restored, _ = checkpoints.restore(other, only=["params/layer"])
    assert_bitwise(restored, {"params": {"layer": small(), "layers": other["params"]["layers"]}})
    with pytest.raises(SettingError, match="only=weigh: matches no array of the state, whose arrays include params/"):
        checkpoints.restore(nested, only="weigh")


def test_a_part_is_compared_with_its_digests(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    path = epath.Path(tmp_path / "certificates" / "1" / "process-0.json")
    part = PARTS.read(path)
    for words in part.arrays["state/weights"].blocks.values():
        words["0"] = "0" * 16
    PARTS.write(path, part)
    checkpoints = Checkpoints(tmp_path, every=1)
    like = laid_out(("data", "model"))
    assert_bitwise(checkpoints.restore(like, only="step")[0], like)
    with pytest.raises(CheckpointError, match=r"state/weights differs"):
        checkpoints.restore(like, only="weights")


def test_a_checkpoint_under_another_name_and_a_strange_certificate_are_refused(tmp_path: Path) -> None:
    checkpoints = two(tmp_path)
    (tmp_path / "2").rename(tmp_path / "5")
    (tmp_path / "certificates" / "2").rename(tmp_path / "certificates" / "5")
    with pytest.raises(CheckpointError, match=r"5 is damaged \(.*process-0.json belongs to step 2, process 0\)"):
        checkpoints.restore(describe(small()), step=5)
    (tmp_path / "5").rename(tmp_path / "2")
    shutil.copytree(tmp_path / "certificates" / "1", tmp_path / "certificates" / "2")
    with pytest.raises(CheckpointError, match=r"2/process-0.json belongs to step 1, process 0"):
        checkpoints.restore(describe(small()), step=2)


def test_replicas_that_differed_when_they_were_saved_are_no_state(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    parts = [jax.device_put(jnp.full((64, 64), float(i)), device) for i, device in enumerate(mesh.devices)]
    sharding = NamedSharding(mesh, PartitionSpec())
    state = {"weights": jax.make_array_from_single_device_arrays((64, 64), sharding, parts)}
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, state, {})
    with pytest.raises(CheckpointError, match=r"state/weights differed between devices when it was saved"):
        checkpoints.restore(describe(state))
    with ocp.training.Checkpointer(tmp_path) as plain:  # of replicas the first one is there
        np.testing.assert_array_equal(plain.load(1, describe(state))["weights"], np.zeros((64, 64)))
