"""Lines of the record against counts done by hand from the twins' tensors."""

import jax
import jax.numpy as jnp
import numpy as np

import sdc
from sdc.faults import Moment
from sdc.faults.kinds import BitFlip
from sdc.train.programs.tallies import tally
from tests.train.programs.test_tallies import FAULTS, LAYERS, MICROSTEPS, NONE, RANKS, SIZE, reports


def test_rows_and_totals_against_numpy() -> None:
    values, mismatches, events = reports(FAULTS)
    healthy, suspect = values  # [rank, microstep, layer, element]
    differs = healthy.view(np.uint32) != suspect.view(np.uint32)
    relative = np.where(differs, np.abs(suspect - healthy) / np.abs(healthy), 0)
    sites, rows = tally(mismatches, events, step=4)
    rows = [row for row in rows if row["site"] == "fwd/p"]
    assert len(rows) == MICROSTEPS * LAYERS
    severities = []
    for row in rows:
        here = (slice(None), row["microstep"], row["layer"])
        assert row["step"] == 4
        assert row["mismatched"] == row["injected"] == differs[here].sum()
        assert row["checked"] == RANKS * SIZE
        assert row["frequency"] == row["mismatched"] / (RANKS * SIZE)
        means = relative[here].sum(1) / differs[here].sum(1)
        np.testing.assert_allclose(row["severity"], means.max(), rtol=1e-5)
        np.testing.assert_allclose(row["relative_max"], relative[here].max(), rtol=1e-5)
        assert [(r["twin"], r["data"], r["model"]) for r in row["ranks"]] == [(1, 0, 0), (1, 0, 1)]
        np.testing.assert_allclose([r["relative_mean"] for r in row["ranks"]], means, rtol=1e-5)
        severities.append(means.max())
    assert sites["fwd/p"]["mismatched"] == sites["fwd/p"]["injected"] == differs.sum()
    assert sites["fwd/p"]["checked"] == differs.size
    np.testing.assert_allclose(sites["fwd/p"]["frequency"], differs.mean())
    np.testing.assert_allclose(sites["fwd/p"]["severity"], max(severities), rtol=1e-5)


def test_a_clean_step_has_no_rows_but_counts() -> None:
    _, mismatches, events = reports([sdc.Fault(BitFlip(), 0.0, "fwd/p", at={"twin": 1})])
    sites, rows = tally(mismatches, events, step=0)
    assert rows == []
    assert sites["fwd/p"] == {
        "checked": RANKS * MICROSTEPS * LAYERS * SIZE, "mismatched": 0, "zero_reference": 0, "nonfinite": 0,
        "injected": 0, "undecided": 0, "frequency": 0.0, "severity": None,
    }  # fmt: skip
    assert sites["fwd/once"]["checked"] == RANKS * SIZE  # a site outside loops is one layer


def test_what_a_repetition_did_not_show_again_is_a_row_without_size() -> None:
    """A fault outside of the twins strikes the first pass only; the probe behind it is the first to see it."""
    twins = sdc.lockstep(lambda x: sdc.probe(sdc.probe(x, "p") * 2.0, "q"), "twin", exchange="step")
    fault = sdc.Fault(BitFlip(bits=(20,)), 0.5, "fwd/p", at={"twin": 1})
    run = jax.vmap(sdc.inject(twins, [fault]), in_axes=(None, None), axis_name="twin", axis_size=2)
    (_, mismatches), _ = run(Moment(jax.random.key(0), jnp.int32(0)), jnp.arange(8.0))
    reports = jax.tree.map(lambda a: np.asarray(a)[:, None, None], mismatches)
    sites, (row,) = tally(reports, NONE, step=0)
    assert (row["site"], row["unrepeated"], row["mismatched"], row["severity"]) == ("fwd/q", 1, 0, None)
    (rank,) = row["ranks"]
    assert (rank["twin"], rank["unrepeated"], rank["mismatched"]) == (1, 1, 0)
    assert {name: site["unrepeated"] for name, site in sites.items()} == {"fwd/p": 0, "fwd/q": 1}
