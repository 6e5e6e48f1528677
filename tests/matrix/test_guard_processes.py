"""A guard in two processes: they check the same steps, healthy ones are quiet, and a bit that another program flips in
the memory of one of them is found."""

from pathlib import Path

import pytest

from tests.pairs import run_pair

CHILD = """
import ctypes, json, os, subprocess, sys
import jax
folder, process, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import sdc
from sdc.guarding import watch as watching
FORM = open(f"{folder}/form").read()

def free(work):
    work()
    return 0.0

watching.seconds_of = free  # checks that cost nothing run at every step
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))

def loss(w, x):
    return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2)

def plain(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, {"loss": value}

def of_device(w, x):
    value, gradient = lax.pmean(jax.value_and_grad(loss)(w, x), "data")
    return w - 0.1 * gradient, {"loss": value}

mapped = jax.shard_map(of_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
step = jax.jit({"plain": plain, "mapped": mapped}[FORM])

def placed(x, spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

draw = np.random.default_rng(0)
w = placed(draw.normal(size=(3, 16, 16)).astype(np.float32) / 4, P())
assert sdc.first_nonfinite(step)(w, placed(np.ones((16, 16), np.float32), P("data")))[1] is None
layers = [*sdc.guarding.layers_for(mesh, "data"), sdc.guarding.Replay()]
watch = sdc.guard(step, mesh, budget=0.9, layers=layers)
for number in range(120):
    w, _ = watch(w, placed(draw.normal(size=(16, 16)).astype(np.float32), P("data")))
    jax.block_until_ready(w)
    watch.idle()
    if number == 59:
        quiet = watch.report()
    if number > 60 and process == 1 and number % 5 == 0:
        shard = w.addressable_shards[0].data
        place = shard.unsafe_buffer_pointer() + 4 * int(draw.integers(shard.size)) + 1
        if os.geteuid() == 0:  # only root may write into the memory of a process that it did not start
            flip = f"import os; from tests.storms.flips import flip; flip(os.getppid(), {place}, 4)"
            subprocess.run([sys.executable, "-c", flip], check=True)
        else:
            ctypes.cast(place, ctypes.POINTER(ctypes.c_uint8))[0] ^= 1 << 4
report = watch.report()
print(json.dumps({
    "quiet": [str(one) for one in quiet.findings], "checks": [[one.name, one.runs] for one in report.layers],
    "found": sorted({one.layer for one in report.findings}), "verdict": report.verdict().verdict,
    "on": sorted({device for one in report.findings for device in one.devices}),
    "why": {one.name: one.why_not for one in report.layers},
}), flush=True)
"""


@pytest.mark.parametrize("form", ["plain", "mapped"])
def test_two_processes(form: str, tmp_path: Path) -> None:
    (tmp_path / "form").write_text(form)
    first, second = run_pair(CHILD, tmp_path)
    assert first == second
    assert not first["quiet"]
    assert first["verdict"] == "corrupt"
    assert {"replicas", "at rest"} & set(first["found"])
    assert first["why"]["ring"] == "devices of several processes cannot be rotated"
    assert {name for name, why in first["why"].items() if why} == {"ring"}, first["why"]
    assert all(dict(first["checks"])[name] > 5 for name in ("witness", "abft", "replay"))
