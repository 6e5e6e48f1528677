"""Twins on a mesh and twins under vmap are the same computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from sdc.train.programs.placement import RANKS, Placement, place


def mesh(**axes: int) -> Mesh:
    devices = np.asarray(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


PLACEMENTS = {
    "mesh": Placement(mesh(twin=2, data=1, model=2), 2),
    "vmap": Placement(mesh(data=1, model=2), 2),
    "vmap, three": Placement(mesh(data=1, model=2), 3),
    "alone": Placement(mesh(data=1, model=2), None),
}


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_outputs_and_reports(placement: Placement) -> None:
    twins = placement.twins

    def fn(state: jax.Array, scale: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        index = lax.axis_index("twin") if twins else jnp.int32(0)
        return state * scale + index.astype(jnp.float32), {
            "rank": lax.axis_index("model"),
            "twin": jnp.stack([index] * 3),
        }

    run = jax.jit(placement.map(fn, stacked=P("model"), shared=P(), out=(P("model"), RANKS)))
    state = placement.stack(jnp.arange(4.0))
    out, report = run(state, jnp.float32(2))
    if twins is None:
        np.testing.assert_array_equal(out, 2 * np.arange(4.0))
        np.testing.assert_array_equal(report["rank"], [[0, 1]])
        return
    np.testing.assert_array_equal(out, [2 * np.arange(4.0) + twin for twin in range(twins)])
    np.testing.assert_array_equal(report["rank"], [[[0, 1]]] * twins)
    np.testing.assert_array_equal(report["twin"][:, 0, 1, 2], np.arange(twins))
    assert report["twin"].shape == (twins, 1, 2, 3)


def test_the_devices_must_be_as_many_as_needed() -> None:
    with pytest.raises(ValueError, match="8 devices were given, but 2 twin × 1 data × 2 model needs 4; change --twins"):
        place(twins=2, data=1, model=2)
    assert place(twins=2, data=2, model=2).mesh.devices.shape == (2, 2, 2)
    assert place(twins=2, data=4, model=2, kind="vmap").stacked == (None,)
