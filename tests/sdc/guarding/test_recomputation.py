"""What a step computes twice is found as XLA runs it, and a flip in one of the two passes is found where it was."""

import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.faults import BitFlip
from sdc.guarding import NotRepeatable, calibrate, comparable, first_mismatch, witnessed_share
from sdc.program import arithmetic, compiling_for, direction, inside, named, products, recomputations
from sdc.program.numbering import ELSEWHERE, LEFT_OUT, SAVED

LAYERS, WIDTH = 3, 8
KEYS = jax.random.split(jax.random.key(0), 5)
W = {name: jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 3 for name, key in zip("abcd", KEYS, strict=False)}
X = jax.random.normal(KEYS[4], (4, WIDTH))
POLICIES = jax.checkpoint_policies


def block(h: Any, w: Any) -> Any:
    """Attention over the rows, and a gated network: six products, of which the last is not computed again."""
    with jax.named_scope("attn"):
        q, k = h @ w["a"], h @ w["b"]
        h = h + checkpoint_name(jax.nn.softmax(q @ k.T) @ h, "mixed")
    with jax.named_scope("ffn"):
        return h + jax.nn.silu(h @ w["c"]) @ w["d"]


def scanned(block: Any, w: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda h, w: (block(h, w), None), x, w)[0] ** 2)


def scanned_at_once(block: Any, w: Any, x: Any) -> Any:
    return jnp.sum(lax.scan(lambda h, w: (block(h, w), None), x, w, unroll=True)[0] ** 2)


def unrolled(block: Any, w: Any, x: Any) -> Any:
    for layer in range(LAYERS):
        x = block(x, jax.tree.map(lambda w, layer=layer: w[layer], w))
    return jnp.sum(x**2)


def gradient(loss: Any, block: Any) -> Callable[..., Any]:
    return jax.grad(functools.partial(loss, block))


def looped(h: Any, w: Any) -> Any:
    """A layer with a loop, in which the block runs twice, and a branch."""
    h, _ = lax.scan(lambda h, half: (block(h, w) * half, None), h, jnp.ones(2))
    return lax.cond(jnp.sum(h) > 0, lambda h: jnp.sin(h @ w["a"]), lambda h: jnp.cos(h @ w["b"]), h)


def over_devices(loss: Any, w: Any, x: Any) -> Any:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    body = jax.shard_map(
        lambda w, x: lax.psum(loss(w, x), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    return body(w, x)


def microsteps(loss: Any, w: Any, x: Any) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, w)
    add = functools.partial(jax.tree.map, jnp.add)
    return lax.scan(lambda total, x: (add(total, jax.grad(loss)(w, x)), None), zeros, jnp.stack([x, x + 1]))[0]


@jax.custom_vjp
def kernel(x: Any) -> Any:
    def double(read: Any, written: Any) -> None:
        written[...] = read[...] * 2

    return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


kernel.defvjp(lambda x: (kernel(x), None), lambda _, cotangent: (2 * cotangent,))


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return jnp.sin(self.linear(x))


def of_nnx(remat: Any, w: Any, x: Any) -> Any:
    graph, state = nnx.split(Layer())
    states = jax.tree.map(lambda x: jnp.stack([x] * LAYERS), state)
    return jnp.sum(lax.scan(lambda h, part: (remat(lambda p, h: nnx.merge(graph, p)(h))(part, h), None), x, states)[0])


def of_linen(remat: Any, w: Any, x: Any) -> Any:
    class Body(nn.Module):
        @nn.compact
        def __call__(self, h: Any, _: Any) -> Any:
            return jnp.sin(nn.Dense(WIDTH)(h)), None

    whole = nn.scan(remat(Body), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)()
    params = {"Dense_0": {"kernel": w["a"], "bias": w["b"][:, 0]}}
    return jnp.sum(whole.apply({"params": params}, x, None)[0])


def plain(function: Any) -> Any:
    return function


Remat = Callable[[Any], Any]
saved = POLICIES.save_only_these_names("mixed")
# For each form of a step: the step, given what makes its layers recomputed; how; and how many products then run twice.
FORMS: dict[str, tuple[Callable[[Remat], Callable[..., Any]], Remat, int]] = {
    "scan": (lambda remat: gradient(scanned, remat(block)), jax.checkpoint, 5),
    "no barrier": (
        lambda remat: gradient(scanned, remat(block)),
        functools.partial(jax.checkpoint, prevent_cse=False),
        5,
    ),
    "unrolled": (
        lambda remat: gradient(unrolled, remat(block)),
        functools.partial(jax.checkpoint, prevent_cse=False),
        0,
    ),
    "unrolled by scan": (
        lambda remat: jax.grad(functools.partial(scanned_at_once, remat(block))),
        jax.checkpoint,
        0,
    ),
    "all saved": (
        lambda remat: gradient(scanned, remat(block)),
        functools.partial(jax.checkpoint, policy=POLICIES.everything_saveable),
        0,
    ),
    "products saved": (
        lambda remat: gradient(scanned, remat(block)),
        functools.partial(jax.checkpoint, policy=POLICIES.dots_saveable),
        0,
    ),
    "one value saved": (
        lambda remat: gradient(scanned, remat(block)),
        functools.partial(jax.checkpoint, policy=saved),
        4,
    ),
    "not recomputed": (lambda remat: gradient(scanned, remat(block)), plain, 0),
    "functions": (lambda remat: jax.jit(gradient(scanned, jax.jit(remat(block)))), jax.checkpoint, 5),
    "nested": (lambda remat: gradient(scanned, remat(lambda h, w: remat(block)(h, w) * 2)), jax.checkpoint, 5),
    "loops": (lambda remat: gradient(scanned, remat(looped)), jax.checkpoint, 8),
    "microsteps": (
        lambda remat: functools.partial(microsteps, functools.partial(scanned, remat(block))),
        jax.checkpoint,
        5,
    ),
    "devices": (
        lambda remat: jax.grad(functools.partial(over_devices, functools.partial(scanned, remat(block)))),
        jax.checkpoint,
        5,
    ),
    "nnx": (lambda remat: jax.grad(functools.partial(of_nnx, remat), argnums=1), nnx.remat, 1),
    "linen": (lambda remat: jax.grad(functools.partial(of_linen, remat)), nn.remat, 1),
}


def products_in(step: Any, *args: Any) -> int:
    text = jax.jit(step).lower(*args).compile().as_text() or ""
    return len(re.findall(r" dot\(", text))


@pytest.mark.parametrize("name", FORMS)
def test_products_that_xla_computes_twice_are_found(name: str) -> None:
    form, remat, count = FORMS[name]
    found = recomputations(form(remat), W, X, where=products)
    assert sum(len(group.again) for group in found.groups) == count
    if name != "unrolled by scan":  # of which XLA does not merge all
        assert products_in(form(remat), W, X) - products_in(form(plain), W, X) == count


def two_branches(w: Any, x: Any) -> Any:
    """The same product under two predicates, of which either may be false."""

    def maybe(predicate: Any) -> Any:
        return lax.cond(predicate, lambda: x @ w["a"][0], lambda: x)

    return maybe(x[0, 0] > 0) + maybe(x[0, 1] > 0)


def two_loops(w: Any, x: Any) -> Any:
    """Loops of equal length from the same start, which go on differently."""
    first = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w["a"])[0]
    return first + lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, w["a"])[0]


