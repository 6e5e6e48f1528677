"""Files of others: what is refused, what counts once, and whose device it is."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from sdc.analysis.fleet.collection import HostKey, collect, find_results
from sdc.analysis.fleet.fleet_summary import Moved, summarize_results
from sdc.burnin.pair import PAIR
from sdc.burnin.results import RESULT, UNDER_WAY
from sdc.records.format import seal
from sdc.settings import SettingError
from sdc.verdict import Verdict
from tests.reports import DAY, WORKLOADS, digest_of, make_finding, make_pair, make_report, put_pair, put_report

NEXT_DAY = DAY.replace("-05T", "-06T")


def reseal(path: Path, old: str, new: str) -> None:
    """Changes a result as somebody does who computes its checksum anew."""
    text = path.read_text().rpartition(',\n "checksum"')[0] + "\n}\n"
    assert old in text
    path.write_bytes(seal(text.replace(old, new, 1).encode()))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"schema": 1', '"schema": 2', "layout 2"),
        ('"format": "jax-sdc burn-in"', '"format": "x"', "not a result of sdc burnin"),
        ('"verdict": "clean"', '"verdict": "corrupt"', "contradicts itself: the verdict is FAIL, but PASS follows"),
        ('"differences": 0', '"differences": 1', "contradicts itself: the verdict is PASS, but FAIL follows"),
        ('"elements": 1000', '"elements": 999', "contradicts itself: "),
        ('"simulated": 0', '"simulated": 4', "simulated faults changed elements, but the settings contain no fault"),
        ('"index": 1', '"index": 0', "contradicts itself: "),
        ('"runs": 9', '"runs": -9', "-9 runs"),
        ('"seconds": 2.0', '"seconds": -2.0', "expected float >= 0"),
        ('"seconds": 2.0', '"seconds": "Infinity"', "inf seconds"),
        ('"work": 1000000000000.0', '"work": "Infinity"', "throughput of inf"),
        ('"devices": [', '"devices": 5, "x": [', "has different fields"),
        ('"notes": [', '"x": ' + 200 * "[" + 200 * "]" + ', "notes": [', "nested deeper"),
    ],
)
def test_lies_are_refused_and_told(old: str, new: str, why: str, tmp_path: Path) -> None:
    bad = put_report(tmp_path, make_report("liar"))
    put_report(tmp_path, make_report("honest"))
    reseal(bad, old, new)
    found = collect(find_results([tmp_path]))
    assert [each.host.name for each in found.results] == ["honest"]
    (refused,) = found.refused
    assert refused.file == str(bad)
    assert why in refused.reason


def test_damage_is_refused_and_told(tmp_path: Path) -> None:
    whole = put_report(tmp_path, make_report("whole")).read_bytes()
    damaged = {
        "edited": whole.replace(b"whole", b"wrong"),
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "unsealed": whole.rpartition(b',\n "checksum"')[0] + b"\n}\n",
        "binary": bytes(range(256)) * 9,
        "list": b"[1]\n",
    }
    for name, content in damaged.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / RESULT).write_bytes(content)
    found = collect(find_results([tmp_path]))
    assert [each.host.name for each in found.results] == ["whole"]
    assert {Path(each.file).parent.name for each in found.refused} == set(damaged)
    summary = summarize_results(found)
    assert summary.results == 1
    assert len(summary.refused) == 6


def test_a_result_counts_once(tmp_path: Path) -> None:
    first = put_report(tmp_path / "a", make_report("x"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "link").symlink_to(first)
    found = collect(find_results([tmp_path / "a", tmp_path / "b", first, tmp_path / "link"]))
    assert len(found.results) == 1
    assert not found.refused
    assert [each.of for each in found.duplicates] == [str(first)] * 3
    assert summarize_results(found).elements == 2 * len(WORKLOADS) * 1000


def test_two_results_of_one_id_that_differ_are_both_refused(tmp_path: Path) -> None:
    put_report(tmp_path, make_report("y"))
    for number, host in enumerate(["x", "x", "z"]):
        put_report(tmp_path, make_report(host, id="same", seconds=1.0 + number), f"{host}{number}")
    found = collect(find_results([tmp_path]))
    assert [each.host.name for each in found.results] == ["y"]
    assert len(found.refused) == 3
    assert all("either may be wrong" in each.reason for each in found.refused)


def test_what_is_not_there_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no such file"):
        collect(find_results([tmp_path / "nothing"]))
    with pytest.raises(SettingError, match=f"this folder and its subfolders contain no {RESULT}"):
        collect(find_results([tmp_path]))


def test_who_a_device_is(tmp_path: Path) -> None:
    board = f"host board ({digest_of('machine', 'board')[:8]}) device 0"
    cases = {
        "serial": ({}, "serial SN-serial-0"),
        "uuid": ({"serial": None}, f"uuid GPU-{digest_of('uuid', 0)}"),
        "placeholder": ({"serial": "0000000", "uuid": "N/A"}, "machine M bus 0000:00:00.0"),
        "chip": ({"serial": None, "uuid": None, "bus": None, "coordinates": lambda i: [0, i, 0], "core": 1},
                 "machine M chip 0,0,0 core 1"),
        "board": ({"serial": "B", "uuid": "U", "bus": "S"}, board),
        "parts": ({"serial": "B", "uuid": lambda i: f"U{i}"}, "uuid U0"),
    }  # fmt: skip
    for name, (fields, _) in cases.items():
        put_report(tmp_path, make_report(name, device=fields))
    found = collect(find_results([tmp_path]))
    for result in found.results:
        expected = cases[result.host.name][1].replace("machine M", f"machine {result.host.machine}")
        assert result.parts[0].identity == expected
        assert len({part.identity for part in result.parts.values()}) == 2


def test_a_number_that_two_hosts_claim_at_once_is_no_identity(tmp_path: Path) -> None:
    for host in ("a", "b"):
        put_report(tmp_path, make_report(host, device={"serial": lambda i: f"CLONE{i}"}))
    found = [make_finding(host="c", devices=(0,))]
    put_report(tmp_path, make_report("c", device={"serial": lambda i: f"MOVED{i}"}, findings=found))
    put_report(tmp_path, make_report("d", device={"serial": lambda i: f"MOVED{i}", "uuid": None}, created=NEXT_DAY))
    summary = summarize_results(results := collect(find_results([tmp_path])))
    assert summary.doubtful_identities == ["serial CLONE0", "serial CLONE1"]
    assert summary.moved == [Moved(identity=f"serial MOVED{i}", hosts=["c", "d"]) for i in range(2)]
    (suspect,) = summary.suspects  # where it is now
    assert (suspect.identity, suspect.host, suspect.next[0]) == ("serial MOVED0", "d", "take d out of service")
    assert summary.devices == 6
    assert results.results[0].parts[0].identity.startswith("uuid ")


def test_what_is_no_suspect_and_not_clean_is_told(tmp_path: Path) -> None:
    from sdc.burnin.results import Ended

    for report in (
        make_report("xid", events={1: ["Xid 48"]}),
        make_report("ecc", uncorrected={0: 2}),
        make_report("lost", unfinished=[Ended(workload=None, device=1, round=2, reason="device lost")]),
        make_report("stopped", stopped="SIGTERM"),
        make_report("hot", void=[(WORKLOADS[0], 1)]),
        make_report("found", findings=[make_finding(persistence="persistent")], events={0: ["Xid 63"]}),
    ):
        put_report(tmp_path, report)
    summary = summarize_results(collect(find_results([tmp_path])))
    assert [each.host for each in summary.suspects] == ["found"]
    told = {(each.host, each.device): each.reason for each in summary.watch}
    assert told == {
        ("xid", 1): "the driver reported Xid 48",
        ("found", 0): "the driver reported Xid 63",
        ("ecc", 0): "the driver reported 2 memory errors that ECC could not correct",
        ("lost", 1): "all workloads ended in round 2: device lost",
        ("stopped", None): "stopped early by SIGTERM",
        ("hot", 1): "throttled in 1 workload",
    }
    reasons = [each.reason.startswith("the driver") for each in summary.watch]
    assert reasons == sorted(reasons, reverse=True)
    assert HostKey("xid", digest_of("machine", "xid")) == collect(find_results([tmp_path])).results[-1].host


def test_simulations_that_agree_say_nothing_about_a_real_host(tmp_path: Path) -> None:
    for report in (make_report("real"), make_report("a", simulated=True), make_report("b", simulated=True)):
        put_report(tmp_path, report)
    summary = summarize_results(collect(find_results([tmp_path])))
    assert (summary.verdict, summary.simulated) == ("inconclusive", "some")
    assert summary.compared.hosts == 0
    put_report(tmp_path, make_report("another"))
    assert summarize_results(collect(find_results([tmp_path]))).verdict == "clean"


def test_a_simulated_pair_accuses_no_real_host(tmp_path: Path) -> None:
    for name in "ab":
        put_report(tmp_path, make_report(name))
    put_pair(tmp_path / "rehearsal", make_pair(Verdict.CORRUPT, simulated=True))
    assert summarize_results(collect(find_results([tmp_path]))).verdict == "clean"
    put_pair(tmp_path / "pair", make_pair(Verdict.CORRUPT, ("c", "d")))
    assert summarize_results(collect(find_results([tmp_path]))).verdict == "corrupt"


def verdict_of(folder: Path) -> tuple[str, str]:
    summary = summarize_results(collect(find_results([folder])))
    return summary.verdict, summary.sentence


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """A folder with the results of two hosts that agree."""
    for host in ("a", "b"):
        put_report(tmp_path / "fleet", make_report(host))
    assert verdict_of(tmp_path / "fleet")[0] == "clean"
    return tmp_path / "fleet"


def test_what_was_not_read_is_not_clean(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link elsewhere, a link that leads nowhere, a damaged file and a folder that only others can read may each hide
    a FAIL."""
    put_report(tmp_path / "elsewhere", make_report("c", findings=[make_finding()]))
    for name, target, reason in (
        ("link", tmp_path / "elsewhere", "is a link to the folder"),
        ("lost", tmp_path / "nothing", "is a link that leads nowhere"),
        ("circle", clean / "circle", "is a link that leads nowhere"),
        (RESULT, tmp_path / "nothing", "is a link that leads nowhere"),
    ):
        (clean / name).symlink_to(target)
        found, said = verdict_of(clean)
        assert (found, str(clean / name) in said, reason in said) == ("inconclusive", True, True), said
        (clean / name).unlink()
    (clean / "latest").symlink_to(next(clean.iterdir()))  # this folder is read anyway
    assert verdict_of(clean)[0] == "clean"
    (clean / "folder" / RESULT).mkdir(parents=True)
    assert verdict_of(clean)[0] == "inconclusive"
    shutil.rmtree(clean / "folder")
    (clean / PAIR).write_text("{}")
    assert verdict_of(clean)[0] == "inconclusive"
    (clean / PAIR).unlink()
    (clean / "closed").mkdir()
    real = os.scandir

    def scan(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert verdict_of(clean) == (
        "inconclusive",
        f"{clean / 'closed'} could not be read or counted: Permission denied",
    )
    assert collect(find_results([clean / "closed"])).refused[0].file == str(clean / "closed")


def test_a_burn_in_under_way_and_a_pair_that_differed_are_not_clean(clean: Path) -> None:
    put_report(clean, make_report("b", stopped=UNDER_WAY, created=NEXT_DAY))
    assert verdict_of(clean) == ("inconclusive", "the burn-in of b is under way")
    put_pair(clean / "passed", make_pair(Verdict.CLEAN))
    assert verdict_of(clean)[0] == "inconclusive"
    put_pair(clean / "differed", make_pair(Verdict.CORRUPT, ("gpu-1", "gpu-2")))
    put_pair(clean / "again", make_pair(Verdict.CORRUPT, ("gpu-1", "gpu-2")))
    assert verdict_of(clean) == ("corrupt", "hosts differed in pairs or pools: gpu-1 and gpu-2")
    (row,) = summarize_results(collect(find_results([clean]))).pairs
    assert (row.hosts, row.verdict) == (["gpu-1", "gpu-2"], "corrupt")
