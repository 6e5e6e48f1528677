"""`sdc golden`: records, verifies, merges and lists; a damaged or foreign register is inconclusive, never clean."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdc.burnin.golden_register import GOLDEN, Register, lookup, mark_of
from sdc.tools import cli
from tests.sdc.burnin.registers import BAD, GOOD, register

ONLY = ("--level", "quick", "--only", "ordering", "--devices", 2, "--rounds", 1)


class Run:
    """Runs the command, and returns its output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int) -> Any:
        got = cli.run(["golden", *map(str, words)])
        printed = self._capsys.readouterr()
        assert got == code, printed
        return printed

    def json(self, *words: object, code: int) -> dict[str, Any]:
        found = json.loads(self(*words, "--json", code=code).out)
        assert isinstance(found, dict)
        return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("sdc.records.prepare", lambda **_: None)
    return Run(capsys)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records what two devices compute."""
    path = tmp_path_factory.mktemp("golden") / "once.golden"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdc.records.prepare", lambda **_: None)
        assert cli.run(["golden", "record", str(path), *map(str, ONLY)]) == 0
    return path


@pytest.fixture
def recorded(once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(once, tmp_path / "here.golden"))


def test_what_is_recorded_is_confirmed(run: Run, recorded: Path, tmp_path: Path) -> None:
    printed = run.json("record", tmp_path / "again.golden", *ONLY, code=0)
    assert (printed["verdict"], printed["recorded"], printed["sentences"]) == ("clean", 1, [])
    assert lookup(GOLDEN.read(tmp_path / "again.golden")) == lookup(GOLDEN.read(recorded))
    found = run.json("verify", recorded, code=0)
    assert (found["verdict"], found["confirmed"], found["elsewhere"]) == ("clean", 1, 0)
    assert "1 digests confirmed by this host" in run("verify", recorded, "--rounds", 1, "--devices", 1, code=0).out
    whole = run.json("verify", recorded, "--no-run", code=0)
    assert "verdict" not in whole  # nothing was compared
    assert "is undamaged: 1 digests, 0 disputed; no workload was run" in whole["sentence"]


def test_a_register_is_not_overwritten(run: Run, recorded: Path) -> None:
    before = recorded.read_bytes()
    assert "exists already" in run("record", recorded, *ONLY, code=2).err
    assert "exists already" in run("merge", recorded, recorded, code=2).err
    assert "does not exist" in run("record", recorded / "below" / "x.golden", *ONLY, code=2).err
    assert recorded.read_bytes() == before


def test_nothing_is_recorded_where_nothing_agrees(run: Run, tmp_path: Path) -> None:
    words = (*ONLY[:-4], "--devices", 1, "--rounds", 1)
    printed = run("record", tmp_path / "a.golden", *words, code=3).out
    assert "no workload ran twice on one device" in printed
    assert "INCONCLUSIVE  nothing is recorded" in printed
    assert list(tmp_path.iterdir()) == []


def test_devices_that_are_not_there(run: Run, tmp_path: Path) -> None:
    for words in (("--devices", "gpu:8"), ("--devices", 20), ()):
        printed = run("record", tmp_path / "a.golden", *ONLY[:-4], "--rounds", 1, *words, code=3).err
        assert printed.startswith("sdc: inconclusive: ")
    assert list(tmp_path.iterdir()) == []


def rewritten(path: Path, **differs: Any) -> None:
    """Changes fields of the first entry of a register."""
    import msgspec

    value = GOLDEN.read(path)
    entry = value.entries[0]
    if "environment" in differs:
        there = next(iter(value.environments.values())) | differs.pop("environment")
        value.environments = {mark_of(there): there}
        differs["subject"] = msgspec.structs.replace(entry.subject, environment=mark_of(there))
    value.entries[0] = msgspec.structs.replace(entry, **differs)
    GOLDEN.write(path, value)


def test_other_bits_are_found(run: Run, recorded: Path) -> None:
    rewritten(recorded, digest=BAD)
    found = run.json("verify", recorded, code=1)
    assert (found["verdict"], found["confirmed"]) == ("corrupt", 0)
    assert "found by golden" in found["sentences"][0]


def test_a_register_of_elsewhere_is_inconclusive(run: Run, recorded: Path) -> None:
    rewritten(recorded, environment={"jaxlib": "0.0.1"})
    found = run.json("verify", recorded, code=3)
    assert (found["verdict"], found["confirmed"], found["elsewhere"]) == ("inconclusive", 0, 1)
    assert "on this host, 0.0.1 in the register (1 workload)" in found["sentences"][0]


@pytest.mark.parametrize("words", ["verify {}", "verify --no-run {}", "merge {}.new {}", "list {}"])
def test_a_damaged_register_is_inconclusive(words: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.golden"
    GOLDEN.write(path, register())
    path.write_bytes(path.read_bytes().replace(GOOD.encode(), BAD.encode()))
    printed = run(*words.format(path, path).split(), code=3)
    assert printed.err.startswith("sdc: inconclusive: ")
    assert "its checksum is wrong" in printed.err
    assert printed.out == ""
    path.unlink()
    assert "there is no such file" in run(*words.format(path, path).split(), code=2).err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["verify {}", "verify --no-run {}", "merge {}/new {}", "list {}"])
def test_a_folder_is_no_register(words: str, run: Run, tmp_path: Path) -> None:
    printed = run(*words.format(tmp_path, tmp_path).split(), code=2)
    assert f"{tmp_path} is a folder, not the file of a golden register; give a file" in printed.err
    assert "damaged" not in printed.err


def test_an_empty_register_is_told_as_such(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.golden").touch()
    printed = run("verify", tmp_path / "a.golden", code=3)
    assert "a.golden is damaged (it is empty); restore it or record it again" in printed.err


def test_repetition_alone_is_warned_of(run: Run, tmp_path: Path) -> None:
    words = ("--level", "quick", "--devices", 1, "--rounds", 2, "--only", "ordering", "--only", "functions")
    printed = run.json("record", tmp_path / "a.golden", *words, "--dtypes", "float32", code=0)
    # The host computes orderings too, so they do not rest on the device alone.
    assert (printed["verdict"], printed["repeated_only"]) == ("clean", printed["recorded"] - 1)
    (warning,) = printed["sentences"]
    counts = f"{printed['repeated_only']} of {printed['recorded']}"
    assert warning.startswith(f"warning: {counts} digests are confirmed only by repetition")
    assert "a fault that repeats itself would affect them too" in warning


def written(folder: Path, **registers: Register) -> list[Path]:
    for name, value in registers.items():
        GOLDEN.write(folder / f"{name}.golden", value)
    return [folder / f"{name}.golden" for name in registers]


def test_registers_are_merged_and_listed(run: Run, tmp_path: Path) -> None:
    files = written(tmp_path, a=register("a"), b=register("b", {"w": GOOD, "x": BAD}))
    out = tmp_path / "out.golden"
    assert f"2 digests in {out}" in run("merge", out, *files, code=0).out
    assert len(GOLDEN.read(out).entries) == 2
    printed = run("list", out, code=0).out
    for words in ("driver 550.1", "xla_flags=--a=1", "host host-a", "gpu H100", GOOD, BAD, "repeat, vote"):
        assert words in printed
    listed = run.json("list", *files, code=0)
    assert [(row["subject"]["workload"], row["digest"]) for row in listed["entries"]] == [("w", GOOD), ("x", BAD)]
    assert sorted(listed["recordings"]) == ["a", "b"]
    assert listed["disputed"] == []


def test_a_disagreement_ends_with_one(run: Run, tmp_path: Path) -> None:
    files = written(tmp_path, a=register("a", {"w": GOOD, "x": GOOD}), b=register("b", {"w": BAD}))
    out = tmp_path / "out.golden"
    found = run.json("merge", out, *files, code=1)
    assert (found["verdict"], found["digests"]) == ("corrupt", 1)
    assert "host-a" in found["sentences"][0]
    assert "host-b" in found["sentences"][0]
    merged = GOLDEN.read(out)
    assert [entry.subject.workload for entry in merged.entries] == ["x"]
    assert [each.subject.workload for each in merged.disputed] == ["w"]
    assert "disputed: w | seed 0" in run("list", out, code=0).out
    other = register("a")
    other.recordings["a"].rounds = 9
    (wrong,) = written(tmp_path, c=other)
    assert "described differently" in run("merge", tmp_path / "new", files[0], wrong, code=3).err


def test_what_needs_no_device_starts_without_jax(tmp_path: Path) -> None:
    (path,) = written(tmp_path, a=register())
    code = (
        "import sys\nfrom sdc.tools.cli import run\n"
        f"for words in (['list', {str(path)!r}], ['merge', {str(path) + '.m'!r}, {str(path)!r}], "
        f"['verify', '--no-run', {str(path)!r}], ['record', {str(path)!r}], ['verify', 'nothing']):\n"
        "    print(run(['golden', *words]))\n    assert 'jax' not in sys.modules, words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.isdecimal()] == ["0", "0", "0", "2", "2"]
