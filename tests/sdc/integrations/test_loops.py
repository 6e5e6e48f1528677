"""Guards of training loops refuse what they cannot guard; tests/conformance/test_loops.py tries the real packages."""

import types
from typing import Any

import pytest

from sdc.integrations import guard_maxtext

COMPILES = types.SimpleNamespace(jit_train_and_eval_step=lambda *given: given)
TRAIN = types.SimpleNamespace(train_utils=COMPILES)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [({"bugdet": 0.1}, "bugdet"), ({"budget": 5.0}, "budget=5"), ({"layers": ["abft"]}, "'abft'")],
)
def test_wrong_settings_are_refused_before_maxtext_starts(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem), guard_maxtext(TRAIN, **settings):
        pytest.fail("MaxText would start")


def test_maxtext_is_restored_after_an_error() -> None:
    before = COMPILES.jit_train_and_eval_step

    def fails() -> None:
        with guard_maxtext(TRAIN):
            assert COMPILES.jit_train_and_eval_step is not before
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert COMPILES.jit_train_and_eval_step is before
    with pytest.raises(TypeError, match="expected maxtext"), guard_maxtext(pytest):
        pytest.fail("another module was accepted")
