"""The scripts for Slurm in a real one: what drains a node, what does not, and what becomes of the jobs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sdc.schema import identify, now
from sdc.standing.ledger import Ledger, Origin
from tests.reports import make_finding, make_report, put_report

from .slurm import DEPLOY, FAULT, NODES, SDC, SMALL, Slurm, until

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    yield slurm
    slurm.end()


@pytest.fixture
def slurm(running: Slurm) -> Iterator[Slurm]:
    yield running
    for name in NODES:
        running.settle(name)
        if running.drained(name):
            running.resume(name)


def enter(state: Path, origin: Origin | None = None, *, failed: bool = False) -> None:
    """Enters the result of a burn-in into the ledger in a folder."""
    findings = [make_finding()] if failed else []
    with ledger_in(state, origin) as ledger:
        ledger.begin("run", simulated=False, level="quick")
        report = make_report(machine=identify().machine, findings=findings, created=now(), ended=now())
        ledger.add(report, begun="run")


def ledger_in(state: Path, origin: Origin | None = None) -> Ledger:
    file = state / f"ledger-{identify().machine}.sqlite"
    return Ledger(file, write=True, origin=Origin.current if origin is None else lambda: origin)


def read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def test_a_burn_in_that_passes_lets_the_job_start(slurm: Slurm) -> None:
    slurm.settle("n1", SDC_PROLOG="burnin", SDC_BURNIN_FLAGS=SMALL)
    job = slurm.submit("--nodelist=n1", "--wrap", "true")
    assert slurm.ended(job)["JobState"] == "COMPLETED"
    (result,) = (slurm.folder / "results-n1").glob(f"job-{job}-*/result.json")
    assert read(result)["verdict"] == "clean"
    assert not slurm.drained("n1")


def test_one_that_fails_drains_the_node_and_the_job_moves_on(slurm: Slurm) -> None:
    slurm.settle("n1", SDC_PROLOG="burnin", SDC_BURNIN_FLAGS=f"{SMALL} {FAULT}")
    moved = slurm.submit("--wrap", "true")  # n1 has the smallest weight
    until(lambda: slurm.drained("n1"), 60, slurm.log)
    assert slurm.node("n1")["Reason"].startswith("Prolog error [")
    assert "SIMULATION" in (slurm.folder / "prolog-n1.log").read_text()
    bound = slurm.submit("--nodelist=n1", "--wrap", "true")
    job = slurm.ended(moved, 120)
    assert (job["JobState"], job["Restarts"], job["BatchHost"]) == ("COMPLETED", "1", "n2")
    assert slurm.job(bound)["JobState"] == "PENDING"
    assert "ReqNodeNotAvail" in slurm.job(bound)["Reason"]
    slurm.settle("n1", SDC_PROLOG="burnin", SDC_BURNIN_FLAGS=SMALL)
    slurm.resume("n1")
    job = slurm.ended(bound)
    assert (job["JobState"], job["BatchHost"]) == ("COMPLETED", "n1")


@pytest.mark.parametrize(
    ("settings", "drains"),
    [
        ({}, False),  # no result: inconclusive
        ({"SDC_DRAIN_ON": "FAIL INCONCLUSIVE"}, True),
        ({"SDC_MAX_AGE": "banana", "SDC_DRAIN_ON": "FAIL INCONCLUSIVE"}, False),  # bad usage
        ({"SDC": "/nowhere/sdc", "SDC_DRAIN_ON": "FAIL INCONCLUSIVE"}, False),
        ({"SDC_PROLOG": "burnin", "SDC_BURNIN_FLAGS": "--devices banana"}, False),
    ],
)
def test_policies_of_the_prolog(slurm: Slurm, tmp_path: Path, settings: dict[str, str], drains: bool) -> None:
    slurm.settle("n1", SDC_STATE=tmp_path, **settings)
    job = slurm.submit("--nodelist=n1", "--wrap", "true")
    if drains:
        until(lambda: slurm.drained("n1"), 60, slurm.log)
        assert slurm.job(job)["JobState"] == "PENDING"
        slurm.run("scancel", job)
    else:
        assert slurm.ended(job)["JobState"] == "COMPLETED"
        assert not slurm.drained("n1")
        log = (slurm.folder / "prolog-n1.log").read_text().splitlines()[-1]
        assert log.startswith("sdc[crit]: this host is NOT checked" if len(settings) > 1 else "sdc[warning]: the job")


def test_a_failure_stays_until_it_is_acknowledged(slurm: Slurm, tmp_path: Path) -> None:
    slurm.settle("n3", SDC_STATE=tmp_path, SDC_RESUME="acknowledged", SDC_PROLOG="verdict")
    enter(tmp_path, failed=True)
    until(lambda: slurm.drained("n3"), 60, slurm.log)
    assert slurm.node("n3")["Reason"].startswith("sdc: 20")
    here = Origin.current()
    later = msgspec.structs.replace(here, uptime=1.0, host=msgspec.structs.replace(here.host, boot="another boot"))
    enter(tmp_path, later)  # a PASS after a reboot
    enter(tmp_path)
    put_report(tmp_path, make_report("another-host"), "newer")
    with ledger_in(tmp_path) as ledger:
        ledger.begin("killed", simulated=False, level="quick")
    slurm.checked_again("n3")
    assert slurm.drained("n3")
    slurm.run("scontrol", "update", "nodename=n3", "state=resume")  # by hand, without an acknowledgement
    until(lambda: slurm.drained("n3"), 60, slurm.log)
    device = next(each for each in make_report().devices if each.index == 0)
    words = (f"serial {device.serial}", "--reason", "reseated", "--by", "a person")
    slurm.run(SDC, "fleet", "acknowledge", *words, SDC_STATE=str(tmp_path))
    slurm.checked_again("n3")
    assert slurm.drained("n3")  # the last burn-in left no result
    enter(tmp_path)
    until(lambda: not slurm.drained("n3"), 60, slurm.log)


def test_the_health_check_gives_the_reason_for_what_the_prolog_drained(slurm: Slurm, tmp_path: Path) -> None:
    slurm.run("scontrol", "update", "nodename=n3", "state=drain", "reason=Prolog error")
    enter(tmp_path, failed=True)
    slurm.settle("n3", SDC_STATE=tmp_path)
    until(lambda: slurm.node("n3").get("Reason", "").startswith("sdc: 20"), 60, slurm.log)


def test_the_health_check_leaves_to_others_what_they_drained(slurm: Slurm, tmp_path: Path) -> None:
    slurm.run("scontrol", "update", "nodename=n3", "state=drain", "reason=bad fan")
    enter(tmp_path)
    slurm.settle("n3", SDC_STATE=tmp_path, SDC_RESUME="acknowledged")
    slurm.checked_again("n3")
    assert slurm.drained("n3")
    enter(tmp_path, failed=True)
    slurm.checked_again("n3")
    assert slurm.node("n3")["Reason"].startswith("bad fan [")


@pytest.mark.parametrize(("fault", "state", "code"), [("", "COMPLETED", "0:0"), (FAULT, "FAILED", "1:0")])
def test_a_burn_in_as_a_job(slurm: Slurm, tmp_path: Path, fault: str, state: str, code: str) -> None:
    metrics = tmp_path / "sdc.prom"
    script = DEPLOY / "slurm" / "burnin.sbatch"
    job = slurm.submit(
        "--nodelist=n2", script, *SMALL.split(), *fault.split(),
        SDC_STATE=str(tmp_path / "results"), SDC_METRICS=str(metrics),
    )  # fmt: skip
    ended = slurm.ended(job)
    assert (ended["JobState"], ended["ExitCode"]) == (state, code), slurm.output(job)
    assert (tmp_path / "results" / f"burnin-{job}" / "result.json").exists()
    assert "sdc_burnin_verdict" in metrics.read_text()


def test_a_cancelled_burn_in_leaves_a_result(slurm: Slurm, tmp_path: Path) -> None:
    script, words = DEPLOY / "slurm" / "burnin.sbatch", ["--devices", "4", "--only", "ordering", "--minutes", "10"]
    job = slurm.submit("--nodelist=n2", script, *words, SDC_STATE=str(tmp_path))
    result = tmp_path / f"burnin-{job}" / "result.json"
    until(lambda: result.exists() and read(result)["rounds"] != 0, 60, lambda: slurm.output(job))
    slurm.run("scancel", job)
    until(lambda: read(result)["stopped"] == "SIGTERM", 15, lambda: slurm.output(job))
    assert read(result)["verdict"] == "inconclusive"


def test_a_pair_and_a_pool_are_jobs(slurm: Slurm, tmp_path: Path) -> None:
    """The processes find one another by what Slurm tells JAX."""
    pair = slurm.submit(
        "--nodelist=n1,n2", DEPLOY / "slurm" / "pair.sbatch", "--devices", 2, "--steps", 1, SDC_SHARED=str(tmp_path)
    )
    ended = slurm.ended(pair, 600)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), slurm.output(pair)
    found = read(tmp_path / f"pair-{pair}-0" / "pair.json")
    assert found["verdict"] == "clean"
    assert [host["processes"] for host in found["hosts"]] == [[0], [1]]  # type: ignore[attr-defined]
    pool = slurm.submit(
        DEPLOY / "slurm" / "pool.sbatch", "--devices", 3, "--steps", 1, "--fault", "bitflip,rate=1e-2",
        SDC_SHARED=str(tmp_path),
    )  # fmt: skip
    ended = slurm.ended(pool, 600)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0"), slurm.output(pool)
    found = read(tmp_path / f"pool-{pool}-0" / "pool.json")
    assert found["verdict"] == "corrupt"
    assert found["faults"]
