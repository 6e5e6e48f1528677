"""Certified checkpoints of two processes, each with four of the eight devices: one answer, and nobody left waiting."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import sdc
from sdc.checkpoints import CertificateError
from tests.pairs import run_pair, spoiled

CHILD = """
import json, sys
import jax
from pathlib import Path
folder, process, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
from orbax.checkpoint import v1 as ocp
import sdc
from tests.matrix.checkpoints.test_shared import SPECS, abstract, restored, spoil, state

checkpointer = sdc.certify(ocp.training.Checkpointer(folder))
for step in (1, 2):
    checkpointer.save(step, state(step, SPECS[0]))
told = [restored(checkpointer, spec) for spec in SPECS]
load = checkpointer._orbax.load_checkpointables
if process == 1:
    checkpointer._orbax.load_checkpointables = spoil(load)  # in one process's memory
told.append(restored(checkpointer, SPECS[0]))
told.append(restored(checkpointer, SPECS[2]))

def broken(*args):
    load(*args)  # which ends in a barrier of Orbax's own
    raise OSError("stale file handle")

checkpointer._orbax.load_checkpointables = broken if process == 1 else load
told.append(restored(checkpointer, SPECS[0]))
print(json.dumps(told), flush=True)
checkpointer.close()
"""
SPECS = [P("all"), P(None, "all"), P()]


def state(step: int, spec: P) -> dict[str, Any]:
    mesh = Mesh(np.asarray(jax.devices()), ("all",))
    whole = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    number = np.int32(step)
    return {
        "w": jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index]),
        "step": jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda _: number),
    }


def abstract(spec: P) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0, spec))


def restored(checkpointer: Any, spec: P) -> Any:
    """The step that was restored, or why none was."""
    try:
        return checkpointer.restore_verified(abstract(spec))[1]
    except CertificateError as error:
        return str(error)


def spoil(load: Any) -> Any:
    """Orbax's load of the newest checkpoint, and one element of this process's last shard changed."""

    def load_spoiled(step: int, given: Any) -> Any:
        loaded = load(step, given)
        if step == 2:
            loaded["state"]["w"] = spoiled(loaded["state"]["w"])
        return loaded

    return load_spoiled


def test_two_processes_come_to_the_same_answer(tmp_path: Path) -> None:
    told = run_pair(CHILD, tmp_path)
    for answers in told:
        assert answers[:3] == [2, 2, 2]
        assert answers[3:5] == [1, 1]  # shards, and replicas of which one differs
        assert "no checkpoint in" in answers[5]
        assert "stale file handle" in answers[5]
    # One process takes over what two have saved, and misses the part of one of them.
    checkpointer = sdc.certify(ocp.training.Checkpointer(tmp_path))
    for spec in SPECS:
        assert restored(checkpointer, spec) == 2
    (tmp_path / "certificates" / "2" / "process-1.json").unlink()
    assert restored(checkpointer, SPECS[0]) == 1
    assert "lacks the part of process 1" in checkpointer.rejected[0][1]
    with pytest.raises(CertificateError):
        checkpointer.status(2)
