"""An outer transformation sees exactly the sites of the plain step, whatever the inner ones compute."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse

import sdc
from sdc.checksums import accumulators
from sdc.faults import BitFlip
from sdc.program import Site, arithmetic, everything, iteration, operations, primitive

MOMENT = sdc.Moment(jax.random.key(0), jnp.int32(0))
Step = Callable[..., Any]


def injected(step: Step, where: Any) -> Step:
    faulty = sdc.inject(step, [sdc.Fault(BitFlip(), 0.5, where), sdc.Fault(BitFlip(), 1e-3, where)], record=2)
    return lambda *args: faulty(MOMENT, *args)


TOOLS: dict[str, Callable[[Step, Any], Step]] = {
    "fingerprint": sdc.fingerprint,
    "inject": injected,
    "strike": lambda step, where: lambda *args: sdc.strike(step, where)(sdc.no_strike(), *args),
    "abft": lambda step, where: sdc.abft(step, output="as is"),
}


def seen(step: Step, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """What an outer transformation is told of a step, but for how deep the inner ones have wrapped it."""

    def facts(site: Site) -> tuple[Any, ...]:
        return site.name, site.outputs, site.dims, site.trips, site.mesh, site.flops, site.source

    found = sdc.sites(step, *args, where=everything)
    # The step's own arrays have no order: what the inner transformation looked at comes first.
    ports = sorted((site for site in found if site.path is not None), key=lambda site: site.name)
    return [facts(site) for site in (*ports, *(site for site in found if site.path is None))]


def test_sites_seen_beside_iterations_and_sums() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, y: (jnp.tanh(c @ y), None), w, x)[0]

    args = (jnp.eye(4), jnp.ones((3, 4, 4)))
    assert seen(TOOLS["fingerprint"](step, primitive("tanh") & iteration(1)), args) == seen(step, args)
    names = [site.name for site in sdc.sites(step, *args)]
    assert [site.name for site in sdc.sites(accumulators(step), *args)] == names


def test_twins_of_a_corrupted_step_count_what_was_injected() -> None:
    """Over a selector of arithmetic: no site is renamed by what the injection computes, and each event is found."""

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - 1.0) ** 2))(w)

    where = operations & arithmetic
    fault = sdc.Fault(BitFlip(bits=(20,)), 1.0, primitive("mul"), at={"twin": 1})
    twins = sdc.lockstep(sdc.inject(step, [fault]), "twin", where=where)
    run = jax.jit(jax.vmap(twins, in_axes=(None, None, 0), axis_name="twin"))
    args = (jnp.linspace(0.1, 1.0, 4), jnp.broadcast_to(jnp.linspace(-1.0, 1.0, 32).reshape(8, 4), (2, 8, 4)))
    (_, events), mismatches = run(MOMENT, *args)
    assert set(mismatches) == {site.name for site in sdc.sites(step, args[0], args[1][0], where=where)}
    assert len(events) > 0
    for name, mismatch in mismatches.items():
        changed = int(events[name].changed[1]) if name in events else 0
        assert int(mismatch.difference.mismatched[0, 1]) == changed
        assert name not in events or changed > 0


def with_references(x: Any) -> Any:
    reference = jax.new_ref(x)
    reference[...] = jnp.tanh(reference[...] @ x)
    return reference[...] * 2.0, jax.freeze(reference)


def test_references_keep_their_sites() -> None:
    """A write is none: what it returns nobody reads."""
    x = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
    expected = seen(with_references, (x,))
    assert not any("swap" in name for name, *_ in expected)
    for first, second in itertools.product(("fingerprint", "inject", "strike"), repeat=2):
        assert seen(TOOLS[first](TOOLS[second](with_references, everything), everything), (x,)) == expected
    fault = sdc.Fault(BitFlip(bits=(20,)), 0.3, arithmetic, at={"twin": 1})
    twins = sdc.lockstep(sdc.inject(with_references, [fault]), "twin", where=arithmetic)
    (_, events), mismatches = jax.jit(jax.vmap(twins, in_axes=None, axis_name="twin", axis_size=2))(MOMENT, x)
    found = {name: int(mismatch.difference.mismatched[0, 1]) for name, mismatch in mismatches.items()}
    assert found == {name: int(event.changed[1]) for name, event in events.items()}
    assert sum(found.values()) > 0


def test_scopes_are_left_at_the_same_depth() -> None:
    def step(x: Any) -> Any:
        return x * 1.0, jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(x)

    args = (jnp.ones(3),)
    depths = [(site.name, site.leaves) for site in sdc.sites(step, *args, where=operations)]
    for tool in ("fingerprint", "inject", "strike"):
        found = sdc.sites(TOOLS[tool](step, operations), *args, where=operations)
        assert [(site.name, site.leaves) for site in found] == depths


def test_sparse_products_compose() -> None:
    matrix = sparse.BCOO.fromdense(jnp.asarray(np.where(np.arange(16).reshape(4, 4) % 3, 0.0, 1.5), jnp.float32))

    def step(matrix: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(matrix @ x))

    args = (matrix, jnp.ones(4))
    expected = seen(step, args)
    for first, second in itertools.product(("fingerprint", "inject", "strike"), repeat=2):
        where = operations & arithmetic
        assert seen(TOOLS[first](TOOLS[second](step, where), where), args) == expected


def test_a_check_in_a_branch_that_vmap_chooses() -> None:
    def step(w: Any, x: Any, go: Any) -> Any:
        return lax.cond(go, lambda: jnp.sum(x @ w), lambda: jnp.float32(0))

    def steps(w: Any, x: Any, go: Any) -> Any:
        return lax.scan(lambda total, _: (total + step(w, x, go), None), jnp.float32(0), None, length=2)[0]

    w, x, go = jnp.ones((4, 2)), jnp.ones((5, 4)), jnp.asarray([True, False])
    for one, expected in ((step, 40.0), (steps, 80.0)):
        out, flags = jax.vmap(sdc.abft(one), in_axes=(None, None, 0))(w, x, go)
        assert out.tolist() == [expected, 0.0]
        assert np.asarray(flags["fwd/dot_general"].checked).reshape(2, -1).sum(1).tolist() == [expected / 8, 0]
        out, _ = sdc.abft(jax.vmap(one, in_axes=(None, None, 0)))(w, x, go)
        assert out.tolist() == [expected, 0.0]
