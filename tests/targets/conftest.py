"""The compilers read their settings when they are loaded; nothing of this suite but these tests asks for them."""

import pytest

from sdc.costs import prepare_compilers


@pytest.fixture(scope="session", autouse=True)
def compilers() -> None:
    prepare_compilers()
