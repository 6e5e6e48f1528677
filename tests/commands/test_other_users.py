"""Another user of the same machine, a real second one, can neither block nor delete, read or forge anything."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp

import sdc
from sdc.analysis.fleet.ledger import update_ledger
from sdc.analysis.fleet.suspects import vote
from sdc.checkpoints import CertificateError, RunningCheckpoint
from sdc.records import Lock, Record, RecordError, own_folder
from sdc.standing import standing_of
from sdc.verdict import Verdict
from tests.tools.command import sdc as command

OTHER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder such as /tmp, to which everyone can write."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/tmp") and folder.stat().st_uid == os.geteuid() and folder.name:
            folder.chmod(folder.stat().st_mode | 0o055)
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


def as_other(attempt: str) -> int:
    return subprocess.run(
        ["/bin/sh", "-c", attempt], cwd="/", user=OTHER, group=OTHER, extra_groups=[], capture_output=True, check=False
    ).returncode


def test_a_run_in_a_folder_of_this_user(shared: Path) -> None:
    """The run was killed, which leaves its lock."""
    run = shared / "run"
    killed = (
        f"import os; from sdc.records import Record; r = Record.create({str(run)!r}, {{}}, kind='twin'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", killed], check=False)
    assert (run / "lock.json").exists()
    for attempt in (
        f"flock --exclusive {run}/lock.json true", f"cat {run}/lock.json", f"rm -f {run}/lock.json",
        f"echo > {run}/lock.json", f"ln {run}/lock.json {shared}/lock", f"ln {run}/manifest.json {shared}/m",
        f"echo >> {run}/manifest.json", f"touch {run}/more", f"mkdir {run}/certificates", f"chmod 777 {run}",
        f"rm -rf {run}", f"mv {run} {run}x", f"rmdir {run}",
    ):  # fmt: skip
        assert as_other(attempt), attempt
    Record.resume(run, {}, at=0).close()


def certified(folder: Path) -> None:
    with sdc.certify(ocp.training.Checkpointer(folder)) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(4)})


def running(folder: Path) -> None:
    RunningCheckpoint(folder, {"w": jnp.ones((4, 4))}, rows=1).close()


WRITERS: dict[str, Callable[[Path], object]] = {
    "record": lambda folder: Record.create(folder, {}, kind="twin"),
    "lock": lambda folder: Lock(folder),
    "certificates": certified,
    "running checkpoint": running,
    "fleet ledger": lambda folder: update_ledger(folder / "ledger.json", [], vote([])),
    "local copies": own_folder,
}
PLANTS = {
    "folder": "mkdir -m 777 {place}",
    "folder above": "mkdir -m 777 {place}",
    "link to a folder of the first": "ln -s {own} {place}",
    "link to a folder of the other": "mkdir -m 777 {place}x && ln -s {place}x {place}",
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_into_what_another_user_planted(shared: Path, writer: str, plant: str) -> None:
    own = shared.parent / "own"
    own.mkdir()
    (own / "precious").write_text("content")
    place = shared / "runs"
    assert as_other(PLANTS[plant].format(place=place, own=own)) == 0
    folder = place / "mine" if plant == "folder above" else place
    with pytest.raises(
        (RecordError, CertificateError, PermissionError), match="belongs to another user, and everyone can write to"
    ):
        WRITERS[writer](folder)
    assert [path for path in own.rglob("*") if path.is_file()] == [own / "precious"]
    assert (own / "precious").read_text() == "content"


COMMANDS = [
    ("train", "--config", "mini", "--steps", 1),
    ("burnin", "--devices", 2, "--only", "transfers", "--rounds", 1),
]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_in_a_shared_folder(shared: Path, words: tuple[object, ...]) -> None:
    """The folder `runs`, the default of all commands, is planted."""
    assert as_other(f"mkdir -m 777 {shared}/runs") == 0
    code, _, err = command(*words, "--run", shared / "runs" / "mine")
    assert code == 2, err
    assert "belongs to another user" in err
    assert "Traceback" not in err
    assert not [path for path in (shared / "runs").rglob("*") if path.is_file()]


@pytest.mark.parametrize("plant", ["mkdir -m 777 {}", "mkdir {0}-own; ln -s {0}-own {0}"])
def test_no_output_is_written_where_others_can_replace_it(shared: Path, plant: str) -> None:
    run = shared.parent / "run"
    assert command(*COMMANDS[1], "--run", run)[0] == 0
    out = shared / "out"
    assert as_other(plant.format(out)) == 0
    for words in (
        ("fleet", "summarize", run, "--output", out),
        (*COMMANDS[1], "--run", shared.parent / "junit", "--junit", out / "junit.xml"),
        (*COMMANDS[1], "--run", shared.parent / "prom", "--prometheus", out / "sdc.prom"),
    ):
        code, _, err = command(*words)
        assert (code, "belongs to another user" in err, err.count("\n")) == (2, True, 1), err
    assert [path for path in shared.rglob("*") if path.is_file()] == []


def test_a_planted_result_decides_nothing(shared: Path) -> None:
    assert command(*COMMANDS[1], "--run", shared.parent / "own")[0] == 0
    shutil.copytree(shared.parent / "own", shared / "mine")
    assert standing_of(shared / "mine").verdict is Verdict.CLEAN
    assert as_other(f"cp -r {shared.parent}/own {shared}/planted && touch {shared}/planted/result.json") == 0
    planted = standing_of(shared / "planted")
    assert (planted.verdict, "belongs to another user" in planted.reason) == (Verdict.INCONCLUSIVE, True)
    code, _, err = command("burnin", "--devices", 2, "--run", shared / "planted", "--resume")
    assert code == 2
    assert "belongs to another user" in err


def test_a_planted_golden_file_judges_nothing(shared: Path) -> None:
    golden = shared / "devices.golden"
    assert command("golden", "record", shared.parent / "own.golden", *COMMANDS[1][1:])[0] == 0
    assert as_other(f"cp {shared.parent}/own.golden {golden}") == 0
    code, _, err = command(*COMMANDS[1], "--golden", golden, "--run", shared.parent / "run")
    assert (code, "belongs to another user" in err) == (2, True), err
    code, _, err = command("golden", "verify", golden, "--no-run")
    assert (code, "belongs to another user" in err) == (3, True), err
