"""Runs of several processes that start at unequal speed, lose each other, or are not comparable."""

import signal
import time
from pathlib import Path

import pytest

from sdc.records import read_record
from sdc.train import Checkpoints
from tests.pairs import run_pair
from tests.tools.command import sdc, several, start, wait
from tests.tools.test_processes import TWIN

# Gloo's collectives give up after 30 seconds; process 1 compiles the step for longer.
UNEQUAL = """
import json, os, sys, time
from jax._src import compiler

folder, process, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
compiled, slow = compiler.compile_or_get_cached, process == 1

def compile_slowly(backend, computation, *args, **options):
    global slow
    if slow and "jit_on_mesh" in str(computation.operation.attributes["sym_name"]):
        slow = False
        time.sleep(33)
    return compiled(backend, computation, *args, **options)

compiler.compile_or_get_cached = compile_slowly

from sdc.records import prepare
from sdc.train import Peers, Twins, Workload, joined, run

def lost(why):
    print(json.dumps(why), flush=True)
    os._exit(3)

def ready(processes):
    prepare(cpu_devices=1, cpu_threads=4, only_cpu=True)

peers = Peers(coordinator=f"127.0.0.1:{port}", processes=2, process=process)
with joined(peers, ready, lost):
    record = run(Twins(workload=Workload(config="tiny"), steps=1, folder=f"{folder}/run"))
print(json.dumps([slow, record and len(record.lines)]))
"""


def test_processes_that_compile_at_unequal_speed_meet_before_the_first_collective(tmp_path: Path) -> None:
    assert run_pair(UNEQUAL, tmp_path) == [[False, 1], [False, None]]


# A save that fails because the peer was lost in one of its collectives
LOST = """
import json, os, signal, sys, time

folder, process, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]

from sdc.train import Peers, joined
from sdc.train.checkpoints import NotWritten

def lost(why):
    print(json.dumps(why), flush=True)
    os._exit(3)

with joined(Peers(coordinator=f"127.0.0.1:{port}", processes=2, process=process), lambda processes: None, lost):
    if process == 1:
        print("null", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    collective = ValueError("UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer")
    raise NotWritten("cannot write checkpoint 3") from collective
"""


def test_a_save_that_fails_because_a_peer_was_lost_says_so(tmp_path: Path) -> None:
    why, nothing = run_pair(LOST, tmp_path)
    assert why.startswith("process 1 was lost (no heartbeat for ")
    assert nothing is None


def messages(err: str) -> list[str]:
    """Returns the last messages of a command, without progress, waiting, and the runtime's log.

    The parent of all commands has set a level of that log that a command would not choose.
    """
    lines = [line for line in err.splitlines() if not line.startswith(("step ", "injection ", "waiting "))]
    return [line for line in lines if "coordination_service_agent.cc" not in line]


@pytest.mark.parametrize(("victim", "how"), [(0, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGKILL)])
def test_a_lost_peer_ends_the_other(victim: int, how: signal.Signals, tmp_path: Path) -> None:
    processes = several(2, *TWIN[:-1], 100_000, "--run", tmp_path / "run", "--timeout", 10)
    steps = tmp_path / "run" / "steps.jsonl"
    wait(processes[victim], lambda: steps.is_file() and steps.stat().st_size > 0)
    processes[victim].send(how)
    sent = time.monotonic()
    code, _, err = processes[1 - victim].end()
    assert time.monotonic() - sent < 15
    processes[victim].kill()
    assert code == 3, err[-2000:]
    (line,) = messages(err)
    assert line.startswith(f"sdc: inconclusive: process {victim} was lost")
    assert f"The record is in {tmp_path / 'run'}; continue with: sdc twin " in line
    assert line.endswith(f"--process {1 - victim} --resume")


def test_a_signal_to_one_process_ends_all_after_the_same_step(tmp_path: Path) -> None:
    processes = several(2, *TWIN[:-1], 100_000, "--run", tmp_path / "run")
    steps = tmp_path / "run" / "steps.jsonl"
    wait(processes[0], lambda: steps.is_file() and steps.stat().st_size > 0)
    processes[1].send(signal.SIGTERM)
    for process in processes:
        code, _, err = process.end()
        assert code == 3, err[-2000:]
        (line,) = messages(err)
        assert line.startswith("sdc: inconclusive: interrupted by SIGTERM. The record is in ")
    record = read_record(tmp_path / "run", "twin")
    assert not record.ended
    assert Checkpoints(tmp_path / "run" / "checkpoints", every=1).steps == [len(record.lines)]
    assert not (tmp_path / "run" / "lock.json").exists()


@pytest.mark.parametrize(
    ("command", "how"),
    [
        (TWIN, signal.SIGTERM),
        (("campaign", "--config", "mini", "--injections", 9, "--where", "probes"), signal.SIGINT),
    ],
)
def test_a_signal_while_compiling_is_not_lost(command: tuple[object, ...], how: signal.Signals, tmp_path: Path) -> None:
    process = start(*command, "--run", tmp_path / "run")
    wait(process, (tmp_path / "run" / "manifest.json").is_file)
    process.send(how)
    code, _, err = process.end()
    assert code == 3, err[-2000:]
    (line,) = messages(err)
    assert line.startswith(f"sdc: inconclusive: interrupted by {how.name}")
    assert line.endswith("--resume")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / "lock.json").exists()


def test_a_peer_that_does_not_come(tmp_path: Path) -> None:
    flags = ("--coordinator", "127.0.0.1:9", "--processes", 2, "--process", 1, "--timeout", 3)
    code, _, err = sdc(*TWIN, *flags, "--run", tmp_path / "run")
    assert code == 3
    assert (
        "a peer did not connect within 3 s at 127.0.0.1:9 (127.0.0.1 is an address that each host uses for itself"
        in err
    )
    assert not (tmp_path / "run").exists()


def test_a_coordinator_whose_name_has_no_address_yet_is_awaited(tmp_path: Path) -> None:
    """This happens while a cluster starts; the reason for waiting is printed at once."""
    flags = ("--coordinator", "gpu-9.invalid:4321", "--processes", 2, "--process", 1, "--timeout", 3)
    code, _, err = sdc(*TWIN, *flags, "--run", tmp_path / "run")
    assert code == 3
    first, last = err.splitlines()
    assert first.startswith(
        "waiting for the other processes at gpu-9.invalid:4321 (gpu-9.invalid cannot be resolved on"
    )
    assert last.startswith(
        "sdc: inconclusive: a peer did not connect within 3 s at gpu-9.invalid:4321 (gpu-9.invalid cannot be resolved"
    )
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
