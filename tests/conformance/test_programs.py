"""The four properties of `test_packages.py` on random programs, under transformations in random order."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings, strategies as st
from jax import lax

import sdc
from sdc.program import arithmetic, named, operations, products, recomputations
from sdc.program.interpreter import rewrite
from sdc.program.selectors import Selector

from .programs import Program, W, X, bodies, programs
from .test_packages import Never, assert_same, once

MOMENT = sdc.Moment(jax.random.key(3), jnp.int32(0))
Step = Callable[..., Any]
WHERE = operations & arithmetic
mapped = Selector("mapped", lambda site: bool(site.mesh))
NEVER = sdc.Fault(sdc.faults.BitFlip(), 0.0, WHERE)
OTHERS: dict[str, Callable[[Step], Step]] = {
    "fingerprint": lambda step: sdc.fingerprint(step, WHERE),
    "inject": lambda step: lambda *args: sdc.inject(step, [NEVER])(MOMENT, *args),
    "strike": lambda step: lambda *args: sdc.strike(step, WHERE & ~mapped)(sdc.no_strike(), *args),
    "abft": lambda step: sdc.abft(step, output="as is"),
}


def own(out: Any) -> Any:
    """What the step itself returns, without the reports of those around it."""
    while isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], sdc.Reports):
        out = out[0]
    return out


def strikes(sites: list[sdc.Site]) -> list[sdc.Site]:
    return [site for site in sites if site.outputs[0].dtype == jnp.float32 and site.outputs[0].size]


def check(program: Program, order: list[str], number: int) -> None:
    step, arguments = program.step, (W, X)
    plain = jax.device_get(jax.jit(step)(*arguments))
    sites = strikes(sdc.sites(step, *arguments, where=WHERE))

    # (a) To the bit where nothing is selected; to rounding under any transformations.
    assert_same(jax.jit(rewrite(step, lambda site: False, Never()))(*arguments)[0], plain)
    has_products = any(map(products, sites))
    transformed = step
    everywhere = any(not site.mesh for site in sites)
    for name in order:
        possible = {"abft": has_products, "strike": everywhere}.get(name, True)
        transformed = OTHERS[name](transformed) if possible else transformed
    assert [site.name for site in sdc.sites(transformed, *arguments, where=WHERE)] == [
        site.name for site in sdc.sites(step, *arguments, where=WHERE)
    ]

    # (b) One struck bit is named; around the strike stands whatever else.
    site = sites[number % len(sites)]
    assert os.path.basename(site.source.partition(":")[0]) in ("programs.py", "test_programs.py")
    hit, none = once(site, 22), sdc.no_strike(axes=sorted(dict(site.mesh)))
    traced = jax.jit(sdc.fingerprint(sdc.strike(transformed, named(site.name)), WHERE))
    (healthy_out, healthy), (struck_out, struck) = (traced(given, *arguments) for given in (none, hit))
    assert_same(own(healthy_out), plain, bits=False, rtol=1e-3)
    reports = [out[1] for out in _pairs(struck_out)]
    changed = sum(int(np.sum(event.changed)) for event in reports[0].values())
    first = sdc.first_difference(healthy, struck)
    if changed:  # the first iteration, or this branch, may not reach it
        assert first is not None
        order = next(each.order for each in healthy.sites if each.name == site.name)
        loop = order[: order.index("while") - 1] if "while" in order else None
        # Iterations of a `while` share a digest: named is the first operation of the loop that differs in any.
        assert first.site.name == site.name or (loop is not None and first.site.order[: len(loop)] == loop)
    else:
        assert first is None

    # (c) No false alarm at any scale; a struck product is flagged and corrected, within the step or by another program.
    targets = [site for site in sites if site.primitive == "dot_general"]
    if targets:
        target = targets[number % len(targets)]
        where = named(target.name)
        struck = sdc.strike(step, where)
        again: Any = sdc.abft(struck, mode="correct", examine="again")
        checked = again if number % 2 else jax.jit(sdc.abft(struck, mode="correct"))
        quiet = sdc.no_strike(axes=sorted(dict(target.mesh)))
        for scale in (1e-3, 1.0, 1e3):
            _, flags = checked(quiet, W * np.float32(scale), X)
            assert not any(jnp.any(flag.flagged) for flag in flags.values()), scale
        (healthy_out, _), _ = checked(quiet, *arguments)
        (mended, events), flags = checked(once(target, 30), *arguments)
        changed = sum(int(np.sum(event.changed)) for event in events.values())
        assert int(jnp.sum(flags[target.name].corrected)) == changed
        assert sum(int(jnp.sum(flag.flagged)) for flag in flags.values()) == changed
        assert_same(mended, jax.device_get(healthy_out), bits=False)

    # (d) Twins find what was injected.
    some = named(*{sites[part * len(sites) // 3].name for part in range(3)})
    fault = sdc.Fault(sdc.faults.BitFlip(bits=(20,)), 0.3, some, at={"twin": 1})
    # A step that changes a reference from before its first compared value cannot be repeated from there.
    exchange: sdc.twins.Exchange = "step" if number % 2 and "reference" not in program.text else "probe"
    twins = sdc.lockstep(sdc.inject(step, [fault]), "twin", where=some, exchange=exchange)
    pair = jax.vmap(twins, in_axes=None, axis_name="twin", axis_size=2)
    (_, events), mismatches = jax.jit(pair)(MOMENT, *arguments)
    injected = {name: int(np.sum(event.changed[1])) for name, event in events.items()}
    assert {name: int(np.sum(found.difference.mismatched[0][..., 1])) for name, found in mismatches.items()} == injected


def _pairs(out: Any) -> list[Any]:
    """Results with their reports, the outermost first."""
    found = []
    while isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], sdc.Reports):
        found.append(out)
        out = out[0]
    return found


class Value:
    """Reports what an operation computes."""

    def __call__(self, place: Any, bind: Any, *inputs: Any) -> Any:
        outs = bind(*inputs)
        return outs, outs

    def merge(self, total: Any, new: Any) -> Any:
        return new


def check_recomputations(body: Callable[..., Any]) -> None:
    """Checks that operations with equal numbers compute equal values, up to the rounding of different kernels."""

    def step(w: Any, x: Any) -> Any:
        layer = jax.checkpoint(body)

        def loss(w: Any) -> Any:
            return jnp.mean(lax.scan(lambda x, _: (layer(x, w), None), x, length=2)[0] ** 2)

        return jax.grad(loss)(w)

    found = recomputations(step, W, X)
    if not found.groups:
        return
    _, values = jax.jit(rewrite(step, lambda site: site.name in found.names, Value()))(W, X)
    for first, again, _ in found.groups:
        for other in again:
            for a, b in zip(values[first.name], values[other.name], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def hold_recomputations(examples: int, part: int) -> None:
    @seed(part)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bodies())
    def run(given: tuple[str, Callable[..., Any]]) -> None:
        text, body = given
        if "while" not in text and "reference" not in text and text.count("shard_map") < 2:  # has a derivative
            check_recomputations(body)

    run()


def hold(examples: int, part: int) -> None:
    """Checks so many programs; another part draws others."""

    @seed(part)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs(), st.lists(st.sampled_from(sorted(OTHERS)), max_size=2), st.integers(0, 1000))
    def run(program: Program, order: list[str], number: int) -> None:
        check(program, order, number)

    run()


def test_some_programs() -> None:
    hold(8, 0)
    hold_recomputations(40, 0)


@pytest.mark.conformance
@pytest.mark.parametrize("part", range(1, 9))
def test_a_thousand_programs(part: int) -> None:
    hold(125, part)
    hold_recomputations(125, part)
