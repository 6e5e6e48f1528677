"""Environments are described, compared, and prepared before JAX starts."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from sdc.records.determinism import (
    GPU_FLAGS,
    check_deterministic,
    differences,
    environment,
    prepare,
    program_fingerprint,
)


def test_equal_environments_do_not_differ() -> None:
    own = environment()
    assert differences([own, json.loads(json.dumps(own))]) == ()
    assert own["packages"]["jax"] == jax.__version__


def test_what_one_does_not_have_is_told_once() -> None:
    assert [each.describe() for each in differences([{"options": None}, {"options": {"x": {"y": 4}}}])] == [
        each.describe() for each in differences([{}, {"options": {"x": {"y": 4}}}])
    ]
    assert len(differences([{"options": None}, {"options": {"x": {"y": 4}}}])) == 1
    assert len(differences([{"options": None}, {"options": 3}])) == 1


def test_differences_name_key_processes_and_values() -> None:
    a = {"packages": {"jax": "1"}, "seed": 0}
    more, jax_version = differences([a, a, {"packages": {"jax": "2"}, "seed": 0, "more": True}])
    assert (more.key, more.values) == ("more", ("nothing", "nothing", True))
    assert (jax_version.key, jax_version.values) == ("packages.jax", ("1", "1", "2"))
    assert more.describe() == "more: process 0 has nothing, process 2 has True"
    assert jax_version.describe(("here", "there", "elsewhere")) == "packages.jax: here 1, elsewhere 2"
    with pytest.raises(ValueError, match="zip"):
        more.describe(("here", "there"))


def test_fingerprints_tell_programs_apart() -> None:
    x = jnp.ones(3)
    a, b, c = (program_fingerprint(jax.jit(f).lower(x)) for f in (jnp.sin, jnp.cos, jnp.sin))
    assert a == c != b


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    start = "import os, jax; from sdc.records.determinism import prepare\n"
    variables = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return subprocess.run(
        [sys.executable, "-c", start + code], env={**variables, **environment}, capture_output=True, text=True
    )


def test_prepare_sets_flags_devices_and_threads() -> None:
    code = (
        "prepare(cpu_devices=3, cpu_threads=5, only_cpu=True)\n"
        "print(len(jax.devices()), os.environ['NPROC'], os.environ['XLA_FLAGS'])"
    )
    devices, threads, *flags = run(code, XLA_FLAGS="--xla_gpu_autotune_level=0").stdout.split()
    assert (devices, threads) == ("3", "5")
    assert sorted(flags) == sorted(GPU_FLAGS)


@pytest.mark.parametrize("devices", [0, -1, 1025, 2**31, 10**30])
def test_more_devices_than_a_process_can_have(devices: int) -> None:
    with pytest.raises(ValueError, match=f"cpu_devices={devices}: expected a number from 1 to 1,024 for one process"):
        prepare(cpu_devices=devices)


def test_contrary_flags_are_refused() -> None:
    result = run("prepare(cpu_devices=1)", XLA_FLAGS="--xla_gpu_deterministic_ops=false")
    assert "remove the wrong flag" in result.stderr


def test_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XLA_FLAGS", "NPROC"):  # restored afterwards
        monkeypatch.setenv(variable, "")
    jax.devices()
    with pytest.raises(ValueError, match="start the command in a new process"):
        prepare(cpu_devices=1)


def test_a_gpu_that_was_started_without_the_flags_is_refused() -> None:
    for platform in ("cpu", "tpu"):
        check_deterministic({"platform": platform, "xla_flags": ""})
    check_deterministic({"platform": "gpu", "xla_flags": " ".join(["--xla_dump_to=x", *GPU_FLAGS])})
    for flag in GPU_FLAGS:
        flags = " ".join(other for other in GPU_FLAGS if other != flag)
        with pytest.raises(ValueError, match=rf"XLA_FLAGS lacks {flag}, .* call sdc\.records\.prepare"):
            check_deterministic({"platform": "gpu", "xla_flags": flags})
