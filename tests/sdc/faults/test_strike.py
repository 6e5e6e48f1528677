"""One program serves every fault; what is hit is what was asked for, and is found where it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.faults import BitFlip, Rotate, Run, Scale, Stuck
from sdc.faults._strike import LOOPS
from sdc.program import arithmetic, direction, everything, iteration, operations, primitive

MESH = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))


def loss(params: Any, x: Any) -> Any:
    """Tensor-parallel layers over two devices, as somebody might write them who never heard of this project."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        with jax.named_scope("ffn"):
            h = jax.checkpoint(lambda x: jax.nn.silu(x @ w["up"]))(x)
            return x + lax.psum(h @ w["down"], "model"), None

    x, _ = lax.scan(layer, x, params)
    return jnp.mean(x**2) / 2


def body(params: Any, x: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), lax.psum(value, "model")


SPECS = {"up": P(None, None, "model"), "down": P(None, "model", None)}
step = jax.shard_map(body, mesh=MESH, in_specs=(SPECS, P()), out_specs=(SPECS, P()), check_vma=False)
RNG = np.random.default_rng(0)
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in
          {"up": (3, 4, 8), "down": (3, 8, 4)}.items()}  # fmt: skip
X = RNG.normal(size=(5, 4)).astype(np.float32)
WHERE = operations & arithmetic
SITES = sdc.sites(step, PARAMS, X, where=WHERE)


@jax.jit
def struck_and_traced(strike: Any, params: Any, x: Any) -> Any:
    def struck(params: Any, x: Any) -> Any:
        out, events = sdc.strike(step, WHERE)(strike, params, x)
        return out, jax.tree.map(lambda e: e.sum(), {name: event.changed for name, event in events.items()})

    (out, changed), digests = sdc.fingerprint(struck, WHERE)(params, x)
    return out, changed, digests


CLEAN = struck_and_traced(sdc.no_strike(axes=["model"]), PARAMS, X)


def test_nothing_struck_is_the_clean_step() -> None:
    out, changed, digests = struck_and_traced(sdc.no_strike(axes=["model"]), PARAMS, X)
    assert not any(changed.values())
    assert sdc.first_difference(digests, CLEAN[2]) is None
    for ours, plain in zip(jax.tree.leaves(out), jax.tree.leaves(jax.jit(step)(PARAMS, X)), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)


def tanh_twice(x: Any) -> Any:
    return jnp.sin(jnp.tanh(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "int8", "uint16"])
def test_what_is_hit_is_what_was_asked_for(dtype: str) -> None:
    """Against NumPy, with the events as the record: index, old bits, new bits."""
    x = jnp.arange(1, 13).reshape(3, 4).astype(dtype)
    where = primitive("argument")
    (site,) = sdc.sites(lambda x: x, x, where=where)
    run = jax.jit(sdc.strike(lambda x: x, where))
    width = 8 * np.dtype(dtype).itemsize
    for what, elements, expected in [
        (BitFlip(bits=(width - 2,)), [5], None),
        (Stuck(0.0), [0, 11], 0.0),
        (Scale(2.0), [3], 8.0),
        (Rotate(), [1, 4, 7], None),
        (sdc.faults.StuckBit(1, bits=(1,)), [2], None),
    ]:
        out, events = run(sdc.strike_on(site, what, elements, room=3), x)
        (event,) = events.values()
        before, after = np.asarray(x).reshape(-1), np.asarray(out).reshape(-1)
        raw = f"u{np.dtype(dtype).itemsize}"
        differs = np.flatnonzero(before.view(raw) != after.view(raw))
        assert set(differs) <= set(elements)
        assert int(event.changed) == len(differs)
        assert int(event.drawn) == len(elements)
        rows = np.asarray(event.hits.element)[np.asarray(event.hits.new != event.hits.old).any(1)]
        assert sorted(rows) == sorted(differs)
        for index, old, new in zip(event.hits.element, event.hits.old, event.hits.new, strict=True):
            if (old != new).any():
                assert int(old[0]) == before.view(raw)[index]
                assert int(new[0]) == after.view(raw)[index]
        if expected is not None:
            assert (after[elements].astype(np.float64) == expected).all()
        if isinstance(what, Rotate):
            assert after[elements].tolist() == before[np.roll(elements, -1)].tolist()
    assert run._cache_size() == 1


