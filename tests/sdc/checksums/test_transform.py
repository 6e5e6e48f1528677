"""`abft` on whole steps and in single layers: every nesting, both directions, with the transformations around it."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sdc
from sdc.checksums.fused_products import triton_fits
from sdc.checksums.products import Dot
from sdc.checksums.roundoff import Profile, Rounding, hardware
from sdc.faults import Moment
from sdc.faults.kinds import BitFlip
from sdc.program.selectors import direction, primitive, products

RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 8, 8)).astype(np.float32) / 2
X = RNG.normal(size=(6, 8)).astype(np.float32)


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]


def looped(w: Any, x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w[c[0]])), (0, x))[1]


def branched(w: Any, x: Any) -> Any:
    return lax.cond(x[0, 0] > 100, lambda: x, lambda: jnp.tanh(x @ w[0]))


def rematerialized(w: Any, x: Any) -> Any:
    return jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]))(w, x)


def mapped(w: Any, x: Any) -> Any:
    return jax.vmap(lambda w: jnp.tanh(x @ w))(w)


def attention(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("td,dhc->thc", x, m.reshape(8, 2, 4)) for m in w)
    return jnp.einsum("hst,thc->shc", jax.nn.softmax(jnp.einsum("shc,thc->hst", q, k)), v)


def convolved(w: Any, x: Any) -> Any:
    return lax.conv(x[None, None], w[0, :3, :3][None, None], (1, 1), "SAME")


FORWARD: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda w, x: jnp.tanh(x @ w[0]),
    "jit": jax.jit(lambda w, x: jnp.tanh(x @ w[0])),
    "scan": scanned,
    "while": looped,
    "cond": branched,
    "remat": rematerialized,
    "vmap": mapped,
    "attention": attention,
    "convolution": convolved,
}


def step_of(name: str) -> Callable[[Any, Any], Any]:
    forward = FORWARD[name]
    if name == "while":  # has no reverse mode
        return lambda w, x: jnp.sum(forward(w, x) ** 2)
    return jax.value_and_grad(lambda w, x: jnp.sum(forward(w, x) ** 2))


def bits(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf).view(f"uint{8 * leaf.dtype.itemsize}") for leaf in jax.tree.leaves(tree)]


def assert_same_bits(one: Any, other: Any) -> None:
    for a, b in zip(bits(one), bits(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_inputs_rounded_to_bfloat16_are_checked_as_they_were_multiplied() -> None:
    """XLA may leave a rounding out where it computes an input once more for the check: 2^-9 of every term."""
    x = jnp.asarray(RNG.normal(size=(64, 256)), jnp.bfloat16)
    w = jnp.asarray(RNG.normal(size=(256, 64)), jnp.bfloat16)

    def step(w: Any, x: Any) -> Any:
        return (jax.nn.silu(x) * x) @ w

    for output in ("float32 accumulator", "as is"):
        [flag] = jax.jit(sdc.abft(step, output=output))(w, x)[1].values()
        assert int(flag.examined) == 0
        assert float(flag.margin) == 0
        assert float(flag.first_margin) < (0.5 if output == "float32 accumulator" else 0.8)


def test_accumulators_are_what_bfloat16_products_sum_up_in() -> None:
    """Rounding the float32 sums gives the product rounded once, and only narrow products change."""
    x = jnp.asarray(RNG.normal(size=(64, 64)), jnp.bfloat16)
    step = sdc.checksums.accumulators(lambda x: x @ x)
    exact = np.asarray(x, np.float64) @ np.asarray(x, np.float64)
    np.testing.assert_allclose(np.asarray(step(x), np.float64), exact, rtol=2**-8, atol=1e-4)
    wide = x.astype(jnp.float32)
    plain, transformed = lambda x: x @ x, sdc.checksums.accumulators(lambda x: x @ x)
    texts = [jax.jit(step).lower(wide).as_text().partition("{")[2] for step in (plain, transformed)]
    assert texts[0] == texts[1]
    integers = sdc.checksums.accumulators(lambda x: x @ x)(jnp.ones((2, 2), jnp.int8))
    assert integers.dtype == jnp.int8


def test_faults_after_the_rounding_are_checked_as_they_are() -> None:
    """`abft(inject(step))` sees rounded outputs: large errors are found, with the bound of the rounding."""
    x = jnp.asarray(RNG.normal(size=(64, 64)), jnp.bfloat16)
    step = sdc.inject(lambda x: x @ x, [sdc.Fault(BitFlip(bits=(15,)), 2e-3, products)], record=8)
    (_, events), flags = jax.jit(sdc.abft(step))(Moment(jax.random.key(0), jnp.int32(0)), x)
    [event], [flag] = events.values(), flags.values()
    assert 0 < int(flag.flagged) <= int(event.changed)


def test_selection_names_and_refusals() -> None:
    step = step_of("scan")
    flags = jax.eval_shape(sdc.abft(step, products & direction("bwd")), W, X)[1]
    assert all(name.startswith("bwd/") for name in flags)
    assert flags
    assert set(jax.eval_shape(sdc.abft(step, "products"), W, X)[1]) > set(flags)
    with pytest.raises(ValueError, match=r"dot_general"):
        sdc.abft(step, primitive("dot_generol"))(W, X)
    with pytest.raises(ValueError, match="output=float16: expected one of"):
        sdc.abft(step, output="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checks a product as a whole"):
        sdc.abft(step, mode="locate", scheme="paper")
    faulty = sdc.inject(lambda x: x @ x, [sdc.Fault(BitFlip(), 0.1, products)])
    with pytest.raises(ValueError, match="scheme='residual' needs the sums before they are rounded"):
        sdc.abft(faulty, scheme="residual")(Moment(jax.random.key(0), jnp.int32(0)), jnp.ones((4, 4), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"can be handled: .*the roundoff of int8 is unknown"):
        sdc.abft(lambda x: lax.dot(x, x, preferred_element_type=jnp.float32), products)(jnp.ones((2, 2), jnp.int8))


def test_layers_in_loops_and_under_vmap() -> None:
    """Flags of a scanned layer come out by layer; those of a mapped one are of the one product that it becomes."""

    def product(x: Any, w: Any) -> Any:
        return sdc.checksums.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(lax.scan(lambda c, w: (jnp.tanh(product(c, w)), None), x, w)[0] ** 2)

    flags = jax.jit(sdc.checksums.collect(jax.grad(loss)))(W, X)[1]
    assert {name.split("/")[0]: flag.checked.tolist() for name, flag in flags.items()} == {
        "fwd": [6, 6, 6], "bwd": [8, 8, 8]
    }  # fmt: skip
    [flag] = jax.jit(sdc.checksums.collect(jax.vmap(product, (None, 0))))(X, W)[1].values()
    assert int(flag.checked) == 3 * 6
    assert int(flag.flagged) == 0
    with pytest.raises(ValueError, match="checked_product"):
        sdc.checksums.collect(lambda x: x @ x)(W[0])


def test_a_cached_checksum_checks_the_same() -> None:
    """And a stale one is not taken for corruption: what looks wrong is judged without it."""
    dimensions = (((1,), (0,)), ((), ()))
    w = jnp.asarray(W[0])

    def run(w: Any, cached: Any) -> Any:
        return sdc.checksums.collect(lambda x: sdc.checksums.dot_general(x, w, dimensions, checksum=cached))(X)

    fresh, cached = run(w, None), run(w, sdc.checksums.checksum(w, dimensions))
    assert_same_bits(fresh[0], cached[0])
    assert_same_bits([f.checked for f in fresh[1].values()], [f.checked for f in cached[1].values()])
    stale = run(w, sdc.checksums.checksum(2 * w, dimensions))[1]["fwd/checked_product"]
    assert int(stale.examined) == 6
    assert int(stale.flagged) == 0
    for wrong in (jnp.ones((3, 1)), sdc.checksums.checksum(w, dimensions).astype(jnp.bfloat16)):
        with pytest.raises(ValueError, match=r"compute the checksum with sdc\.checksums\.checksum"):
            run(w, wrong)


def test_profiles(tmp_path: Path) -> None:
    """What is saved is read back; damage, another device and another version are told apart."""
    profile = Profile(Rounding(12.0, 2.0**-11), ("fwd/a",), True, hardware(), {"kappa": {"64": 0.1}})
    path = tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    settings = profile.settings(sdc.checksums.Settings(), "fwd/a")
    assert settings.tier == 2
    assert settings.rounding.kappa == 12
    assert profile.settings(sdc.checksums.Settings(), "fwd/b").tier == 1

    with_infinity = Profile(Rounding(), measured_on=hardware())
    with_infinity.save(path)
    assert Profile.load(path) == with_infinity

    Profile(Rounding(), measured_on={**hardware(), "device_kind": "another"}).save(path)
    with pytest.warns(UserWarning, match="device_kind: measured on another, here cpu"):
        Profile.load(path)
    text = path.read_text()
    for damaged in (
        text[: len(text) // 2],
        "{}",
        "[]",
        text.replace('"kappa"', '"kapa"'),
        text.replace('"schema": 1', '"schema": 9'),
        text.replace('"fused": false', '"fused": "no"'),
        text.replace('"second_tier": []', '"second_tier": "fwd/a"'),
    ):
        path.write_text(damaged)
        with pytest.raises(ValueError, match="sdc abft calibrate"):
            Profile.load(path)
    os.mkfifo(tmp_path / "pipe")
    for name, why in (
        ("none.json", "there is no .*; create one with sdc abft calibrate"),
        (5_000 * "x", r"cannot be read \(File name too long\)"),
        ("x\0", r"cannot be read \(a path must not contain a zero byte\)"),
        ("pipe", "is a pipe, not a file"),
    ):
        with pytest.raises(ValueError, match=why):
            Profile.load(tmp_path / name)
    with pytest.raises(TypeError, match=r"sdc\.checksums\.Profile\.load"):
        sdc.abft(lambda x: x @ x, profile="profile.json")  # type: ignore[arg-type]


def test_the_kernel_takes_only_what_it_fits() -> None:
    product = Dot((((1,), (0,)), ((), ())), (2, 2), dtype=jnp.dtype(jnp.float32))
    narrow = jnp.zeros((128, 128), jnp.bfloat16)
    assert triton_fits(product, narrow, narrow)
    assert not triton_fits(product, narrow.astype(jnp.float32), narrow.astype(jnp.float32))
    assert not triton_fits(product, narrow[:100], narrow)
    assert not triton_fits(product, narrow[:, :100], narrow[:100])
    assert not triton_fits(dataclasses.replace(product, dtype=jnp.dtype(jnp.bfloat16)), narrow, narrow)
    assert not triton_fits(Dot((((0,), (0,)), ((), ())), (2, 2), dtype=product.dtype), narrow, narrow)
    assert not triton_fits(Dot((((2,), (1,)), ((0,), (0,))), (3, 3), dtype=product.dtype), narrow[None], narrow[None])
