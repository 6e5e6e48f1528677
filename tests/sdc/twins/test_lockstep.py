"""Lock-step twins: mismatches equal the injected ones, twins stay equal, and little crosses the twin axis."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.costs import collective_calls
from sdc.faults import BitFlip, Moment, Relative, Stuck
from sdc.program import varying
from tests.sdc.twins.test_mismatch import CASES

LAYERS, ROWS, WIDTH = 3, 4, 8
W = np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 3
X = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)


def step(w: Any, x: Any) -> Any:
    """Forward, backward and recomputed probes in a scan; collectives over `model` where it is bound."""

    @jax.checkpoint
    def layer(c: Any, w: Any) -> Any:
        return sdc.probe(jnp.tanh(sdc.probe(c @ w, "a")), "b")

    def loss(w: Any) -> Any:
        return jnp.mean(lax.scan(lambda c, w: (layer(c, w), None), x, w)[0] ** 2)

    return jax.value_and_grad(loss)(w)


FAULTS = [
    sdc.Fault(BitFlip(), 0.1, at={"twin": 1}),
    sdc.Fault(Relative(0.5), (0.02, 0.0, 0.03), site="bwd/a", at={"twin": 1}),
    sdc.Fault(Stuck(np.nan), 0.02, site="remat/*", at={"twin": 1}),
]
SITES = {"fwd/a", "fwd/b", "remat/a", "bwd/b", "bwd/a"}


def twins(faults: list[sdc.Fault], **options: Any) -> Callable[..., Any]:
    return sdc.lockstep(sdc.inject(step, faults), "twin", **options)


def place(run: Callable[..., Any], placement: str, number: int) -> Callable[..., Any]:
    """The step on `number` twins: inputs and outputs with a leading twin axis."""
    w, x = (np.broadcast_to(a, (number, *a.shape)) for a in (W, X))
    if placement == "vmap":
        return lambda moment: jax.vmap(run, (None, 0, 0), axis_name="twin")(moment, w, x)
    if placement == "pmap":
        return lambda moment: jax.pmap(run, in_axes=(None, 0, 0), axis_name="twin")(moment, w, x)
    mesh = jax.make_mesh((number,), ("twin",), axis_types=(AxisType.Auto,))

    def body(moment: Moment, w: Any, x: Any) -> Any:
        return jax.tree.map(lambda a: a[None], varying(run(moment, w[0], x[0])))

    placed = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("twin"), P("twin")), out_specs=P("twin"), check_vma="checked" in placement
    )
    return lambda moment: placed(moment, w, x)


def bits(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf).view(np.uint32) for leaf in jax.tree.leaves(tree)]


def test_without_faults_nothing_is_found() -> None:
    out, mismatches = jax.vmap(sdc.lockstep(step, "twin"), in_axes=None, axis_size=2, axis_name="twin", out_axes=0)(
        W, X
    )
    assert all(int(m.difference.mismatched.sum()) == 0 for m in mismatches.values())
    assert sum(int(m.difference.checked[0].sum()) for m in mismatches.values()) == len(SITES) * LAYERS * ROWS * WIDTH
    np.testing.assert_allclose(out[0][0], step(W, X)[0], rtol=1e-6)


def test_three_that_all_differ_are_undecided() -> None:
    run = jax.vmap(sdc.lockstep(lambda x: sdc.probe(x, "p"), "twin"), axis_name="twin")
    out, mismatches = run(jnp.asarray([1.0, 2.0, 3.0]))
    assert mismatches["fwd/p"].undecided.tolist() == [1, 1, 1]
    assert len(set(out.tolist())) == 1


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_statistics_and_repair_are_exact(case: Any) -> None:
    reference, suspect, expected = case
    pair = jnp.asarray([reference, suspect], jnp.float32)
    out, mismatches = jax.vmap(sdc.lockstep(lambda x: sdc.probe(x, "p"), "twin"), axis_name="twin")(pair)
    got = [float(column[0, 1]) for column in mismatches["fwd/p"].difference]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_array_equal(bits(out)[0], bits(pair)[0][[0, 0]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "bool"])
def test_every_type_is_repaired(dtype: str) -> None:
    pair = jnp.asarray([[0, 1, 1], [0, 1, 0]], dtype)
    out, mismatches = jax.vmap(sdc.lockstep(lambda x: sdc.probe(x, "p"), "twin"), axis_name="twin")(pair)
    assert out.dtype == pair.dtype
    assert bool((out[1] == pair[0]).all())
    assert int(mismatches["fwd/p"].difference.mismatched[0, 1]) == 1


def test_what_is_no_array_passes_through() -> None:
    tree = {"w": jnp.ones(3), "act": jnp.tanh}
    out: dict[str, Any] = {}

    def compare(w: Any) -> Any:
        both, mismatch = sdc.synchronize({**tree, "w": w}, "twin")
        out.update(both)
        return both["w"], mismatch

    w, mismatch = jax.vmap(compare, axis_name="twin")(jnp.stack([jnp.ones(3), jnp.zeros(3)]))
    assert out["act"] is jnp.tanh
    assert (w == 1).all()
    assert mismatch.difference.mismatched[0].tolist() == [0, 3]


def test_states_in_the_memory_of_the_host_are_synchronized_there() -> None:
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    pair = jax.device_put(jnp.asarray([[1.0, 2.0], [1.0, 5.0]]), host)
    same, mismatch = jax.jit(jax.vmap(lambda x: sdc.synchronize(x, "twin"), axis_name="twin"))(pair)
    assert same.sharding.memory_kind == "pinned_host"
    assert np.asarray(same).tolist() == [[1, 2], [1, 2]]
    assert mismatch.difference.mismatched[0].tolist() == [0, 1]


def test_at_most_64_bytes_per_probe_cross_the_twin_axis() -> None:
    run = jax.jit(place(twins(FAULTS), "shard_map", 2))
    text = run.lower(Moment(jax.random.key(0), jnp.int32(0))).compile().as_text()
    found = collective_calls(text)
    outside = [
        size
        for collective in found
        if not collective.conditional and collective.crosses((0, 1))
        for size in collective.sizes
    ]
    assert outside == [16] * len(SITES)
    assert any(collective.conditional for collective in found)


def test_twins_need_an_axis_of_two() -> None:
    with pytest.raises(ValueError, match="'twin' is not bound"):
        sdc.lockstep(step, "twin")(W, X)
    with pytest.raises(ValueError, match="has size 1"):
        jax.vmap(sdc.lockstep(lambda x: x, "twin"), axis_name="twin")(jnp.ones(1))
    with pytest.raises(ValueError, match="expected 'gated' or 'always'"):
        sdc.lockstep(step, "twin", compare="never")  # type: ignore[arg-type] # the mistake under test


def test_a_step_without_a_site_is_refused() -> None:
    with pytest.raises(ValueError, match=r"probes matches none of the step's 3 sites; name tensors with sdc\.probe"):
        jax.vmap(sdc.lockstep(lambda x: x * 2.0, "twin"), axis_name="twin")(jnp.ones(2))


@pytest.mark.parametrize("exchange", ["probe", "step"])
def test_partly_manual_twins_around_an_automatically_sharded_step(exchange: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("twin", "data"), axis_types=(AxisType.Auto,) * 2)
    pair = sdc.lockstep(step, "twin", exchange=exchange)
    body = lambda w, x: jax.tree.map(lambda a: a[None], pair(w[0], x))  # noqa: E731 - in one line
    run = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(P("twin"), P()), out_specs=P("twin"), axis_names={"twin"}, check_vma=False
        )
    )
    w = jnp.stack([W, W])
    corrupted = w.at[1, 0, 0, 0].add(1.0)
    for weights, bad in ((w, False), (corrupted, True)):
        out, mismatches = run(weights, jax.device_put(X, jax.sharding.NamedSharding(mesh, P("data"))))
        assert (int(mismatches["fwd/a"].difference.mismatched[0].sum()) > 0) == bad
        assert (bits(out)[0][0] == bits(out)[0][1]).all()


def test_no_recompilation() -> None:
    run = jax.jit(place(twins(FAULTS), "vmap", 2))
    for number in range(2):
        run(Moment(jax.random.key(number), jnp.int32(number)))
    assert run._cache_size() == 1
