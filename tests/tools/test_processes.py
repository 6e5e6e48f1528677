"""Runs of several processes that lose one another, or do not fit together: the others end with a message."""

from pathlib import Path

import pytest

from tests.tools.command import kill_when, sdc, several, start

TWIN = ("twin", "--config", "mini", "--devices", 4, "--model", 2, "--steps", 5)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_peer_ends_the_other(victim: int, tmp_path: Path) -> None:
    processes = several(2, *TWIN[:-1], 100_000, "--run", tmp_path / "run")
    steps = tmp_path / "run" / "steps.jsonl"
    kill_when(processes[victim], lambda: steps.is_file() and steps.stat().st_size > 0)
    code, _, err = processes[1 - victim].end()
    assert code == 3, err[-2000:]
    assert "sdc: inconclusive: " in err


def test_a_peer_that_does_not_come(tmp_path: Path) -> None:
    flags = ("--coordinator", "127.0.0.1:9", "--processes", 2, "--process", 1, "--timeout", 3)
    code, _, err = sdc(*TWIN, *flags, "--run", tmp_path / "run")
    assert code == 3
    assert "a peer did not come within 3 s" in err
    assert not (tmp_path / "run").exists()


def test_processes_that_are_not_comparable(tmp_path: Path) -> None:
    processes = several(2, *TWIN, "--run", tmp_path / "run")
    processes[1].kill()
    processes[1] = start(*processes[1].arguments, "--dtype", "bfloat16")
    for process in processes:
        code, _, err = process.end()
        assert code == 3, err[-2000:]
        assert "config.model.dtype: process 0 has float32, process 1 has bfloat16" in err
        assert "program.step" in err
    assert not (tmp_path / "run").exists()
