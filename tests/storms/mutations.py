"""Mutations: records and checkpoints with every kind of damage that a disk or an editor can do."""

import contextlib
import io
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sdc.records import read_record
from sdc.train.checkpoints import CheckpointError, Checkpoints
from tests.tools.command import start

from .kills import RUNS, _start
from .tally import Tally, verdict_of

Mutation = Callable[[random.Random, bytes], bytes]


def _flip(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]


def _lines(change: Callable[[random.Random, list[bytes]], list[bytes]]) -> Mutation:
    return lambda draw, data: b"".join(change(draw, data.splitlines(keepends=True)))


def _without(draw: random.Random, lines: list[bytes]) -> list[bytes]:
    at = draw.randrange(len(lines))
    return lines[:at] + lines[at + draw.randrange(1, 4) :]


def _twice(draw: random.Random, lines: list[bytes]) -> list[bytes]:
    at = draw.randrange(len(lines))
    return lines[: at + 1] + lines[at:]


def _shuffled(draw: random.Random, lines: list[bytes]) -> list[bytes]:
    return draw.sample(lines, len(lines))


def _digit(draw: random.Random, data: bytes) -> bytes:
    places = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    at = draw.choice(places or [0])
    return data[:at] + str(draw.randrange(10)).encode() + data[at + 1 :]


def _zeros(draw: random.Random, data: bytes) -> bytes:
    at, count = draw.randrange(len(data)), draw.randrange(1, 600)
    return data[:at] + bytes(len(data[at : at + count])) + data[at + count :]


MUTATIONS: dict[str, Mutation] = {
    "a bit": _flip,
    "a digit": _digit,
    "zeros": _zeros,
    "cut": lambda draw, data: data[: draw.randrange(len(data))],
    "a line lost": _lines(_without),
    "a line twice": _lines(_twice),
    "lines shuffled": _lines(_shuffled),
    "made clean": lambda draw, data: re.sub(
        rb'"mismatched": \d+', b'"mismatched": 0', data.replace(b"corrupt", b"clean")
    ),
    "something added": lambda draw, data: data + draw.choice([b"\n", b"{}\n", b'{"step": 99}\n', b"\x00" * 512]),
    "emptied": lambda draw, data: b"",
}


def run(count: int, seed: int) -> Tally:
    """Makes `count` mutations, seven out of ten of records."""
    tally, draw = Tally("mutations"), random.Random(seed)
    folder = Path(tempfile.mkdtemp())
    kinds = {
        "healthy": ("twin compute", 0),
        "suspect": ("twin params, suspect", 1),
        "campaign": ("campaign", 0),
        "trace": ("trace", 0),
    }
    for name, (command, expected) in kinds.items():
        (ended,) = [process.end() for process in _start(*RUNS[command], folder / name)]
        assert ended[0] == expected, ended
    abft = start("train", "--config", "mini", "--steps", 4, "--abft", "--fault", "bitflip,rate=1e-3,where=products",
                 "--run", folder / "abft").end()  # fmt: skip
    assert abft[0] == 1, abft
    names = [*kinds, "abft"]
    for number in range(count * 7 // 10):
        _record(tally, draw, folder / names[number % len(names)])
        tally.trials += 1
    saved = folder / "saved"
    state = {"a": jnp.arange(300.0).reshape(3, 100), "b": jnp.ones((7,), jnp.bfloat16), "key": jax.random.key(3)}
    with Checkpoints(saved, every=1) as checkpoints:
        checkpoints.save(1, state, {"batch": 1})
    while tally.trials < count:
        _checkpoint(tally, draw, saved, state)
        tally.trials += 1
    return tally


def _damage(draw: random.Random, files: list[Path]) -> str:
    """Damages or removes one of the files; returns what was done."""
    file = draw.choice([file for file in files if file.stat().st_size])
    if draw.random() < 0.08:
        file.unlink()
        return f"{file.name} lost"
    name = draw.choice(list(MUTATIONS))
    old = file.read_bytes()
    file.write_bytes(new := MUTATIONS[name](draw, old))
    return f"{name} in {file.name}" + (" (no change)" if new == old else "")


def _record(tally: Tally, draw: random.Random, whole: Path) -> None:
    copy = Path(tempfile.mkdtemp()) / whole.name
    shutil.copytree(whole, copy, ignore=shutil.ignore_patterns("checkpoints", "report.*"))
    what = _damage(draw, [file for file in copy.iterdir() if file.is_file()])
    where, said = f"{whole.name}: {what}, {copy}", io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            verdict = verdict_of(copy)
    except Exception as error:
        tally.fail("traceback", f"{where}: {error!r}")
        return
    tally.read(said.getvalue(), where)
    tally.note(f"{whole.name} {verdict}")
    if verdict == "corrupt" and whole.name not in ("suspect", "abft"):
        tally.fail("false corrupt", where)
    if verdict == "clean":
        before, after = (read_record(path) for path in (whole, copy))
        same = (before.lines, before.manifest) == (after.lines, after.manifest)
        unaware = whole.name in ("campaign", "trace") and before.lines[: len(after.lines)] == after.lines
        if (not same and not (unaware and not after.ended)) or whole.name in ("suspect", "abft"):
            tally.fail("false clean", where)
    shutil.rmtree(copy.parent)


def _checkpoint(tally: Tally, draw: random.Random, whole: Path, state: dict[str, jax.Array]) -> None:
    copy = Path(tempfile.mkdtemp()) / "saved"
    shutil.copytree(whole, copy)
    what = _damage(draw, [file for file in (copy / "1").rglob("*") if file.is_file()])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    try:
        with Checkpoints(copy, every=1) as checkpoints:
            restored, position = checkpoints.restore(abstract)
    except CheckpointError:
        tally.note("checkpoint refused")
    except Exception as error:
        tally.fail("traceback", f"checkpoint: {what}, {copy}: {error!r}")
        return
    else:
        tally.note("checkpoint restored")
        bits = [np.asarray(jax.random.key_data(x) if name == "key" else x).tobytes() for name, x in restored.items()]
        expected = [np.asarray(jax.random.key_data(x) if name == "key" else x).tobytes() for name, x in state.items()]
        if bits != expected or position != {"batch": 1}:
            tally.fail("other bits", f"checkpoint: {what}, {copy}")
    shutil.rmtree(copy.parent)
