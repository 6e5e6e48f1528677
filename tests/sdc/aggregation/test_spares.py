"""The shadow replica: clean runs stay clean, wrong ranks are named, one-off differences are not pinned on anybody."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import sdc
from sdc.aggregation.spares import ShadowReport, ShadowState, init_shadow, judge, shadow
from sdc.bits import as_bits, from_bits
from sdc.costs import collective_calls
from sdc.faults import Moment
from sdc.faults.kinds import BitFlip

RANKS, ROWS, INPUTS, OUTPUTS = 5, 2, 7, 3
rng = np.random.default_rng(0)
W = rng.normal(size=(INPUTS, OUTPUTS)).astype(np.float32)
BATCH = {
    "x": rng.normal(size=(RANKS, ROWS, INPUTS)).astype(np.float32),
    "y": rng.normal(size=(RANKS, ROWS, OUTPUTS)).astype(np.float32),
}
HITS = 2
"""Elements of the gradient that a wrong rank gets wrong."""
WRONG = np.uint32(1 << 20)


def gradient(params: Any, batch: Any) -> Any:
    """Loss and gradient of a linear model; rank k inverts the bits `flip[k]` of some elements."""

    def loss(w: Any) -> Any:
        return jnp.mean((jnp.sum(batch["x"][:, :, None] * w, axis=1) - batch["y"]) ** 2)

    value, grad = jax.value_and_grad(loss)(params["w"])
    bits = as_bits(grad)
    bits = bits.at[0, :HITS].set(bits[0, :HITS] ^ params["flip"][lax.axis_index("data")])
    return value, from_bits(bits, grad)


def on_one_device(fn: Callable[..., Any]) -> Any:
    return jax.jit(jax.vmap(fn, in_axes=(None, None, 0), out_axes=None, axis_name="data"))


@pytest.fixture(scope="module")
def single() -> Any:
    return on_one_device(shadow(gradient, "data"))


@pytest.fixture(scope="module")
def double() -> Any:
    return on_one_device(shadow(gradient, "data", spares=2))


def params(flip: Sequence[Any] | np.ndarray = (0,) * RANKS) -> Any:
    return {"w": W, "flip": np.asarray(flip, np.uint32)}


def wrong(*ranks: int) -> np.ndarray:
    """Each of them wrong in its own way."""
    flip = np.zeros(RANKS, np.uint32)
    flip[list(ranks)] = WRONG + np.asarray(ranks, np.uint32)
    return flip


def steps(run: Any, flips: Sequence[Any], batch: Any = BATCH) -> tuple[Any, ShadowState, list[ShadowReport]]:
    state, reports, mean = init_shadow(RANKS), [], None
    for flip in flips:
        mean, state, report = run(state, params(flip), batch)
        reports.append(report)
    return mean, state, reports


def group(report: ShadowReport) -> list[int]:
    return [int(report.watched), *np.asarray(report.spares).tolist()]


def plain_mean(working: int) -> tuple[float, np.ndarray]:
    """Loss and gradient over the working ranks' rows, computed without JAX."""
    x, y = BATCH["x"][:working].reshape(-1, INPUTS), BATCH["y"][:working].reshape(-1, OUTPUTS)
    error = x @ W - y
    return float(np.mean(error**2)), 2 * x.T @ error / error.size


@pytest.mark.parametrize("spares", [1, 2])
def test_a_clean_run(spares: int, single: Any, double: Any) -> None:
    run = (single, double)[spares - 1]
    filler = {name: rows.copy() for name, rows in BATCH.items()}
    for rows in filler.values():
        rows[RANKS - spares :] = np.nan  # a home spare's rows count for nothing
    state, expected = init_shadow(RANKS), plain_mean(RANKS - spares)
    for step in range(RANKS * (RANKS - spares)):
        (loss, grad), state, report = run(state, params(), filler)
        np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
        np.testing.assert_allclose(grad, expected[1], rtol=1e-4, atol=1e-6)
        assert int(report.watched) == step % RANKS
        assert not any(bool(x.any()) for x in (report.differed, report.repeats, report.blamed))
        assert [int(column.sum()) for column in report.difference] == [spares * (W.size + 1), 0, 0, 0, 0, 0]
    if spares == 1:
        np.testing.assert_array_equal(state.checked, 1 - np.eye(RANKS))
    verdict = judge(state)
    assert verdict.verdict == "clean"
    assert verdict.shares == (0.0,) * RANKS
    assert int(sum(jnp.sum(x) for x in (state.blamed, state.undecided))) == 0
    assert int(state.turn) == 0
    assert run._cache_size() == 1