def test_vmap_over_the_fault() -> None:
    """Several faults at once give what each gives alone."""
    where = primitive("tanh", "sin")
    sites = sdc.sites(tanh_twice, X, where=where)
    strikes = [sdc.strike_on(site, BitFlip(bits=(30,)), element) for site in sites for element in (0, 7, 19)]
    run = sdc.strike(tanh_twice, where)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *strikes)
    outs, events = jax.jit(jax.vmap(run, (0, None)))(stacked, X)
    for number, one in enumerate(strikes):
        out, event = jax.jit(run)(one, X)
        np.testing.assert_array_equal(outs[number], out)
        for name in event:
            assert int(events[name].changed[number]) == int(event[name].changed)


def test_first_operation_hit_is_the_first_to_differ() -> None:
    """`fingerprint(inject(step))` before and after the onset of a fault: the first event is the first difference."""
    where = primitive("dot_general", "tanh", "sin")

    def run(step_number: Any, x: Any) -> Any:
        fault = sdc.Fault(BitFlip(), 0.05, where, when=sdc.faults.When(onset=5))
        return sdc.fingerprint(
            lambda x: sdc.inject(lambda x: tanh_twice(x @ x.T), [fault])(sdc.Moment(jax.random.key(1), step_number), x),
            where,
        )(x)

    compiled = jax.jit(run)
    (_, none), clean = compiled(jnp.int32(0), X)
    (_, events), digests = compiled(jnp.int32(6), X)
    assert not any(int(event.changed) for event in none.values())
    first = next(name for name, event in events.items() if int(event.changed))
    difference = sdc.first_difference(clean, digests)
    assert difference is not None
    assert difference.site.name == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"elements": 99}, r"elements \[99\] of fwd/tanh: expected indices from 0 to 19"),
        ({"elements": -1}, "expected indices from 0"),
        ({"elements": 0, "output": 1}, "output=1 of fwd/tanh: expected a number from 0 to 0"),
        ({"elements": 0, "iteration": (1,)}, "the number of enclosing loops is 0"),
        ({"elements": [3, 3]}, "expected distinct integers"),
        ({"elements": [0.5]}, "expected distinct integers"),
        ({"elements": 0, "device": {"model": -1}}, "is not on its mesh {}"),
        ({"elements": 0, "device": (0,)}, "expected an index for each mesh axis, as in"),
        ({"elements": [0, 1], "room": 1}, "increase room"),
        ({"elements": 0, "fault": BitFlip(bits=(40,))}, "bit 40 of a 32-bit float32 does not exist"),
    ],
)
def test_strikes_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    site = sdc.sites(tanh_twice, X, where=primitive("tanh"))[0]
    with pytest.raises(ValueError, match=message):
        sdc.strike_on(site, **{"fault": BitFlip(), **arguments})


def test_values_that_cannot_be_struck() -> None:
    def keyed(x: Any) -> Any:
        return jax.random.normal(jax.random.split(jax.random.key(0))[0], x.shape) + x

    where = primitive("random_split")
    (site, *_) = sdc.sites(keyed, X, where=where)
    with pytest.raises(ValueError, match=r"holds key<fry>; choose an output of real numbers"):
        sdc.strike_on(site, BitFlip(), 0)
    with pytest.raises(ValueError, match=r"random_split.*real numbers.*matches none"):
        sdc.strike(keyed, where)(sdc.no_strike(), X)
    with pytest.raises(ValueError, match=r"holds key<fry>, but faults can corrupt only real numbers"):
        sdc.inject(keyed, [sdc.Fault(BitFlip(), 0.1, where)])(sdc.Moment(jax.random.key(0), jnp.int32(0)), X)
    with pytest.raises(ValueError, match="this axis is not mapped"):
        sdc.strike(tanh_twice, everything)(sdc.no_strike(axes=["model"]), X)


def test_memory_faults_hit_arguments() -> None:
    """A bit of a parameter, in memory: every operation that reads it sees the changed one."""
    where = direction("arg")
    (site,) = [site for site in sdc.sites(step, PARAMS, X, where=where) if site.name == "arg/0/down"]
    out, events = jax.jit(sdc.strike(step, where))(sdc.strike_on(site, BitFlip(bits=(30,)), 4), PARAMS, X)
    corrupted = PARAMS["down"].copy()
    corrupted.reshape(-1).view(np.uint32)[4] ^= 1 << 30
    expected = jax.jit(step)({**PARAMS, "down": corrupted}, X)
    for ours, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert int(events["arg/0/down"].changed) == 1
    assert site.loops == 0 < LOOPS


