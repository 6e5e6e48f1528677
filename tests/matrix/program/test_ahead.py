"""Every transformed step can be compiled ahead of time, and a second process loads what the first one compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys, time
import jax, jax.numpy as jnp
import sdc
from sdc.program import products

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))


def step(w, x):
    def loss(w):
        y = x
        for one in w:
            y = jnp.tanh(y @ one)
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


w, x = [jnp.eye(16) + number for number in range(3)], jnp.ones((8, 16))
moment, fault = sdc.Moment(jax.random.key(0), jnp.int32(0)), sdc.Fault(sdc.faults.BitFlip(), 1e-3, products)
twins = jax.vmap(sdc.lockstep(step, "twin", where=products), in_axes=None, axis_name="twin", axis_size=2)
tools = {
    "plain": (jax.jit(step), (w, x)),
    "fingerprint": (jax.jit(sdc.fingerprint(step, products)), (w, x)),
    "inject": (jax.jit(sdc.inject(step, [fault])), (moment, w, x)),
    "strike": (jax.jit(sdc.strike(step, products)), (sdc.no_strike(), w, x)),
    "lockstep": (jax.jit(twins), (w, x)),
    "abft": (jax.jit(sdc.abft(step)), (w, x)),
    "abft again": (sdc.abft(step, examine="again"), (w, x)),
}
found = {}
for name, (tool, arguments) in tools.items():
    events.clear()
    started = time.perf_counter()
    compiled = tool.lower(*arguments).compile()
    seconds = time.perf_counter() - started
    hits, misses = (events.count(f"/jax/compilation_cache/cache_{what}") for what in ("hits", "misses"))
    compiled(*arguments)
    found[name] = [hits, misses, seconds]
print(json.dumps(found))
"""


def test_a_second_process_loads_what_the_first_one_compiled(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        words = [sys.executable, "-c", SCRIPT, str(tmp_path)]
        found = subprocess.run(
            words, check=True, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        )
        runs.append(json.loads(found.stdout))
    first, second = runs
    assert {name: (hits, misses) for name, (hits, misses, _) in first.items()} == dict.fromkeys(first, (0, 1))
    assert {name: (hits, misses) for name, (hits, misses, _) in second.items()} == dict.fromkeys(first, (1, 0))
