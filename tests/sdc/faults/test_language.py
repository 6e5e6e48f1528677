"""Kinds, patterns and times of faults: every change against NumPy, every event against what really changed."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import sdc
from sdc.faults import Lattice, One, Row, Run, Stride, Tile, When, Whole, as_fault, parse_fault
from sdc.faults.kinds import (
    Add,
    BitFlip,
    Relative,
    Rotate,
    Scale,
    Sign,
    Stuck,
    StuckBit,
    apply,
    field_bits,
    neutral,
)
from sdc.program import argument, direction, iteration, primitive, result

FLOATS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"]
INTEGERS = ["int32", "int16", "int8", "uint8", "uint32"]
NARROW = [
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz",
]  # fmt: skip
KEY = jax.random.key(0)
LAYER = jnp.int32(0)


def raw(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_the_neutral_change_keeps_every_bit(dtype: str) -> None:
    """All 256 patterns of 8-bit numbers, and as many of wider ones: NaN payloads, infinities and -0 among them."""
    width = np.dtype(dtype).itemsize
    bits = (np.arange(256, dtype=np.uint64) << np.uint64(8 * (width - 1))).astype(f"u{width}")
    x = bits.view(np.dtype(dtype))
    np.testing.assert_array_equal(raw(jax.jit(lambda x: apply(x, neutral()))(jnp.asarray(x))), bits)


def test_fields_are_those_of_the_type() -> None:
    """Against ml_dtypes, and against what the bits mean: the sign negates, the exponent doubles."""
    for dtype in ["float64", "float32", "float16", "bfloat16", *NARROW]:
        info = ml_dtypes.finfo(dtype)
        exponent, mantissa, sign = (field_bits(dtype, field) for field in ("exponent", "mantissa", "sign"))
        assert (len(exponent), len(mantissa), len(sign)) == (info.nexp, info.nmant, 1)
        assert sorted((*exponent, *mantissa, *sign)) == list(range(8 * np.dtype(dtype).itemsize))
        x = np.asarray([1.5], dtype)
        assert float((raw(x) ^ raw(x).dtype.type(1 << sign[0])).view(dtype)[0]) == -1.5
        assert float((raw(x) + raw(x).dtype.type(1 << exponent[0])).view(dtype)[0]) == 3.0
    assert field_bits("float8_e8m0fnu", "exponent") == tuple(range(8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "int8"])
def test_kinds_against_numpy(dtype: str) -> None:
    x = jnp.asarray([1, 2, 3, 5, 7, 11], dtype)
    before = raw(x)
    width = 8 * before.dtype.itemsize
    for count in (1, 2, 3):
        flipped = raw(jax.jit(BitFlip(count=count))(KEY, jnp.repeat(x, 100), LAYER)) ^ np.repeat(before, 100)
        assert {int(bits).bit_count() for bits in flipped} == {count}
        assert int(np.bitwise_or.reduce(flipped)) == 2**width - 1
    top = raw(jax.jit(BitFlip(field="mantissa"))(KEY, x, LAYER)) ^ before
    assert all(int(bits).bit_length() - 1 in field_bits(dtype, "mantissa") for bits in top)
    np.testing.assert_array_equal(raw(StuckBit(1, bits=(1,))(KEY, x, LAYER)), before | 2)
    np.testing.assert_array_equal(raw(StuckBit(0, bits=(1,))(KEY, x, LAYER)), before & ~np.asarray(2, before.dtype))
    for kind, expected in [
        (Scale(2.0), [2, 4, 6, 10, 14, 22]),
        (Add(1.0), [2, 3, 4, 6, 8, 12]),
        (Stuck(0.0), [0] * 6),
        (Stuck(3.0), [3] * 6),
        (Rotate(), [2, 3, 5, 7, 11, 1]),
        (Rotate(by=-1), [11, 1, 2, 3, 5, 7]),
    ]:
        assert np.asarray(kind(KEY, x, LAYER)).astype(np.float32).tolist() == expected
    assert (raw(Relative(1e-9)(KEY, x, LAYER)) != before).all()


SHAPE = (3, 4, 6)
SIZE = math.prod(SHAPE)
PATTERNS: dict[str, tuple[One, Any]] = {
    "one": (One(), lambda s: {s}),
    "run": (Run(4), lambda s: {i for i in range(s, s + 4) if i < SIZE}),
    "stride": (Stride(3, 8, 8), lambda s: {i for i in range(s // 8 * 8, s // 8 * 8 + 24, 8) if i < SIZE}),
    "tile": (
        Tile(2, 3),
        lambda s: {
            s + 6 * down + right
            for down, right in itertools.product(range(2), range(3))
            if s // 6 % 4 + down < 4 and s % 6 + right < 6
        },
    ),
    "lattice": (
        Lattice(2, 2, 3),
        lambda s: {
            s + 6 * down + right + neighbour
            for down, right, neighbour in itertools.product(range(0, 4, 2), range(0, 6, 3), range(2))
            if s // 6 % 4 + down < 4 and s % 6 + right + neighbour < 6
        },
    ),
    "row": (Row(), lambda s: set(range(s // 6 * 6, s // 6 * 6 + 6))),
    "whole": (Whole(), lambda s: set(range(SIZE))),
}


@pytest.mark.parametrize(("pattern", "expected"), PATTERNS.values(), ids=PATTERNS)
def test_patterns_cover_what_they_say(pattern: One, expected: Any) -> None:
    starts = jnp.arange(SIZE + 1, dtype=jnp.int32)
    found = np.asarray(pattern.positions(starts, SHAPE))
    assert found.shape == (SIZE + 1, pattern.size(SHAPE))
    for start in range(SIZE):
        assert set(found[start]) - {SIZE} == expected(start)
    assert set(found[SIZE]) == {SIZE}  # no start, no hit
    by_numpy = pattern.positions(np.arange(SIZE + 1), SHAPE)
    assert isinstance(by_numpy, np.ndarray)
    np.testing.assert_array_equal(by_numpy, found)


@pytest.mark.parametrize("pattern", [Run(4), Stride(4, 2**30), Tile(1, 4), Tile(2**20, 1)], ids=repr)
def test_positions_do_not_wrap_around(pattern: One) -> None:
    size = 2**31 - 2
    found = np.asarray(pattern.positions(np.asarray([size - 2], np.int32), (size,)))
    assert set(found[0].tolist()) <= {size - 2, size - 1, size}


@pytest.mark.parametrize("dtype", [*NARROW, "float16", "bfloat16"])
def test_what_is_not_hit_keeps_its_bits(dtype: str) -> None:
    """Moving narrow floats by way of wider ones would lose payloads of NaNs: all patterns of bits, among few hits."""
    width = np.dtype(dtype).itemsize
    x = np.tile(np.arange(256**width, dtype=f"u{width}"), 4 // width).view(dtype)
    fault = sdc.Fault(BitFlip(), 15 / x.size, argument("*"))
    out, events = jax.jit(sdc.inject(lambda x: x, [fault]))(sdc.Moment(KEY, jnp.int32(0)), jnp.asarray(x))
    assert 0 < (raw(out) != raw(x)).sum() == int(events["arg/0"].changed) < 50


def test_rotations_at_an_edge_stay_among_the_elements_hit() -> None:
    groups = jnp.asarray([[1, 2, 0, 0], [3, 4, 5, 6]])
    turned = np.asarray(Rotate()(KEY, groups, LAYER, jnp.asarray([2, 4])))
    assert turned[0, :2].tolist() == [2, 1]
    assert turned[1].tolist() == [4, 5, 6, 3]


def test_iterations_that_a_selector_names() -> None:
    step = lambda x: jax.lax.scan(lambda c, y: (c, jnp.sin(y)), 0.0, x)[1]  # noqa: E731 - a step in one line
    fault = sdc.Fault(Scale(2.0), 1.0, primitive("sin") & iteration(2))
    _, events = sdc.inject(step, [fault])(sdc.Moment(KEY, jnp.int32(0)), jnp.ones((4, 5)))
    assert events["fwd/sin"].changed.tolist() == [0, 0, 5, 0]


def test_records_of_a_while_loop_are_joined() -> None:
    step = lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]  # noqa: E731
    fault = sdc.Fault(Stuck(5.0), 1.0, primitive("sin"))
    _, events = sdc.inject(step, [fault], record=8)(sdc.Moment(KEY, jnp.int32(0)), jnp.ones(3))
    event = events["fwd/sin"]
    assert int(event.changed) == 9
    assert event.hits.element.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert (np.asarray(event.hits.new)[:, 0] == np.float32(5.0).view(np.uint32)).all()


def test_bursts_of_gamma_distributed_rates() -> None:
    """Mean 1 and variance 1/shape, to five standard errors; one step only; an end."""
    steps = jnp.arange(20_000)
    keys = jax.random.split(KEY, len(steps))
    for shape in (0.5, 1.0, 4.0):
        when = When(gamma=shape)
        factor = np.asarray(jax.vmap(when.factor)(keys, steps), np.float64)
        assert abs(factor.mean() - 1) < 5 / math.sqrt(shape * len(factor))
        kurtosis = 3 + 6 / shape
        assert abs(factor.var() * shape - 1) < 5 * math.sqrt((kurtosis - 1) / len(factor))
        assert factor.max() <= when.largest()
    only = parse_fault("bitflip,rate=0.1,step=3").when
    assert [only.mean(step) for step in range(2, 6)] == [0.0, 1.0, 0.0, 0.0]
    factor = jax.vmap(only.factor)(keys[:6], jnp.arange(6))
    assert factor.tolist() == [0, 0, 0, 1, 0, 0]


def test_a_whole_tensor_is_hit_as_often_as_any_of_its_elements() -> None:
    fault = sdc.Fault(Scale(2.0), 0.01, argument("*"), pattern=Whole())
    run = jax.jit(jax.vmap(sdc.inject(lambda x: x, [fault]), (sdc.Moment(None, 0), None)))
    _, events = run(sdc.Moment(KEY, jnp.arange(2000)), jnp.ones(50))
    changed = np.asarray(events["arg/0"].changed)
    assert set(changed) == {0, 50}
    p = 1 - 0.99**50
    assert abs((changed > 0).mean() - p) < 5 * math.sqrt(p * (1 - p) / 2000)


def test_kinds_and_patterns_from_text() -> None:
    for text, expected in {
        "bitflip": (BitFlip(), One()),
        "bitflip,bits=3+5,count=2,run=8": (BitFlip((3, 5), count=2), Run(8)),
        "bitflip,field=exponent,row": (BitFlip(field="exponent"), Row()),
        "stuck1,bits=30,stride=4x32": (StuckBit(1, (30,)), Stride(4, 32, 32)),
        "stuck0,field=sign": (StuckBit(0, field="sign"), One()),
        "zero,whole": (Stuck(0.0), Whole()),
        "add,value=2,tile=4x2": (Add(2.0), Tile(4, 2)),
        "swap": (Rotate(), Run(2)),
        "rotate,by=3,run=9": (Rotate(3), Run(9)),
        "rotate,by=2,row": (Rotate(2), Row()),
        "sign": (Sign(), One()),
        "zero(row=False)": (Stuck(0.0), One()),
    }.items():
        what, pattern = expected
        assert as_fault(text) == sdc.Fault(what, pattern=pattern)
    fault = parse_fault('sign,rate=1e-3,where=primitive("dot_general", "exp") & direction("bwd"),gamma=0.5,end=9')
    assert str(fault.site) == 'primitive("dot_general", "exp") & direction("bwd")'
    assert fault.when == When(end=9, gamma=0.5)
    fault = parse_fault(
        'nan,where=source("a b", "*(attention)", "c,d(") & (probes | primitive("x", "y")),rate=1,layer=2'
    )
    assert str(fault.site) == 'source("a b", "*(attention)", "c,d(") & (probes | primitive("x", "y"))'
    assert (fault.rate, fault.layer) == (1.0, 2)
    described = [one.describe() for one in (fault, sdc.Fault(BitFlip(field="sign"), 0.1, pattern=Run(3)))]
    assert described[1] == "bitflip field sign, run length 3, rate 0.1, site *"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_fault("bitflip,field=exponent,bits=3"), "both select bits"),
        (lambda: as_fault("bitflip,field=head"), "field=head: expected one of sign, exponent, mantissa"),
        (lambda: as_fault("bitflip,rate=1"), "unknown key 'rate'"),
        (lambda: as_fault("bitflip,run=0"), "run=0: expected at least 1"),
        (lambda: as_fault("bitflip,tile=4"), r"as in tile=\(4, 32\), or 4x32 in the shorthand"),
        (lambda: parse_fault("nan(rate=1, site=None)"), "None is not a valid value"),
        (lambda: parse_fault("nan(rate=1, site=b'x')"), "b'x' is not a valid value"),
        (lambda: parse_fault("nan(rate=1, model=1.5)"), "model=1.5: expected the index of a device"),
        (lambda: as_fault("bitflip,row,run=2"), "several patterns"),
        (lambda: as_fault("zero,row=3"), "'row' takes no value; write row=True"),
        (lambda: as_fault("rotate,by=2"), "leaves 2 elements in place"),
        (lambda: sdc.Fault(Rotate(), 0.1), "leaves 1 element in place"),
        (lambda: Rotate(0), "by=0"),
        (lambda: sdc.Fault(BitFlip(), 0.1, layer=-1), "layer=-1: expected a number of at least 0"),
        (lambda: parse_fault("nan,rate=1,site=a,where=probes"), "'site' and 'where' are mutually exclusive"),
        (lambda: parse_fault("nan,rate=1,where=dot"), "is not a selector"),
        (lambda: parse_fault("nan,rate=1,onset=4,end=4"), "expected a step after onset"),
        (lambda: parse_fault("nan,rate=1,onset=2147483648"), "expected a step of at most 2,147,483,647"),
        (lambda: parse_fault(f"nan,rate=1,step={10**30}"), "expected a step of at most 2,147,483,647"),
        (lambda: parse_fault("nan,rate=1,burst=nan"), "burst >= 0"),
        (lambda: When(gamma=0.01), "at least 0.1"),
        (lambda: BitFlip(count=0), "at least one bit"),
        (lambda: StuckBit(2), "expected 0 or 1"),
        (lambda: BitFlip(count=9)(KEY, jnp.ones(2, jnp.int8), LAYER), "only 8 bits"),
        (lambda: BitFlip(field="exponent")(KEY, jnp.ones(2, jnp.int32), LAYER), "int32 has no exponent"),
        (lambda: Sign()(KEY, jnp.ones(2, jnp.uint8), LAYER), "uint8 has no sign"),
        (lambda: Stuck(math.nan)(KEY, jnp.ones(2, jnp.int8), LAYER), "int8 cannot hold nan"),
        (lambda: Stuck(300.0)(KEY, jnp.ones(2, jnp.int8), LAYER), "int8 cannot hold 300"),
        (lambda: Stuck(2.5)(KEY, jnp.ones(2, jnp.int8), LAYER), "int8 cannot hold 2.5"),
        (lambda: Stuck(math.inf)(KEY, jnp.ones(2, jnp.float8_e4m3fn), LAYER), "float8_e4m3fn cannot hold inf"),
        (lambda: Stuck(1e6)(KEY, jnp.ones(2, jnp.float16), LAYER), "float16 cannot hold 1e.06"),
        (lambda: field_bits("float8_e8m0fnu", "sign"), "choose exponent, or give bit positions"),
    ],
)
def test_faults_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_patterns_at_high_rates_are_refused() -> None:
    fault = sdc.Fault(BitFlip(), 0.5, argument("*"), pattern=Run(3))
    with pytest.raises(ValueError, match="would corrupt most of the tensor"):
        sdc.inject(lambda x: x, [fault])(sdc.Moment(KEY, jnp.int32(0)), jnp.ones(9))


def test_a_selector_that_hits_nothing_lists_near_misses() -> None:
    fault = sdc.Fault(BitFlip(), 0.5, primitive("tnah") & direction("fwd"))
    with pytest.raises(ValueError, match=r"matches none of the step's 3 sites.*near misses: tanh"):
        sdc.inject(jnp.tanh, [fault])(sdc.Moment(KEY, jnp.int32(0)), jnp.ones(9))


@pytest.mark.parametrize(
    ("step", "site", "layer", "message"),
    [
        (lambda x: sdc.probe(x > 0, "p"), "fwd/p", None, "'fwd/p', which holds bool, .*choose another site"),
        (lambda x: x.astype(jnp.complex64), result("*"), None, "'out', which holds complex64"),
        (lambda x: x.astype(jnp.int4), result("*"), None, "'out', which holds int4"),
        (jnp.sin, primitive("sin"), 3, "'fwd/sin', which is outside of any loop, but the fault has layer=3"),
        (lambda x: jax.lax.map(jnp.sin, x), primitive("sin"), 9, "in a loop of 9 iterations, but .* layer=9"),
    ],
)
def test_sites_that_cannot_be_hit(step: Any, site: Any, layer: int | None, message: str) -> None:
    fault = sdc.Fault(BitFlip(), 0.1, site, layer=layer)
    with pytest.raises(ValueError, match=message):
        sdc.inject(step, [fault])(sdc.Moment(KEY, jnp.int32(0)), jnp.ones(9))


def test_what_holds_no_numbers_is_left_out() -> None:
    def step(x: Any, key: Any) -> Any:
        return jnp.where(x > 0, x, jax.random.normal(key, x.shape)), key

    fault = sdc.Fault(BitFlip(), 1.0, argument("*") | result("*"))
    _, events = sdc.inject(step, [fault])(sdc.Moment(KEY, jnp.int32(0)), jnp.ones(9), KEY)
    assert list(events) == ["arg/0", "out/0"]


def test_a_tensor_too_large_to_find_elements_in() -> None:
    step = sdc.inject(lambda x: x, [sdc.Fault(BitFlip(), 1e-9, argument("*"))])
    with pytest.raises(ValueError, match=r"2,147,483,648 elements on one device.*shard the tensor"):
        jax.eval_shape(step, sdc.Moment(KEY, jnp.int32(0)), jax.ShapeDtypeStruct((2**16, 2**15), jnp.int8))
