"""Scalars of results are their totals, and a writer that fails does not end the training."""

import logging
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import sdc
from sdc.integrations import scalars_of, write_scalars

W = jnp.ones((2, 4, 4))
MOMENT = sdc.Moment(jax.random.key(0), jnp.int32(0))


def step(w: Any) -> Any:
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    return jax.grad(lambda w: jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), jnp.ones((3, 4)), w)[0]))(w)


def test_scalars_are_totals() -> None:
    flags = jax.jit(sdc.abft(step))(W)[1]
    assert scalars_of(flags) == {
        "sdc/checked": sum(float(one.checked.sum()) for one in flags.values()), "sdc/flagged": 0.0
    }  # fmt: skip
    witnessed = jax.jit(sdc.witness(step))(W)[1]
    assert scalars_of(witnessed) == {"sdc/checked": 2.0, "sdc/mismatched": 0.0}
    events = sdc.inject(step, ["bitflip,rate=1,bits=3,where=products"])(MOMENT, W)[1]
    assert scalars_of(events) == {"sdc/simulated": sum(float(one.changed.sum()) for one in events.values())}
    assert scalars_of(sdc.fingerprint(step, "products")(W)[1]) == {}


def test_a_guard_has_an_overhead() -> None:
    watch = sdc.guard(step)
    watch(W)
    assert set(scalars_of(watch)) == {"sdc/checked", "sdc/flagged", "sdc/overhead"}
    assert scalars_of(watch) == scalars_of(watch.report())


class Broken:
    calls = 0

    def write_scalars(self, step: int, scalars: dict[str, Any]) -> None:
        self.calls += 1
        scalars.clear()  # a writer may change what it is given
        raise OSError(f"disk full at {step}")


def test_a_writer_that_fails_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    flags, writer = sdc.abft(lambda x: x @ x)(jnp.ones((4, 4)))[1], cast(Any, Broken())
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            assert write_scalars(writer, number, flags) == {"sdc/checked": 4.0, "sdc/flagged": 0.0}
    assert [record.getMessage() for record in caplog.records] == [
        "metrics were not written (OSError: disk full at 0); training goes on"
    ]
    assert writer.calls == 3


def test_what_has_no_scalars_is_refused() -> None:
    assert scalars_of(sdc.Reports((), ())) == {"sdc/checked": 0.0}
    with pytest.raises(TypeError, match=r"expected reports, or a guard, not dict"):
        scalars_of({"fwd/dot_general": 3})
    with pytest.raises(TypeError, match="is no writer"):
        write_scalars(cast(Any, 3), 0, sdc.abft(lambda x: x @ x)(jnp.ones((4, 4)))[1])


def test_scalars_of_a_line_have_the_loss_of_each_twin() -> None:
    line = {
        "step": 3, "loss": [2.5, 2.75], "gradient_norm": 1.0, "seconds": None, "sites": {
            "fwd/attn": {"checked": 10, "mismatched": 2, "injected": 3}, "fwd/ffn": {"checked": 10, "mismatched": 0},
        }, "state": {"checked": 5, "mismatched": 1}, "abft": {"checked": 7, "flagged": 1}, "findings": [{}],
    }  # fmt: skip
    assert scalars_of(line) == {
        "loss/0": 2.5, "loss/1": 2.75, "gradient_norm": 1.0, "sdc/checked": 32.0, "sdc/mismatched": 3.0,
        "sdc/flagged": 2.0, "sdc/simulated": 3.0,
    }  # fmt: skip
    assert scalars_of({"step": 0, "loss": 2.0}) == {"loss": 2.0}