def test_nothing_is_clean_before_every_rank_was_compared(single: Any) -> None:
    verdict = judge(init_shadow(RANKS))
    assert (verdict.verdict, verdict.comparisons) == ("inconclusive", 0)
    assert np.isnan(verdict.shares).all()
    _, state, _ = steps(single, [wrong()] * (RANKS - 2))
    assert judge(state).verdict == "inconclusive"
    assert judge(state).reason == "no difference in 3 comparisons, which did not include rank 4"
    _, state, _ = steps(single, [wrong()] * (RANKS - 1))
    assert judge(state).verdict == "clean"


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_stays_wrong_is_named(rank: int, single: Any) -> None:
    _, state, reports = steps(single, [wrong(rank)] * 12)
    for report in reports:
        assert bool(report.differed) == (rank in group(report))
        assert int(report.difference.mismatched.sum()) == (HITS if report.differed else 0)
    first = next(i for i, report in enumerate(reports) if report.differed)
    assert first <= rank
    assert reports[first + 1].repeats
    assert [bool(report.blamed[rank]) for report in reports[first : first + 4]] == [False, False, False, True]
    verdict = judge(state)
    assert (verdict.verdict, verdict.suspects, verdict.undecided) == ("corrupt", (rank,), ())
    assert verdict.differences == sum(bool(report.differed) for report in reports)
    assert verdict.shares[rank] == 1.0
    assert int(state.undecided.sum()) == int(state.phase > 0)  # at most that which is under way
    assert f"rank {rank} was wrong" in verdict.reason


def test_two_ranks_that_stay_wrong_are_named(single: Any) -> None:
    _, state, _ = steps(single, [wrong(0, 1)] * 60)
    assert judge(state).suspects == (0, 1)
    assert judge(state).undecided == ()


def test_a_single_flip_is_measured_and_pinned_on_nobody(single: Any) -> None:
    _, state, reports = steps(single, [wrong(), wrong(2), wrong()] + [wrong()] * 5)
    assert [bool(report.differed) for report in reports] == [False, True, *[False] * 6]
    assert [group(report) for report in reports] == [[0, 1], [1, 2], [1, 2], [1, 3], [3, 2], [2, 3], [3, 4], [4, 0]]
    assert not any(bool(x.any()) for report in reports for x in (report.repeats, report.blamed))
    assert [int(column[0]) for column in reports[1].difference][:4] == [W.size + 1, HITS, 0, 0]
    clean = np.asarray(plain_rank(1)[0, :HITS])
    flipped = (clean.view(np.uint32) ^ wrong(2)[2]).view(np.float32)
    np.testing.assert_allclose(reports[1].difference.relative_max[0], np.max(np.abs(flipped / clean - 1)), rtol=1e-3)
    verdict = judge(state)
    assert (verdict.verdict, verdict.suspects, verdict.undecided) == ("corrupt", (), ((1, 2),))
    said = "1 of 8 comparisons found a difference, 0 of them in a re-check; rank 1 or rank 2 was wrong"
    assert verdict.reason == said


def plain_rank(rank: int) -> np.ndarray:
    x, y = BATCH["x"][rank], BATCH["y"][rank]
    error = x @ W - y
    return (2 * x.T @ error / error.size).astype(np.float32)


def test_a_flip_during_the_follow_up_decides_between_the_pair(single: Any) -> None:
    """Rank 1 is wrong twice, and right at the re-check."""
    _, state, reports = steps(single, [wrong(1), wrong(), wrong(), wrong(1)])
    assert group(reports[0]) == [0, 1]
    assert group(reports[3]) == [2, 1]
    assert not reports[1].repeats
    assert judge(state).suspects == (1,)


