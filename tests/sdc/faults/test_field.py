"""Faults of production reports: bands of values, types, periodic neighbours, gross outcomes, rising rates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdc
from sdc.faults import BitFlip, Extreme, Lattice, Scale, Stuck, When, parse_fault
from sdc.program import primitive

SINE, KEY = primitive("sin"), jax.random.key(0)


def after(fault: sdc.Fault, x: jax.Array, step: int = 0) -> tuple[np.ndarray, int, int]:
    """Returns what a faulty sine computes, and how many elements were drawn and changed."""
    out, events = jax.jit(sdc.inject(jnp.sin, [fault]))(sdc.Moment(KEY, jnp.int32(step)), x)
    event = events["fwd/sin"]
    return np.asarray(out), int(event.drawn), int(event.changed)


@pytest.mark.parametrize("rate", [1.0, 0.05])  # all elements are drawn, and hits only
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_magnitudes_in_the_band_change(rate: float, dtype: str) -> None:
    x = jnp.linspace(-1.5, 1.5, 4001).astype(dtype)
    clean = np.asarray(jax.jit(jnp.sin)(x))
    got, drawn, changed = after(sdc.Fault(Scale(-2.0), rate, SINE, band=(0.25, 0.5)), x)
    differs = got != clean
    inside = (np.abs(clean.astype(np.float32)) >= 0.25) & (np.abs(clean.astype(np.float32)) <= 0.5)
    assert changed == differs.sum() > 0
    assert drawn > changed
    assert not differs[~inside].any()
    assert rate < 1 or differs[inside].all()


def test_only_arrays_of_the_type_are_struck() -> None:
    fault = sdc.Fault(Stuck(0.0), 1.0, SINE, dtype="bfloat16")
    _, events = sdc.inject(lambda x: (jnp.sin(x), jnp.sin(x.astype(jnp.bfloat16))), [fault])(
        sdc.Moment(KEY, jnp.int32(0)), jnp.ones(8)
    )
    assert {name: int(event.changed) for name, event in events.items()} == {"fwd/sin#2": 8}
    keys, values = jnp.arange(8.0), jnp.arange(8)
    fault = sdc.Fault(BitFlip(), 1.0, primitive("sort"), dtype="float32")
    (floats, integers), _ = sdc.inject(lambda k, v: jax.lax.sort((k, v)), [fault])(
        sdc.Moment(KEY, jnp.int32(0)), keys, values
    )
    assert (floats != keys).all()
    np.testing.assert_array_equal(integers, values)
    with pytest.raises(ValueError, match="float16"):
        sdc.inject(jnp.sin, [sdc.Fault(Stuck(0.0), 1.0, SINE, dtype="float16")])(
            sdc.Moment(KEY, jnp.int32(0)), jnp.ones(8)
        )


def test_neighbours_recur_along_both_axes() -> None:
    x = jnp.full((64, 96), 0.5)
    fault = sdc.Fault(Stuck(0.0), 2e-4, SINE, pattern=Lattice(4, 16, 32))
    wrong = next(got for step in range(50) if (got := after(fault, x, step)[0] == 0).any())
    rows, columns = np.nonzero(wrong)
    starts = {(int(row), int(column)) for row, column in zip(rows, columns, strict=True)}
    first = min(starts)
    expected = {
        (row, column + neighbour)
        for row in range(first[0], 64, 16)
        for column in range(first[1], 96, 32)
        for neighbour in range(4)
        if column + neighbour < 96
    }
    assert expected <= starts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_outcomes_have_their_shares(dtype: str) -> None:
    x = jnp.full(30_000, 0.5, dtype)
    got, drawn, changed = after(sdc.Fault(Extreme(), 1.0, SINE), x)
    assert drawn == changed == x.size
    clean = float(np.asarray(jnp.sin(x))[0])
    infinite, flipped = np.isinf(got), (got < 0) & np.isfinite(got)
    near = np.abs(got.astype(np.float32)) < 1e-5
    for share in (infinite.mean(), flipped.mean(), near.mean()):
        assert share == pytest.approx(1 / 3, abs=4 * np.sqrt(2 / 9 / x.size))
    np.testing.assert_allclose(got[flipped].astype(np.float32), -clean * 2.0**20, rtol=1e-2)
    for wrong in ({"zero": 0.7, "flipped": 0.7}, {"factor": 1.0}):
        with pytest.raises(ValueError, match="expected"):
            Extreme(**wrong)


def test_rates_rise_with_age() -> None:
    when = When(onset=10, rise=0.5)
    assert [when.mean(step) for step in (9, 10, 12, 10_000)] == [0.0, 1.0, 2.0, 100.0]
    for steps in (5, 11, 60, 500):
        assert when.average(steps) == pytest.approx(np.mean([when.mean(step) for step in range(steps)]))
    x, counts = jnp.full(20_000, 0.5), []
    fault = sdc.Fault(BitFlip(), 1e-4, SINE, when=when)
    run = jax.jit(sdc.inject(jnp.sin, [fault]))
    for step in (9, 10, 110, 400):
        _, events = run(sdc.Moment(KEY, jnp.int32(step)), x)
        counts.append(int(events["fwd/sin"].drawn))
    assert counts[0] == 0
    for count, factor in zip(counts[1:], (1, 51, 100), strict=True):
        assert count == pytest.approx(2 * factor, abs=5 * np.sqrt(2 * factor) + 1)


def test_texts_and_errors() -> None:
    fault = parse_fault("bitflip(bits=30, band=(0.5, 2), dtype=bfloat16, rate=1e-4, site='fwd/*', rise=0.01)")
    assert (fault.band, fault.dtype, fault.when.rise) == ((0.5, 2.0), "bfloat16", 0.01)
    assert "magnitudes from 0.5 to 2, bfloat16, rise 0.01" in fault.describe()
    for wrong, message in (("band=(2, 1)", "band"), ("dtype=int33", "dtype"), ("rise=-1", "rise")):
        with pytest.raises(ValueError, match=message):
            parse_fault(f"bitflip(rate=1e-4, {wrong})")
    [site] = sdc.sites(jnp.sin, jnp.ones(3), where=SINE)
    with pytest.raises(ValueError, match="leave band and dtype to inject"):
        sdc.strike_on(site, sdc.Fault(BitFlip(), band=(0.0, 1.0)), 0)
