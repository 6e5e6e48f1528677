"""Certified checkpoints: what is restored is what was on the devices, or it is said what is not."""

import pytest

from tests.storms import bits


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what Orbax leaves behind
@pytest.mark.parametrize("form", bits.FORMS)
def test_no_flipped_bit_is_restored(form: str) -> None:
    """A few; `make storms STORMS=bits` does ten thousand."""
    tally = bits.trials(form, 40, seed=1)
    assert tally.wrong == []
    assert tally.seen["found"] > 10
