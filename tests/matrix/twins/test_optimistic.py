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

import sdc
from sdc.costs import collective_calls
from sdc.faults import BitFlip
from sdc.program import operations
from tests.sdc.twins.test_lockstep import LAYERS, ROWS, SITES, WIDTH, W, X, bits, place, step
from tests.sdc.twins.test_optimistic import MOMENT, optimistic, struck

MICROSTEPS = 3


def microstepped(w: Any, x: Any) -> Any:
    """Gradients added up in a loop, each turn of which makes both passes."""

    def turn(total: Any, scale: Any) -> Any:
        value, gradient = step(w, x * scale)
        return jax.tree.map(jnp.add, total, gradient), value

    return lax.scan(turn, jax.tree.map(jnp.zeros_like, w), jnp.arange(1.0, 1.0 + MICROSTEPS))


def first_after(site: str) -> str:
    """Where a value that an outer tool changed is first digested: behind the next probe."""
    return {"fwd/a": "fwd/b", "remat/a": "bwd/a", "bwd/b": "bwd/a"}[site]


@pytest.mark.parametrize("site", ["fwd/a", "remat/a", "bwd/b"])
@pytest.mark.parametrize("twin", [0, 2])
def test_the_first_in_the_order_of_the_program_and_the_twin_outvoted(site: str, twin: int) -> None:
    run = jax.jit(place(sdc.inject(optimistic(step), [struck(site, twin)]), "vmap", 3))
    (_, mismatches), events = run(MOMENT)
    layers = np.flatnonzero(np.asarray(events[site].changed[twin]))
    assert len(layers) > 1  # backward the last layer comes first
    first = layers[0] if site.startswith("fwd") else layers[-1]
    found = {name: np.argwhere(np.asarray(mismatch.unrepeated[0])).tolist() for name, mismatch in mismatches.items()}
    assert {name: places for name, places in found.items() if places} == {first_after(site): [[first, twin]]}


def test_what_comes_again_is_measured_beside_what_does_not() -> None:
    inside = optimistic(sdc.inject(step, [struck("bwd/a", 1)]))
    (((_, events), mismatches), outer) = jax.jit(place_twice(sdc.inject(inside, [struck("fwd/a", 1)])))(MOMENT)
    layer = np.flatnonzero(np.asarray(outer["fwd/a"].changed[1]))[0]
    injected = {name: np.zeros(LAYERS) for name in SITES} | {"bwd/a": events["bwd/a"].changed[1]}
    for name, mismatch in mismatches.items():
        np.testing.assert_array_equal(mismatch.difference.mismatched[0][:, 1], injected[name])
        places = np.argwhere(np.asarray(mismatch.unrepeated[0])).tolist()
        assert places == ([[layer, 1]] if name == "fwd/b" else [])
    assert int(events["bwd/a"].changed[1].sum()) > 0


def place_twice(run: Any) -> Any:
    w, x = (np.broadcast_to(a, (2, *a.shape)) for a in (W, X))
    return lambda moment: jax.vmap(run, (None, None, 0, 0), axis_name="twin")(moment, moment, w, x)


@pytest.mark.parametrize("exchange", ["step", "call"])
@pytest.mark.parametrize("run", [step, microstepped, jax.jit(microstepped)], ids=["step", "microsteps", "jit"])
def test_one_exchange_in_a_microstep_or_a_step(run: Any, exchange: str) -> None:
    compiled = jax.jit(place(lambda moment, w, x: optimistic(run, exchange=exchange)(w, x), "shard_map", 2))
    text = compiled.lower(MOMENT).compile().as_text()
    found = [each for each in collective_calls(text) if not each.conditional and each.crosses((0, 1))]
    # Of all five probes in three layers one digest of each of two twins, of 8 bytes, however many microsteps there are.
    assert [size for each in found for size in each.sizes] == [2 * 8]
    out, mismatches = compiled(MOMENT)
    for leaf, clean in zip(bits(out), bits(jax.jit(run)(W, X)), strict=True):
        np.testing.assert_array_equal(leaf, np.stack([clean, clean]))
    rounds = () if run is step else (MICROSTEPS,)
    for mismatch in mismatches.values():
        assert mismatch.difference.checked[0, ..., 1].shape == (*rounds, LAYERS)
        assert np.all(mismatch.difference.checked[0, ..., 1] == ROWS * WIDTH)


@pytest.mark.parametrize("exchange", ["step", "call"])
def test_only_what_differs_is_repeated(exchange: str) -> None:
    turns: list[Any] = []

    def loss(w: Any, x: Any) -> Any:
        hidden = sdc.probe(x @ w, "a")
        jax.debug.callback(lambda _: turns.append(1), hidden)
        return jnp.sum(sdc.probe(jnp.tanh(hidden), "b"))

    def counted(w: Any, x: Any) -> Any:
        def turn(total: Any, scale: Any) -> Any:
            value, gradient = jax.value_and_grad(loss)(w[0], x * scale)
            return total + gradient, value

        return lax.scan(turn, w[0], jnp.arange(8.0))

    fault = sdc.Fault(BitFlip(bits=(20,)), 0.01, site="fwd/a", at={"twin": 1})
    twins = sdc.inject(optimistic(counted, exchange=exchange), [fault])
    (_, mismatches), events = jax.jit(place(twins, "shard_map", 2))(MOMENT)
    jax.effects_barrier()
    differed = np.flatnonzero(np.asarray(mismatches["fwd/b"].unrepeated[0][:, 1]))
    hit = np.flatnonzero(np.asarray(events["fwd/a"].changed[1]))
    assert 0 < len(differed) < 8
    if exchange == "step":
        assert set(differed) <= set(hit)
        assert len(turns) == 2 * (8 + len(differed))
    else:  # the first of all
        assert list(differed) == [hit[0]]
        assert len(turns) == 2 * (8 + 8)


def test_where_every_operation_is_compared() -> None:
    run = place(optimistic(sdc.inject(step, [struck("bwd/a", 1)]), where=operations), "vmap", 2)
    (_, events), mismatches = jax.jit(run)(MOMENT)
    assert (
        sum(int(m.difference.mismatched.sum()) for m in mismatches.values()) >= int(events["bwd/a"].changed.sum()) > 0
    )
