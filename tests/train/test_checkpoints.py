import functools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

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
    Checkpoints(tmp_path, every=1).save(1, tree, {})
    restored, _ = Checkpoints(tmp_path, every=1).restore(describe(tree))
    assert_bitwise(restored, tree)
    np.testing.assert_array_equal(jax.random.bits(restored["key"]), jax.random.bits(tree["key"]))


def test_saves_when_due_and_keeps_the_last_two(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=3)
    saved = [step for step in range(1, 11) if checkpoints.save(step, small(step), {"step": step})]
    assert saved == [3, 6, 9]
    assert checkpoints.save(10, small(10.0), {"step": 10}, force=True)
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


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "seal", "position"])
def test_damage_is_found_before_anything_is_restored(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(1, small(1.0), {"batch": 1})
    checkpoints.save(2, small(2.0), {"batch": 2})
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
        (tmp_path / "2" / "checksums.json").write_text('{"arrays')
    else:
        contents = tmp_path / "2" / "contents.json"
        contents.write_text(contents.read_text().replace('"batch": 2', '"batch": 3'))
    with pytest.raises(
        CheckpointError, match=r"2 is damaged \(.*\); delete that folder to fall back on step 1"
    ) as error:
        checkpoints.restore(describe(small()))
    assert "\n" not in str(error.value)
    for path in sorted((tmp_path / "2").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
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
    with pytest.raises(
        CheckpointError, match=r"cannot write checkpoint .*file/1 \(.*\); make room or name another"
    ) as error:
        Checkpoints(tmp_path / "file", every=1).save(1, small(), {})
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="every 0 steps, keeping 2: expected at least 1 of each"):
        Checkpoints(tmp_path, every=0)


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
    # The run goes on over what the kill left behind, and cleans it up.
    for step in (latest + 1, latest + 2):
        assert checkpoints.save(step, target, {"batch": step})
    assert checkpoints.restore(describe(target))[1] == {"batch": latest + 2}
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [latest + 1, latest + 2]


@pytest.mark.parametrize("left", ["arrays", "arrays.orbax-checkpoint-tmp", "sealed"])
def test_every_stage_of_a_save_can_be_the_last(tmp_path: Path, left: str) -> None:
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(1, small(1.0), {"batch": 1})
    checkpoints.save(2, small(2.0), {"batch": 2})
    if left != "sealed":
        (tmp_path / "2" / "checksums.json").unlink()
        (tmp_path / "2" / "arrays").rename(tmp_path / "2" / left)
    assert checkpoints.latest == (2 if left == "sealed" else 1)
    assert checkpoints.save(2, small(3.0), {"batch": 2})
    assert_bitwise(checkpoints.restore(describe(small()))[0], small(3.0))
    table = json.loads((tmp_path / "2" / "checksums.json").read_text())
    assert any(name.startswith("arrays/") for name in table)


def test_an_overwritten_step_no_longer_counts_until_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(1, small(1.0), {})
    checkpoints.save(2, small(2.0), {})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sdc.train.checkpoints.ocp.save", full)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*/2 \(.*No space left on device\); make room"):
        checkpoints.save(2, small(3.0), {})
    assert checkpoints.latest == 1
