"""Bits: flips a bit in any file of a certified checkpoint, in each of Orbax's formats, and restores the checkpoint.

It must be refused, or restore the bits that were saved. The state has arrays of several dtypes and PRNG keys.
"""

import contextlib
import gc
import logging
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from sdc.checkpoints import CertificateError, certify

from .tally import Tally

FORMS = ("ocdbt", "zarr3", "zarr2")


def run(count: int, seed: int) -> Tally:
    """Makes `count` flips, in files of all formats."""
    whole = Tally("bits")
    for form in FORMS:
        part = trials(form, -(-count // len(FORMS)), seed)
        whole.trials += part.trials
        whole.wrong += part.wrong
        for what, times in part.seen.items():
            whole.seen[f"{form}: {what}"] += times
        print(f"  bits: {whole.trials} of {count}", flush=True)
    return whole


def trials(form: str, count: int, seed: int) -> Tally:
    """Makes flips in one format, in files chosen uniformly and by size in turns."""
    tally, draw = Tally(f"bits in {form}"), random.Random(seed)
    with quiet(), tempfile.TemporaryDirectory() as folder, opened(form, folder) as checkpointer:
        state = saved()
        checkpointer.save(3, state)
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
        )
        files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.stat().st_size]
        sizes = [path.stat().st_size for path in files]
        for number in range(count):
            path = draw.choice(files) if number % 2 else draw.choices(files, sizes)[0]
            content = path.read_bytes()
            place, bit = draw.randrange(len(content)), draw.randrange(8)
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            where = f"{form}: {path.relative_to(folder)}, byte {place}, bit {bit}"
            try:
                same = bits_of(checkpointer.load(3, abstract)) == bits_of(state)
                tally.note("harmless") if same else tally.fail("other bits", where)
            except CertificateError:
                tally.note("found")
            except Exception as error:
                tally.fail("traceback", f"{where}: {error!r}")
            path.write_bytes(content)
            tally.trials += 1
    return tally


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences Orbax's log of restores and failures, and collects the garbage of failed restores at the end."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        gc.collect()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def opened(form: str, folder: str) -> Any:
    """Returns a certified checkpointer that writes files in a format."""
    context = ocp.Context()
    context.array.saving.use_ocdbt = form == "ocdbt"
    context.array.saving.use_zarr3 = form != "zarr2"
    return certify(ocp.training.Checkpointer(folder, context=context))


def saved() -> dict[str, Any]:
    """Returns a state with arrays of several dtypes."""
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "float32": jax.random.normal(keys[0], (64, 8)),
        "bfloat16": jax.random.normal(keys[1], (32,), jnp.bfloat16),
        "int32": jnp.arange(5, dtype=jnp.int32),
        "keys": keys,
    }


def bits_of(tree: Any) -> list[bytes]:
    """Returns the bits of all arrays."""
    return [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf).tobytes()
        for leaf in jax.tree.leaves(tree)
    ]