def test_a_follow_up_under_way_is_undecided(single: Any) -> None:
    _, state, _ = steps(single, [wrong(1)] * 2)
    assert judge(state)[:3] == ("corrupt", (), ((0, 1),))
    assert judge(state).repeated == 1


def test_the_mean_is_over_each_row_once() -> None:
    """Also where ranks are swapped: each working rank's row is a unit vector, whoever computes on it."""
    for spares in (1, 2, 3):
        run = on_one_device(shadow(lambda params, batch: jnp.where(params["on"], batch, 0.0), "data", spares=spares))
        working = RANKS - spares
        rows = np.where(np.arange(RANKS)[:, None] < working, np.eye(RANKS, working, dtype=np.float32), np.nan)
        state = init_shadow(RANKS)
        for turn in range(RANKS * working):
            for phase in range(4 if spares == 1 else 2):
                at = state._replace(turn=jnp.int32(turn), phase=jnp.int32(phase))
                mean, _, report = run(at, {"on": jnp.bool_(True)}, rows)
                np.testing.assert_array_equal(mean, np.full(working, np.float32(1) / np.float32(working)))
                assert len(set(group(report))) == spares + 1
                assert not report.differed
        assert run._cache_size() == 1


@pytest.mark.parametrize("placement", ["vmap", "pmap", "shard_map"])
def test_placements_agree(placement: str, single: Any) -> None:
    flips = [wrong(1)] * 6
    _, expected, reference = steps(single, flips)
    step = shadow(gradient, "data")
    if placement == "vmap":
        run = jax.jit(jax.vmap(step, in_axes=(None, None, 0), axis_name="data"))
    elif placement == "pmap":
        run = jax.pmap(step, in_axes=(None, None, 0), axis_name="data")
    else:
        run = on_mesh(step)
    state = jax.tree.map(np.asarray, init_shadow(RANKS))
    for flip, other in zip(flips, reference, strict=True):
        mean, states, reports = run(state, params(flip), BATCH)
        for leaf in jax.tree.leaves((mean, states, reports)):  # the same on every rank
            rows = np.asarray(as_bits(leaf))
            np.testing.assert_array_equal(rows, np.broadcast_to(rows[:1], rows.shape))
        state, report = jax.tree.map(lambda x: np.asarray(x)[0], (states, reports))
        assert group(report) == group(other)
        np.testing.assert_array_equal(report.difference.mismatched, other.difference.mismatched)
    for got, want in zip(state, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert judge(state).suspects == (1,)
    if placement != "pmap":  # which has no count
        assert run._cache_size() == 1


def on_mesh(step: Callable[..., Any]) -> Any:
    """On devices; the outputs get a leading axis of ranks."""
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,))

    def body(state: Any, params: Any, batch: Any) -> Any:
        out = step(state, params, jax.tree.map(lambda x: x[0], batch))
        return jax.tree.map(lambda x: x[None], out)

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P("data"), check_vma=False))


def test_injected_faults_are_found_with_the_exact_count() -> None:
    def grad(w: Any, batch: Any) -> Any:
        return sdc.probe(jax.grad(lambda w: jnp.sum(jnp.sin(batch @ w)))(w), "grad")

    step = sdc.inject(shadow(grad, "data"), [sdc.Fault(BitFlip(), 0.2, at={"data": 2})])
    run = jax.jit(jax.vmap(step, in_axes=(None, None, None, 0), axis_name="data"))
    state, found = init_shadow(RANKS), 0
    for number in range(8):
        ((_, states, reports), events) = run(Moment(jax.random.key(0), jnp.int32(number)), state, W, BATCH["x"])
        state, report = jax.tree.map(lambda x: x[0], (states, reports))
        truth = int(events["fwd/grad"].changed[2]) if 2 in group(report) else 0
        assert int(report.difference.mismatched[0]) == truth
        assert bool(report.differed) == (truth > 0)
        found += truth
    assert found > 5
    assert judge(state).suspects == (2,)


def test_a_copy_damaged_on_its_way_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = lambda tree, axis, sender: jax.tree.map(lambda x: lax.psum(x, axis), tree)  # noqa: E731 - in one line
    monkeypatch.setattr(sys.modules["sdc.aggregation.spares"], "from_reference", damaged)
    run = on_one_device(shadow(lambda params, x: params * x, "data"))
    _, _, report = run(init_shadow(RANKS), 2.0, np.arange(1, RANKS + 1, dtype=np.float32))
    assert report.differed


