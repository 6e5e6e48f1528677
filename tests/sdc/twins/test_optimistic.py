"""One exchange in a microstep or a step: it is repeated only if digests differ, and says what did not come again.

A tool around such twins sees the first pass and not the repetition: an `inject` there is a fault that does not come
again, one inside of the twins is a fault that does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import sdc
from sdc.faults import BitFlip, Moment
from tests.sdc.twins.test_lockstep import LAYERS, W, X, bits, place, step

MOMENT = Moment(jax.random.key(0), jnp.int32(0))


def optimistic(step: Any, **options: Any) -> Any:
    return sdc.lockstep(step, "twin", **{"exchange": "step", **options})


def struck(site: str, twin: int, **options: Any) -> sdc.Fault:
    return sdc.Fault(BitFlip(bits=(20,)), 0.2, site=site, at={"twin": twin}, **options)


@pytest.mark.parametrize("placement", ["vmap", "shard_map", "shard_map, checked"])
def test_of_what_does_not_come_again_the_place_is_known(placement: str) -> None:
    run = jax.jit(place(sdc.inject(optimistic(step), [struck("fwd/a", 1)]), placement, 2))
    (out, mismatches), events = run(MOMENT)
    layers = np.flatnonzero(np.asarray(events["fwd/a"].changed[1]))
    expected = np.zeros((LAYERS, 2), np.uint32)
    expected[layers[0], 1] = 1
    for name, mismatch in mismatches.items():
        for row in mismatch.unrepeated:  # the same on every twin
            np.testing.assert_array_equal(row, expected if name == "fwd/b" else np.zeros((LAYERS, 2)))
        assert not np.any(mismatch.difference.mismatched)
    plain = jax.jit(step)(W, X)
    for leaf, clean in zip(bits(out), bits(plain), strict=True):
        np.testing.assert_array_equal(leaf, np.stack([clean, clean]))


def test_a_while_loop_and_a_branch_are_part_of_the_step() -> None:
    def looped(w: Any, x: Any) -> Any:
        def turn(state: Any) -> Any:
            number, c = state
            c = lax.cond(number % 2 == 0, lambda c: sdc.probe(jnp.tanh(c @ w[0]), "even"), lambda c: c * 1.5, c)
            return number + 1, sdc.probe(c + 1.0, "each")

        return lax.while_loop(lambda state: state[0] < 4, turn, (0, x))[1]

    run = jax.jit(place(sdc.inject(optimistic(looped), [struck("fwd/even", 1)]), "vmap", 2))
    (out, mismatches), events = run(MOMENT)
    assert int(events["fwd/even"].changed[1].sum()) > 0
    # All turns of the loop share one digest, and in a later one this site differs too.
    assert mismatches["fwd/even"].unrepeated[0].tolist() == [0, 1]
    assert mismatches["fwd/each"].unrepeated[0].tolist() == [0, 0]
    assert (bits(out)[0][0] == bits(jax.jit(looped)(W, X))[0]).all()


def test_a_fault_in_a_while_loop_that_comes_again_is_not_told_twice() -> None:
    """In its second turn the loop's first site differs too, and only in the first pass."""

    def looped(x: Any, offset: Any) -> Any:
        def turn(state: Any) -> Any:
            number, c = state
            return number + 1, sdc.probe(jnp.tanh(sdc.probe(c @ W[0], "a")) + offset, "b")

        return lax.while_loop(lambda state: state[0] < 3, turn, (0, x))[1]

    run = jax.vmap(optimistic(looped), in_axes=(None, 0), axis_name="twin")
    _, mismatches = jax.jit(run)(X, jnp.asarray([0.0, 0.1]))
    assert [m.unrepeated[0].tolist() for m in mismatches.values()] == [[0, 0], [0, 0]]
    assert [int(m.difference.mismatched[0, 1]) for m in mismatches.values()] == [0, 3 * X.size]


def test_what_cannot_be_repeated_is_refused() -> None:
    total = jax.new_ref(jnp.zeros(()))

    def changing(x: Any) -> Any:
        y = sdc.probe(x * 2.0, "a")
        total[...] += jnp.sum(y)
        return sdc.probe(y + 1.0, "b")

    def told(x: Any) -> Any:
        y = sdc.probe(x * 2.0, "a")
        io_callback(lambda _: None, None, y, ordered=True)
        return sdc.probe(y + 1.0, "b")

    for wrong, message in ((changing, "in place"), (told, r"test_optimistic\.py.*ordered=False")):
        with pytest.raises(ValueError, match=message):
            jax.make_jaxpr(optimistic(wrong), axis_env=[("twin", 2)])(jnp.ones(3))
    for options, message in (
        ({"exchange": "never"}, "'step' or 'call'"),
        ({"compare": "always"}, "requires exchange='probe'"),
    ):
        with pytest.raises(ValueError, match=message):
            sdc.lockstep(step, "twin", **{"exchange": "step", **options})  # type: ignore[arg-type]
