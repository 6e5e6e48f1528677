"""`sdc fleet`: exit codes, pages, CSV files, and malicious host names."""

import base64
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdc.records import identify
from sdc.standing import Ledger
from sdc.tools import cli
from tests.reports import WORKLOADS, digest_of, make_finding, make_report, put_report
from tests.tools.command import sdc

HOSTILE = ("=HYPERLINK(1)", "<script>alert(1)</script>", "gpu\x1b[2J\u202e", '"a",b\n@c', "+1", "a'; reboot")


def wrong(host: str) -> dict[tuple[str, int], str]:
    return {(WORKLOADS[0], 0): digest_of("wrong", host)}


def fleet(folder: Path, bad: set[str], count: int = 30, **about: Any) -> list[str]:
    names = [f"gpu-{number:02}" for number in range(count)]
    for name in names:
        put_report(folder, make_report(name, digests=wrong(name) if name in bad else None, **about))
    return names


def run_json(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code = cli.run([*map(str, words), "--json"])
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return code, value


def test_three_bad_hosts_of_thirty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"gpu-04", "gpu-17", "gpu-29"}
    fleet(tmp_path / "results", bad)
    words = ("fleet", "summarize", tmp_path / "results")
    code, summary = run_json(capsys, *words, "--output", tmp_path / "page", "--ledger", tmp_path / "ledger.json")
    assert code == 1
    assert {each["host"] for each in summary["suspects"]} == bad
    assert {(each["device"], each["serial"]) for each in summary["suspects"]} == {(0, f"SN-{name}-0") for name in bad}
    assert summary["compared"]["devices_that_agree"] == 57
    rows = list(csv.DictReader(io.StringIO((tmp_path / "page" / "devices.csv").read_text(), newline="")))
    assert len(rows) == 60
    assert {row["host"] for row in rows if row["suspect"]} == bad
    assert {row["elements"] for row in rows} == {"3000"}
    page = (tmp_path / "page" / "index.html").read_text()
    assert "3 suspects among 60 devices of 30 hosts" in page
    drawn = re.sub(r"\s+", " ", page[page.index("<figure>") : page.index("</figure>")])
    assert re.findall(r">(gpu-\d\d)<", drawn)[:4] == ["gpu-04", "gpu-17", "gpu-29", "gpu-00"]
    assert {letter: drawn.count(f">{letter}</text>") for letter in "CPW·–"} == {"C": 0, "P": 3, "W": 0, "·": 57, "–": 0}
    assert re.search(r'(src|href)="(?!#)', page) is None
    again, second = run_json(capsys, *words, "--output", tmp_path / "page", "--ledger", tmp_path / "ledger.json")
    assert (again, second["ledger"]["known"]) == (1, 30)
    assert {**second, "ledger": None} == {**summary, "ledger": None}  # the same files give the same result
    code, out, _ = sdc(*words)
    assert code == 1
    assert "gpu-17  0       SN-gpu-17-0  probable" in out
    assert "sdc fleet schedule gpu-04 HEALTHY1" in out
    assert out.splitlines()[-1].startswith("DIFFERENCES FOUND  3 suspects")


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet(tmp_path / "clean", set(), 3)
    assert run_json(capsys, "fleet", "summarize", tmp_path / "clean")[0] == 0
    put_report(tmp_path / "one", make_report("a"))
    code, summary = run_json(capsys, "fleet", "summarize", tmp_path / "one")
    assert (code, summary["verdict"]) == (3, "inconclusive")
    put_report(tmp_path / "found", make_report("a", findings=[make_finding()]))
    assert run_json(capsys, "fleet", "summarize", tmp_path / "found")[0] == 1
    both = {(WORKLOADS[0], device): "0" * 16 for device in (0, 1)}
    put_report(tmp_path / "tie", make_report("a"))
    put_report(tmp_path / "tie", make_report("b", digests=both))
    code, summary = run_json(capsys, "fleet", "summarize", tmp_path / "tie")
    assert (code, summary["suspects"], len(summary["ties"])) == (1, [], 1)
    (tmp_path / "bad.json").write_text("{}")
    code, summary = run_json(capsys, "fleet", "summarize", tmp_path / "bad.json")
    assert (code, [set(each) for each in summary["refused"]]) == (3, [{"file", "reason"}])
    (tmp_path / "ledger.json").write_text("{}")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").touch()
    for words in (
        [tmp_path / "nothing"], [], [tmp_path / "clean", "--ledger", tmp_path / "ledger.json"],
        [tmp_path / "clean", "--ledger", tmp_path / "no" / "ledger.json"],
        [tmp_path / "clean", "--output", tmp_path / "taken"], [tmp_path / "clean", "--output", tmp_path / "bad.json"],
    ):  # fmt: skip
        assert cli.run(["fleet", "summarize", *map(str, words)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
    assert os.listdir(tmp_path / "taken") == ["thesis.txt"]


def test_simulations_are_marked_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played = [make_finding(simulated=3)]
    for name in ("a", "b", "c"):
        findings = played if name == "a" else []
        put_report(tmp_path / "all", make_report(name, simulated=True, findings=findings))
    words = ["fleet", "summarize", str(tmp_path / "all"), "--output", str(tmp_path / "page")]
    assert cli.run(words) == 1
    out = capsys.readouterr().out
    assert "this is a rehearsal" in out
    assert "SIMULATED a" in out
    assert out.splitlines()[-2].startswith("SIMULATION: DIFFERENCES FOUND")
    page = (tmp_path / "page" / "index.html").read_text()
    assert "SIMULATION: DIFFERENCES FOUND" in page
    assert "SIMULATED a" in page
    assert "yes" in (tmp_path / "page" / "suspects.csv").read_text().splitlines()[1].split(",")
    put_report(tmp_path / "all", make_report("real"))
    code, summary = run_json(capsys, *words[:3])
    assert (code, summary["simulated"], summary["simulated_results"]) == (1, "some", 3)
    assert cli.run(words[:3]) == 1
    assert "3 of 4 results contain simulated faults" in capsys.readouterr().out


def test_names_of_others_do_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(HOSTILE):
        report = make_report(name, digests=wrong(name), device={"serial": name + "0", "uuid": None})
        put_report(tmp_path / "results", report, f"h{number}")
    fleet(tmp_path / "results", set(), 9)
    words = ["fleet", "summarize", str(tmp_path / "results")]
    assert cli.run([*words, "--output", str(tmp_path / "page")]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "sdc fleet schedule" not in out  # none of these names may be put into a command
    page = (tmp_path / "page" / "index.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)  # our own, which alone may run
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in page
    assert "&lt;script&gt;alert(1)" in page
    content = (tmp_path / "page" / "suspects.csv").read_bytes()
    assert b"\r\n" in content
    assert b"\x1b" not in content
    rows = list(csv.reader(io.StringIO(content.decode(), newline="")))
    assert len(rows) == 1 + len(HOSTILE)
    assert {len(row) for row in rows} == {len(rows[0])}
    hosts = {row[0] for row in rows[1:]}
    assert hosts == {
        "'=HYPERLINK(1)",
        "<script>alert(1)</script>",
        "gpu\\x1b[2J\\u202e",
        '"a",b\\n@c',
        "'+1",
        "a'; reboot",
    }
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in rows for cell in row)


def test_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("a b # two\nc,d\n\n")
    words = ["fleet", "schedule", f"@{tmp_path / 'hosts'}", "e", "f", "--rounds", "3", "--suspects", "a, f"]
    assert cli.run(words) == 0
    script = capsys.readouterr().out
    assert script.count("srun --kill-on-bad-exit=0 --nodes=2") == 9
    assert "# each suspect meets 3 hosts that are not suspects" in script
    checked = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert cli.run([*words, "--format", "json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [len(each["pairs"]) for each in value["rounds"]] == [3, 3, 3]
    assert not any(set(pair) == {"a", "f"} for each in value["rounds"] for pair in each["pairs"])
    assert cli.run([*words, "--format", "jobset", "--image", "x/y"]) == 0
    assert capsys.readouterr().out.count("kind") == 9
    for more in (["--suspects", "z"], ["--rounds", "0"], ["$(reboot)"], ["@nothing"], ["a"], ["--seed", "-1"]):
        assert cli.run([*words, *more]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("/dev/zero", "is a device, expected a text file of host names"),
        ("{}/pipe", "is a pipe, expected a text file"),
        ("{}", "is a folder, expected a text file"),
        ("{}/bits", "is not UTF-8 text; give a text file"),
        ("{}/long", "expected a file of at most 10,000,000 bytes"),
        ("{}/none", "there is no such file"),
    ],
)
def test_hosts_come_from_a_text_file(
    name: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")  # no process writes into it: opening it would block forever
    (tmp_path / "bits").write_bytes(b"gpu-1 \xfd")
    (tmp_path / "long").write_bytes(b"a " * 5_000_001)
    word = f"@{name.format(tmp_path)}"
    assert cli.run(["fleet", "schedule", word, "--rounds", "2"]) == 2
    assert capsys.readouterr().err.startswith(f"sdc: error: HOSTS {word}: {problem}")


def test_a_folder_is_no_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet(tmp_path / "results", set(), 2)
    (tmp_path / "ledgers").mkdir()
    assert cli.run(["fleet", "summarize", str(tmp_path / "results"), "--ledger", str(tmp_path / "ledgers")]) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path}/ledgers is a folder, but a ledger is a file" in err
    assert f"such as {tmp_path}/ledgers/ledger.json" in err
    assert list((tmp_path / "ledgers").iterdir()) == []


def test_simulated_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fleet", "simulate", "--hosts", "16", "--rounds", "2", "--trials", "20"]
    code, value = run_json(capsys, *words)
    assert code == 0
    assert value["simulated"] is True
    assert [row["exact"] for row in value["rounds"]] == [0, 20]
    assert cli.run(words) == 0
    assert "SIMULATED, 20 fleets" in capsys.readouterr().out
    assert cli.run([*words, "--probability", "nan"]) == 2


def test_none_of_it_needs_jax(tmp_path: Path) -> None:
    fleet(tmp_path / "results", set(), 3)
    summarize = ["fleet", "summarize", str(tmp_path / "results"), "--output", str(tmp_path / "page")]
    code = (
        "import sys\nfrom sdc.tools.cli import run\n"
        f"assert run({[*summarize, '--ledger', str(tmp_path / 'ledger')]!r}) == 0\n"
        "assert run('fleet schedule a b --rounds 1'.split()) == 0\n"
        "assert run('fleet simulate --hosts 4 --rounds 1 --trials 2'.split()) == 0\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_number_may_contain_what_separates_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = identify().machine
    device = {"serial": lambda index: f"SN-{index}, rev. B", "machine": machine}
    report = make_report(device=device, machine=machine, findings=[make_finding(devices=(0,))])
    with Ledger(tmp_path / "ledger.sqlite", write=True) as ledger:
        ledger.begin("begun", simulated=False, level="quick")
        ledger.add(report, begun="begun")
    words = ("--ledger", str(tmp_path / "ledger.sqlite"), "--reason", "reseated", "--by", "me")
    for names in (["serial SN-0, rev. B"], ["serial SN-0, rev. B, serial SN-1, rev. B"]):
        assert cli.run(["fleet", "acknowledge", *names, *words]) == 0, capsys.readouterr().err
    assert cli.run(["fleet", "acknowledge", "serial SN-2, rev. B", *words]) == 2
