"""The files of tools/deploy: their commands exist, and each script handles every way in which sdc can end."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdc.burnin.exports import metrics
from sdc.burnin.judgement import BURN_IN
from sdc.burnin.results import RESULT
from sdc.tools.parse import COMMANDS, parse

from ..reports import make_finding, make_report

DEPLOY = Path(__file__).resolve().parents[2] / "tools" / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix in (".sh", ".sbatch")]
SOURCED = ("ask.sh",)
VARIABLES = {
    "$SDC_MAX_AGE": "7d", "$SDC_STATE": "state", "$run": "run", "${flags[@]}": "", "$@": "", "$SLURM_NTASKS": "3",
    "$SDC_METRICS": "sdc.prom", "__DEVICES__": "8",
}  # fmt: skip


def named(path: Path) -> str:
    return path.relative_to(DEPLOY).as_posix()


def commands() -> Iterator[tuple[str, str]]:
    """Yields every command line of sdc in the files, with its file."""
    for path in FILES:
        text = path.read_text().replace("\\\n", " ")
        for match in re.finditer(r'(?:"\$SDC"|jax-sdc) ([a-z]+(?: [^\n;)]*|$))', text, re.MULTILINE):
            words = match[1]
            if words.split()[0] in COMMANDS:
                yield named(path), re.split(r" 2>| &$", words)[0]
        for match in re.finditer(r"sbatch \S+ (?:\S+ )?(burnin|pair|pool)\.sbatch (.*)", text):
            yield named(path), f"{match[1]} {match[2]}"
        for match in re.finditer(r"burnin\.sh, \S+\]\n +args: \[(.*)\]", text):
            yield named(path), f"burnin {match[1].replace(',', ' ')}"
        for match in re.finditer(r"flags\+?=\((.*?)\)", text):
            yield named(path), f"burnin {match[1]} --run run"


@pytest.mark.parametrize(("file", "line"), list(commands()))
def test_commands_parse(file: str, line: str) -> None:
    for name, value in VARIABLES.items():
        line = line.replace(name, value)
    words = [word for word in shlex.split(line) if word]
    assert not [word for word in words if "$" in word]
    parse(words)


def test_all_commands_were_found() -> None:
    found = {(file, line.split()[0]) for file, line in commands()}
    expected = [
        ("slurm/prolog.sh", "burnin"), ("lib/ask.sh", "verdict"),
        ("slurm/burnin.sbatch", "burnin"), ("slurm/pair.sbatch", "pair"), ("slurm/pool.sbatch", "pool"),
        ("kubernetes/burnin.sh", "burnin"), ("kubernetes/burnin-job.yaml", "burnin"),
        ("container/Containerfile", "burnin"),
    ]  # fmt: skip
    assert not set(expected) - found


@pytest.mark.parametrize("path", SCRIPTS, ids=named)
def test_scripts_are_valid(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    shell = "sh" if first == "#!/bin/sh" else "bash"
    assert subprocess.run([shell, "-n", str(path)], check=False).returncode == 0
    assert os.access(path, os.X_OK) == (path.name not in SOURCED)


def test_all_files_are_installed() -> None:
    assert all(len(path.relative_to(DEPLOY).parts) == 2 for path in FILES)  # deploy/*/* in setup.cfg
    assert "sdc.tools = deploy/*/*\n" in (DEPLOY.parents[1] / "setup.cfg").read_text()


def test_job_and_configuration_say_what_the_codes_mean() -> None:
    job = yaml.safe_load((DEPLOY / "kubernetes" / "burnin-job.yaml").read_text())["spec"]
    rules = {rule["action"]: rule.get("onExitCodes", {}).get("values") for rule in job["podFailurePolicy"]["rules"]}
    assert rules == {"FailJob": [1, 2], "Ignore": None, "Count": [3, 4]}
    pod = job["template"]["spec"]
    assert [container["name"] for container in pod["initContainers"]] == ["prepare", "begin", "burnin"]
    for container in (*pod["initContainers"], *pod["containers"]):
        mounts = [mount["name"] for mount in container["volumeMounts"]]
        assert ("token" in mounts) == (container["image"] == "__KUBECTL_IMAGE__")
    role = next(
        part
        for part in yaml.safe_load_all((DEPLOY / "kubernetes" / "rbac.yaml").read_text())
        if part["kind"] == "ClusterRole"
    )
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}]
    monitor = json.loads((DEPLOY / "node-problem-detector" / "sdc-monitor.json").read_text())
    assert monitor["pluginConfig"]["skip_initial_status"]  # no problem is ruled out before the first check
    assert [rule["condition"] for rule in monitor["rules"]] == [each["type"] for each in monitor["conditions"]]


def test_alerts_are_on_metrics_that_there_are() -> None:
    report = make_report(findings=[make_finding()])
    known = re.findall(r"^# TYPE (\w+)", metrics(report), re.MULTILINE)
    groups: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    rules = groups[0]["rules"]
    used = [name for rule in rules for name in re.findall(r"sdc_\w+", rule["expr"])]
    assert len(used) >= 8
    assert set(used) <= set(known)
    for rule in rules:
        assert rule["expr"].count("sdc_burnin") == rule["expr"].count('{simulated="false"')


SAID = {
    "pass": (0, "PASS  all well  (2026-01-05T00:00:00+00:00, state/result.json)"),
    "fail": (1, "FAIL  host gpu-17, device 3: 'wrong'  (2026-01-05T00:00:00+00:00, state/result.json)"),
    "simulated": (1, "SIMULATION  FAIL  host gpu-17  (2026-01-05T00:00:00+00:00, state/result.json)"),
    "inconclusive": (3, "INCONCLUSIVE  there is no result in state; run sdc burnin"),
    "under way": (3, "INCONCLUSIVE  the burn-in that began at 2026-01-05T00:00:00+00:00 is under way (PID 17)"),
    "usage": (2, "sdc: error: --max-age banana: expected a number"),
    "cannot start": (1, "Traceback (most recent call last):\nModuleNotFoundError: No module named 'sdc'"),
    "contradiction": (0, "FAIL  host gpu-17  (2026-01-05T00:00:00+00:00, state/result.json)"),
    "killed": (None, ""),
    "missing": (None, ""),
    "late": (None, ""),
}  # fmt: skip
BROKEN = ("usage", "cannot start", "contradiction", "killed", "missing", "late")
NODE = "NodeName=gpu-17 Arch=x86_64 State={state} ThreadsPerCore=1{reason}"


class Host:
    """A host with fake sdc and scontrol."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.settings = folder, {"SDC_STATE": str(folder / "state"), "SDC_ASK_LIMIT": "1"}
        self.made(
            "scontrol", f'echo "$*" >>{folder}/calls\n[[ $* == *show* ]] && cat {folder}/node; exit ${{FAILING:-0}}'
        )
        self.state("IDLE")

    def made(self, name: str, text: str) -> None:
        file = self.folder / name
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)

    def says(self, how: str) -> None:
        code, text = SAID[how]
        (self.folder / "line").write_text(text + "\n")
        ending = {"killed": "kill -9 $$", "late": "exec sleep 20"}.get(how, f"cat {self.folder}/line; exit {code}")
        self.made("sdc", f'echo "$*" >>{self.folder}/asked\n{ending}')
        if how == "missing":
            (self.folder / "sdc").unlink()

    def state(self, state: str, reason: str = "") -> None:
        said = f" Reason={reason} [root@2026-01-05T00:00:01]" if reason else ""
        (self.folder / "node").write_text(NODE.format(state=state, reason=said) + "\n")

    def run(self, script: str, *words: str, **environment: str) -> tuple[int, str]:
        """Runs a script; returns its exit code and output."""
        settings = self.folder / "settings"
        settings.write_text("".join(f"{key}={shlex.quote(value)}\n" for key, value in self.settings.items()))
        done = subprocess.run(
            [str(DEPLOY / script), *words], text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={
                "PATH": f"{self.folder}:/usr/bin:/bin", "SDC_SETTINGS": str(settings), "SLURMD_NODENAME": "gpu-17",
                **environment,
            },
        )  # fmt: skip
        return done.returncode, done.stdout

    def updates(self) -> list[str]:
        """Returns the updates that scontrol was asked for."""
        calls = self.folder / "calls"
        return [line for line in calls.read_text().splitlines() if "update" in line] if calls.exists() else []


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("how", SAID)
def test_the_prolog_drains_for_a_fail_alone(host: Host, how: str) -> None:
    """By its exit code: a prolog must not call scontrol."""
    host.says(how)
    code, said = host.run("slurm/prolog.sh")
    assert code == (1 if how in ("fail", "simulated") else 0)
    assert not (host.folder / "calls").exists()
    assert ("drains this node" in said, "SIMULATION" in said) == (code == 1, how == "simulated")
    assert ("NOT checked" in said) == (how in BROKEN)
    if how != "missing":
        assert (host.folder / "asked").read_text() == "verdict --max-age 7d\n"  # the ledger


