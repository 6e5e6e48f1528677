"""A running checkpoint that tests write."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sdc.checkpoints import RunningCheckpoint

from .states import opened


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningCheckpoint]:
    with opened(tmp_path / "store") as checkpoint:
        yield checkpoint
