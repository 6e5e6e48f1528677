"""The study of the simulated nodes: what it finds of a node, and that each of its claims can fail."""

import dataclasses
import math
from pathlib import Path

import pytest

from sdc.analysis.studies import findings_of, write_study
from sdc.nodes.simulated_nodes import FittedValue
from sdc.settings import SettingError
from sdc.train.studies import NodesStudy, _nodes as module, finish, settings as study_settings
from sdc.train.studies._nodes import NoiseModel
from sdc.train.studies.measurements import Compared, NodesMeasured, Predicted


@pytest.fixture(scope="module")
def measured() -> NodesMeasured:
    """Nodes 2 and 11 with a coarse grid; one small model, of which all is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        grid = {
            "fews": (0.75, 1.7),
            "responses": (0.3,),
            "roundings": (0.008, 0.014),
            "scatters": (0.4,),
            "runs": 2,
        }
        patch.setattr(module, "NoiseModel", lambda seed: NoiseModel(**grid, seed=seed))
        for place in (module, study_settings):
            patch.setattr(place, "SIZES", ((2, 32, 32),))
        study = NodesStudy(nodes=("node2", "node11"), runs=20, steps=40)
        told: list[str] = []
        found = finish(study.run(), told.append)
        assert len(told) == study.count()
        return found


def test_a_node_agrees_where_it_should(measured: NodesMeasured) -> None:
    rows = {(row.node, row.quantity, row.place): row for row in measured.rows}
    assert rows["node11", "frequency", "fwd/attn"].agrees
    assert rows["node2", "frequency", "fwd/attn"].simulated == 0
    assert measured.predicted["node11"].published == 0.051
    assert measured.responses[0].rounding > 1e-4
    [trained] = measured.trainings
    assert trained.node == "node11"
    assert (trained.noise > 0).all()


def test_where_nothing_is_known_nothing_is_said(measured: NodesMeasured) -> None:
    [drift] = [row for row in measured.rows if (row.node, row.quantity) == ("node2", "drift")]
    assert drift.agrees is None
    assert "the run is too short" in drift.note
    overview = findings_of(measured).grids[0]
    assert dict(zip(overview.header, overview.rows[0], strict=True))["drift"] == "undetermined"


@pytest.mark.parametrize("quantity", ["frequency", "severity by layer", "time", "drift", "loss"])
def test_each_claim_fails_where_figures_disagree(measured: NodesMeasured, quantity: str) -> None:
    wrong = tuple(dataclasses.replace(row, agrees=False) if row.quantity == quantity else row for row in measured.rows)
    claims = {"drift": "drift grows", "loss": "loss curves coincide", "time": "behavior over time"}
    begins = claims.get(quantity, f"{quantity}:")
    [check] = [
        check
        for check in findings_of(dataclasses.replace(measured, rows=wrong)).checks
        if check.claim.startswith(begins)
    ]
    assert not check.holds


def test_the_claims_of_figure_10_can_fail(measured: NodesMeasured) -> None:
    def held(**flagged: float | None) -> list[bool | None]:
        checks = findings_of(dataclasses.replace(measured, flagged=flagged)).checks
        return [check.holds for check in checks if check.claim.startswith("figure 10")]

    assert measured.flagged["node2"] is None
    assert held(node2=None, node11=1e-4, node14=0.5) == [True, True]
    assert held(node11=0.02, node14=0.01) == [False, False]
    assert held(node11=1e-4) == [True]
    assert held(node2=None) == []


def test_the_claims_of_the_fit_fail_too(measured: NodesMeasured) -> None:
    far = {node: Predicted(one.published, 1.0, 0.9, 1.1) for node, one in measured.predicted.items()}
    rounding = FittedValue(1.0, 0.9, 1.1)
    broken = dataclasses.replace(
        measured, predicted=far, estimates={**measured.estimates, "few": rounding, "rounding": rounding},
        used={**measured.used, "few": FittedValue(9.0, 8.0, 10.0)},
    )  # fmt: skip
    failed = [check.claim for check in findings_of(broken).checks if not check.holds]
    for begins in ("noise:", "the parameters", "small models"):
        assert any(claim.startswith(begins) for claim in failed)
    # A fit that leaves a parameter anywhere does not confirm it.
    free = dict.fromkeys(measured.estimates, FittedValue(1.0, 0.0, math.inf))
    [undecided] = [
        check
        for check in findings_of(dataclasses.replace(measured, estimates=free)).checks
        if check.claim.startswith("the parameters of")
    ]
    assert undecided.holds is None
    assert "not determined: few" in undecided.seen


def test_each_miss_has_a_reason(measured: NodesMeasured) -> None:
    misses = (
        Compared("node11", "severity", "fwd/attn", 1e3, 1.0, 0.5, 2.0, False),
        Compared("node11", "severity by layer", "fwd/attn, layer 2", 0.1, 1.0, 0.5, 2.0, False),
        Compared("node3", "noise", "", 1e-15, 1e-3, 1e-4, 1e-2, False),
    )
    grids = findings_of(dataclasses.replace(measured, rows=(*measured.rows, *misses))).grids
    [grid] = [grid for grid in grids if "outside the intervals" in grid.caption]
    told = [row[-1] for row in grid.rows]
    unknown = [row for row in grid.rows if row[-1] == "not known" and not row[1].startswith("frequency")]  # by chance
    assert unknown == []
    assert told[-3].startswith("its most severe layer was more severe")
    assert told[-2].startswith("this layer was milder")
    assert told[-1].startswith("less than a last bit")


def test_the_record_and_the_page(measured: NodesMeasured, tmp_path: Path) -> None:
    summary = write_study(tmp_path / "run", measured)
    assert summary["study"] == "nodes"
    assert "STUDY: NODES" in Path(summary["report"]).read_text()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nodes": ("node16",)}, "expected one or more of node1 ... node15"),
        ({"nodes": ()}, "expected one or more"),
        ({"runs": 3}, "do not suffice for an interval"),
        ({"steps": 10}, "do not suffice for a conclusion"),
        ({"seed": -1}, "expected a whole number from 0"),
    ],
)
def test_bad_settings(settings: dict, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        NodesStudy(**settings).check()