def test_policy_of_the_prolog(host: Host) -> None:
    host.settings["SDC_DRAIN_ON"] = "FAIL INCONCLUSIVE"
    for how, code in (("inconclusive", 1), ("under way", 0), ("usage", 0)):
        host.says(how)
        assert host.run("slurm/prolog.sh")[0] == code


@pytest.mark.parametrize("how", ["pass", "fail", "simulated", "inconclusive", "usage", "killed", "missing"])
def test_a_burn_in_in_the_prolog(host: Host, how: str) -> None:
    host.settings |= {"SDC_PROLOG": "burnin", "SDC_BURNIN_FLAGS": "--devices gpu:8"}
    old, *evidence = (host.folder / "state" / f"job-{number}" for number in (1, 2, 3))
    for folder, findings in zip((old, *evidence), (0, 0, 1), strict=True):
        folder.mkdir(parents=True)
        BURN_IN.write(folder / RESULT, make_report(findings=[make_finding()] * findings))
    (evidence[0] / "bundle.tar.gz").touch()
    for folder in (old, *evidence):
        os.utime(folder, (0, 0))
    host.says(how)
    code, said = host.run("slurm/prolog.sh", SLURM_JOB_ID="17")
    assert code == (how in ("fail", "simulated"))
    assert ("NOT checked" in said) == (how in BROKEN)
    assert not old.exists()
    assert all(folder.exists() for folder in evidence)
    if how != "missing":
        burnin, *verdict = (host.folder / "asked").read_text().splitlines()
        run = rf"{host.folder}/state/job-17-\S+"
        assert re.fullmatch(rf"burnin --level quick --run {run} --devices gpu:8", burnin)
        assert re.fullmatch(rf"verdict --max-age 7d {run}\nverdict --max-age 7d", "\n".join(verdict))


