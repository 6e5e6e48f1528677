"""What studies claim, from numbers that are given: claims hold or fail by them, and misprints are rejected."""

from sdc.analysis.studies import findings_of
from sdc.train.studies import LossyStudy, PaftStudy, linear, study
from tests.analysis.test_studies import held


def test_measurements_reject_the_misprints() -> None:
    """The studies themselves, shrunk: lemma 3.1 on a thousand parameters, and copies of a random walk."""
    chosen = PaftStudy(steps=100, seeds=3, variances=(0.1,), periods=(), bursts=(), seed=1)
    drifting = findings_of(study(chosen, [linear(features=512)]))
    assert held(drifting)["divergence follows the exact form, not the printed one (once)"], drifting.checks
    walks = findings_of(study(LossyStudy(rates=(), walk_rates=(0.1, 0.4)), []))
    assert held(walks) == {"drift follows the exact form, not the printed one (once)": True}, walks.checks
    for _, *numbers in walks.grids[0].rows:
        measured, exact, printed, _ = numbers
        assert abs(measured / exact - 1) < 0.05
        assert abs(measured / printed - 1) > 0.07
