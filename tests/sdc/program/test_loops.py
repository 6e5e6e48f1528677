"""Reports of a loop inside a `while` are merged row by row, whatever they hold."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import sdc
from sdc.program import products

X = jnp.eye(4) / 2


def step(x: Any) -> Any:
    def layers(carry: Any) -> Any:
        number, x = carry
        return number + 1, lax.scan(lambda x, _: (jnp.tanh(x @ X), None), x, None, length=3)[0]

    return lax.while_loop(lambda carry: carry[0] < 2, layers, (jnp.int32(0), x))[1]


def test_lists_of_hits_and_of_wrong_elements() -> None:
    x = jnp.ones((4, 4))
    [site] = sdc.sites(step, x, where=products)
    struck = sdc.strike(step, products)
    hit = sdc.strike_on(site, "bitflip,bits=30", [5, 6], iteration=(1, 2))
    _, events = jax.jit(struck)(hit, x)
    assert events[site.name].changed.tolist() == [0, 0, 2]
    assert events[site.name].hits.element.tolist() == [[0, 0], [0, 0], [5, 6]]
    (_, _), flags = jax.jit(sdc.abft(struck, mode="correct"))(hit, x)
    flag = flags[site.name]
    assert flag.checked.tolist() == [8, 8, 8]
    assert flag.corrected.tolist() == [0, 0, 1]
    assert flag.wrong.found.tolist() == [0, 0, 2]
    assert flag.wrong.element[2, :2].tolist() == [5, 6]
    faulty = sdc.inject(step, [sdc.Fault(sdc.faults.BitFlip(bits=(20,)), 0.3, products)], record=8)
    _, events = jax.jit(faulty)(sdc.Moment(jax.random.key(0), jnp.int32(0)), x)
    event = events[site.name]
    assert event.changed.shape == (3,)
    for row, number in enumerate(event.changed.tolist()):
        assert int((event.hits.old[row] != event.hits.new[row]).any(-1).sum()) == min(number, 8)
