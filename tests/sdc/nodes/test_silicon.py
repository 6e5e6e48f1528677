"""Profiles of faulty silicon carry the published shares, and the kind that they are made of does what it says.

Shares are of elements that a simulated step really changed, as its ground truth tells. They are compared by exact
binomial intervals of 99.9 % confidence: of the share that the profile states, which the interval must hold, and of the
published one, whose own interval must meet it. Draws are the same each time, so that this does not fail by chance.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import sdc
from sdc.analysis.statistics import proportion_interval
from sdc.faults.fault import as_fault, parse_fault
from sdc.faults.kinds import BitFlip, Mixed, apply, field_bits
from sdc.nodes import silicon
from sdc.nodes.simulated_nodes import SUBMODULES
from sdc.program.selectors import primitive

KEY = jax.random.key(0)
LAYER = jnp.int32(0)
DTYPES = ["float32", "bfloat16"]
SHAPE = (32768, 128)
ROOM = 8192
MORE = 100
STEP = 1
CONFIDENCE = 0.999


def raw(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def after(kind: Mixed | BitFlip, x: Any) -> np.ndarray:
    """What a kind makes of every element; compiled, which is faster than operation by operation."""
    return np.asarray(jax.jit(lambda x: kind(KEY, x, LAYER))(jnp.asarray(x)))


@functools.cache
def numbers() -> Any:
    return jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), jnp.float32)


@functools.cache
def program(name: str, dtype: str) -> Any:
    """A step with the faults of one site, at rates higher by `MORE`.

    That is low enough that no two hits meet: what they make of an element together is no outcome of one.
    """
    faults = [
        dataclasses.replace(fault, rate=fault.rate * MORE)
        for fault in silicon.silicon_faults(name, layers=1)
        if fault.site == "fwd/attn" and isinstance(fault.rate, float)
    ]
    return jax.jit(sdc.inject(lambda x: sdc.probe(x, "attn"), faults, record=ROOM))


@functools.cache
def simulated(name: str, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Where one site was changed in one step, its numbers before and after, and how many elements were hit."""
    x = numbers().astype(dtype)
    out, events = program(name, dtype)(sdc.Moment(KEY, jnp.int32(STEP)), x)
    event = events["fwd/attn"]
    count = int(event.changed)
    assert 100 < count < ROOM
    places = np.asarray(event.hits.element)[:count]
    words = [np.asarray(part)[:count, 0].astype(f"u{np.dtype(dtype).itemsize}") for part in event.hits[2:]]
    # The ground truth is what really changed.
    np.testing.assert_array_equal(np.flatnonzero(raw(x).reshape(-1) != raw(out).reshape(-1)), places)
    np.testing.assert_array_equal(words[1], raw(out).reshape(-1)[places])
    old, new = (part.view(np.dtype(dtype)) for part in words)
    return places, old, new, int(event.drawn)


