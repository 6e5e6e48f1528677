"""The shadow replica: clean runs stay clean, wrong ranks are named, one-off differences are not pinned on anybody."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from sdc.aggregation.spares import init_shadow, judge, shadow
from tests.sdc.aggregation.test_spares import RANKS


def test_bad_input() -> None:
    state, x = init_shadow(RANKS), jnp.ones((RANKS, 2))

    def run(step: Any, state: Any = state, x: Any = x) -> Any:
        return jax.vmap(step, in_axes=(None, None, 0), axis_name="data")(state, None, x)

    def identity(params: Any, x: Any) -> Any:
        return x

    with pytest.raises(ValueError, match="'data' is not bound"):
        shadow(identity, "data")(state, None, x)
    with pytest.raises(ValueError, match="spares=0: expected at least one"):
        shadow(identity, "data", spares=0)
    with pytest.raises(ValueError, match="ranks=2: expected at least three"):
        init_shadow(2)
    with pytest.raises(ValueError, match="has size 2; with spares=1, it must be at least 3"):
        run(shadow(identity, "data"), x=x[:2])
    with pytest.raises(ValueError, match="has size 5; with spares=4, it must be at least 6"):
        run(shadow(identity, "data", spares=4))
    with pytest.raises(ValueError, match=r"shape \(4, 4\), but axis 'data' has size 5; start with init_shadow\(5\)"):
        run(shadow(identity, "data"), init_shadow(4))
    with pytest.raises(ValueError, match=r"int32\[2\], which has no mean"):
        run(shadow(lambda params, x: x.astype(jnp.int32), "data"))
    with pytest.raises(ValueError, match="returns no elements"):
        run(shadow(lambda params, x: (), "data"))
    for talk in (lax.pmean, lax.all_gather, lambda x, axis: lax.ppermute(x, axis, [(0, 1)])):
        with pytest.raises(ValueError, match="over 'data', which makes the ranks of this axis equal"):
            run(shadow(lambda params, x, talk=talk: jax.jit(lambda x: talk(x, "data"))(x), "data"))
    with pytest.raises(ValueError, match=r"shape \(2, 5, 5\); expected \(ranks, ranks\)"):
        judge(jax.tree.map(lambda x: jnp.stack([x, x]), state))
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="pass check_vma=False to shard_map"):
        jax.shard_map(lambda x: shadow(identity, "data")(state, None, x), mesh=mesh, in_specs=P("data"), out_specs=P())(
            x
        )
