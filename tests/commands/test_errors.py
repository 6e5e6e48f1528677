"""Bad input gives one clear line and the right exit code, and writes no partial files."""

from pathlib import Path

import pytest

from tests.tools.command import sdc
from tests.tools.test_errors import check, words

WITH_DEVICES: dict[str, tuple[str, str]] = {
    "site": (
        "twin --config mini --steps 1 --fault bitflip,rate=1e-3,site=fwd/mlp",
        "site 'fwd/mlp' matches no probe of the step",
    ),
    "resume other": ("train --steps 3 --resume --run {taken}", "a record of kind 'twin'; give the folder of a train"),
}
"""Errors that require a program to detect."""


@pytest.mark.parametrize("case", WITH_DEVICES.values(), ids=WITH_DEVICES)
def test_one_clear_line_of_a_program(case: tuple[str, str], tmp_path: Path) -> None:
    command = words(case[0], tmp_path)
    before = sorted(tmp_path.rglob("*"))
    check(*sdc(*command), case[1])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_fills_up_during_a_run(tmp_path: Path) -> None:
    """A limit on the size of files simulates a full disk; the record stays readable."""
    flags = ("train", "--config", "mini", "--steps", 3, "--checkpoint-every", 1, "--run", tmp_path / "run")
    code, _, err = sdc(*flags, largest_file=200_000)
    assert code == 2, err
    assert "sdc: error: cannot write" in err
    assert "--resume" in err
    code, _, err = sdc("report", tmp_path / "run")
    assert code == 0, err
