import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from sdc.train.checkpoints import Checkpoints
from sdc.train.programs.step import TrainState, abstract_state, state_specs
from tests.train.test_checkpoints import CONFIG, assert_bitwise, describe, folders, state

# Numbers that JSON and floating point are known to spoil, and what grain puts into a position.
POSITION = {"version": 2, "last_seen_indices": {"0": 2**62 + 1}, "shard": [0, None, "ü"], "exhausted": False}


def shard(abstract: Any, specs: Any, data: int, model: int) -> Any:
    mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        abstract,
        specs,
    )


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
    assert folders(tmp_path) == [latest, latest + 1, latest + 2]  # the one that was restored is known to be good
