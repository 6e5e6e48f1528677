"""`abft(examine="again")`: the first tier in a program of its own, and what a suspicious step is then found to be."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sdc
from sdc.checksums import PLATFORMS, Profile, _check, coverage
from sdc.checksums._check import LARGEST_PADDED, LARGEST_TOGETHER, Deferred, screen, screen_together
from sdc.checksums.examination import TRACED, UNREPEATED
from sdc.checksums.products import Dot
from sdc.checksums.roundoff import Settings
from sdc.checksums.schemes import Operands
from sdc.faults import Moment
from sdc.faults.kinds import Scale
from sdc.program.interpreter import rewrite
from sdc.program.selectors import direction, named, products

from .test_transform import FORWARD, RNG, W, X, assert_same_bits, step_of


@pytest.mark.parametrize("name", FORWARD)
def test_flags_of_a_healthy_and_of_a_faulty_step_are_those_of_one_program(name: str) -> None:
    faulty = sdc.inject(sdc.checksums.accumulators(step_of(name)), [sdc.Fault(Scale(-2.0), 0.05, products)])
    healthy, moment = step_of(name), Moment(jax.random.key(1), jnp.int32(1))
    for step, arguments in ((healthy, (W, X)), (faulty, (moment, W, X))):
        out, flags = sdc.abft(step, examine="again")(*arguments)
        expected, within = jax.jit(sdc.abft(step))(*arguments)
        assert flags.sites == within.sites
        assert coverage(flags) == coverage(within)
        for one, other in zip(flags.values(), within.values(), strict=True):
            for count in ("checked", "flagged", "confirmed", "corrected", "nonfinite"):
                np.testing.assert_array_equal(getattr(one, count), getattr(other, count))
            # The first tier of backward and of small products takes the norm of the terms, so that it passes on fewer
            # rows. Backward products of attention begin with the second tier.
            ours, theirs = (np.maximum(flag.margin, flag.first_margin) for flag in (one, other))
            same = (one.margin > 0) == (other.margin > 0)  # tiers
            assert (ours <= np.where(same, 1.5 * theirs, 1.0)).all()
        for ours, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def square(x: Any) -> Any:
    return x @ x.T


@pytest.mark.parametrize(
    ("scheme", "mode"),
    [("paper", "detect"), *itertools.product(("deterministic", "blocks", "residual"), ("detect", "locate"))],
)
def test_schemes(scheme: Any, mode: Any) -> None:
    x, step = jnp.asarray(X, jnp.bfloat16), square
    _, flags = sdc.abft(step, mode=mode, scheme=scheme, examine="again")(x)
    _, within = jax.jit(sdc.abft(step, mode=mode, scheme=scheme))(x)
    assert jax.tree.structure(flags) == jax.tree.structure(within)
    assert [leaf.dtype for leaf in jax.tree.leaves(flags)] == [leaf.dtype for leaf in jax.tree.leaves(within)]
    [one], [other] = flags.values(), within.values()
    np.testing.assert_allclose((one.margin, one.first_margin), (other.margin, other.first_margin), rtol=0.2)


class _Adds:
    """Adds the next of some numbers to the first element of a product."""

    def __init__(self, numbers: Iterator[float]) -> None:
        self._numbers = numbers

    def __call__(self, place: Any, bind: Any, *inputs: Any) -> Any:
        (out,) = bind(*inputs)
        error = jax.pure_callback(lambda _: np.float32(next(self._numbers, 0.0)), jax.ShapeDtypeStruct((), "f4"), out)
        return [out.at[0, 0].add(error)], ()

    def merge(self, total: Any, new: Any) -> Any:
        return ()


def clean(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w[0]) @ w[1]


def flaky(numbers: Sequence[float]) -> Callable[[Any, Any], Any]:
    """Returns a step of two products. A number is added to the second one in each run."""
    _, second = sdc.sites(clean, W, X, where=products)
    rule = _Adds(iter(numbers))
    return lambda w, x: rewrite(clean, lambda site: site.name == second.name, rule)(w, x)[0]


EXPECTED = np.tanh(X @ W[0]) @ W[1]


@pytest.mark.parametrize("mode", ["detect", "correct"])
@pytest.mark.parametrize(
    ("numbers", "first"),
    [
        ((9.0,), 9.0),
        ((np.nan,), np.nan),
        ((9.0, 5.0, 9.0, 9.0), 9.0),
        ((9.0, 0.0, 9.0, 9.0), 9.0),
        ((9.0, 9.0, 0.0, 0.0), 9.0),
    ],
    ids=["once", "NaN once", "the second run differs", "the second run is right", "the examination is right"],
)
def test_a_fault_that_does_not_recur_is_never_dropped(mode: Any, numbers: Sequence[float], first: float) -> None:
    """If two of three runs agree, the third was wrong; the first tier's product is flagged."""
    out, flags = sdc.abft(flaky(numbers), mode=mode, examine="again")(W, X)
    before, struck = flags.values()
    assert int(before.flagged) == 0
    assert int(struck.flagged) >= 1
    assert int(struck.confirmed) == int(struck.flagged)
    assert int(struck.corrected) == (int(struck.flagged) if mode == "correct" else 0)
    assert float(struck.margin) > 1
    assert not np.isnan(struck.margin)
    error = np.zeros_like(EXPECTED)
    error[0, 0] = 0 if mode == "correct" else first
    np.testing.assert_allclose(out, EXPECTED + error, rtol=1e-5, atol=1e-5)


