"""Repair: only what is wrong is put right, from whatever source has it, and it is said how old that is."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import sdc
from sdc.checkpoints import (
    CertificateError,
    Damaged,
    FromCheckpoint,
    FromRunning,
    FromState,
    RunningCheckpoint,
    Wrong,
    differing,
    repair,
)
from tests.storms.bits import bits_of


def state(step: int) -> dict[str, Any]:
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))
    w = jax.device_put(jnp.full((512, 64), jnp.float32(step)), NamedSharding(mesh, P("a", "b")))
    return {"w": w, "key": jax.random.key(step), "half": jnp.full(3, step, jnp.bfloat16)}


def flipped(good: dict[str, Any], row: int) -> dict[str, Any]:
    return good | {"w": jax.device_put(good["w"].at[row, 5].set(-1.0), good["w"].sharding)}


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_a_suspect_twin_takes_blocks_of_the_healthy_one() -> None:
    good = state(3)
    bad = flipped(good, 300) | {"key": jax.random.key(9)}
    wrong = differing(bad, good)
    assert wrong == [Wrong("key", "differs", ((0, 2),)), Wrong("w", "differs", ((256, 512),))]
    found = repair(bad, wrong, [FromState(good, 3, "the healthy twin")])
    assert bits_of(found.state) == bits_of(good)
    assert found.state["w"].sharding == good["w"].sharding
    assert [str(one) for one in found.repairs] == [
        "key rows 0:2 from the healthy twin, step 3",
        "w rows 256:512 from the healthy twin, step 3",
    ]
    assert not found.left
    assert differing(good, state(3)) == []


def test_a_damaged_checkpoint_is_repaired_from_older_ones(tmp_path: Path) -> None:
    """What is right stays as new as it is; only rows that are wrong are older."""
    place = tmp_path / "certified"
    with sdc.certify(ocp.training.Checkpointer(place)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        with ocp.training.Checkpointer(place) as plain:
            plain.save(2, flipped(state(2), 100), overwrite=True, force=True)
        with pytest.raises(Damaged) as damage:
            checkpointer.load(2, abstract(state(0)))
        with ocp.training.Checkpointer(place) as plain:
            damaged = plain.load(2, abstract(state(0)))
        older = FromCheckpoint(checkpointer, 1, abstract(state(0)))
        found = repair(damaged, damage.value.wrong, [older])
        assert [str(one) for one in found.repairs] == ["w rows 0:256 from the checkpoint of step 1, step 1"]
        np.testing.assert_array_equal(found.state["w"], state(2)["w"].at[:256].set(1.0))
        broken = FromCheckpoint(checkpointer, 2, abstract(state(0)))
        assert repair(damaged, damage.value.wrong, [broken]).left == [Wrong("state/w", "differs", ((0, 256),))]
    with RunningCheckpoint(tmp_path / "running", state(0), rows=64, fraction=0.2) as running:
        assert repair(damaged, damage.value.wrong, [FromRunning(running)]).left  # never saved
        running.save(flipped(state(0), 100), 1)
        wrong = [Wrong("w", "differs", ((96, 104),))]
        found = repair(damaged, wrong, [broken, FromRunning(running)])
        assert [str(one) for one in found.repairs] == ["w rows 96:104 from the running checkpoint, step 1"]
        assert found.state["w"][100, 5] == -1.0
        assert (found.state["w"][104:] == 2.0).all()


def test_what_cannot_be_compared_or_is_not_there() -> None:
    with pytest.raises(CertificateError, match=r"v is absent in one state and float32\[3\] in the other"):
        differing({"w": jnp.zeros(3)}, {"v": jnp.zeros(3)})
    with pytest.raises(CertificateError, match="the state has no x; its arrays include w"):
        repair({"w": jnp.zeros(3)}, [Wrong("x", "differs")], [])
    with pytest.raises(CertificateError, match="w has only rows 0:3, but rows 0:9 are listed as wrong"):
        repair({"w": jnp.zeros(3)}, [Wrong("w", "differs", ((0, 9),))], [])
    others = [jnp.ones(3, jnp.bfloat16), jnp.ones(2), jnp.ones((3, 1)), jnp.ones(3, jnp.int32)]
    sources = [FromState({"w": other}, 1) for other in others]
    assert repair({"w": jnp.zeros(3)}, [Wrong("w", "differs")], sources).left == [Wrong("w", "differs", ((0, 3),))]
    whole = repair({"w": jnp.zeros(3)}, [Wrong("w", "differs")], [FromState({"w": jnp.ones(3)}, 1)])
    np.testing.assert_array_equal(whole.state["w"], jnp.ones(3))
