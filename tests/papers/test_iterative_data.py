"""Data of iterative-convergent training: what of ratings, documents and tables is parsed, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdc.settings import SettingError
from sdc.train.iterative.corpora import (
    most_active,
)
from tests.train.test_iterative_data import made


@settings(max_examples=50)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_the_most_active(users: int, items: int, seed: int) -> None:
    table = np.random.default_rng(seed).integers(0, 3, (6, 6))
    table[range(6), range(6)] = 1
    chosen = sorted(range(6), key=lambda item: (-np.count_nonzero(table[:, item]), item))[:items]
    raters = sorted(range(6), key=lambda user: (-np.count_nonzero(table[user, chosen]), user))[:users]
    part = table[sorted(raters)][:, sorted(chosen)]
    if not (part.any(0).all() and part.any(1).all()):
        with pytest.raises(SettingError, match="have ratings in this selection; change both numbers"):
            most_active(made(table), users, items)
        return
    kept = most_active(made(table), users, items)
    expected = made(part)
    for name in ("users", "items", "values"):
        np.testing.assert_array_equal(getattr(kept, name), getattr(expected, name))
    assert kept.shape == (users, items)
    assert kept.source == f"made, {users} users and {items} items with the most ratings"