def test_iterations_and_devices_that_do_not_exist() -> None:
    site = next(site for site in SITES if site.loops)
    assert (site.trips, site.mesh) == ((3,), (("model", 2),))
    for arguments in ({"iteration": (3,)}, {"iteration": (-2,)}, {"device": {"model": 2}}, {"iteration": (0, 0)}):
        with pytest.raises(ValueError, match=r"the loops have|is not on its mesh|give one index for each"):
            sdc.strike_on(site, BitFlip(), 0, **arguments)  # type: ignore[arg-type] # tables of arguments
    with pytest.raises(ValueError, match="matches none"):
        sdc.sites(step, PARAMS, X, where=primitive("dot_general") & iteration(9))


def test_operations_of_several_outputs_and_empty_ones() -> None:
    """What is counted is what changed, whichever output is struck; empty arrays are passed over."""

    def several(x: Any) -> Any:
        values, indices = lax.top_k(x, 2)
        return values, indices, x[:0] * 2.0

    run = jax.jit(sdc.strike(several, everything))
    x = jnp.asarray([3.0, 1.0, 2.0])
    (site,) = sdc.sites(several, x, where=primitive("top_k"))
    for output in (0, 1):
        out, events = run(sdc.strike_on(site, BitFlip(bits=(0,)), 1, output=output), x)
        clean = several(x)
        assert [int((np.asarray(a) != np.asarray(b)).sum()) for a, b in zip(out, clean, strict=True)] == [
            output == 0, output == 1, 0,
        ]  # fmt: skip
        event = events[site.name]
        assert (int(event.changed), int(event.drawn), int(event.hits.output[0])) == (1, 1, output)


def test_a_fault_is_struck_as_it_is_injected() -> None:
    """One type: kind, fault and text make the same strike; pattern, layer and device come from the fault."""

    def equal(a: Any, b: Any) -> bool:
        return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    site = next(site for site in SITES if site.loops and site.direction == "fwd")
    flip = BitFlip(bits=(22,))
    plain = sdc.strike_on(site, flip, 3)
    for same in ("bitflip,bits=22", sdc.Fault(flip), sdc.Fault(flip, 0.1, WHERE)):
        assert equal(sdc.strike_on(site, same, 3), plain)
    placed = sdc.Fault(flip, layer=2, at={"model": 1}, pattern=Run(4))
    spelled = sdc.strike_on(site, flip, [3, 4, 5, 6], iteration=[2], device={"model": 1})
    assert equal(sdc.strike_on(site, placed, 3), spelled)
    last = int(np.prod(site.outputs[0].shape)) - 1
    assert np.asarray(sdc.strike_on(site, placed, last, room=4).elements).tolist() == [last, -1, -1, -1]
    with pytest.raises(ValueError, match=r"does not select .*choose a site that it selects"):
        sdc.strike_on(site, sdc.Fault(flip, site="collectives"), 3)
    with pytest.raises(ValueError, match="starts at one element"):
        sdc.strike_on(site, placed, [3, 4])
    with pytest.raises(ValueError, match="the loops have"):
        sdc.strike_on(site, sdc.Fault(flip, layer=99), 3)
    with pytest.raises(ValueError, match="what=3: expected a kind of fault"):
        sdc.strike_on(site, 3, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="site=fwd/h: expected a site"):
        sdc.strike_on("fwd/h", flip, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at=model: expected an index for each mesh axis"):
        sdc.Fault(flip, at="model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bits=30: expected a sequence of bit positions"):
        BitFlip(bits=30)  # type: ignore[arg-type]


def test_a_layer_is_struck_in_every_iteration_of_the_loops_around_it() -> None:
    def nested(x: Any) -> Any:
        inner = lambda c, y: (c, jnp.sin(y))  # noqa: E731 - a step in one line
        return lax.map(lambda rows: lax.scan(inner, 0.0, rows)[1], x)

    x = jnp.ones((2, 3, 4))
    [sine] = sdc.sites(nested, x, where=primitive("sin"))
    hit = sdc.strike_on(sine, sdc.Fault(BitFlip(bits=(22,)), layer=1), 0)
    _, events = sdc.strike(nested, primitive("sin"))(hit, x)
    assert events[sine.name].changed.tolist() == [[0, 1, 0], [0, 1, 0]]
