"""Kinds, patterns and times of faults: every change against NumPy, every event against what really changed."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import sdc
from sdc.faults import One, Row, Run, Stride, Tile, Whole
from sdc.faults.kinds import (
    Add,
    BitFlip,
    Gaussian,
    Relative,
    Rotate,
    Scale,
    Sign,
    Stuck,
    StuckBit,
    Tailed,
)
from sdc.program import argument, collectives, primitive
from tests.sdc.faults.test_language import KEY, LAYER, PATTERNS, SHAPE, SIZE, raw


def test_wide_numbers_have_two_words() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray([1.0, -2.5], jnp.float64)
        for bit in (0, 31, 32, 63):
            flipped = raw(BitFlip(bits=(bit,))(KEY, x, LAYER)) ^ raw(x)
            assert flipped.tolist() == [1 << bit] * 2
        assert np.asarray(Stuck(0.1)(KEY, x, LAYER)).tolist() == [0.1, 0.1]
        assert raw(StuckBit(1, bits=(40,))(KEY, x, LAYER)).tolist() == (raw(x) | np.uint64(1 << 40)).tolist()


@given(st.sampled_from(list(PATTERNS)), st.lists(st.integers(1, 5), max_size=3), st.integers(0, 124))
def test_patterns_stay_inside_any_shape(name: str, shape: list[int], start: int) -> None:
    pattern, size = PATTERNS[name][0], math.prod(shape)
    found = np.asarray(pattern.positions(jnp.asarray([min(start, size)]), tuple(shape)))
    assert ((found >= 0) & (found <= size)).all()
    inside = found[found < size]
    assert len(set(inside)) == len(inside)


ANY = [BitFlip(), BitFlip(count=2), StuckBit(0), StuckBit(1), Scale(3.0), Add(1.0), Relative(0.1),
       Tailed(0.1, 1.0, 0.2), Stuck(0.0), Rotate()]  # fmt: skip


SIGNED = [*ANY, Sign()]


REAL = [*SIGNED, BitFlip(field="exponent"), Gaussian(0.5), Stuck(math.nan)]


KINDS: dict[str, list[Any]] = {
    "float32": REAL,
    "bfloat16": REAL,
    "float8_e5m2": REAL,
    "float8_e4m3fn": REAL,
    "int32": SIGNED,
    "uint8": ANY,
}


# All of six elements, so that they share what is compiled.
SIXES = [One(), Run(6), Stride(6, 4, 2), Tile(2, 3), Row(), Whole()]


@pytest.mark.parametrize("dtype", KINDS)
def test_events_are_what_really_changed(dtype: str) -> None:
    """Every kind with every pattern: counts, places, bits; some of them compiled as well.

    Each type has a third of the pairs, in which every kind and every pattern is found, and each pair has a type. The
    tensor holds random bits: NaNs with their payloads, infinities and -0 among them.
    """
    width = np.dtype(dtype).itemsize
    x = jnp.asarray(np.random.default_rng(1).integers(0, 256, SIZE * width, np.uint8).view(dtype).reshape(SHAPE))
    cases = [
        (kind, pattern)
        for number, (kind, pattern) in enumerate(itertools.product(KINDS[dtype], SIXES))
        if not (isinstance(kind, Rotate) and pattern == One())
        and (number + number // len(SIXES)) % 3 == list(KINDS).index(dtype) % 3
    ]

    def run(case: Any, moment: Any, x: Any) -> Any:
        kind, pattern = case
        fault = sdc.Fault(kind, 0.05, argument("*"), pattern=pattern)
        return sdc.inject(lambda x: x, [fault], record=SIZE)(moment, x)

    def check(case: Any, out: Any, events: Any) -> None:
        (event,) = events.values()
        before, after = raw(x).reshape(-1), raw(out).reshape(-1)
        differs = np.flatnonzero(before != after)
        count = int(event.changed)
        assert count == len(differs), case
        assert int(event.drawn) >= max(count, 1)
        assert np.asarray(event.hits.element)[:count].tolist() == differs.tolist()
        assert np.asarray(event.hits.old)[:count, 0].tolist() == before[differs].tolist()
        assert np.asarray(event.hits.new)[:count, 0].tolist() == after[differs].tolist(), case
        assert not np.asarray(event.hits.element)[count:].any()
        if isinstance(case[0], BitFlip):  # also where patterns overlap, every element is hit once
            assert int(event.drawn) == count
            assert {int(bits).bit_count() for bits in before[differs] ^ after[differs]} == {case[0].count}

    moment = sdc.Moment(KEY, jnp.int32(2))
    for case in cases:
        check(case, *run(case, moment, x))
    if dtype == "float32":
        some = [(Gaussian(0.5), Whole()), (BitFlip(), Run(6)), (Relative(0.1), Tile(2, 3))]
        compiled = jax.jit(lambda moment, x: [run(case, moment, x) for case in some])
        for case, result in zip(some, compiled(moment, x), strict=True):
            check(case, *result)


def sharded(w: Any, x: Any) -> Any:
    return jax.lax.psum(jnp.tanh(x @ w), "d")


def test_operations_links_and_memory() -> None:
    """A fault of a selector hits these sites and no others; a sum over devices is corrupted on one of them."""
    w, x = jnp.ones((3, 3)), jnp.ones((2, 4, 3))
    moment = sdc.Moment(KEY, jnp.int32(0))
    for where, names in [
        (primitive("dot_general"), ["fwd/dot_general"]),
        (collectives, ["fwd/psum"]),
        (argument("0") | primitive("tanh"), ["arg/0", "fwd/tanh"]),
    ]:
        fault = sdc.Fault(Scale(2.0), 1.0, where, at={"d": 1})
        run = jax.vmap(sdc.inject(sharded, [fault]), (None, None, 0), axis_name="d")
        out, events = run(moment, w, x)
        assert list(events) == names
        for event in events.values():
            assert not int(event.changed[0])
            assert int(event.changed[1]) == int(event.drawn[1]) > 0
        assert (out[0] != out[1]).any() == (where is collectives)