@pytest.mark.parametrize(
    ("code", "result", "ledger", "found"),
    [
        (0, "pass", "fail", "fail"),
        (3, "inconclusive", "fail", "fail"),
        *((code, "inconclusive", "fail", "fail") for code in (2, 124, 127, 134, 139, 143)),
        (137, "missing", "fail", "fail"),
        (1, "fail", "inconclusive", "fail"),  # the ledger cannot be written
        (1, "simulated", "pass", "simulated"),
        (0, "pass", "inconclusive", "inconclusive"),
        (0, "inconclusive", "pass", "inconclusive"),  # a rehearsal
        (137, "inconclusive", "inconclusive", "inconclusive"),
        (1, "pass", "pass", "usage"),  # Python cannot start
        (2, "inconclusive", "pass", "usage"),
        (0, "pass", "usage", "usage"),
    ],
)
def test_the_gravest_word_wins_whatever_the_exit_code(
    host: Host, code: int, result: str, ledger: str, found: str
) -> None:
    host.settings |= {"SDC_PROLOG": "burnin"}
    says = [f"echo {shlex.quote(SAID[how][1])}; exit {SAID[how][0]}" for how in (result, ledger)]
    host.made("sdc", f"[[ $1 == burnin ]] && exit {code}\n[[ $4 ]] && {{ {says[0]}; }}\n{says[1]}")
    drains, said = host.run("slurm/prolog.sh")
    assert drains == (found in ("fail", "simulated"))
    assert ("NOT checked" in said) == (found == "usage")
    assert ("SIMULATION" in said) == (found == "simulated")
    assert host.run("kubernetes/burnin.sh", str(host.folder / "verdict"))[0] == 0
    word, simulated, *_ = (host.folder / "verdict").read_text().splitlines()
    assert word == {"fail": "FAIL", "simulated": "FAIL", "inconclusive": "INCONCLUSIVE", "usage": "BROKEN"}[found]
    assert simulated == str(found == "simulated").lower()