def finite(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a NaN may be a signalling one
        return np.isfinite(x.astype(np.float64))


def outcomes(old: np.ndarray, new: np.ndarray) -> dict[str, np.ndarray]:
    special = ~finite(new)
    zero = raw(new) == 0
    return {"zero": zero, "special": special, "flips": ~zero & ~special}


def flipped(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.asarray([int(bits).bit_count() for bits in raw(old) ^ raw(new)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_bits_and_their_places(dtype: str) -> None:
    """Shares of each number of bits; low bits more often than high ones, in a straight line."""
    _, old, new, _ = simulated("silicon:gpu", dtype)
    chosen = outcomes(old, new)["flips"]
    counts = flipped(old, new)[chosen]
    assert set(counts) == {1, 2, 3, 4}
    for number, share in enumerate(silicon.FLIPS, 1):
        low, high = proportion_interval(int((counts == number).sum()), counts.size, confidence=CONFIDENCE)
        assert low <= share <= high, number
    width = len(field_bits(dtype))
    lone = (raw(old) ^ raw(new))[chosen][counts == 1]
    places = np.asarray([int(bits).bit_length() - 1 for bits in lone])
    for below in (width // 4, width // 2, 3 * width // 4):
        share = sum(range(width - below + 1, width + 1)) / sum(range(1, width + 1))
        low, high = proportion_interval(int((places < below).sum()), places.size, confidence=CONFIDENCE)
        assert low <= share <= high, below


def test_addresses_are_periodic() -> None:
    """In a warp that was hit, the changed elements are every 2nd, 4th, 8th or 16th; each period is as often hit."""
    places, *_ = simulated("silicon:gpu", "float32")
    by_warp: dict[int, set[int]] = {}
    for place in places.tolist():
        by_warp.setdefault(place // 32, set()).add(place % 32)
    expected = {frozenset(range(0, 32, period)): period for period in (2, 4, 8, 16)}
    assert {frozenset(lanes) for lanes in by_warp.values()} == set(expected)
    counts = dict.fromkeys(expected.values(), 0)
    for lanes in by_warp.values():
        counts[expected[frozenset(lanes)]] += 1
    share = -math.expm1(-32 * MORE * silicon.RATE / 4)  # of the warps that a fault of one period hits
    for period in (2, 4, 8, 16):
        low, high = proportion_interval(counts[period], math.prod(SHAPE) // 32, confidence=CONFIDENCE)
        assert low <= share <= high, period


def test_the_same_key_gives_the_same_draws() -> None:
    run = program("silicon:gpu", "float32")
    first, again, other, later = (
        raw(run(sdc.Moment(jax.random.key(seed), jnp.int32(step)), numbers())[0])
        for seed, step in ((1, 3), (1, 3), (2, 3), (1, 4))
    )
    assert (first == again).all()
    assert (first != other).any()
    assert (first != later).any()


@pytest.mark.parametrize("name", silicon.SILICON)
def test_profiles_are_faults_like_those_of_nodes(name: str) -> None:
    faults = silicon.silicon_faults(name, layers=3, at={"twin": 1})
    assert {fault.site for fault in faults} == set(SUBMODULES)
    for submodule in SUBMODULES:
        rates = [fault.rate for fault in faults if fault.site == submodule]
        assert sum(rates) == pytest.approx(1e-6)
    for fault in faults:
        assert fault.at == {"twin": 1}
        assert parse_fault(str(fault)) == fault
    chosen = silicon.silicon_faults(name, layers=3, where=lambda name: primitive("dot_general"))
    assert all(str(fault.site) == 'primitive("dot_general")' for fault in chosen)


@pytest.mark.parametrize("name", ["silicon:gpu", "silicon:tensor-core", "silicon:fma"])
def test_the_expected_frequency_is_that_of_the_simulation(name: str) -> None:
    places, *_, drawn = simulated(name, "float32")
    assert len(places) <= drawn
    expected = silicon.silicon_frequency(name)
    assert set(expected) == set(SUBMODULES)
    hits = drawn / {"silicon:gpu": 7.5, "silicon:tensor-core": 9, "silicon:fma": 1}[name]
    # Edges take up to 3 %; beyond that five standard errors of the hits.
    mean = expected["fwd/attn"] * MORE * math.prod(SHAPE)
    assert 0.97 - 5 / math.sqrt(hits) < drawn / mean < 1 + 5 / math.sqrt(hits)
    assert silicon.silicon_frequency("silicon:cache-line") == {}


@given(st.floats(0, 0.5), st.floats(0, 0.5), st.lists(st.integers(1, 99), min_size=1, max_size=5))
def test_the_kind_is_read_as_it_is_written(zero: float, special: float, weights: list[int]) -> None:
    kind = Mixed(zero, special, tuple(weight / sum(weights) for weight in weights))
    assert as_fault(str(kind)).what == kind
    assert repr(as_fault(str(kind)).what) == repr(kind)


def test_one_text() -> None:
    text = "mixed(zero=0.5068, special=0.0101, flips=(0.39, 0.28, 0.19, 0.14))"
    [fault, *_] = silicon.silicon_faults("silicon:gpu", layers=1)
    assert str(fault.what) == text
    assert as_fault("mixed") == sdc.Fault(Mixed())
    told = fault.describe()
    assert told.startswith("mixed zero 0.507 special 0.0101 flips (0.39, 0.28, 0.19, 0.14), stride count 16 step 2 al")


@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2"])
def test_flips_leave_finite_numbers_finite(dtype: str) -> None:
    """Of numbers whose exponents lack few bits to be that of infinity: they stay finite, the number of bits stays."""
    exponent, mantissa = (len(field_bits(dtype, field)) for field in ("exponent", "mantissa"))
    near = [((1 << exponent) - 1) ^ mask for mask in range(1, 1 << exponent) if mask.bit_count() <= 4]
    unsigned = np.asarray([e << mantissa for e in near], f"u{np.dtype(dtype).itemsize}")
    x = np.tile(unsigned.view(dtype), 4000 // len(unsigned))
    bare = jax.jit(lambda x: apply(x, Mixed().change(KEY, x.shape, x.dtype, LAYER)))(jnp.asarray(x))
    assert not finite(np.asarray(bare)).all()  # there is something to mend
    for most in (1, exponent - 1):
        kind = Mixed(flips=(0.0,) * (most - 1) + (1.0,))
        mended = after(kind, x)
        assert (flipped(x, mended) == most).all()
        assert finite(mended).all()
    x[:] = np.nan  # what was no number before may stay none
    assert (flipped(x, after(kind, x)) == most).all()


def test_other_types() -> None:
    """Integers have no numbers that are none; a type without infinity gets NaN; wide ones have two words."""
    whole = np.full(4000, 77, np.int32)
    struck = after(Mixed(0.3, flips=(0.5, 0.0, 0.5)), whole)
    assert 1000 < (struck == 0).sum() < 1400
    assert set(flipped(whole, struck)[struck != 0]) == {1, 3}
    narrow = after(Mixed(special=1.0), np.ones(50, jnp.float8_e4m3fn))
    assert set(raw(narrow).tolist()) == {0x7F}
    with jax.enable_x64(True):
        wide = np.full(4000, 1.5)
        struck = after(Mixed(0.2, 0.3, (0.5, 0.5)), wide)
        kept = np.isfinite(struck) & (struck != 0)
        assert set(flipped(wide, struck)[kept]) == {1, 2}
        assert (raw(struck)[kept] >> np.uint64(32) != raw(wide)[kept] >> np.uint64(32)).any()
        assert np.isnan(struck).any()
        assert {math.inf, -math.inf, 0.0} <= set(struck.tolist())


def test_a_strike_can_be_mixed() -> None:
    """Campaigns take the kind as data: one program for all of its outcomes."""
    step = lambda x: jnp.sin(x) + 0.0  # noqa: E731 - a step in one line
    x = jnp.linspace(0.5, 1.0, 12)
    [sine] = sdc.sites(step, x, where=primitive("sin"))
    run = jax.jit(sdc.strike(step, primitive("sin")))
    seen = set()
    for element in range(12):
        out, events = run(sdc.strike_on(sine, "mixed,zero=0.3,special=0.3", element), x)
        assert int(events["fwd/sin"].changed) == 1
        value = float(out[element])
        seen.add("zero" if value == 0 else "flip" if math.isfinite(value) else "special")
    assert seen == {"zero", "special", "flip"}
    assert run._cache_size() == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: silicon.silicon_faults("silicon:cpu", layers=2), "expected one of silicon:gpu, silicon:tensor-core, "),
        (lambda: silicon.silicon_faults("silicon:gpus", layers=2), "did you mean 'silicon:gpu'"),
        (lambda: silicon.silicon_frequency("node1"), "unknown profile 'node1'; expected one of silicon:gpu"),
        (lambda: silicon.silicon_faults("silicon:gpu", layers=0), "layers=0: expected at least 1"),
        (lambda: as_fault("mixed,zero=1.2"), "zero=1.2: expected a share of the elements, between 0 and 1"),
        (lambda: as_fault("mixed,special=-1"), "special=-1: expected a share"),
        (lambda: as_fault("mixed,zero=nan"), "zero=nan: expected a share"),
        (lambda: as_fault("mixed,zero=0.6,special=0.6"), r"zero \+ special=1.2: expected a share"),
        (lambda: as_fault("mixed,flips=0.4+0.5"), "sum to 0.9; they must sum to 1"),
        (lambda: as_fault("mixed,flips=1.5+-0.5"), "expected the shares of one, two, "),
        (lambda: as_fault("mixed,flips=a"), r"expected numbers, as in .*joined by \+"),
        (lambda: as_fault("mixed,bits=3"), "unknown key 'bits'"),
        (lambda: Mixed(flips=()), "expected the shares of one, two, "),
        (lambda: Mixed(flips=0.5), "expected the shares of one, two, "),  # type: ignore[arg-type]  # what is refused
        (
            lambda: Mixed(special=0.1)(KEY, jnp.ones(2, jnp.int32), LAYER),
            "int32 has neither NaN nor an infinity; omit special",
        ),
        (
            lambda: Mixed(flips=silicon.FLIPS)(KEY, jnp.ones(2, jnp.float8_e4m3fn), LAYER),
            "4 shares, .* allows at most 3 inverted bits",
        ),
    ],
)
def test_what_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
