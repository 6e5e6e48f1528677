import functools
import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from sdc.checkpoints.certificate import Draft, certified_steps
from sdc.settings import SettingError
from sdc.train.checkpoints import CheckpointError, Checkpoints
from sdc.train.loop import run_steps
from sdc.train.programs.config import ModelConfig, OptimizerConfig, TrainConfig
from sdc.train.programs.device import StepRows
from sdc.train.programs.step import TrainState, init_state
from tests.storms.soak import Held

CONFIG = TrainConfig(
    name="test",
    model=ModelConfig(vocab_size=64, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn_width=48),
    optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=2, total_steps=50, weight_decay=0.1, clip=0.5),
    sequence_length=16,
    batch_size=4,
    microsteps=2,
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


def folders(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name != "certificates")


def small(value: float = 1.0) -> dict[str, Any]:
    return {"weights": value * jax.random.normal(jax.random.key(0), (64, 64)), "step": jnp.int32(3)}


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
    assert folders(tmp_path) == [9, 10]
    assert checkpoints.latest == 10
    assert checkpoints.restore(describe(small()))[1] == {"step": 10}


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(4, small(1.0), {"try": 1})
    checkpoints.save(4, small(2.0), {"try": 2})
    restored, position = checkpoints.restore(describe(small()))
    assert_bitwise(restored, small(2.0))
    assert position == {"try": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": ((64, 32), "float32")}, r"state/weights was certified with shape \[64, 64\], not \[64, 32\]"),
        ({"weights": ((64, 64), "bfloat16")}, r"was certified as float32, not as bfloat16"),
        ({"step": None}, r"it has no state/step, which was saved"),
        (
            {"more": ((2,), "float32")},
            r"it has state/more, which was not saved; resume with the original configuration",
        ),
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
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*; start a new run"):
        Checkpoints(tmp_path, every=1).restore(describe(small()))
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(
            CheckpointError, match=r"cannot write checkpoint .*file/1 \(.*\); free some space or choose another"
        ) as error,
        Checkpoints(tmp_path / "file", every=1) as checkpoints,
    ):
        checkpoints.save(1, small(), {})
    assert "\n" not in str(error.value)
    for setting in ("every", "keep"):
        with pytest.raises(SettingError, match=f"{setting}=0: expected at least 1"):
            Checkpoints(tmp_path, **{"every": 1, setting: 0})
    with pytest.raises(SettingError, match=r"folder=s3://bucket/run: Orbax cannot write to s3://; give .*"):
        Checkpoints("s3://bucket/run", every=1)


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
    assert folders(tmp_path) == [1, 2]


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
        patch.setattr(Draft, "write", full)
        for call in (lambda: checkpoints.save(3, small(), {}), checkpoints.close, lambda: checkpoints.latest):
            assert checkpoints.save(2, small(3.0), {})  # an overwritten step no longer counts
            with pytest.raises(
                CheckpointError, match=r"cannot write checkpoint .*/2 \(.*No space left on device\); free some space"
            ):
                call()
            assert checkpoints.latest == 1
    assert checkpoints.restore(describe(small()))[1] == {"batch": 1}
    checkpoints.save(4, small(4.0), {"batch": 4})
    checkpoints.close()
    assert folders(tmp_path) == [1, 4]


def test_a_save_leaves_the_loop_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), Draft.write

    def late(*given: Any) -> None:
        assert go.wait(60)
        write(*given)

    monkeypatch.setattr(Draft, "write", late)
    checkpoints = Checkpoints(tmp_path, every=1)
    assert checkpoints.save(1, small(), {})
    assert certified_steps(epath.Path(tmp_path)) == []
    go.set()
    assert checkpoints.latest == 1


def test_saves_leave_no_descriptors_and_no_threads(tmp_path: Path) -> None:
    """Orbax's answer to a save in the background has both until it is asked for its result."""
    held = []
    with Checkpoints(tmp_path, every=1) as checkpoints:
        for step in range(8):
            checkpoints.save(step, small(), {})
            checkpoints.wait()
            held.append(Held.now(tmp_path))
    assert held[-1].descriptors <= held[3].descriptors
    assert (
        held[-1].threads <= held[3].threads + 2
    )  # the last threads of the pools of libraries; each save had leaked one


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


def test_a_given_step_is_restored(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every=1, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, small(step), {"batch": step})
    restored, position = checkpoints.restore(describe(small()), step=2)
    assert_bitwise(restored, small(2))
    assert position == {"batch": 2}
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 7 in .*; available steps: 1, 2, 3"):
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
        status = tmp_path / "certificates" / "1" / "status.json"
        reader = status.open()  # a process that reads while another writes has the old file, whole
        checkpoints.protect(3)
        checkpoints.release(1)
        with reader:
            assert json.loads(reader.read())["protected"]
        assert not json.loads(status.read_text())["protected"]
        assert checkpoints.protected == {3}
        checkpoints.protect(1)
        checkpoints.release(3)
    with Checkpoints(tmp_path, every=1, keep=1) as resumed:
        assert resumed.protected == {1}
        resumed.save(4, small(), {})
        assert resumed.steps == [1, 4]
        assert resumed.restore(describe(small()), step=1)[1] == {"batch": 1}
        resumed.release(1)
        resumed.restore(describe(small()))
        for step in (5, 6):
            resumed.save(step, small(), {})
        assert resumed.steps == [4, 6]  # the one that was restored last stays as well
        (tmp_path / "certificates" / "6" / "status.json").write_text("{")  # nothing is deleted while that is not known
        resumed.save(7, small(), {})
        assert resumed.steps == [4, 6, 7]


def test_a_step_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    class Batches:
        def __next__(self) -> np.ndarray:
            return np.zeros((1, 1, 1), np.int32)

        def get_state(self) -> dict[str, Any]:
            return {}

    def step(state: Any, _: Any, number: int) -> Any:
        if number == 1:
            raise ArithmeticError("step 1")
        return state, None

    program = SimpleNamespace(
        placement=SimpleNamespace(mesh=jax.make_mesh((1, 1), ("data", "model"))),
        step=step,
        observe=lambda state, out: (state, out),
        rows=lambda *_: StepRows({}),
    )
    with pytest.raises(ArithmeticError, match="step 1"), Checkpoints(tmp_path, every=1) as checkpoints:
        run_steps(program, small(), steps=range(3), batches=Batches(), record=None, checkpoints=checkpoints)
    assert (tmp_path / "1" / "commit_success.txt").is_file()  # without a further call
