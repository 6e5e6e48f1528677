"""Lock-step twins: mismatches equal the injected ones, twins stay equal, and little crosses the twin axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdc
from sdc.faults import BitFlip, Moment
from tests.sdc.twins.test_lockstep import FAULTS, LAYERS, ROWS, SITES, WIDTH, bits, place, twins


@pytest.mark.parametrize("placement", ["vmap", "pmap", "shard_map", "shard_map, checked"])
@pytest.mark.parametrize("options", [{}, {"compare": "always"}, {"exchange": "step"}], ids=str)
def test_measured_equals_injected_site_by_site(placement: str, options: dict[str, str]) -> None:
    run = jax.jit(place(twins(FAULTS, **options), placement, 2))
    found = 0
    for number in range(3):
        ((loss_and_gradient, events), mismatches) = run(Moment(jax.random.key(0), jnp.int32(number)))
        assert set(mismatches) == set(events) == SITES
        for name, mismatch in mismatches.items():
            for twin_row in mismatch.difference.mismatched:  # the same on every twin
                np.testing.assert_array_equal(twin_row[:, 0], 0)
                np.testing.assert_array_equal(twin_row[:, 1], events[name].changed[1])
            np.testing.assert_array_equal(mismatch.difference.checked[0, :, 1], ROWS * WIDTH)
            np.testing.assert_array_equal(events[name].changed[0], 0)
            found += int(events[name].changed.sum())
        for leaf in bits(loss_and_gradient):
            np.testing.assert_array_equal(leaf[0], leaf[1])
    assert found > 20


def test_placements_give_the_same_counts() -> None:
    moment = Moment(jax.random.key(5), jnp.int32(2))
    counts = [
        {
            name: np.asarray(m.difference.mismatched)
            for name, m in jax.jit(place(twins(FAULTS), p, 2))(moment)[1].items()
        }
        for p in ("vmap", "pmap", "shard_map")
    ]
    for other in counts[1:]:
        for name in SITES:
            np.testing.assert_array_equal(counts[0][name], other[name])


def test_a_mismatch_does_not_spread() -> None:
    """The healthy result of a corrupted run is that of a run without faults."""
    moment = Moment(jax.random.key(0), jnp.int32(0))
    (clean, _), _ = jax.jit(place(twins([sdc.Fault(BitFlip(), 0.0, at={"twin": 1})]), "vmap", 2))(moment)
    ((out, events), _) = jax.jit(place(twins(FAULTS), "vmap", 2))(moment)
    assert sum(int(e.changed.sum()) for e in events.values()) > 0
    np.testing.assert_allclose(out[0], clean[0], rtol=1e-6)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_majority_of_three_is_the_reference(odd: int) -> None:
    faults = [sdc.Fault(BitFlip(), 0.1, at={"twin": odd})]
    (out, events), mismatches = jax.jit(place(twins(faults), "vmap", 3))(Moment(jax.random.key(0), jnp.int32(0)))
    for name in SITES:
        expected = np.zeros((LAYERS, 3), np.uint32)
        expected[:, odd] = events[name].changed[odd]
        np.testing.assert_array_equal(mismatches[name].difference.mismatched[0], expected)
        assert int(mismatches[name].undecided.sum()) == 0
    for leaf in bits(out):
        np.testing.assert_array_equal(leaf[0], leaf[odd])


def test_synchronize_repairs_or_only_compares() -> None:
    tree = {
        "w": jnp.asarray([[1.0, 2.0], [1.0, 5.0]]),
        "n": jnp.asarray([3, 4]),
        "key": jax.random.split(jax.random.key(0)),
    }
    fixed, mismatch = jax.vmap(lambda t: sdc.synchronize(t, "twin"), axis_name="twin")(tree)
    assert mismatch.difference.mismatched[0].tolist() == [0, 3]
    assert mismatch.difference.checked[0].tolist() == [0, 4]
    assert (fixed["w"][1] == tree["w"][0]).all()
    assert fixed["n"].tolist() == [3, 3]
    same, mismatch = jax.vmap(lambda t: sdc.synchronize(t, "twin", repair=False), axis_name="twin")(tree)
    assert (same["w"] == tree["w"]).all()
    assert mismatch.difference.mismatched[0].tolist() == [0, 3]
    assert sdc_checked_nothing()


def sdc_checked_nothing() -> bool:
    _, mismatch = jax.vmap(lambda x: sdc.synchronize((), "twin"), axis_name="twin")(jnp.arange(2))
    return int(mismatch.difference.checked.sum()) == 0
