import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
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

from sdc.settings import SettingError
from sdc.train import sealed, seals
from sdc.train.checkpoints import CheckpointError, Checkpoints
from tests.train.test_checkpoints import assert_bitwise, describe, small


@pytest.mark.parametrize(
    "damage", ["flip", "cut", "delete", "seal", "position", "stray", "loose", "pipe", "circle", "deep"]
)
def test_damage_is_found_before_anything_is_restored(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(1, small(1.0), {"batch": 1})
    checkpoints.save(2, small(2.0), {"batch": 2})
    checkpoints.close()
    data = max((tmp_path / "2").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(data.read_bytes())
    if damage == "flip":  # of one bit in the array data, which Orbax would restore as another number
        content[random.Random(0).randrange(len(content))] ^= 16
        data.write_bytes(content)
    elif damage == "cut":
        data.write_bytes(content[: len(content) // 2])
    elif damage == "delete":
        data.unlink()
    elif damage == "seal":
        (tmp_path / "2" / "state" / "seals" / "process-0.json").unlink()
    elif damage == "stray":
        (data.parent / "more").write_bytes(b"")
    elif damage == "loose":
        (tmp_path / "2" / "more").mkdir()
    elif damage == "pipe":
        (tmp_path / "2" / "state" / "contents.json").unlink()
        os.mkfifo(tmp_path / "2" / "state" / "contents.json")
    elif damage == "circle":
        for name in ("one", "two"):  # each leads to both, at forty levels
            (tmp_path / "2" / "state" / name).symlink_to(".")
    elif damage == "deep":
        (tmp_path / "2" / "state" / "contents.json").write_text("[" * 100_000)
    else:
        contents = tmp_path / "2" / "state" / "contents.json"
        contents.write_text(contents.read_text().replace('"batch": 2', '"batch": 3'))
    with pytest.raises(
        CheckpointError, match=r"2 is damaged \(.*\); delete that folder to fall back on step 1"
    ) as error:
        checkpoints.restore(describe(small()))
    assert "\n" not in str(error.value)
    assert_bitwise(checkpoints.restore(describe(small()), step=1)[0], small(1.0))
    shutil.rmtree(tmp_path / "2")
    restored, position = checkpoints.restore(describe(small()))
    assert_bitwise(restored, small(1.0))
    assert position == {"batch": 1}


def test_what_the_host_spoils_on_the_way_to_the_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = ocp.handlers.PyTreeHandler.save

    async def spoiled(self: Any, directory: Any, tree: Any) -> Any:
        return await save(self, directory, {**tree, "weights": tree["weights"].at[5, 7].multiply(2)})

    monkeypatch.setattr(ocp.handlers.PyTreeHandler, "save", spoiled)
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, small(), {})
    with pytest.raises(CheckpointError, match=r"1 is damaged \(\['weights'\] differs from its seal at 0:64,0:64\)"):
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
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = where.draw(st.sampled_from(files), label="file")
    content = bytearray(file.read_bytes())
    byte = where.draw(st.integers(0, len(content) - 1), label="byte")
    content[byte] ^= 1 << where.draw(st.integers(0, 7), label="bit")
    file.write_bytes(content)
    like = laid_out(("model",), ("data",))
    arrays = "ocdbt" in str(file) or "d/" in str(file.relative_to(folder)) or file.name.startswith("manifest")
    try:
        restored, position = Checkpoints(folder, every=1).restore(describe(like))
    except CheckpointError as error:
        outcome = str(error)
    else:
        outcome = "restored"
        assert not arrays
        assert_bitwise(restored, like)
        assert position == {"batch": 1}
    assert any(words in outcome for words in ("is damaged", "cannot be read", "restored"))


@pytest.mark.parametrize("name", ["weights", "half", "key", "step"])
def test_arrays_are_compared_with_their_seals_under_any_sharding(
    sound: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ocp.load

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        tree = load(*args, **kwargs)
        leaf = tree[name]
        if name == "key":
            tree[name] = jax.device_put(jax.random.key(8), leaf.sharding)
        else:  # one element on one device
            shards = [np.array(shard.data) for shard in leaf.addressable_shards]
            shards[-1].reshape(-1)[-1:] += np.ones((), leaf.dtype)
            devices = [shard.device for shard in leaf.addressable_shards]
            parts = [jax.device_put(part, device) for part, device in zip(shards, devices, strict=True)]
            tree[name] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
        return tree

    monkeypatch.setattr("sdc.train.checkpoints.ocp.load", spoiled)
    for specs in [(("data", "model"),), ((None, ("data", "model")), ("data",)), ((("model", "data"),),), ((), ())]:
        with pytest.raises(CheckpointError, match=rf"1 is damaged \(\['{name}'\] differs (from its seal|between)"):
            Checkpoints(sound, every=1).restore(describe(laid_out(*specs)))


def test_an_unknown_seal_and_arrays_without_a_seal_are_refused(sound: Path, tmp_path: Path) -> None:
    class Other(seals.Sha256):
        algorithm = "other"

    class Careless(seals.Sha256):
        def take(self, arrays: Any) -> Any:
            return super().take({name: array for name, array in arrays.items() if "step" not in name})

    with Checkpoints(tmp_path, every=1, seal=Other()) as checkpoints:
        checkpoints.save(1, small(), {})
    assert_bitwise(checkpoints.restore(describe(small()))[0], small())
    with pytest.raises(CheckpointError, match=r"sealed with other, which nothing here can compare"):
        Checkpoints(tmp_path, every=1).restore(describe(small()))
    # One that was written by an older algorithm is still read by a run that seals with a newer one.
    restored, _ = Checkpoints(sound, every=1, seal=Other()).restore(describe(laid_out()))
    assert_bitwise(restored, laid_out())
    with Checkpoints(tmp_path, every=1, seal=Careless()) as checkpoints:
        checkpoints.save(2, small(), {})
    with pytest.raises(CheckpointError, match=r"the seals do not cover \['step'\]"):
        checkpoints.restore(describe(small()))


def test_a_part_is_read_and_the_rest_stays(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    checkpoints = Checkpoints(tmp_path, every=1)
    given = {**laid_out(("model",)), "weights": jnp.zeros((2, 2)), "step": jnp.int32(9)}  # of other types
    for only in ("half", ["half"], lambda name: name == "half"):
        restored, position = checkpoints.restore({**given, "half": describe(laid_out())["half"]}, only=only)
        assert_bitwise(restored["half"], laid_out()["half"])
        assert all(restored[name] is given[name] for name in ("weights", "step", "key"))
        assert position == {"batch": 1}
    nested = {"params": {"layer": small(), "layers": small(2.0)}}
    checkpoints.save(2, nested, {})
    other = jax.tree.map(jnp.zeros_like, nested)
    restored, _ = checkpoints.restore(other, only=["params/layer"])
    assert_bitwise(restored, {"params": {"layer": small(), "layers": other["params"]["layers"]}})
    with pytest.raises(SettingError, match=r"only=weigh: the state has no such part; it has params/layer/step, "):
        checkpoints.restore(nested, only="weigh")
    with pytest.raises(CheckpointError, match=r"holds float32\[64, 64\] at \['weights'\], expected float32\[2, 2\]"):
        checkpoints.restore(given, step=1, only=["weights", "half"])


def test_a_part_is_compared_with_its_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, small(), {})
        checkpoints.wait()
        shutil.rmtree(tmp_path / "1" / "state" / "ocdbt.process_0")
        with pytest.raises(CheckpointError, match=r"is damaged .* is missing"):
            checkpoints.restore(small(), only="step")
        checkpoints.save(1, small(2.0), {})
        checkpoints.wait()
        seal = epath.Path(tmp_path / "1" / "state" / "seals" / "process-0.json")
        body = sealed.read_checked(seal)
        body["arrays"]["['weights']"]["0:64,0:64"] = "0" * 64
        sealed.write_checked(seal, body)
        assert_bitwise(checkpoints.restore(small(), only="step")[0], small())
        with pytest.raises(CheckpointError, match=r"\['weights'\] differs from its seal"):
            checkpoints.restore(small(), only="weights")
        with (tmp_path / "1" / "state" / "_sharding").open("a") as file:
            file.write(" ")
        with pytest.raises(CheckpointError, match=r"_sharding has \d+ bytes instead of \d+"):
            checkpoints.restore(small(), only="step")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint as version 0.1 wrote it."""
    path = tmp_path / "3"
    ocp.save(path / "arrays", small())
    types = {"['weights']": "float32[64, 64]", "['step']": "int32[]"}
    (path / "contents.json").write_text(json.dumps({"arrays": types, "position": {"batch": 3}}))
    files = sorted(file for file in path.rglob("*") if file.is_file())
    sums = {file.relative_to(path).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (path / "checksums.json").write_text(json.dumps(sums))
    return path


def test_a_run_of_version_0_1_is_continued(old: Path) -> None:
    (old.parent / "2" / "arrays").mkdir(parents=True)  # cut off by a crash
    with Checkpoints(old.parent, every=1, keep=2) as checkpoints:
        assert checkpoints.steps == [3]
        restored, position = checkpoints.restore(describe(small()))
        assert_bitwise(restored, small())
        assert position == {"batch": 3}
        restored, _ = checkpoints.restore({**small(5.0), "step": jnp.int32(0)}, only="step")
        assert_bitwise(restored, {**small(5.0), "step": jnp.int32(3)})
        checkpoints.save(4, small(), {})
        assert checkpoints.steps == [3, 4]
        checkpoints.save(5, small(), {})
    assert sorted(path.name for path in old.parent.iterdir()) == ["4", "5"]


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("checksums.json", os.mkfifo, "checksums.json cannot be read: .* is a pipe, not a file"),
        ("checksums.json", lambda path: path.write_text("[" * 100_000), "it is nested deeper than 100 levels"),
        ("arrays/pipe", os.mkfifo, "arrays/pipe is a pipe, not a file"),
        ("arrays/circle", lambda path: path.symlink_to("."), "circle"),
    ],
)
def test_a_checkpoint_of_version_0_1_is_read_to_its_end(
    old: Path, name: str, make: Callable[[Path], None], message: str
) -> None:
    (old / name).unlink(missing_ok=True)
    make(old / name)
    with pytest.raises(CheckpointError, match=rf"3 is damaged \(.*{message}"):
        Checkpoints(old.parent, every=1).restore(describe(small()))


def test_damage_to_a_checkpoint_of_version_0_1_is_found(old: Path) -> None:
    data = max((path for path in old.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 16
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"3 is damaged \(the checksum of arrays/.* differs\); delete"):
        Checkpoints(old.parent, every=1).restore(describe(small()))


def test_a_checkpoint_under_another_name_and_a_strange_seal_are_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, small(1.0), {})
        checkpoints.save(2, small(2.0), {})
    (tmp_path / "2").rename(tmp_path / "5")
    with pytest.raises(CheckpointError, match=r"5 is damaged \(it is the checkpoint of step 2\)"):
        checkpoints.restore(describe(small()))
    (tmp_path / "5").rename(tmp_path / "2")
    shutil.copytree(tmp_path / "1" / "state" / "seals", tmp_path / "2" / "state" / "seals", dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match=r"seals/process-0.json belongs to step 1, process 0"):
        checkpoints.restore(describe(small()))


def test_of_replicas_that_differ_the_first_is_saved(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    parts = [jax.device_put(jnp.full((64, 64), float(i)), device) for i, device in enumerate(mesh.devices)]
    sharding = NamedSharding(mesh, PartitionSpec())
    state = {"weights": jax.make_array_from_single_device_arrays((64, 64), sharding, parts)}
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, state, {})
    np.testing.assert_array_equal(checkpoints.restore(describe(state))[0]["weights"], np.zeros((64, 64)))
