"""Faults do what they say, where and when they say, and the events are the ground truth."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.faults import BitFlip, FaultKind, Moment, Relative, Scale, When, parse_fault
from sdc.faults.kinds import Change, neutral

SIZE = 4096
X = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)


def moment(step: int = 0, seed: int = 0) -> Moment:
    return Moment(jax.random.key(seed), jnp.int32(step))


def identity(x: Any) -> Any:
    return sdc.probe(x, "p")


def bits_changed(a: Any, b: Any) -> np.ndarray:
    width = f"u{np.asarray(a).dtype.itemsize}"
    return np.asarray(a).view(width) != np.asarray(b).view(width)


def test_relative_faults_always_change_a_number_but_never_zero() -> None:
    x = jnp.asarray([1.0, -2.0, 0.0, np.nan, np.inf], jnp.bfloat16)
    out, events = sdc.inject(identity, [sdc.Fault(Relative(1e-9), 1.0)])(moment(), x)
    assert bits_changed(out, x).tolist() == [True, True, False, False, False]
    assert (int(events["fwd/p"].drawn), int(events["fwd/p"].changed)) == (5, 2)


def test_same_key_same_faults_other_step_other_faults() -> None:
    run = jax.jit(sdc.inject(identity, [sdc.Fault(BitFlip(), 0.01)]))
    a, b, c, d = (np.asarray(run(m, X)[0]) for m in (moment(), moment(), moment(1), moment(0, 1)))
    assert not bits_changed(a, b).any()
    assert bits_changed(a, c).any()
    assert bits_changed(a, d).any()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_the_faults_of_a_site_do_not_depend_on_other_sites(impl: str) -> None:
    def step(x: Any) -> Any:
        return sdc.probe(sdc.probe(x, "p") + 1, "q")

    now = Moment(jax.random.key(0, impl=impl), jnp.int32(0))
    drawn = [
        sdc.inject(step, [sdc.Fault(BitFlip(), 0.01, where)], record=64)(now, X)[1]["fwd/q"].hits
        for where in ("fwd/q", "fwd/*")
    ]
    assert np.count_nonzero(drawn[0].element) > 10
    assert drawn[0].element.tolist() == drawn[1].element.tolist()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_the_faults_of_a_key_do_not_depend_on_other_keys(impl: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), 3)
    run = sdc.inject(identity, [sdc.Fault(BitFlip(), 0.01)])
    alone = [run(Moment(key, jnp.int32(0)), X)[0] for key in keys]
    together = jax.vmap(lambda key: run(Moment(key, jnp.int32(0)), X)[0])(keys)
    assert not bits_changed(together, jnp.stack(alone)).any()


@dataclasses.dataclass(frozen=True, repr=False)
class Narrow(FaultKind):
    """Draws parts of a change in narrow types."""

    def change(self, key: Any, shape: tuple[int, ...], dtype: Any, layer: Any) -> Change:
        factor = 2 + jax.random.uniform(key, shape).astype(jnp.bfloat16)
        flip = jnp.zeros((*shape, 2), jnp.uint8) + jnp.asarray(layer, jnp.uint8)
        return neutral()._replace(factor=factor, flip=flip, turn=jax.random.bernoulli(key))


def test_a_kind_that_draws_narrow_numbers() -> None:
    out, events = sdc.inject(identity, [sdc.Fault(Narrow(), 0.01)])(moment(), X)
    changed = bits_changed(out, X)
    assert changed.sum() == int(events["fwd/p"].changed) > 0
    ratio = np.asarray(out)[changed] / X[changed]
    assert ((ratio >= 2) & (ratio <= 3)).all()
    with pytest.raises(TypeError, match=r"Own overrides __call__; override change or settled"):
        type("Own", (FaultKind,), {"__call__": lambda *given: None})


def test_long_loops_draw_their_own_faults() -> None:
    def step(x: Any) -> Any:
        def body(carry: Any, _: Any) -> tuple[Any, Any]:
            for _ in range(8):
                carry = jnp.sin(carry) + 1
            return carry, None

        return lax.scan(body, x, None, length=4000)[0]

    run = sdc.inject(step, ["bitflip(rate=1e-6, where=operations)"])
    memory = jax.jit(run).lower(moment(), jnp.ones(64)).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 8 * 2**20  # plans of all iterations of 16 sites would take 12 MiB and more


def test_rates_with_numbers_of_64_bits() -> None:
    run = sdc.inject(identity, [sdc.Fault(BitFlip((1,)), 0.01)])
    expected = np.asarray(run(moment(), X)[0])
    with jax.enable_x64(True):
        assert not bits_changed(run(moment(), X)[0], expected).any()


def unrolled(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def test_sites_of_equal_shape_share_kernels() -> None:
    """The time to compile is that of the kernels, and XLA compiles equal kernels once."""

    def kernels(layers: int) -> tuple[int, int]:
        run = sdc.inject(unrolled, ["bitflip(rate=1e-3, where=operations)"])
        text = jax.jit(run).lower(moment(), [jnp.eye(16)] * layers, jnp.ones((8, 16))).compile().as_text()
        assert text is not None
        used = set(re.findall(r"fusion\([^\n]*calls=%?([\w.\-]+)", text))
        bodies = [body for body in text.split("\n\n") if re.split("[ (]", body.strip().lstrip("%"))[0] in used]
        names = r", metadata=\{[^}]*\}|%[\w.\-]+|[\w\-]+\.\d[\d.]*"
        return len(used), len({re.sub(names, "", body) for body in bodies})

    (few, distinct), (many, still) = kernels(4), kernels(16)
    assert many - few <= 12 * 24  # two sites in each layer; a site that draws its own faults has about 58
    assert still <= distinct + 4


def layered(x: Any) -> Any:
    return lax.scan(lambda c, y: (c, sdc.probe(y, "p")), jnp.float32(0), x)[1]


def test_layer_and_rates_by_layer() -> None:
    x = jnp.asarray(X).reshape(4, -1)
    _, events = sdc.inject(layered, [sdc.Fault(BitFlip(), 1.0, layer=2)])(moment(), x)
    assert events["fwd/p"].changed.tolist() == [0, 0, SIZE // 4, 0]
    _, events = sdc.inject(layered, [sdc.Fault(BitFlip(), (1.0, 0.0, 0.5, 0.0))])(moment(), x)
    changed = events["fwd/p"].changed.tolist()
    assert changed[0] == SIZE // 4
    assert changed[1] == changed[3] == 0
    assert abs(changed[2] - SIZE / 8) < 5 * math.sqrt(SIZE / 16)


def test_other_layers_draw_other_faults() -> None:
    x = jnp.ones((2, SIZE))
    out, _ = sdc.inject(layered, [sdc.Fault(BitFlip((1,)), 0.01)])(moment(), x)
    hit = bits_changed(out, x)
    assert (hit[0] != hit[1]).any()


def test_only_the_named_device() -> None:
    mesh = jax.make_mesh((2, 2), ("twin", "model"), axis_types=(AxisType.Auto,) * 2)
    step = sdc.inject(identity, [sdc.Fault(Scale(2.0), 1.0, at={"twin": 1, "model": 0})])
    run = jax.shard_map(
        lambda x: jax.tree.map(lambda a: a[None, None], step(moment(), x)[1]["fwd/p"].changed),
        mesh=mesh, in_specs=P("twin", "model"), out_specs=P("twin", "model"), check_vma=False,
    )  # fmt: skip
    assert jax.jit(run)(jnp.ones((2, 4))).tolist() == [[0, 0], [2, 0]]


def count(fault: sdc.Fault, steps: int) -> np.ndarray:
    run = jax.jit(jax.vmap(sdc.inject(identity, [fault]), in_axes=(Moment(None, 0), None)))
    return np.asarray(run(Moment(jax.random.key(2), jnp.arange(steps)), jnp.ones(1000))[1]["fwd/p"].changed, np.float64)


def test_time_onset_spikes_and_burst() -> None:
    onset = count(sdc.Fault(BitFlip(), 0.1, when=When(onset=5)), 10)
    assert (onset[:5] == 0).all()
    assert (onset[5:] > 0).all()
    spikes = count(sdc.Fault(BitFlip(), 0.02, when=When(spike=0.1)), 500)
    share = (spikes > 0).mean()
    assert abs(share - 0.1) < 5 * math.sqrt(0.09 / 500)
    assert abs(spikes[spikes > 0].mean() - 200) < 5 * math.sqrt(160 / 50)
    when = When(burst=9.0, decay=3.0)
    burst = count(sdc.Fault(BitFlip(), 0.02, when=when), 12)
    for step, hits in enumerate(burst):
        expected = 20 * when.mean(step)
        assert abs(hits - expected) < 5 * math.sqrt(expected)


def test_no_recompilation_with_the_step() -> None:
    run = jax.jit(sdc.inject(identity, [sdc.Fault(BitFlip(), 0.01)]))
    for step in range(3):
        run(moment(step, step), jnp.asarray(X))
    assert run._cache_size() == 1


def test_cost_follows_the_number_of_faults() -> None:
    """At a low rate nothing but views of the tensor, and the scatter in its loop, handles all of its elements."""
    size = 1_000_000
    jaxpr = jax.make_jaxpr(sdc.inject(identity, [sdc.Fault(BitFlip(), 1e-6)]))(moment(), jnp.ones(size))
    assert large_equations(jaxpr.jaxpr, size) <= {
        "probe", "mark", "reshape", "scatter", "bitcast_convert_type", "jit", "while",
    }  # fmt: skip
    jaxpr = jax.make_jaxpr(sdc.inject(identity, [sdc.Fault(BitFlip(), 0.5)]))(moment(), jnp.ones(size))
    assert "select_n" in large_equations(jaxpr.jaxpr, size)


def large_equations(jaxpr: Any, size: int) -> set[str]:
    """Names of the primitives, in nested jaxprs too, with an output of at least `size` elements."""
    found = set()
    for eqn in jaxpr.eqns:
        if any(v.aval.size >= size for v in eqn.outvars):
            found.add(eqn.primitive.name)
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            found |= large_equations(inner, size)
    return found


def test_a_value_typed_as_equal_on_all_devices_is_refused() -> None:
    mesh = jax.make_mesh((2,), ("twin",), axis_types=(AxisType.Auto,))
    step = sdc.inject(identity, [sdc.Fault(BitFlip(), 0.1, at={"twin": 1})])
    with pytest.raises(ValueError, match="does not vary over 'twin'"):
        jax.shard_map(lambda x: step(moment(), x)[0], mesh=mesh, in_specs=P(), out_specs=P("twin"))(jnp.ones(4))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (sdc.Fault(BitFlip(), 0.1, site="fwd/other"), "'fwd/other' matches no probe.*fwd/p"),
        (sdc.Fault(BitFlip(), 0.1, at={"twin": 1}), "twin=1, but no axis 'twin' is mapped"),
        (sdc.Fault(BitFlip((40,)), 0.1), "bit 40 of a 32-bit float32"),
    ],
)
def test_faults_that_cannot_be_placed(fault: sdc.Fault, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sdc.inject(identity, [fault])(moment(), jnp.asarray(X))


def test_texts_of_faults_are_faults() -> None:
    text = "bitflip,bits=20,rate=0.3,site=fwd/p"
    moment, x = sdc.Moment(jax.random.key(0), jnp.int32(0)), jnp.arange(64.0)
    (one, _), (other, _) = (
        sdc.inject(lambda x: sdc.probe(x, "p"), [fault])(moment, x) for fault in (text, parse_fault(text))
    )
    np.testing.assert_array_equal(one, other)
    assert (np.asarray(one) != np.asarray(x)).any()


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("bitflip,rate=1", "expected a sequence of faults"),
        (sdc.Fault(BitFlip(), 0.1), "expected a sequence of faults"),
        ([BitFlip()], "expected an sdc.Fault"),
        ([3], "expected an sdc.Fault"),
    ],
)
def test_what_is_no_list_of_faults(faults: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sdc.inject(lambda x: x, faults)


def test_a_step_without_its_moment() -> None:
    step = sdc.inject(lambda x: sdc.probe(x, "p"), [sdc.Fault(BitFlip(), 0.1, "fwd/p")])
    with pytest.raises(TypeError, match=r"expected an sdc\.Moment"):
        step(jnp.ones(3))


def test_a_device_beyond_the_axis() -> None:
    step = sdc.inject(identity, [sdc.Fault(BitFlip(), 0.1, at={"twin": 2})])
    with pytest.raises(ValueError, match="axis 'twin' has size 2"):
        jax.vmap(lambda x: step(moment(), x), axis_name="twin")(jnp.ones((2, 3)))


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan, ()])
def test_rates_are_probabilities(rate: Any) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        sdc.Fault(BitFlip(), rate)


def test_parse_fault() -> None:
    fault = parse_fault(
        "bitflip,bits=30+31,rate=1e-4,site=fwd/attn,layer=2,model=1,onset=3,burst=2,decay=5", at={"twin": 1}
    )
    assert fault.what == BitFlip((30, 31))
    assert (fault.rate, fault.site, fault.layer) == (1e-4, "fwd/attn", 2)
    assert fault.at == {"twin": 1, "model": 1}
    assert fault.when == When(onset=3, burst=2.0, decay=5.0)
    assert parse_fault("scale,factor=2,rate=1").what == Scale(2.0)
    assert math.isnan(parse_fault("nan,rate=0.5").what.value)  # type: ignore[union-attr] # nan is Stuck


def test_describe() -> None:
    faults = [
        parse_fault("bitflip,rate=1e-4,site=fwd/attn,layer=2,onset=3", at={"twin": 1}),
        sdc.Fault(Relative((1.0, 2.5)), (0.1, 0.2), "bwd/*", when=When(burst=4.0, decay=5.0)),
    ]
    assert [fault.describe() for fault in faults] == [
        "bitflip bits any, rate 0.0001, site fwd/attn, layer 2, twin 1, onset 3",
        "relative severity 1 to 2.5, rate 0.1 to 0.2, site bwd/*, burst 4, decay 5",
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("meteor,rate=1", "unknown kind 'meteor'; expected one of bitflip"),
        ("bitflip", "'rate' is missing"),
        ("scale,rate=1", "'factor' is missing"),
        ("bitflip,rate=2", "from 0 to 1"),
        ("bitflip,rate=x", "rate=x: expected a number"),
        ("bitflip,rate", "not of the form key=value"),
        ("bitflip,rate=1,rate=1", "given twice"),
        ("bitflip,rate=1,factor=3", "unknown key 'factor'"),
        ("nan,rate=1,spike=0", "0 < spike <= 1"),
    ],
)
def test_parse_errors(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_fault(spec)
