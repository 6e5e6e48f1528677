"""Rewriting takes a small multiple of plain tracing: how often a rule is traced, which no clock need tell."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

import sdc
from sdc.program import Place, everything, probes, rewrite, traced_once

from .test_interpreter import Total, X, probed


def test_a_rule_is_traced_once_for_all_sites_of_a_shape() -> None:
    traces: list[tuple[int, ...]] = []

    @traced_once
    def look(outs: list[Any]) -> tuple[list[Any], Any]:
        traces.append(outs[0].shape)
        return outs, jnp.sum(outs[0])

    class Look:
        def __call__(self, place: Place, bind: Callable[..., list[Any]], *inputs: Any) -> tuple[list[Any], Any]:
            return look(bind(*inputs))

        def merge(self, total: Any, new: Any) -> Any:
            return total + new

    def step(x: Any) -> Any:
        for _ in range(20):
            x = jnp.sin(x)
        return jnp.sin(x[:2])

    _, reports = rewrite(step, everything, Look())(X)
    assert len(reports) > 20
    assert sorted(traces) == [(2,), (8,)]


@pytest.mark.parametrize("loop", ["while", "condition", "cond"])
def test_nested_control_flow_is_traced_in_time_that_grows_with_its_depth(loop: str) -> None:
    calls = 0

    class Count(Total):
        def __call__(self, place: Place, bind: Callable[..., list[Any]], *inputs: Any) -> tuple[list[Any], Any]:
            nonlocal calls
            calls += 1
            return super().__call__(place, bind, *inputs)

    def nested(depth: int) -> Callable[[Any], Any]:
        if not depth:
            return probed
        inner = nested(depth - 1)
        if loop == "cond":
            return lambda x: lax.cond(x[0] > 0, inner, jnp.cos, x)

        def go_on(loop_state: Any) -> Any:
            count, x = loop_state
            return count < 2 if loop == "while" else jnp.sum(sdc.probe(x, "c")) > 1e3 * count.astype(jnp.float32)

        return lambda x: lax.while_loop(go_on, lambda s: (s[0] + 1, inner(s[1])), (jnp.int32(0), x))[1]

    rewrite(nested(6), probes, Count())(X)
    assert calls <= 7 if loop == "condition" else calls == 1