def test_a_spare_that_computes_nan_does_not_spoil_the_mean() -> None:
    run = on_one_device(shadow(lambda k, x: jnp.where(lax.axis_index("data") == k, jnp.nan, x), "data"))
    mean, _, report = run(init_shadow(RANKS), jnp.int32(1), jnp.ones(RANKS))
    assert report.spares.tolist() == [1]
    assert float(mean) == 1.0
    assert int(report.difference.nonfinite[0]) == 1


def test_narrow_gradients_are_added_up_in_float32() -> None:
    """Four times 20,000 is more than float16 holds."""
    run = on_one_device(shadow(lambda _, x: x, "data"))
    mean, _, _ = run(init_shadow(RANKS), None, jnp.full(RANKS, 20_000, jnp.float16))
    assert mean.dtype == jnp.float16
    assert float(mean) == 20_000


def test_equal_nans_are_no_difference(single: Any) -> None:
    batch = {"x": BATCH["x"].copy(), "y": BATCH["y"]}
    batch["x"][:, 0, 0] = np.nan
    (loss, grad), state, _ = steps(single, [wrong()] * 5, batch)
    assert np.isnan(loss)
    assert np.isnan(grad).any()
    assert judge(state).verdict == "clean"


def test_a_wrong_result_beside_the_gradient_is_found() -> None:
    run = on_one_device(shadow(lambda k, x: (jnp.where(lax.axis_index("data") == k, 2.0, 1.0) + x[0], x), "data"))
    _, _, report = run(init_shadow(RANKS), jnp.int32(1), jnp.zeros((RANKS, 3)))
    assert int(report.difference.mismatched[0]) == 1


def test_two_spares_check_a_difference_again_and_go_on(double: Any) -> None:
    _, _, reports = steps(double, [wrong(0)] * 4)
    assert [group(report) for report in reports] == [[0, 1, 2], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert [bool(report.repeats) for report in reports] == [False, True, False, False]


@pytest.mark.parametrize("rank", range(RANKS))
def test_two_spares_decide_at_once(rank: int, double: Any) -> None:
    right, *_ = steps(double, [wrong()])
    state = init_shadow(RANKS)
    for _ in range(8):
        mean, state, report = double(state, params(wrong(rank)), BATCH)
        taken = rank in group(report)
        assert bool(report.differed) == taken
        np.testing.assert_array_equal(np.flatnonzero(report.blamed), [rank] if taken else [])
        if taken:  # the majority's gradient is used
            np.testing.assert_allclose(mean[1], right[1], rtol=1e-4, atol=1e-6)
            mismatched = np.asarray(report.difference.mismatched)
            np.testing.assert_array_equal(
                mismatched, [HITS, HITS] if rank == report.watched else HITS * (np.asarray(report.spares) == rank)
            )
    assert judge(state)[:3] == ("corrupt", (rank,), ())


def test_two_spares_that_differ_from_each_other_decide_nothing(double: Any) -> None:
    _, state, reports = steps(double, [wrong(0, 1, 2)])
    assert group(reports[0]) == [0, 1, 2]
    assert reports[0].differed
    assert not reports[0].blamed.any()
    assert judge(state).undecided == ((0, 1), (0, 2), (1, 2))


def judged(undecided: Sequence[tuple[int, int]], ranks: int = RANKS) -> tuple[tuple[int, ...], Any]:
    pairs = np.zeros((ranks, ranks), np.uint32)
    for pair in undecided:
        pairs[pair] += 1
    everywhere = np.uint32(100) * (1 - np.eye(ranks, dtype=np.uint32))
    verdict = judge(init_shadow(ranks)._replace(checked=everywhere, differed=pairs, undecided=pairs))
    return verdict.suspects, verdict.undecided


def test_a_rank_that_is_wrong_now_and_then_is_named_when_chance_is_no_explanation() -> None:
    star = [(0, 1), (1, 2), (3, 1), (1, 4), (1, 0), (2, 1), (1, 3)]
    assert judged(star[:2]) == ((), ((0, 1), (1, 2)))
    assert judged(star) == ((1,), ())
    assert judged([*star * 2, (3, 4)]) == ((1,), ((3, 4),))
    assert judged([(1, 7), (30, 1)], 64) == ((), ((1, 7), (1, 30)))
    assert judged([(1, 7), (30, 1), (1, 9)], 64) == ((1,), ())
    assert judged([(a, b) for a in range(RANKS) for b in range(RANKS) if a != b] * 200)[0] == ()


def test_gradients_move_only_where_they_differ() -> None:
    run = on_mesh(shadow(gradient, "data"))
    text = run.lower(init_shadow(RANKS), params(), BATCH).compile().as_text()
    found = collective_calls(text)
    always = sorted(size for c in found if not c.conditional for size in c.sizes)
    x, y, grad, loss = 4 * ROWS * INPUTS, 4 * ROWS * OUTPUTS, W.nbytes, 4
    digests = RANKS * 2 * 4
    assert always == sorted([digests, x, y, x, y, grad, loss])
    gated = sorted(size for c in found if c.conditional for size in c.sizes)
    assert gated == sorted([grad, loss] * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "uint8", "int16", "bool", "key"])