@pytest.mark.parametrize("ending", ["exit 1", "exec sleep 20"])
def test_a_full_disk_does_not_lose_a_fail(host: Host, ending: str) -> None:
    """Not even if the prolog ends the burn-in at its limit."""
    host.settings |= {"SDC_PROLOG": "burnin", "SDC_BURNIN_LIMIT": "1"}
    printed, verdict = (shlex.quote(SAID[how][1]) for how in ("fail", "inconclusive"))
    full = f"{{ echo {printed}; echo cannot write >&2; {ending}; }}"
    host.made("sdc", f"[[ $1 == burnin ]] && {full}\necho {verdict}; exit 3")
    code, said = host.run("slurm/prolog.sh")
    assert code == 1
    assert "drains this node: FAIL  host gpu-17" in said
    if ending == "exit 1":  # in Kubernetes, the kubelet ends a pod
        assert host.run("kubernetes/burnin.sh", str(host.folder / "verdict"))[0] == 0
        assert (host.folder / "verdict").read_text().startswith("FAIL\n")


def test_only_the_settings_name_another_ledger(host: Host) -> None:
    host.made("sdc", f'echo "${{SDC_LEDGER-none}}" >>{host.folder}/ledgers')
    host.run("slurm/health-check.sh", SDC_LEDGER="/home/me/ledger.sqlite")
    assert {*(host.folder / "ledgers").read_text().split()} == {"none"}


@pytest.mark.parametrize("script", ["burnin", "pair", "pool"])
def test_jobs_use_the_ledger_that_the_health_check_reads(host: Host, script: str) -> None:
    """Unless the job's environment names another one."""
    host.made("srun", 'shift\n"$@"')
    host.made("sdc", f'echo "$SDC_STATE" >>{host.folder}/states')
    job = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "3", "SLURM_SUBMIT_DIR": str(host.folder)}
    other = host.folder / "other"
    for environment in ({}, {"SDC_STATE": str(other)}):
        assert host.run(f"slurm/{script}.sbatch", **job, **environment)[0] == 0
    states = (host.folder / "states").read_text().splitlines()
    assert states == [host.settings["SDC_STATE"]] * 2 + [str(other)] * 2


@pytest.mark.parametrize("writable", [True, False])
def test_a_burn_in_without_a_place_for_metrics_runs_nevertheless(host: Host, writable: bool) -> None:
    host.says("pass")
    host.made("srun", 'shift\n"$@"')
    metrics = host.folder / "sdc.prom" if writable else host.folder / "nowhere" / "sdc.prom"
    state = {"SLURM_JOB_ID": "17", "SDC_STATE": str(host.folder / "state"), "SDC_METRICS": str(metrics)}
    code, said = host.run("slurm/burnin.sbatch", "--devices", "gpu:8", **state)
    burnin, _ = (host.folder / "asked").read_text().splitlines()
    assert (code, "--prometheus" in burnin, "nowhere is not writable" in said) == (0, writable, not writable)


