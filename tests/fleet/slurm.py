"""A Slurm of three nodes on this host, which is gone after the test: its own munge key, ports and folders.

Debian builds slurmd so that several run on one host. What needs cgroups is left out (proctrack/linuxproc, task/none).
JAX finds its peers by the names of the nodes, so the daemons live in a mount namespace in which these mean this host.
"""

import atexit
import functools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "tools" / "deploy"
SDC = Path(sys.executable).with_name("sdc")
NODES = ("n1", "n2", "n3")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
    "TMPDIR": tempfile.mkdtemp(),  # locks: the burn-in of somebody else on this host would have this one refused
    "SDC_LEDGER": "",  # the ledger of a node is in its SDC_STATE
}
atexit.register(shutil.rmtree, ENVIRONMENT["TMPDIR"], ignore_errors=True)
CHECK_EVERY = 5
"""Seconds between two health checks of a node."""
SMALL = "--devices 4 --only ordering --rounds 1"
"""Flags of a burn-in of seconds."""
FAULT = "--fault bitflip,rate=1e-3"
WRAPPER = """#!/bin/bash
export SDC_SETTINGS={folder}/settings/$SLURMD_NODENAME
{script} 2>>{folder}/{name}-$SLURMD_NODENAME.log
code=$?
echo $code >>{folder}/{name}-$SLURMD_NODENAME.codes
exit $code
"""
CONFIGURATION = """
ClusterName=rehearsal
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
KillWait=30
Prolog={folder}/prolog
PrologFlags=Alloc
SchedulerParameters=nohold_on_prolog_fail,sched_min_interval=0,sched_interval=2
HealthCheckProgram={folder}/health-check
HealthCheckInterval={every}
HealthCheckNodeState=ANY
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """A cluster that is running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hosts = folder / "hosts"
        hosts.write_text(Path("/etc/hosts").read_text() + f"\n127.0.0.1 {' '.join(NODES)}\n")
        mount = f"mount --bind {shlex.quote(str(hosts))} /etc/hosts && echo ready && exec sleep infinity"
        self._room = subprocess.Popen(["unshare", "--mount", "sh", "-c", mount], stdout=subprocess.PIPE, text=True)
        assert self._room.stdout is not None
        assert self._room.stdout.readline() == "ready\n", "a mount namespace needs root"
        for name in ("state", "settings"):
            (folder / name).mkdir()
        for name, script in (("prolog", "prolog.sh"), ("health-check", "health-check.sh")):
            wrapper = folder / name
            wrapper.write_text(WRAPPER.format(folder=folder, script=DEPLOY / "slurm" / script, name=name))
            wrapper.chmod(0o755)
        ports = free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(folder=folder, host=host, port=ports[0], every=CHECK_EVERY)
        for weight, (name, port) in enumerate(zip(NODES, ports[1:], strict=True), start=1):
            (folder / f"spool-{name}").mkdir()
            text += f"NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} Weight={weight} RealMemory=1000\n"
            self.settle(name)
        (folder / "slurm.conf").write_text(text)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        self._munge = [f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
        self.run("munged", "--force", *self._munge, *files)
        self.run("slurmctld", "-c")
        for name in NODES:
            self.run("slurmd", "-N", name)
        until(lambda: all(self.node(name)["State"] == "IDLE" for name in NODES), 30, self.log)

    def end(self) -> None:
        """Ends the daemons and whatever they started."""
        for name in ("slurmctld.pid", *(f"slurmd-{node}.pid" for node in NODES), "munge.pid"):
            file = self.folder / name
            if file.exists():
                pid = int(file.read_text())
                os.kill(pid, signal.SIGTERM)
                until(functools.partial(_gone, pid), 30)
        self._room.kill()
        self._room.communicate()

    def run(self, *words: object, **more: str) -> str:
        """Output of a command of Slurm."""
        own = {"SLURM_CONF": f"{self.folder}/slurm.conf", "SDC": str(SDC), **ENVIRONMENT}
        command = ["nsenter", "--target", str(self._room.pid), "--mount", *map(str, words)]
        done = subprocess.run(
            command, env={**os.environ, **own, **more}, cwd=self.folder, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert not done.returncode, f"{words}: {done.stdout}{self.log()}"
        return done.stdout

    def settle(self, node: str, **settings: object) -> None:
        """Writes the settings of a node's scripts."""
        chosen = {"SDC": SDC, "SDC_STATE": self.folder / f"results-{node}", **settings}
        lines = [f"{key}={shlex.quote(str(value))}\n" for key, value in chosen.items()]
        exported = {**ENVIRONMENT, "SLURM_CONF": f"{self.folder}/slurm.conf"}
        exports = [f"export {key}={shlex.quote(value)}\n" for key, value in exported.items()]
        (self.folder / "settings" / node).write_text("".join([*lines, *exports]))

    def node(self, name: str) -> dict[str, str]:
        return fields(self.run("scontrol", "--oneliner", "show", "node", name), "Reason")

    def drained(self, name: str) -> bool:
        return "DRAIN" in self.node(name)["State"]

    def job(self, number: str) -> dict[str, str]:
        return fields(self.run("scontrol", "--oneliner", "show", "job", number))

    def submit(self, *words: object, **environment: str) -> str:
        """Number of a new job."""
        output = self.folder / "job-%j.out"
        return self.run("sbatch", "--parsable", f"--output={output}", *words, **environment).split()[0]

    def ended(self, number: str, limit: float = 60) -> dict[str, str]:
        """A job that has ended."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(lambda: self.job(number)["JobState"] in over, limit, lambda: f"{self.job(number)}{self.log()}")
        return self.job(number)

    def output(self, number: str) -> str:
        file = self.folder / f"job-{number}.out"
        return file.read_text() if file.exists() else ""

    def resume(self, name: str) -> None:
        self.run("scontrol", "update", f"nodename={name}", "state=resume")
        until(lambda: self.node(name)["State"] in ("IDLE", "ALLOCATED", "MIXED"), 30, lambda: str(self.node(name)))

    def checked_again(self, name: str) -> None:
        """Waits until a health check has begun and ended after now."""
        file = self.folder / f"health-check-{name}.codes"
        count = len(file.read_text().splitlines()) if file.exists() else 0
        until(lambda: file.exists() and len(file.read_text().splitlines()) >= count + 2, 60, self.log)

    def log(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("job-*.out")]
        return "".join(f"\n--- {file.name}\n{file.read_text()[-3000:]}" for file in files)


def fields(text: str, last: str | None = None) -> dict[str, str]:
    """What scontrol prints as NAME=VALUE; the value of the last name may have blanks."""
    text, _, rest = text.partition(f" {last}=") if last else (text, "", "")
    found = dict(word.split("=", 1) for word in text.split() if "=" in word)
    return {**found, last: rest.strip()} if last else found


def until(ready: Callable[[], bool], limit: float, told: Callable[[], str] = str) -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + limit
    while not ready():
        assert time.monotonic() < deadline, f"not so after {limit:g} s: {told()}"
        time.sleep(0.3)


def free_ports(count: int) -> Sequence[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def burnin(folder: Path, *words: str) -> int:
    """Exit code of a small burn-in with its result in a folder."""
    command = [str(SDC), "burnin", "--run", str(folder), *SMALL.split(), *words]
    return subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, check=False).returncode


def _gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()
