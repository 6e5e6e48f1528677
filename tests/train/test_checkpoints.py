import functools
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
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
from sdc.train.config import ModelConfig, OptimizerConfig, TrainConfig
from sdc.train.step import TrainState, abstract_state, init_state, state_specs

CONFIG = TrainConfig(
    name="test",
    model=ModelConfig(vocab_size=64, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=48),
    optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=2, total_steps=50, weight_decay=0.1, clip=0.5),
    sequence_length=16,
    batch_size=4,
    microsteps=2,
)
# Numbers that JSON and floating point are known to spoil, and what grain puts into a position.
POSITION = {"version": 2, "last_seen_indices": {"0": 2**62 + 1}, "shard": [0, None, "ü"], "exhausted": False}


def shard(abstract: Any, specs: Any, data: int, model: int) -> Any:
    mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        abstract,
        specs,
    )


def describe(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def assert_bitwise(actual: Any, expected: Any) -> None:
    def check(mine: Any, theirs: Any) -> None:
        assert mine.dtype == theirs.dtype
        if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()

    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(check, actual, expected)


@functools.cache
def state() -> TrainState:
    quick = {"xla_backend_optimization_level": 0}  # compiles in half the time
    return jax.jit(functools.partial(init_state, CONFIG), compiler_options=quick)(jax.random.key(0))


def small(value: float = 1.0) -> dict[str, Any]:
    return {"weights": value * jax.random.normal(jax.random.key(0), (64, 64)), "step": jnp.int32(3)}


def test_a_training_state_comes_back_bitwise_on_any_mesh(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new", every=5)
    saved = jax.device_put(state(), jax.tree.map(lambda leaf: leaf.sharding, sharded(2, 2)))
    assert checkpoints.latest is None
    assert checkpoints.save(5, saved, POSITION)
    checkpoints.close()
    for mesh in [(2, 2), (4, 1), (1, 1)]:
        target = sharded(*mesh)
        restored, position = Checkpoints(tmp_path / "new", every=5).restore(target)
        assert isinstance(restored, TrainState)
        assert_bitwise(restored, saved)
        assert jax.tree.all(jax.tree.map(lambda leaf, like: leaf.sharding == like.sharding, restored, target))
        assert position == POSITION


def sharded(data: int, model: int) -> Any:
    return shard(abstract_state(CONFIG), state_specs(CONFIG), data, model)


def test_every_bit_survives(tmp_path: Path) -> None:
    odd = np.array([0x7FC1, 0x8000, 0xFF80, 0x0001, 0x3F80], np.uint16)  # NaN with payload, -0, -inf, subnormal, 1
    tree = {
        "bfloat16": jax.lax.bitcast_convert_type(jnp.asarray(odd), jnp.bfloat16),
        "float32": jnp.asarray(np.array([0x7FA00001, 0x80000000, 1, 0xFF800000], np.uint32).view(np.float32)),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8), 3),
        "step": jnp.int32(2**31 - 1),
        "empty": (),
    }
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, tree, {})
    restored, _ = Checkpoints(tmp_path, every=1).restore(describe(tree))
    assert_bitwise(restored, tree)
    np.testing.assert_array_equal(jax.random.bits(restored["key"]), jax.random.bits(tree["key"]))


def test_saves_when_due_and_keeps_the_last_two(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=3)
    saved = [step for step in range(1, 11) if checkpoints.save(step, small(step), {"step": step})]
    assert saved == [3, 6, 9]
    assert checkpoints.save(10, small(10.0), {"step": 10}, force=True)
    assert checkpoints.steps == [9, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "9"]
    assert checkpoints.latest == 10
    assert checkpoints.restore(describe(small()))[1] == {"step": 10}


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(4, small(1.0), {"try": 1})
    checkpoints.save(4, small(2.0), {"try": 2})
    restored, position = checkpoints.restore(describe(small()))
    assert_bitwise(restored, small(2.0))
    assert position == {"try": 2}


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "seal", "position", "stray", "loose"])
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": ((64, 32), "float32")}, r"holds float32\[64, 64\] at \['weights'\], expected float32\[64, 32\]"),
        ({"weights": ((64, 64), "bfloat16")}, r"expected bfloat16\[64, 64\]"),
        ({"step": None}, r"holds int32\[\] at \['step'\], expected nothing"),
        ({"more": ((2,), "float32")}, r"holds nothing at \['more'\], expected float32\[2\]"),
    ],
    ids=["shape", "dtype", "fewer", "more"],
)
def test_another_state_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(1, small(), {})
    other = {"weights": ((64, 64), "float32"), "step": ((), "int32"), **change}
    abstract = {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in other.items() if leaf}
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore(abstract)


def test_nothing_to_restore_and_nowhere_to_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*; start the run anew"):
        Checkpoints(tmp_path, every=1).restore(describe(small()))
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(
            CheckpointError, match=r"cannot write checkpoint .*file/1 \(.*\); make room or name another"
        ) as error,
        Checkpoints(tmp_path / "file", every=1) as checkpoints,
    ):
        checkpoints.save(1, small(), {})
    assert "\n" not in str(error.value)
    for setting in ("every", "keep"):
        with pytest.raises(SettingError, match=f"{setting}=0: expected at least 1"):
            Checkpoints(tmp_path, **{"every": 1, setting: 0})
    with pytest.raises(SettingError, match=r"folder=s3://bucket/run: Orbax writes arrays to .*, not to s3://"):
        Checkpoints("s3://bucket/run", every=1)


CHILD = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp
from pathlib import Path
from sdc.train.checkpoints import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), every=1)
state = {"weights": jax.random.normal(jax.random.key(0), (512, 512)), "step": jnp.int32(3)}
checkpoints.save(1, state, {"batch": 1})
delay = float(sys.argv[2])
threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
step = 2
while True:
    checkpoints.save(step, state, {"batch": step})
    step += 1
