"""`sdc train --checkpoint scar`: a process is lost, all end, all are started again and go on from what was saved."""

from pathlib import Path

from sdc.record import read_record
from sdc.train.running import saved_step
from tests.tools.command import sdc, several, wait

TRAIN = ("train", "--config", "mini", "--data", 2, "--checkpoint", "scar", "--checkpoint-every", 4)


def test_a_process_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = (*TRAIN, "--checkpoint-fraction", 0.5, "--run", folder, "--timeout", 30)
    processes = several(2, *flags, "--steps", 100_000)
    wait(processes[0], lambda: saved_step(folder) >= 4)
    processes[1].kill()
    code, _, err = processes[0].end()
    assert code == 3, err[-2000:]
    assert "process 1 was lost" in err
    saved = saved_step(folder)
    assert not (folder / "checkpoints").exists() or not list((folder / "checkpoints").iterdir())
    for process in several(2, *flags, "--steps", saved + 3, "--resume"):
        code, _, err = process.end()
        assert code == 0, err[-2000:]
    record = read_record(folder, "train")
    assert record.ended
    assert [row["step"] for row in record.lines] == list(range(saved + 3))


def test_flags_that_would_have_no_effect(tmp_path: Path) -> None:
    for flag, value in (("--lose-shards", "shards,step=1"), ("--checkpoint-fraction", 0.5)):
        code, _, err = sdc("train", "--config", "mini", flag, value, "--run", tmp_path / "run")
        assert code == 2
        assert "--checkpoint scar" in err
    assert not (tmp_path / "run").exists()
