"""Lines of the record against counts done by hand from the twins' tensors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sdc
from sdc.faults import Moment
from sdc.faults.kinds import BitFlip, Relative
from sdc.program.reports import Reports
from sdc.train.programs.tallies import tally, total

MICROSTEPS, LAYERS, SIZE, RANKS = 2, 3, 50, 2
X = np.random.default_rng(0).normal(size=(RANKS, MICROSTEPS, LAYERS, SIZE)).astype(np.float32)
NONE = Reports((), ())


def step(x: Any) -> Any:
    def microstep(c: Any, rows: Any) -> Any:
        return c, lax.scan(lambda c, row: (c, sdc.probe(row, "p")), c, rows)[1]

    return lax.scan(microstep, jnp.float32(0), x)[1], sdc.probe(x[0, 0], "once")


def reports(faults: list[sdc.Fault]) -> Any:
    """Outputs of the injected step alone, and the reports of lock-step twins on two ranks: [twin, data, model, ...]."""
    moment = Moment(jax.random.key(0), jnp.int32(4))
    injected = sdc.inject(step, faults)

    def ranks(run: Any) -> Any:
        placed = jax.vmap(lambda x: run(moment, x), axis_name="model")
        return jax.jit(jax.vmap(lambda _: placed(X), axis_name="twin", axis_size=2, in_axes=None))(0)

    (values, _), _ = ranks(injected)
    (_, events), mismatches = ranks(sdc.lockstep(injected, "twin"))
    expand = lambda tree: jax.tree.map(lambda a: np.asarray(a)[:, None], tree)  # noqa: E731 - the data axis
    return np.asarray(values), expand(mismatches), expand(events)


FAULTS = [
    sdc.Fault(Relative(0.5), 0.2, "fwd/p", at={"twin": 1}),
    sdc.Fault(BitFlip((31,)), 0.1, "fwd/p", at={"twin": 1}),
]


def test_a_reference_that_was_a_guess_is_counted() -> None:
    run = sdc.lockstep(lambda x: sdc.probe(x, "p"), "twin")
    _, mismatches = jax.vmap(run, axis_name="twin")(jnp.asarray([1.0, 2.0, 3.0]))
    reports = jax.tree.map(lambda a: np.asarray(a)[:, None, None], mismatches)
    sites, (row,) = tally(reports, NONE, step=0)
    assert row["undecided"] == sites["fwd/p"]["undecided"] == 1


def test_injected_but_not_compared() -> None:
    _, _, events = reports(FAULTS)
    sites, rows = tally(NONE, events, step=0)
    assert sites["fwd/p"]["checked"] == 0
    assert sites["fwd/p"]["injected"] == sum(row["injected"] for row in rows) > 0
    assert sites["fwd/p"]["frequency"] is None


def test_total_of_a_comparison_outside_loops() -> None:
    _, mismatch = jax.vmap(lambda x: sdc.synchronize(x, "twin"), axis_name="twin")(
        jnp.asarray([[1.0, 2.0], [1.0, 3.0]])
    )
    by_rank = jax.tree.map(lambda value: value[:, None, None], jax.device_get(mismatch))  # twin, data, model
    ranks = [{"twin": 1, "data": 0, "model": 0, "mismatched": 1}]
    assert total(by_rank) == {"checked": 2, "mismatched": 1, "ranks": ranks}