def test_a_fault_in_a_repetition_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms that cancel are suspicious in products that are checked alone; a fault strikes the second run only."""
    monkeypatch.setattr("sdc.checksums.transform.LARGEST_TOGETHER", 0)
    x = jnp.asarray([[1e6, 1.0, -1e6]] * 2, jnp.float32)
    rule = _Adds(iter((0.0, 9.0, 0.0, 0.0)))

    def step(x: Any) -> Any:
        return rewrite(lambda x: x @ jnp.ones((3, 2)), products, rule)(x)[0]

    out, flags = sdc.abft(step, examine="again")(x)
    [flag] = flags.values()
    assert int(flag.examined) >= 1
    assert int(flag.flagged) == int(flag.confirmed) == 1
    np.testing.assert_array_equal(out, np.ones((2, 2)))


def test_products_after_a_corrected_one_are_not_faulty() -> None:
    """They are suspicious in the first program, where an infinite number reaches them; in the second, none does."""
    first, *_ = sdc.sites(step_of("plain"), W, X, where=products)
    struck = sdc.strike(sdc.checksums.accumulators(step_of("plain")), named(first.name))
    hit = sdc.strike_on(first, "bitflip,bits=30", [3])
    (out, _), flags = sdc.abft(struck, mode="correct", examine="again")(hit, W, X)
    assert [int(flag.flagged) for flag in flags.values()] == [1] + [0] * (len(flags) - 1)
    np.testing.assert_allclose(jax.tree.leaves(out)[0], jax.tree.leaves(step_of("plain")(W, X))[0], rtol=1e-5)


@pytest.mark.parametrize("lost", ["before", "after"])
def test_what_comes_before_a_corrected_product_is_a_fault_of_its_own(lost: str) -> None:
    """One fault recurs and is corrected; another one strikes the first two runs and not the examination."""
    recurs, ends = (rewrite(lambda x: x @ x, products, _Adds(iter(numbers))) for numbers in ([9.0] * 9, [9.0, 9.0]))
    order = [ends, recurs] if lost == "before" else [recurs, ends]
    x = jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32)
    _, flags = sdc.abft(lambda x: [run(x)[0] for run in order], mode="correct", examine="again")(x)
    # After it, the first run computed with other numbers, for all that is known.
    assert [int(flag.flagged) for flag in flags.values()] == ([1, 1] if lost == "before" else [1, 0])


def test_a_step_that_never_repeats_itself_is_examined_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="not deterministic") as said:
        _, flags = sdc.abft(flaky((9.0, 5.0, 7.0, 3.0)), examine="again")(W, X)
    assert str(said[0].message) == UNREPEATED
    assert int(list(flags.values())[1].flagged) == 1


@pytest.mark.parametrize("numbers", [(9.0, 5.0, 7.0, 0.0), (9.0, 0.0, 7.0, 0.0)])
def test_three_results_and_a_fourth_are_no_clean_step(numbers: Sequence[float]) -> None:
    with pytest.warns(UserWarning, match="not deterministic"):
        _, flags = sdc.abft(flaky(numbers), examine="again")(W, X)
    assert int(list(flags.values())[1].flagged) >= 1


def test_faults_in_both_repetitions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run is right, and suspicious only where terms cancel."""
    monkeypatch.setattr("sdc.checksums.transform.LARGEST_TOGETHER", 0)
    step, cancelling = flaky((0.0, 9.0, 7.0, 0.0)), jnp.asarray([[1e6, 1.0, -1e6]] * 2, jnp.float32)

    def both(w: Any, x: Any) -> Any:
        return cancelling @ jnp.ones((3, 2)), step(w, x)

    with pytest.warns(UserWarning, match="not deterministic"):
        (_, out), flags = sdc.abft(both, examine="again")(W, X)
    assert [int(flag.flagged) for flag in flags.values()] == [0, 0, 1]
    np.testing.assert_allclose(out, EXPECTED, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        (nnx.Variable(jnp.ones(())), "Flax NNX object"),
        ("relu", "'relu', which is not an array"),
        (jax.new_ref(jnp.ones(())), "which each run would change"),
    ],
    ids=["NNX", "text", "reference"],
)
def test_arguments_with_which_a_step_cannot_run_again(argument: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sdc.abft(lambda x, other: x @ x.T, examine="again")(X, argument)


def test_a_step_that_closes_over_traced_arrays_examines_within() -> None:
    with pytest.warns(UserWarning, match="inside jit"):
        out = jax.jit(lambda w: sdc.abft(lambda x: x @ w, examine="again")(x=X)[0])(W[0])
    np.testing.assert_allclose(out, X @ W[0], rtol=1e-5)


def test_a_loop_without_iterations_and_outputs_of_four_bits() -> None:
    _, flags = sdc.abft(lambda w, x: lax.scan(lambda c, w: (c @ w, None), x, w)[0], examine="again")(W[:0], X)
    assert [np.size(flag.checked) for flag in flags.values()] == [0]
    cancelling = jnp.asarray([[1e6, 1.0, -1e6]] * 2, jnp.float32)
    out, _ = sdc.abft(lambda x: (x @ jnp.ones((3, 2)), x.astype(jnp.int4)), examine="again")(cancelling)
    assert out[1].dtype == jnp.int4


def test_inside_jit_it_examines_within() -> None:
    checked = sdc.abft(step_of("plain"), examine="again")
    with pytest.warns(UserWarning, match="inside jit") as said:
        out = jax.jit(checked)(W, X)
    assert str(said[0].message) == TRACED
    assert_same_bits(out, jax.jit(sdc.abft(step_of("plain")))(W, X))


def test_an_unknown_way_to_examine() -> None:
    with pytest.raises(ValueError, match="examine=later: expected one of 'within', 'again'"):
        sdc.abft(step_of("plain"), examine="later")  # type: ignore[arg-type]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("batched", [False, True])
def test_backward_products_whose_terms_cancel_are_not_examined(batched: bool, platform: str) -> None:
    """Within a step, their rows would reach the second tier; here, the whole step would run again."""
    profile = Profile(PLATFORMS[platform])
    w, x = jnp.asarray([[1e6, 1.0, -1e6]] * 4, jnp.float32), jnp.ones((2, 4))
    if batched:
        w, x = jnp.stack([w, w]), jnp.stack([x, x])
    step = jax.grad(lambda x, w: jnp.sum(jnp.sin(jnp.matmul(x, w) * 1e-9)) * 1e9)
    _, within = jax.jit(sdc.abft(step, direction("bwd") & products, profile=profile))(x, w)
    assert sum(int(flag.examined) for flag in within.values()) > 0
    runs = []

    def counted(x: Any, w: Any) -> Any:
        jax.debug.callback(lambda: runs.append(1))
        return step(x, w)

    _, flags = sdc.abft(counted, direction("bwd") & products, profile=profile, examine="again")(x, w)
    jax.effects_barrier()
    assert len(runs) == 1
    assert all(int(flag.flagged) == 0 < int(flag.checked) for flag in flags.values())
    tiers = {float(flag.margin) > 0 for flag in flags.values()}  # whether they begin with the second tier
    assert tiers == {batched and platform == "cpu"}


@pytest.mark.parametrize("together", [0, LARGEST_TOGETHER])
def test_gradients_whose_squares_vanish_are_not_examined(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a softmax that is saturated."""
    monkeypatch.setattr("sdc.checksums.transform.LARGEST_TOGETHER", together)
    w, x = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((16, 64), (8, 16)))
    step = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w) * jnp.exp(jnp.linspace(-90.0, -40.0, 64))), argnums=(0, 1))
    _, flags = sdc.abft(step, direction("bwd") & products, examine="again")(x, w)
    assert all(float(flag.first_margin) <= 1 for flag in flags.values())


@pytest.mark.parametrize("sizes", [(1e20, 1e-20), (1e-20, 1e20)])
@pytest.mark.parametrize("together", [0, LARGEST_TOGETHER])
def test_factors_whose_squares_overflow_are_not_examined(
    together: int, sizes: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdc.checksums.transform.LARGEST_TOGETHER", together)
    a, b = (jnp.asarray(RNG.normal(size=(8, 8)) * size, jnp.float32) for size in sizes)
    step = jax.value_and_grad(lambda a, b: jnp.sum(jnp.sin(a @ b) * 1e-18))
    _, flags = sdc.abft(step, examine="again")(a, b)
    assert [int(flag.flagged) for flag in flags.values()] == [0, 0]
    assert all(float(flag.first_margin) <= 1 for flag in flags.values())


def test_factors_over_explicit_axes_are_checked_alone() -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(jnp.ones((4, 6, 2, 8)), NamedSharding(mesh, P("x", None, "y")))
    _, flags = sdc.abft(lambda x: jnp.einsum("bshd,bthd->bhst", x, x), examine="again")(x)
    assert [int(flag.checked) for flag in flags.values()] == [4 * 2 * 6]


def test_backward_products_of_attention_may_lose_terms_where_sums_are_truncated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the second tier allows for it where they are rounded to nearest."""
    bounds, screen_group = [], _check._screen_group

    def seen(several: Any) -> Any:
        bounds.extend(one.relative for one in several)
        return screen_group(several)

    monkeypatch.setattr(_check, "_screen_group", seen)
    w, x = jnp.ones((4, 256)), jnp.ones((2, 4))
    step, profile = jax.grad(lambda x, w: jnp.sum(jnp.sin(jnp.matmul(x, w)))), Profile(PLATFORMS["gpu"])
    for given in ((x, w), (jnp.stack([x, x]), jnp.stack([w, w]))):
        sdc.abft(step, direction("bwd") & products, profile=profile, examine="again").lower(*given)
    plain, batched = bounds
    assert batched > 5 * plain


def test_a_branch_that_is_not_taken_counts_no_rows() -> None:
    def step(x: Any) -> Any:
        return lax.cond(x[0, 0] > 100, lambda: x @ x.T, lambda: x @ x.T + x @ x.T)

    _, flags = sdc.abft(step, examine="again")(X)
    assert [int(flag.checked) for flag in flags.values()] == [len(X), len(X), 0]


def layers(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize("together", [True, False])
def test_the_program_has_few_instructions_for_each_product(together: bool) -> None:
    """A check in full has about a thousand; small products of one shape share a check."""
    width = 16 if together else 256
    assert (width * width + 2 * 4 * width <= LARGEST_TOGETHER) == together
    most = {True: 12, False: 150}[together]  # 92 with jax 0.10, 110 with jax 0.12
    numbers = {}
    for count in (4, 12):
        arguments = [jnp.eye(width)] * count, jnp.ones((4, width))
        programs = (jax.jit(layers), sdc.abft(layers, examine="again"))
        numbers[count] = [instructions(program.lower(*arguments).compile()) for program in programs]
    added = [numbers[12][way] - numbers[4][way] for way in (0, 1)]
    assert (added[1] - added[0]) / 8 < most, added


def instructions(compiled: Any) -> int:
    return sum(" = " in line for line in compiled.as_text().splitlines())


@pytest.mark.parametrize("padded", [0, LARGEST_PADDED])
@pytest.mark.parametrize("tier", [1, 2])
def test_together_or_alone_products_have_the_same_margins(
    monkeypatch: pytest.MonkeyPatch, tier: int, padded: int
) -> None:
    """Products of several shapes and numbers of batches, each with an error that exceeds rounding errors by far."""
    monkeypatch.setattr(_check, "LARGEST_PADDED", padded)
    settings, product = Settings(tier=tier, cancels=True), Dot((((2,), (1,)), ((1,), (2,))), (3, 3))
    deferred, alone = {}, {}
    for batch, m, k, n in ((1, 8, 8, 24), (3, 5, 7, 4), (2, 16, 1, 9), (1, 1, 40, 3), (2, 6, 12, 1)):
        a, b = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((m, batch, k), (n, k, batch)))
        c = product(a, b)
        given = Operands(a, b, c.at[-1, m // 2, n // 2].add(0.05 * jnp.sqrt(jnp.mean(c**2))))
        name = f"{batch}, {m}, {k}, {n}"
        deferred[name], alone[name] = Deferred.of(product, settings, given), screen(product, settings, given)[1]
    stacks = screen_together(deferred)
    assert (len(stacks) == 1) == (padded > 0)
    found = {name: jax.tree.map(lambda x, row=row: x[row], stack.screened)
             for stack in stacks for row, name in enumerate(stack.names)}  # fmt: skip
    assert set(found) == set(alone)
    for name, one in found.items():
        assert int(one.checked) == int(alone[name].checked)
        assert one.last == alone[name].last
        np.testing.assert_allclose(one.margin, alone[name].margin, rtol=1e-4)


def test_a_small_product_that_is_padded_has_its_own_bound() -> None:
    """Lambda is that of its terms and columns, and not that of the products beside it."""
    small, large = jnp.ones((4, 4)), jnp.ones((64, 64))
    error = 40 * 2.0**-24  # of a row's norm: between lambda of 8 and of 128 terms and columns

    def step(small: Any, large: Any) -> Any:
        struck = rewrite(lambda x: x @ x, products, _Adds(iter([4.0 * 2.0 * error] * 9)))(small)[0]
        return struck, large @ large

    _, flags = sdc.abft(step, examine="again")(small, large)
    assert [int(flag.flagged) > 0 for flag in flags.values()] == [True, False]
