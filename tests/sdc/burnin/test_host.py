"""One burn-in on a device at a time, and locks that their process's end gives up."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdc.burnin import host
from sdc.burnin.host import DeviceRequest, claim_names, claimed, lock_folder, parse_devices
from sdc.settings import SettingError

HOLD = """
import sys
from pathlib import Path
from sdc.burnin.host import claimed
with claimed([{"kind": "gpu", "id": "a"}], Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def gpus(*names: str) -> list[dict[str, str]]:
    return [{"kind": "gpu", "id": name} for name in names]


def test_a_second_burn_in_is_refused_until_the_first_has_gone(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(SettingError, match=f"process {first.pid}"), claimed(gpus("b", "a"), tmp_path):
            pass
        with claimed(gpus("b"), tmp_path) as problems:
            assert problems == []
        first.kill()
    with claimed(gpus("a", "b"), tmp_path):
        pass


def test_a_folder_that_takes_no_locks_is_told_and_no_obstacle(tmp_path: Path) -> None:
    with claimed(gpus("a"), tmp_path / "nowhere") as problems:
        assert "could not be locked, so a second burn-in can use it" in problems[0]


@pytest.mark.parametrize("plant", ["pipe", "hard link", "folder of others"])
def test_what_others_planted_is_no_obstacle(tmp_path: Path, plant: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("content")
    if plant == "pipe":
        os.mkfifo(tmp_path / "gpu-a.lock")
    elif plant == "hard link":
        (tmp_path / "gpu-a.lock").hardlink_to(victim)
    with claimed(gpus("a"), tmp_path / "nowhere" if plant == "folder of others" else tmp_path) as problems:
        # A link is replaced: the lock is a file of its own.
        assert plant == "hard link" or "could not be locked, so a second burn-in can use it" in problems[0]
        assert plant != "hard link" or problems == []
    assert victim.read_text() == "content"


def test_locks_are_in_a_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(host, "os", SimpleNamespace(geteuid=lambda: 1000, environ=os.environ))
    folder = lock_folder()
    assert folder.parent == tmp_path / "sdc"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="other users have access"):
        lock_folder()


def test_names_tell_devices_apart() -> None:
    described = [
        {"kind": "NVIDIA H100", "id": 0, "bus": "0000:3b:00.0", "uuid": "GPU-1"},
        {"kind": "NVIDIA H100", "id": 1, "bus": "0000:5e:00.0"},
        {"kind": "TPU v5", "id": 0, "coordinates": [0, 1, 0]},
        {"kind": "TPU v5", "id": 1, "coordinates": [1, 1, 0]},
        {"kind": "cpu", "id": 0},
    ]
    names = claim_names(described)
    assert len(set(names)) == len(names)
    assert names[0] == "NVIDIA-H100-0000-3b-00-0"
    assert not any("/" in name or " " in name for name in names)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (None, DeviceRequest(None, None)),
        ("gpu", DeviceRequest("gpu", None)),
        ("tpu:4", DeviceRequest("tpu", 4)),
        ("4", DeviceRequest("cpu", 4)),
        ("cpu", DeviceRequest("cpu", None)),
    ],
)
def test_what_devices_are_asked_for(text: str | None, asked: DeviceRequest) -> None:
    assert parse_devices(text) == asked
    assert parse_devices(text).simulated == (4 if text == "4" else 1)


@pytest.mark.parametrize("text", ["", "0", "gpu:0", "gpu:", "-1", "xpu", "1025", "cpu:1e3", "٤", "gpu 8"])
def test_what_is_no_device(text: str) -> None:
    with pytest.raises(SettingError, match="expected"):
        parse_devices(text)


def test_doubts_on_the_devices_that_there_are() -> None:
    assert "not requested" in parse_devices(None).doubts("cpu", 1)[0]
    assert parse_devices(None).doubts("gpu", 1) == []
    assert parse_devices("gpu").doubts("cpu", 1) == ["gpu was requested, but this host has cpu"]
    assert parse_devices("gpu").doubts(None, 0) == ["gpu was requested, but this host has no device"]
    assert parse_devices("tpu:4").doubts("tpu", 4) == []
