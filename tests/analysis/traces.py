"""Two traces that part: the digests of a small program, of which one run had another input at its last step."""

from pathlib import Path

import jax
import jax.numpy as jnp

import sdc
from sdc.program.selectors import operations
from sdc.records.determinism import program_fingerprint
from sdc.twins.traces import TraceWriter


def write_traces(folder: Path, *, simulated: bool = False) -> tuple[Path, Path, Path]:
    """Three traces of three steps: the first and the last are equal, the second differs in the last step."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden, _ = jax.lax.scan(lambda h, m: (jnp.tanh(h @ m), None), jnp.sin(x), w)
        return jnp.exp(hidden).sum()

    run = jax.jit(sdc.fingerprint(step, where=operations))
    x, w = jnp.ones((2, 3)), 0.1 * jnp.ones((4, 3, 3))
    struck = w.at[2, 0, 0].set(0.2)
    about = {"program": program_fingerprint(run.lower(x, w)), "where": "operations", "seed": 0}
    for name, last in (("golden", w), ("suspect", struck), ("copy", w)):
        suspect = {"name": "custom", "simulated": simulated, "faults": ["bitflip,step=2"]}
        with TraceWriter(folder / name, about | {"suspect": suspect}) as writer:
            for number, weights in enumerate((w, w, last)):
                writer.add(number, run(x, weights)[1], loss=[2.0 - number / 10])
    return folder / "golden", folder / "suspect", folder / "copy"