"""


def test_a_save_cut_off_by_a_kill_does_not_count(tmp_path: Path) -> None:
    target = {"weights": jax.random.normal(jax.random.key(0), (512, 512)), "step": jnp.int32(3)}
    checkpoints = Checkpoints(tmp_path, every=1)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), "0.41"], env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert child.returncode == -signal.SIGKILL
    latest = checkpoints.latest
    assert latest is not None
    restored, position = checkpoints.restore(describe(target))
    assert_bitwise(restored, target)
    assert position == {"batch": latest}
    (tmp_path / "999.orbax-checkpoint-tmp").mkdir()  # as if the kill had come while Orbax was writing
    # The run goes on over what the kill left behind, and cleans it up.
    for step in (latest + 1, latest + 2):
        assert checkpoints.save(step, target, {"batch": step})
    assert checkpoints.restore(describe(target))[1] == {"batch": latest + 2}
    checkpoints.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [latest + 1, latest + 2]


@pytest.mark.parametrize("left", ["nothing", "tmp", "uncommitted", "complete"])
def test_every_stage_of_a_save_can_be_the_last(tmp_path: Path, left: str) -> None:
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, small(1.0), {"batch": 1})
        checkpoints.save(2, small(2.0), {"batch": 2})
    if left == "nothing":
        shutil.rmtree(tmp_path / "2")
    elif left == "tmp":
        (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    elif left == "uncommitted":  # on object storage, where nothing can be renamed
        (tmp_path / "2" / "commit_success.txt").unlink()
    with Checkpoints(tmp_path, every=1) as checkpoints:
        assert checkpoints.latest == (2 if left == "complete" else 1)
        assert checkpoints.save(2, small(3.0), {"batch": 2})
        assert_bitwise(checkpoints.restore(describe(small()))[0], small(3.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_an_error_in_the_background_comes_at_the_next_call_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(1, small(1.0), {"batch": 1})
    checkpoints.save(2, small(2.0), {"batch": 2})
    checkpoints.wait()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("sdc.train.sealed._write_seal", full)
        for call in (lambda: checkpoints.save(3, small(), {}), checkpoints.close, lambda: checkpoints.latest):
            assert checkpoints.save(2, small(3.0), {})  # an overwritten step no longer counts
            with pytest.raises(
                CheckpointError, match=r"cannot write checkpoint .*/2 \(.*No space left on device\); make room"
            ):
                call()
            assert checkpoints.latest == 1
    assert checkpoints.restore(describe(small()))[1] == {"batch": 1}
    checkpoints.save(4, small(4.0), {"batch": 4})
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4"]


def test_a_save_leaves_the_loop_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), sealed._write_seal

    def late(*given: Any) -> None:
        assert go.wait(60)
        write(*given)

    monkeypatch.setattr(sealed, "_write_seal", late)
    checkpoints = Checkpoints(tmp_path, every=1)
    assert checkpoints.save(1, small(), {})
    assert not (tmp_path / "1").exists()
    go.set()
    assert checkpoints.latest == 1


def test_the_state_may_be_donated_at_once(tmp_path: Path) -> None:
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    start = {f"layer{i}": jnp.full((256, 256), float(i)) for i in range(8)}
    current = jax.tree.map(jnp.copy, start)
    with Checkpoints(tmp_path, every=1, keep=9) as checkpoints:
        for number in range(4):
            checkpoints.save(number, current, {})
            saved, current = current, jax.block_until_ready(step(current))
            for array in saved.values():
                array.delete()  # JAX does not donate, but copies, while somebody still holds the memory
    for number in range(4):
        expected = jax.tree.map(lambda x, number=number: x + number, start)
        assert_bitwise(checkpoints.restore(describe(start), step=number)[0], expected)


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


def test_a_given_step_is_restored(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=1, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, small(step), {"batch": step})
    restored, position = checkpoints.restore(describe(small()), step=2)
    assert_bitwise(restored, small(2))
    assert position == {"batch": 2}
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 7 in .*; those of 1, 2, 3 are there"):
        checkpoints.restore(describe(small()), step=7)
    # A run that went back to step 1 gives up the later ones.
    checkpoints.save(2, small(20), {"batch": 20})
    assert checkpoints.steps == [1, 2]
    assert checkpoints.restore(describe(small()))[1] == {"batch": 20}


def test_a_protected_checkpoint_stays_until_it_is_released(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, every=1, keep=1) as checkpoints:
        checkpoints.save(1, small(1.0), {"batch": 1})
        checkpoints.protect(1)
        for step in (2, 3):
            checkpoints.save(step, small(), {})
        assert checkpoints.steps == [1, 3]
        with pytest.raises(CheckpointError, match="no complete checkpoint of step 2"):
            checkpoints.protect(2)
    with Checkpoints(tmp_path, every=1, keep=1) as resumed:
        assert resumed.protected == {1}
        resumed.save(4, small(), {})
        assert resumed.steps == [1, 4]
        assert resumed.restore(describe(small()), step=1)[1] == {"batch": 1}
        resumed.release(1)
        resumed.save(5, small(), {})
        assert resumed.steps == [5]
        (tmp_path / "protected.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"protected.json cannot be read.*; delete it and protect"):
            resumed.save(6, small(), {})
        assert resumed.steps == [5]


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


def test_damage_to_a_checkpoint_of_version_0_1_is_found(old: Path) -> None:
    data = max((path for path in old.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 16
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"3 is damaged \(the checksum of arrays/.* differs\); delete"):
        Checkpoints(old.parent, every=1).restore(describe(small()))
