"""A part of `make storms STORMS=calls`: no failed file call, and no kill after one, keeps a run from going on."""

from tests.storms import calls


def test_runs_go_on_after_any_call() -> None:
    """Fifty strikes of all kinds of runs."""
    tally = calls.run(50, seed=0)
    assert tally.wrong == []
    assert tally.trials == 50
