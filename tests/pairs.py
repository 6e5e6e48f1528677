"""Runs code in two processes over Gloo, each with four of eight simulated devices."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np


def run_pair(code: str, folder: Path) -> list[Any]:
    """Returns the last line that each process printed, read as JSON.

    The code gets the folder, the number of the process and the port as arguments.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    command = [sys.executable, "-c", code, str(folder)]
    children = [
        subprocess.Popen([*command, str(process), str(port)], env=environment, stdout=subprocess.PIPE, text=True)
        for process in range(2)
    ]
    return [json.loads(child.communicate(timeout=120)[0].splitlines()[-1]) for child in children]


def spoiled(array: jax.Array) -> jax.Array:
    """Returns an array that differs in one element of this process's last shard."""
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    shards[-1][0, 0] += 1
    devices = [shard.device for shard in array.addressable_shards]
    parts = [jax.device_put(part, device) for part, device in zip(shards, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
