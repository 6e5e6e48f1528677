"""Runs `sdc` as people do: as a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

START = (sys.executable, "-c", "from sdc.tools.cli import main; main()")
LIMIT = 240.0


def start(*arguments: object) -> subprocess.Popen[str]:
    dropped = ("XLA_FLAGS", "NPROC", "JAX_NUM_CPU_DEVICES")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    return subprocess.Popen(
        [*START, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def sdc(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    return end(start(*arguments))


def summary(*arguments: object, code: int) -> dict[str, Any]:
    """Runs a command with --json and returns its summary; standard output must hold nothing else."""
    got, out, err = sdc(*arguments, "--json")
    assert got == code, err
    result = json.loads(out)
    assert isinstance(result, dict)
    return result


def lines(folder: Path, name: str = "steps.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def several(count: int, *arguments: object) -> list[subprocess.Popen[str]]:
    """The processes of one run, on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = ("--coordinator", f"127.0.0.1:{port}", "--processes", count)
    return [start(*arguments, *shared, "--process", number) for number in range(count)]


def kill_when(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """Kills a process, without a chance to tidy up, as soon as a condition holds."""
    deadline = time.monotonic() + LIMIT
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