def two_counts(w: Any, x: Any) -> Any:
    """Loops that do the same, but not as often."""

    def times(most: float) -> Any:
        return lax.while_loop(lambda h: jnp.sum(h) < most, lambda h: jnp.tanh(h @ w["a"][0]) + 1, x)

    return times(50.0) + times(90.0)


@pytest.mark.parametrize("step", [two_branches, two_loops, two_counts])
def test_products_that_look_alike_are_no_recomputations(step: Any) -> None:
    assert not recomputations(step, W, X, where=products).groups


POLICY_FORMS = ("scan", "one value saved", "nested", "loops")
FLIPS = 125  # for each policy


@functools.cache
def struck(name: str) -> tuple[Any, Any, Any]:
    form, remat, _ = FORMS[name]
    step = form(remat)
    first = recomputations(step, W, X, where=comparable)
    passes = direction("fwd") & arithmetic & ~inside("transpose(jvp())")

    @jax.jit
    def run(strike: Any, w: Any, x: Any) -> Any:
        (_, events), witnessed = sdc.witness(functools.partial(sdc.strike(step, passes), strike))(w, x)
        return {key: event.changed.sum() for key, event in events.items()}, witnessed

    return run, first, sdc.sites(step, W, X, where=passes)


def flips(sites: Any, count: int, seed: int) -> Any:
    """Yields strikes of single bits of elements that are drawn at random."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        site = sites[rng.integers(len(sites))]
        index = tuple(int(rng.integers(trips)) for trips in site.trips)
        element, bit = int(rng.integers(np.prod(site.outputs[0].shape, dtype=int))), int(rng.integers(32))
        yield site, index, sdc.strike_on(site, BitFlip(bits=(bit,)), element, iteration=index)


@pytest.mark.parametrize("name", POLICY_FORMS)
def test_a_flip_in_the_forward_pass_is_found_at_its_operation(name: str) -> None:
    run, found, _ = struck(name)
    covered = [group.first for group in found.groups]
    for site, index, strike in flips(covered, FLIPS, 1):
        changed, witnessed = run(strike, W, X)
        first = first_mismatch(witnessed)
        if not changed[site.name]:  # a branch that was not taken
            assert not witnessed[site.name].compared[index].any()
            assert first is None
            continue
        assert first is not None
        assert (first.site.name, first.iteration) == (site.name, index)


def test_a_flip_in_a_saved_value_is_not_claimed() -> None:
    run, found, sites = struck("one value saved")
    saved = {one.site.name for one in found.skipped if one.reason == SAVED}
    assert saved
    for _, _, strike in flips([site for site in sites if site.name in saved], 100, 2):
        _, witnessed = run(strike, W, X)
        assert not any(one.differs.any() for one in witnessed.values())


def test_healthy_steps_agree_and_the_output_is_that_of_the_step() -> None:
    step = FORMS["scan"][0](jax.checkpoint)
    out, witnessed = jax.jit(sdc.witness(step))(W, X)
    assert all(bool(one.compared.all()) and not one.differs.any() for one in witnessed.values())
    for name, expected in step(W, X).items():
        np.testing.assert_allclose(out[name], expected, atol=1e-4 * np.abs(expected).max())
    assert {site.direction for site in witnessed.sites} == {"fwd"}


def test_what_is_not_compared_is_listed_with_its_share() -> None:
    step = FORMS["one value saved"][0](FORMS["one value saved"][1])
    _, witnessed = jax.eval_shape(sdc.witness(step, products), W, X)
    reasons = {one.site.name.rpartition("jvp()/")[2]: one.reason for one in witnessed.skipped}
    assert reasons["ffn/dot_general#2"] == ELSEWHERE
    assert reasons["attn/dot_general#4"] == SAVED or SAVED in reasons.values()
    assert reasons["attn/reduce_max"] == LEFT_OUT
    shares = sum(one.share for one in witnessed.skipped if one.share is not None)
    assert witnessed_share(witnessed) + shares == pytest.approx(1, abs=1e-6)


def test_a_step_without_recomputations_is_the_plain_step_and_covers_nothing() -> None:
    step = FORMS["not recomputed"][0](plain)
    out, witnessed = jax.jit(sdc.witness(step))(W, X)
    assert not witnessed
    assert witnessed_share(witnessed) == 0
    jax.tree.map(np.testing.assert_array_equal, out, jax.jit(step)(W, X))


def test_kernels_are_compared_by_their_results() -> None:
    form = jax.checkpoint(lambda h, w: jnp.sin(kernel(h @ w["a"])))
    found = recomputations(gradient(scanned, form), W, X, where=comparable)
    assert [group.first.primitive for group in found.groups] == ["dot_general", "pallas_call"]
    assert [group.after for group in found.groups] == [(), (found.groups[0].first.name,)]


def test_a_branch_that_did_not_run_counts_as_not_compared() -> None:
    step = FORMS["loops"][0](jax.checkpoint)
    _, witnessed = jax.jit(sdc.witness(step, products))(W, X)
    *_, one, other = witnessed.values()
    np.testing.assert_array_equal(one.compared, ~other.compared)


def test_calibration_excludes_what_differs_with_the_reason() -> None:
    step = FORMS["scan"][0](jax.checkpoint)
    calibration = calibrate(step, [(W, X), (W, X + 1)])
    assert calibration.batches == 2
    assert not calibration.differing
    assert set(calibration.names) == {group.first.name for group in recomputations(step, W, X, where=comparable).groups}
    [first, second, *_] = calibration.names

    def apart(witnessed: Any) -> Any:  # what XLA would do if it fused the two passes differently
        return {name: jnp.bool_(name in (first, second)) for name in witnessed}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdc.guarding.recomputation._differing", apart)
        calibration = calibrate(step, [(W, X)])
    assert set(calibration.differing) == {first, second}
    assert not set(calibration.differing) & set(calibration.run(W, X)[1])
    assert all(map(calibration.where, sdc.sites(step, W, X, where=calibration.where)))


def test_a_step_that_does_not_repeat_itself_is_refused() -> None:
    count = iter(range(100))

    def noisy(h: Any, w: Any) -> Any:
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        with jax.named_scope("noisy"):
            return block(h * (1 + jax.pure_callback(lambda: np.float32(next(count)), shape)), w)

    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: scanned(jax.checkpoint(block), w, noisy(x, jax.tree.map(lambda w: w[0], w))))(w)

    with pytest.raises(NotRepeatable, match=r"the same inputs, first at fwd/jvp\(\)/attn/.*block.*doctor"):
        calibrate(step, [(W, X)])
    with pytest.raises(ValueError, match="no arguments"):
        calibrate(step, [])


def test_on_accelerators_barriers_keep_recomputations() -> None:
    step = gradient(unrolled, jax.checkpoint(block))
    with compiling_for("tpu", whole=True):
        assert len(recomputations(step, W, X, where=products).groups) == 5 * LAYERS
    with compiling_for("cpu", whole=True):
        assert not recomputations(step, W, X, where=products).groups


def test_the_witness_composes_with_faults_and_checks() -> None:
    step = FORMS["scan"][0](jax.checkpoint)
    names = [group.first.name for group in recomputations(step, W, X, where=comparable).groups]
    fault = sdc.Fault(BitFlip(bits=(20,)), 1.0, named(names[1]))
    injected = functools.partial(sdc.inject(step, [fault]), sdc.Moment(jax.random.key(0), jnp.int32(0)))
    (_, events), witnessed = jax.jit(sdc.witness(injected))(W, X)
    assert next(name for name, one in witnessed.items() if one.differs.any()) == names[1]
    assert int(sum(event.changed.sum() for event in events.values()))
    (_, flags), witnessed = jax.jit(sdc.witness(sdc.abft(step)))(W, X)
    assert set(witnessed) >= {name for name in names if name in flags}
    assert not any(one.differs.any() for one in witnessed.values())