@pytest.mark.parametrize("how", SAID)
def test_the_health_check_drains_for_a_fail_alone(host: Host, how: str) -> None:
    host.says(how)
    _, said = host.run("slurm/health-check.sh")
    assert len(host.updates()) == (how in ("fail", "simulated"))
    assert ("NOT checked" in said) == (how in BROKEN)


@pytest.mark.parametrize(
    ("reason", "policy", "resumes"),
    [
        ("sdc: 2026-01-04T23:59:59+00:00 FAIL  host gpu-17", "acknowledged", True),
        ("sdc: 2026-01-04T23:59:59+00:00 FAIL  host gpu-17", "never", False),
        ("bad fan", "acknowledged", False),
    ],
)
def test_the_health_check_resumes_what_it_drained(host: Host, reason: str, policy: str, resumes: bool) -> None:
    host.settings["SDC_RESUME"] = policy
    host.state("IDLE+DRAIN", reason)
    for how in ("pass", "inconclusive", "fail"):
        host.says(how)
        host.run("slurm/health-check.sh")
        assert host.updates() == ["update nodename=gpu-17 state=resume"] * resumes


@pytest.mark.parametrize("reason", ["bad fan", "Prolog error"])
def test_who_drained_first_keeps_the_reason(host: Host, reason: str) -> None:
    """Except for the reason that Slurm gives if the prolog fails."""
    host.says("fail")
    host.state("IDLE+DRAIN", reason)
    host.run("slurm/health-check.sh")
    assert len(host.updates()) == (reason == "Prolog error")
    code, said = host.run("slurm/health-check.sh", FAILING="1")  # slurmctld does not answer
    assert (code, "scontrol failed" in said) == (1, reason == "Prolog error") or reason == "bad fan"


@pytest.mark.parametrize("how", sorted(set(SAID) - {"late"}))
def test_codes_of_node_problem_detector_and_nagios(host: Host, how: str) -> None:
    host.says(how)
    known = {"pass": (0, 0), "fail": (1, 2), "simulated": (1, 2)}
    detector, nagios = known.get(how, (2, 3))
    code, said = host.run("node-problem-detector/check.sh")
    assert code == detector
    assert len(said.splitlines()) == 1
    code, said = host.run("nagios/check_sdc.sh")
    assert code == nagios
    assert said.startswith(f"SDC {('OK', '', 'CRITICAL', 'UNKNOWN')[nagios]} - ")


def test_a_burn_in_for_each_node(host: Host) -> None:
    host.made("kubectl", f'[[ $1 == get ]] && printf "node/a\\nnode/b\\n" || {{ cat; echo ---; }} >>{host.folder}/made')
    assert host.run("kubernetes/each-node.sh", "pool=gpu", "r/sdc:1", "r/kubectl:1", "8")[0] == 0
    jobs = [job for job in yaml.safe_load_all((host.folder / "made").read_text()) if job]
    assert [job["metadata"]["name"] for job in jobs] == ["sdc-burnin-a", "sdc-burnin-b"]
    assert "__" not in (host.folder / "made").read_text()
    assert host.run("kubernetes/each-node.sh")[0] == 2


def test_an_api_server_that_refuses_is_no_verdict(host: Host) -> None:
    host.made("kubectl", "exit 1")
    assert host.run("kubernetes/node-verdict.sh", "begin", NODE_NAME="a")[0] == 4


def test_the_dashboard_asks_for_metrics_that_burn_ins_write() -> None:
    panels = json.loads((DEPLOY / "prometheus" / "dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"sdc_burnin_\w+", query)}
    assert asked <= set(re.findall(r"^# HELP (sdc_burnin_\w+)", metrics(make_report()), re.MULTILINE))
    assert all(query.count("sdc_burnin_") == query.count('{simulated="$simulated"') for query in queries)
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in panels]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells))  # no panel covers another
    assert max(x for x, _ in cells) < 24
