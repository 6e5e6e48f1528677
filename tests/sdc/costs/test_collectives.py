"""Collectives are read correctly from compiled programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from sdc.costs import CollectiveCall, collective_calls


def test_kinds_sizes_groups_and_branches() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def body(x: Any) -> Any:
        y = lax.psum(x, "a")
        z = lax.cond(y[0] > 0, lambda: lax.all_gather(y, "b", tiled=True), lambda: jnp.zeros(6))
        w = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, lax.ppermute(c[1], "a", [(0, 1), (1, 0)])), (0, z))
        return w[1]

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("b"), out_specs=P(("a", "b")), check_vma=False))
    found = collective_calls(run.lower(jnp.ones(6)).compile().as_text() or "")
    kinds = {c.kind: c for c in found}
    assert kinds["all-reduce"].sizes == (12,)
    assert not kinds["all-reduce"].conditional
    assert kinds["all-gather"].conditional
    assert kinds["all-gather"].sizes == (24,)
    assert not kinds["collective-permute"].conditional
    devices = {"a": (0, 0, 1, 1), "b": (0, 1, 0, 1)}
    assert kinds["all-reduce"].crosses(devices["a"])
    assert not kinds["all-reduce"].crosses(devices["b"])
    assert kinds["all-gather"].crosses(devices["b"])
    assert not kinds["all-gather"].crosses(devices["a"])
    assert kinds["collective-permute"].crosses(devices["a"])


def test_forms_of_replica_groups() -> None:
    lines = {
        "replica_groups={{0,2},{1,3}}": ((0, 2), (1, 3)),
        "replica_groups=[2,2]<=[4]": ((0, 1), (2, 3)),
        "replica_groups=[2,2]<=[2,2]T(1,0)": ((0, 2), (1, 3)),
        "replica_groups=mesh['a'=2,'b'=2] {'b'}": ((0, 1), (2, 3)),
        "replica_groups=mesh['a'=2,'b'=2] {'a'}": ((0, 2), (1, 3)),
        "replica_groups=mesh['a'=2,'b'=2] {'a','b'}": ((0, 1, 2, 3),),
        "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}": ((0, 2), (1, 3)),
        "replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}": ((3, 1), (2, 0)),
        "replica_groups={}": (),
    }
    for text, groups in lines.items():
        hlo = (
            f"ENTRY %main (p: f32[4]) -> f32[4] {{\n  %r = bf16[2,3]{{1,0}} all-reduce(%p), {text}, to_apply=%add\n}}\n"
        )
        assert collective_calls(hlo) == [CollectiveCall("all-reduce", (12,), groups, conditional=False)]
    assert CollectiveCall("all-reduce", (4,), (), conditional=False).crosses(np.arange(2).tolist())
