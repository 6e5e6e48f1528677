"""Replicas under noise: theory against simulation, schedules, bitwise synchronization, and what XLA may overlap."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sdc.aggregation.synchronization import paft_sync
from sdc.program import compiled_for
from tests.sdc.aggregation.placements import AXIS, equal_replicas, place
from tests.sdc.aggregation.test_synchronization import WORKERS, train_under_noise


@pytest.mark.parametrize("placement", ["vmap", "shard_map", "shard_map, checked"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_an_average_in_two_exchanges(placement: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for TPUs and GPUs: of what can be cut into as many parts as there are workers, and is large enough."""
    monkeypatch.setattr("sdc.aggregation.synchronization.compiled_for", lambda: compiled_for()._replace(platform="tpu"))
    monkeypatch.setattr("sdc.aggregation.synchronization.WORTH", 24 * jnp.dtype(dtype).itemsize)
    shapes = {"first": (8, 3), "second": (3, 8), "last": (3, 1, 12), "no": (5, 5), "empty": (0, 8), "small": (4,)}
    keys = zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True)
    apart = {name: jax.random.normal(key, (WORKERS, *shapes[name]), dtype) for name, key in keys}
    optimizer = paft_sync(optax.sgd(0.0), AXIS, 1)

    def run(theta: Any) -> Any:
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, theta), optimizer.init(theta), theta)
        return optax.apply_updates(theta, updates)

    placed = place(run, placement, WORKERS)
    assert str(jax.make_jaxpr(placed)(apart)).count("all_to_all[") == (0 if placement == "vmap" else 2 * 3)
    found = placed(apart)
    assert equal_replicas(jax.tree.map(lambda leaf: np.asarray(leaf).view(np.uint8), found))
    wide = np.complex128 if dtype == jnp.complex64 else np.float64
    for name, leaf in apart.items():
        mean = np.asarray(leaf).astype(wide).mean(axis=0)
        np.testing.assert_allclose(np.asarray(found[name][0]).astype(wide), mean, atol=4 * jnp.finfo(dtype).eps)


@pytest.mark.parametrize("sync_state", [False, True])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "lion", "muon"])
def test_replicas_stay_one_update_apart(name: str, sync_state: bool) -> None:
    """Whatever the noise and the optimizer: at each average after the first four, replicas are at most 1.9 updates from
    their mean, and at least 0.5 if the period is not at a limit."""
    inner = {
        "sgd": optax.sgd(0.05), "momentum": optax.sgd(0.005, momentum=0.9), "adam": optax.adam(0.01),
        "lion": optax.lion(0.001), "muon": optax.contrib.muon(0.01),
    }[name]  # fmt: skip
    found = train_under_noise(inner, (0.001, 0.01, 0.1, 1.0, 10.0), sync_state=sync_state)
    counts = found.done[:, -1]
    assert counts[0] < counts[1] < counts[2] <= counts[3] <= counts[4]  # at most every second step
    for distance, period in zip(found.distance, found.period, strict=True):
        used = np.flatnonzero(~np.isnan(distance))[4:]
        assert (distance[used] < 1.9).all()
        before = period[used - 1]
        free = (before > 1) & (before < 1000)
        assert (distance[used][free] > 0.5).all()
