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


def test_loops_under_vmap_that_end_row_by_row() -> None:
    """The condition has a value for each row: the loop runs while any goes on."""

    def halve(x: Any) -> Any:
        return lax.while_loop(lambda x: jnp.sum(x) > 1.0, lambda x: jnp.tanh(x @ X), x)

    rows = jnp.stack([jnp.ones(4), 8.0 * jnp.ones(4), jnp.zeros(4)])
    expected = jax.vmap(halve)(rows)
    out, flags = jax.jit(sdc.abft(jax.vmap(halve)))(rows)
    assert jnp.allclose(out, expected, rtol=1e-6)
    assert not flags["fwd/vmap()/dot_general"].flagged.any()
    names = [site.name for site in sdc.sites(jax.vmap(halve), rows)]
    assert [site.name for site in sdc.sites(sdc.fingerprint(jax.vmap(halve), "everything"), rows)] == names
    twice = sdc.fingerprint(sdc.abft(jax.vmap(halve)), "everything")
    assert jnp.allclose(jax.jit(twice)(rows)[0][0], expected, rtol=1e-6)