def test_rows_travel_bit_for_bit(dtype: str) -> None:
    """The owner computes on its own rows and the others on copies: a changed bit would be a difference."""
    words = np.random.default_rng(1).integers(0, 2**32, (RANKS, 8), dtype=np.uint32)
    words[:, :4] = 0x80000000, 0x7FC01234, 0xFF812345, 1  # -0.0, two NaNs with a payload, a denormal number
    if dtype == "key":
        batch: Any = jax.random.wrap_key_data(jnp.asarray(words.reshape(RANKS, 4, 2)))
    elif dtype == "bool":
        batch = words % 2 == 0
    else:
        batch = lax.bitcast_convert_type(jnp.asarray(words), jnp.dtype(dtype))

    def bits(_: Any, x: Any) -> Any:
        words = as_bits(x).astype(jnp.uint32)
        return (words >> 16).astype(jnp.float32), (words % 2**16).astype(jnp.float32)

    run = on_one_device(shadow(bits, "data"))
    state = init_shadow(RANKS)
    for _ in range(RANKS * (RANKS - 1)):
        _, state, report = run(state, None, batch)
        assert not report.differed


def test_a_difference_on_one_device_of_a_rank() -> None:
    """Parameters are sharded over `model`; device (1, 1) is wrong."""
    mesh = jax.make_mesh((3, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def grad(w: Any, x: Any) -> Any:
        here = (lax.axis_index("data") == 1) & (lax.axis_index("model") == 1)
        grads = jax.grad(lambda w: jnp.sum(lax.psum(jnp.sum(w * x), "model") ** 2) / 2)(w)
        return jnp.where(here, grads.at[:2].multiply(2.0), grads)

    def body(state: Any, w: Any, x: Any) -> Any:
        mean, state, report = shadow(grad, "data")(state, w, x[0])
        return mean[None], jax.tree.map(lambda x: x[None, None], (state, report))

    run = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(), P("model"), P("data")),
            out_specs=(P("data", "model"), P("data", "model")),
            check_vma=False,
        )
    )
    state = jax.tree.map(np.asarray, init_shadow(3))
    w, x = jnp.arange(1.0, 9.0), jnp.asarray([1.0, 2.0, 3.0])
    for _ in range(5):
        mean, out = run(state, w, x)
        for leaf in jax.tree.leaves(out):
            assert (np.asarray(leaf) == np.asarray(leaf)[:1, :1]).all()
        assert (np.asarray(mean) == np.asarray(mean)[:1]).all()
        state, report = jax.tree.map(lambda x: np.asarray(x)[0, 0], out)
        assert int(report.difference.checked[0]) == 8
        assert int(report.difference.mismatched[0]) == (2 if 1 in group(report) else 0)
        assert float(report.difference.relative_max[0]) in (0.0, 0.5, 1.0)
    assert judge(state).suspects == (1,)
    assert run._cache_size() == 1
