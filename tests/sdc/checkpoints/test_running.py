"""Running checkpoints: the store is what a simple model in memory says, and what is lost comes back."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from sdc.checkpoints import RunningCheckpoint, StoreError
from sdc.settings import SettingError
from tests.storms.bits import bits_of

from .states import Model, moved, nothing, opened, start


@settings(max_examples=12)
@given(
    moves=st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=5), min_size=1, max_size=5),
    policy=st.sampled_from(["priority", "round-robin", "random"]),
    fraction=st.sampled_from([0.05, 0.3, 1.0]),
    again=st.integers(0, 4),
)
def test_a_store_is_what_was_saved(
    moves: list[list[int]], policy: Any, fraction: float, again: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Opened anew after some of the saves, too."""
    folder = tmp_path_factory.mktemp("store")
    running = opened(folder, policy=policy, fraction=fraction)
    model, state = Model(running), start()
    for step, rows in enumerate(moves, start=1):
        state = moved(state, rows, step)
        model.save(running.save(state, step), state, step)
        if step == again:
            running.close()
            running = opened(folder, policy=policy, fraction=fraction)
    model.agrees(running)
    running.close()


def test_what_moved_most_is_saved(running: RunningCheckpoint) -> None:
    """Against distances from what was saved last, not from the step before; an optimizer's arrays go along."""
    state = moved(start(), [9], 1)
    block = running.partition.of(["params/w"])[2]
    assert block in running.save(state, 1)
    assert {piece.name for piece in running.partition.blocks[block]} == {"params/w", "opt/trace/w"}
    assert block not in running.save(state, 2)
    found = running.recover([block], nothing(state))
    np.testing.assert_array_equal(found.state["params"]["w"][8:12], state["params"]["w"][8:12])
    np.testing.assert_array_equal(found.state["opt"].trace["w"][8:12], state["opt"].trace["w"][8:12])
    assert (found.state["params"]["w"][:8] == 77).all()
    assert found.steps == {block: 1}
    assert found.age(5) == 4


def test_what_belongs_to_lost_parameters_comes_back_as_it_was_or_is_zero(running: RunningCheckpoint) -> None:
    state = moved(start(), [0], 1)
    running.save(state, 1)
    saved = set(running.recover(["params"], state).steps)
    for zeroed in (False, True):
        found = running.recover(["params"], nothing(state), zeroed=zeroed).state
        rows = [number for number in running.partition.of(["params/w"]) if number in saved]
        assert rows
        for number in rows:
            piece = running.partition.blocks[number][0]
            trace = found["opt"].trace["w"][piece.start : piece.stop]
            wanted = state["opt"].trace["w"][piece.start : piece.stop]
            np.testing.assert_array_equal(trace, jnp.zeros_like(wanted) if zeroed else wanted)
            np.testing.assert_array_equal(
                found["params"]["w"][piece.start : piece.stop], state["params"]["w"][piece.start : piece.stop]
            )
        assert int(found["count"]) == 77  # of no parameter: not lost
    never = running.recover(["params"], nothing(state))
    assert never.initial
    assert never.age(5) == 5  # what was never saved is as old as the run
    with pytest.raises(SettingError, match="expected the name of an array, or a block number"):
        running.recover([True], state)
    with pytest.raises(SettingError, match="a replica keeps the optimizer arrays"):
        running.recover(["params"], state, policy="replica", devices=jax.devices()[:1], zeroed=True)


def test_full_partial_and_replica(tmp_path: Path) -> None:
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))
    w = jax.device_put(jnp.arange(64.0).reshape(16, 4), NamedSharding(mesh, P("model")))
    with RunningCheckpoint(tmp_path, {"w": w}, rows=2, fraction=1.0) as running:
        running.save({"w": w + 1}, 1)
        newer = {"w": w + 2}
        gone = list(mesh.devices[0])
        copied = running.recover(["w"], _lost_on(newer, gone), policy="replica", devices=gone)
        assert bits_of(copied.state) == bits_of(newer)
        assert all(same_on_each_device(copied.state["w"]))
        partial = running.recover([3], newer).state["w"]
        assert partial.sharding == w.sharding
        np.testing.assert_array_equal(partial, (w + 2).at[6:8].set((w + 1)[6:8]))
        np.testing.assert_array_equal(running.recover([3], newer, policy="full").state["w"], w + 1)
        with pytest.raises(StoreError, match="no other device holds the data of"):
            running.recover(["w"], newer, policy="replica", devices=list(mesh.devices[:, 0]))
        with pytest.raises(SettingError, match="expected the devices that lost"):
            running.recover(["w"], newer, policy="replica")


def _lost_on(state: Any, devices: Sequence[jax.Device]) -> Any:
    array = state["w"]
    parts = [
        jax.device_put(np.full_like(shard.data, np.nan), shard.device) if shard.device in devices else shard.data
        for shard in array.addressable_shards
    ]
    return {"w": jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)}


def same_on_each_device(array: Any) -> Iterator[bool]:
    whole = np.asarray(array)
    for shard in array.addressable_shards:
        yield bool((np.asarray(shard.data) == whole[shard.index]).all())


def test_survivors_take_over_on_a_smaller_mesh(tmp_path: Path) -> None:
    """A store of eight devices, opened by two of them."""
    eight, two = (Mesh(np.asarray(jax.devices()[:count]), ("all",)) for count in (8, 2))
    w = jnp.arange(64.0).reshape(16, 4)
    with RunningCheckpoint(
        tmp_path, {"w": jax.device_put(w, NamedSharding(eight, P("all")))}, rows=4, fraction=0.25
    ) as running:
        for step in range(1, 5):
            running.save({"w": jax.device_put(w + jnp.float32(step), NamedSharding(eight, P("all")))}, step)
    small = {"w": jax.device_put(jnp.zeros((16, 4)), NamedSharding(two, P("all")))}
    found = RunningCheckpoint.read(tmp_path, small, rows=4).recover(["w"], small)
    assert found.state["w"].sharding.mesh == two
    np.testing.assert_array_equal(found.state["w"][:, 0], w[:, 0] + np.repeat(np.float32([1, 2, 3, 4]), 4))


def test_a_state_that_is_sharded_otherwise_later(tmp_path: Path) -> None:
    mesh = Mesh(np.asarray(jax.devices()), ("all",))
    w = jnp.ones((16, 8))
    first, later = ({"w": jax.device_put(w, NamedSharding(mesh, spec))} for spec in (P(None, "all"), P("all")))
    with (
        RunningCheckpoint(tmp_path, first) as running,
        pytest.raises(StoreError, match="w is sharded differently than"),
    ):
        running.save(later, 1)


def test_explicit_meshes(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("data",))  # its axes are explicit by default
    w = jax.device_put(jnp.zeros((16, 8)), NamedSharding(mesh, P("data")))
    with RunningCheckpoint(tmp_path, {"w": w}, rows=2, fraction=0.2) as running:
        new = jax.device_put(np.asarray(w) + 2.0 * (np.arange(16)[:, None] == 5).astype(np.float32), w.sharding)
        assert running.save({"w": new}, 1) == [2]
        found = running.recover([2], {"w": w})
        assert found.state["w"].sharding == w.sharding
        assert running.distance({"w": w}, found.state) == pytest.approx(2.0 * 8**0.5)
