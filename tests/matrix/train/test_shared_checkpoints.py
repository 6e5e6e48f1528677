"""Checkpoints of a run of two processes, each with four of the eight devices."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sdc.train.checkpoints import CheckpointError, Checkpoints
from tests.pairs import run_pair, spoiled

ROWS, COLUMNS, EVERYWHERE = PartitionSpec("all"), PartitionSpec(None, "all"), PartitionSpec()

CHILD = """
import json, sys
import jax, numpy as np
from pathlib import Path
from jax.experimental import multihost_utils

folder, process, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
from sdc.train import checkpoints as module
from tests.matrix.train.test_shared_checkpoints import COLUMNS, EVERYWHERE, ROWS, abstract, problem, same, spoil, state

checkpoints = module.Checkpoints(folder, every=1, keep=1)
for step in (1, 2):
    checkpoints.save(step, state(ROWS, step), {"batch": step})
    if step == 1:
        checkpoints.protect(1)
steps = checkpoints.steps
restored = [same(checkpoints.restore(abstract(spec))[0], state(spec, 2)) for spec in (ROWS, COLUMNS, EVERYWHERE)]
part = same(checkpoints.restore(abstract(COLUMNS), only="weights", step=1)[0]["weights"], state(COLUMNS, 1)["weights"])

load, problems = module.ocp.training.Checkpointer.load_checkpointables, []
for spec in (ROWS, COLUMNS):
    if process == 1:  # of one process's memory
        module.ocp.training.Checkpointer.load_checkpointables = spoil(load)
    problems.append(problem(checkpoints, spec))
module.ocp.training.Checkpointer.load_checkpointables = load
if process == 1:
    for file in (folder / "2" / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
multihost_utils.sync_global_devices("changed")
problems.append(problem(checkpoints, ROWS))
checkpoints.close()
print(json.dumps({"steps": steps, "restored": restored, "part": part, "problems": problems}), flush=True)
"""


def state(spec: PartitionSpec, step: int) -> dict[str, Any]:
    mesh = jax.make_mesh((8,), ("all",), axis_types=(AxisType.Auto,))
    whole = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    place = lambda sharding: jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])  # noqa: E731
    step_sharding = NamedSharding(mesh, EVERYWHERE)
    return {
        "weights": place(NamedSharding(mesh, spec)),
        "half": place(NamedSharding(mesh, EVERYWHERE)).astype(jnp.bfloat16),
        "step": jax.make_array_from_callback((), step_sharding, lambda _: np.int32(step)),
    }


def abstract(spec: PartitionSpec) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state(spec, 0)
    )


def same(mine: Any, theirs: Any) -> bool:
    """Whether this process holds the same bits, shard by shard."""

    def check(a: Any, b: Any) -> bool:
        pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
        return all(np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes() for x, y in pairs)

    return bool(jax.tree.all(jax.tree.map(check, mine, theirs)))


def problem(checkpoints: Checkpoints, spec: PartitionSpec) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(abstract(spec), step=2)
    return str(error.value)


def spoil(load: Any) -> Any:
    """Orbax's load, and one element of this process's last shard changed."""

    def load_spoiled(*args: Any, **kwargs: Any) -> Any:
        trees = load(*args, **kwargs)
        return {**trees, "state": {**trees["state"], "weights": spoiled(trees["state"]["weights"])}}

    return load_spoiled


def test_two_processes_save_restore_and_fail_together(tmp_path: Path) -> None:
    results = run_pair(CHILD, tmp_path)
    for result in results:
        assert result["steps"] == [1, 2]
        assert result["restored"] == [True, True, True]
        assert result["part"]
        rows, columns, file = result["problems"]
        assert "state/weights differs in rows 0:16" in rows
        assert "is damaged: state/weights differs" in columns
        assert "cannot be read" in file or "state/weights differs" in file
    assert [one.split(";")[0][:60] for one in results[0]["problems"]] == [
        one.split(";")[0][:60] for one in results[1]["problems"]
    ]
    certificate = tmp_path / "certificates" / "1"
    assert {path.name for path in certificate.iterdir()} >= {"process-0.json", "process-1.json"}
    # One process takes over what two have saved.
    for spec in (ROWS, COLUMNS, EVERYWHERE):
        restored, position = Checkpoints(tmp_path, every=1).restore(abstract(spec), step=1)
        assert same(restored, state(spec, 1))
        assert position == {"batch": 1}
    (certificate / "process-1.json").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 1 in .*; available steps: 2"):
        Checkpoints(tmp_path, every=1).restore(abstract(ROWS), step=1)
