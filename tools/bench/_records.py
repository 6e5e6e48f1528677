"""The cost of records, reports and checkpoints.

`sdc bench record`: checksums and syncs of a record, as a share of the run's time. `sdc bench report`: time and memory
for the report of a long run. `sdc bench checkpoint`: certificates and running checkpoints, compared with Orbax alone
and with a training step.
"""

import functools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from sdc.analysis import SUBMODULES, final_states
from sdc.checkpoints import RunningCheckpoint, bits_of, certify, take
from sdc.records import Record, encode
from sdc.schema import RunManifest
from sdc.train import Twins, Workload, get_config, run
from sdc.train.programs import place
from sdc.twins import digest

from . import harness
from .command import BenchOptions

LINES, TURNS = 1000, 5
STEPS, LAYERS, ELEMENTS = 100_000, 16, 4_194_304  # of the reported run
CHECKPOINT_BARS = {
    "certify_digests": 1.5,
    "certify_save": 1.05,
    "certify_restore": 1.05,
    "scar_held_up": 0.02,
    "scar_bytes": 1.05,
    "scar_save": 0.25,
    "scar_recover": 0.25,
    "scar_copies": 1.0,
    "scar_store_after_1000": 3.0,
}
FRACTION = 1 / 8
SAVES = 1000  # number of saves of `tiny` after which the size of its store is measured


def measure_record(options: BenchOptions) -> dict[str, Any]:
    """Trains twins, then writes 1,000 lines like theirs, alternately with and without checksums and syncs."""
    job = Twins(workload=Workload(config=str(options.config)), steps=options.steps + 2)
    compiling, last = _last_comparison(job)
    with tempfile.TemporaryDirectory() as folder:
        trained = run(Twins(workload=job.workload, steps=job.steps, folder=Path(folder) / "run"))
        assert trained is not None
        rows = [trained.lines[2 + step % options.steps] for step in range(LINES)]
        # The fields that the run itself put into a line.
        own = [{key: value for key, value in row.items() if key not in ("details", "discarded")} for row in rows]
        sealed, plain = [], []
        for turn in range(TURNS):
            with Record.create(Path(folder) / f"sealed{turn}", {}, kind="twin") as record:
                sealed.append(harness.seconds_of(functools.partial(_write_sealed, record, own, job.checkpoint_every)))
            with (Path(folder) / f"plain{turn}").open("ab") as lines:
                plain.append(harness.seconds_of(functools.partial(_write_plain, lines, own)))
    step = statistics.median(row["seconds"] for row in rows)
    added = statistics.median(a - b for a, b in zip(sealed, plain, strict=True)) + last
    return {
        "float32": {
            "share": added / (LINES * step),
            "added_seconds": added,
            "lines_seconds": statistics.median(sealed),
            "lines_seconds_plain": statistics.median(plain),
            "last_comparison_seconds": last,
            "compiling_digests_seconds": compiling,
            "step_seconds": step,
        }
    }


def _write_sealed(record: Record, rows: list[dict[str, Any]], every: int) -> None:
    """Writes lines in the same way as a run that saves a checkpoint every `every` steps."""
    for step, row in enumerate(rows):
        record.line({**row, "step": step})
        if (step + 1) % every == 0:
            record.sync()


def _write_plain(lines: Any, rows: list[dict[str, Any]]) -> None:
    """Appends the same lines to a file, and flushes the file after each line."""
    for step, row in enumerate(rows):
        lines.write(encode({**row, "step": step}).encode() + b"\n")
        lines.flush()


def _last_comparison(job: Twins) -> tuple[float, float]:
    """Returns how many seconds it takes to digest and compare the final states, with compilation (once per run) and
    without it.

    The digests are already in the summary of a run when they are compared.
    """
    config, _ = job.load()
    placement = place(twins=job.number, data=job.data, model=job.model, kind=job.layout, devices=jax.devices())
    program = job.program(config, placement, donate=False)
    state = program.init(0)

    def compare() -> None:
        assert final_states(RunManifest(kind=job.kind, twins=job.number), program.digest(state)) is None

    return harness.seconds_of(compare), harness.seconds_of(compare)


def measure_report(options: BenchOptions) -> dict[str, Any]:
    """Measures the report of a record that contains 100,000 steps of twins, one in forty of them with mismatches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        writing = harness.seconds_of(lambda: write_run(path, STEPS))
        seconds, megabytes = harness.command_costs(["report", path], code=1)
        return {
            "report": {
                "steps": STEPS,
                "seconds": seconds,
                "megabytes": megabytes,
                "page_megabytes": (path / "report.html").stat().st_size / 1e6,
                "record_megabytes": sum(file.stat().st_size for file in path.glob("*.jsonl")) / 1e6,
                "writing_seconds": writing,
            }
        }


def write_run(folder: Path, steps: int) -> None:
    """Writes a record like those of twins on two ranks, with bursts of mismatches and a different loss at every
    step."""
    draw = random.Random(0)
    about = {
        "steps": steps, "layers": LAYERS, "sync": "compute", "compare": "gated", "placement": "mesh", "twins": 2,
        "mesh": {"twin": 2, "data": 1, "model": 2}, "suspect": {"name": None, "simulated": False, "faults": []},
    }  # fmt: skip
    with Record.create(folder, about, kind="twin") as record:
        for step in range(steps):
            hits = [_hit(step, draw) for _ in range(draw.randrange(1, 4))] if step % 2000 < 50 else []
            record.line(_line(step, hits, draw), hits)
        record.finish({"verdict": "corrupt", "reason": "twins differ"})


def _hit(step: int, draw: random.Random) -> dict[str, Any]:
    found, severity = draw.randrange(1, 1000), draw.lognormvariate(2, 2)
    rank = {"mismatched": found, "relative_mean": severity, "relative_max": 9 * severity}
    return {
        "step": step, "microstep": 0, "site": draw.choice(SUBMODULES), "layer": draw.randrange(LAYERS),
        "checked": ELEMENTS, "mismatched": found, "zero_reference": 0, "nonfinite": 0, "injected": 0,
        "frequency": found / ELEMENTS, "severity": severity, "relative_max": 9 * severity,
        "ranks": [{"twin": 1, "data": 0, "model": draw.randrange(2), **rank}],
    }  # fmt: skip


def _line(step: int, hits: list[dict[str, Any]], draw: random.Random) -> dict[str, Any]:
    sites = {}
    for site in SUBMODULES:
        here = [hit for hit in hits if hit["site"] == site]
        found = sum(hit["mismatched"] for hit in here)
        sites[site] = {
            "checked": ELEMENTS * LAYERS, "mismatched": found, "zero_reference": 0, "nonfinite": 0, "undecided": 0,
            "injected": 0, "frequency": found / (ELEMENTS * LAYERS),
            "severity": max((hit["severity"] for hit in here), default=None),
        }  # fmt: skip
    loss, norm = 2 + 3 * math.exp(-step / 9000) + draw.gauss(0, 0.02), math.exp(draw.gauss(0, 0.2))
    compared = {"checked": 100_000_000, "mismatched": 0}
    return {
        "step": step, "loss": [loss] * 2, "gradient_norm": [norm] * 2, "learning_rate": 1e-3, "sites": sites,
        "seconds": 0.5 + draw.random() / 10, "state": compared, "gradient": compared, "gradient_difference": [0.0, 0.0],
        "noise_to_signal": [0.0, 0.0], "parameter_difference": [0.0, 0.0], "parameter_norm": [40.0 + norm] * 2,
    }  # fmt: skip


def measure_checkpoint(options: BenchOptions) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        step, (state, batch) = harness.reference_step(harness.config_of(options))
        run = harness.compiled({"step": step}, state, batch)["step"]
        found = _certificates(state, folder, options.steps) | _running(state, run, folder, options.steps)
        # Size of a store of `tiny` after many saves, in sizes of the state.
        _, (state, _) = harness.reference_step(get_config("tiny").of_type("float32"))
        store = folder / "thousand"
        with RunningCheckpoint(store, state, fraction=FRACTION, moving="params") as running:
            for number in range(SAVES):
                state = _moved(state, jax.random.key(number))
                running.save(state, number)
            running.wait()
            size = sum(running.partition.sizes)
        stored = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
        return {"float32": found | {"scar_store_after_1000": stored / size}}


def _orbax(folder: Path) -> Any:
    """Returns a checkpointer that keeps the newest checkpoint."""
    return ocp.training.Checkpointer(folder, preservation_policy=ocp.training.preservation_policies.LatestN(1))


def _shapes(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _certificates(state: Any, folder: Path, steps: int) -> dict[str, Any]:
    leaves = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(state))}
    one = jax.jit(lambda leaves: [digest(bits_of(leaf)) for leaf in leaves.values()])
    writers = {"plain": _orbax(folder / "plain"), "certified": certify(_orbax(folder / "certified"))}
    count = iter(range(1_000_000))
    digests = harness.take_turns({"one": lambda: one(leaves), "blocks": lambda: take(leaves)()[0]}, steps)
    saves, loads = (
        harness.take_turns({name: functools.partial(work, writer) for name, writer in writers.items()}, steps)
        for work in (
            lambda writer: writer.save(next(count), state, force=True),
            lambda writer: writer.load(None, _shapes(state)),
        )
    )
    for writer in writers.values():
        writer.close()
    return {
        "state_mib": sum(leaf.nbytes for leaf in map(bits_of, leaves.values())) / 2**20,
        "orbax_save_seconds": statistics.median(saves["plain"]),
        "orbax_restore_seconds": statistics.median(loads["plain"]),
        "certify_digests": harness.ratio(digests["one"], digests["blocks"]),
        "certify_save": harness.ratio(saves["plain"], saves["certified"]),
        "certify_restore": harness.ratio(loads["plain"], loads["certified"]),
    }


def _running(state: Any, run: Callable[[], Any], folder: Path, steps: int) -> dict[str, Any]:
    """Measures a training step and the checkpoint saved after it, and saving and recovery relative to Orbax."""
    plain = _orbax(folder / "full")
    held, stepped, saved, full = [], [], [], []
    with RunningCheckpoint(folder / "running", state, fraction=FRACTION, moving="params") as running:
        for number in range(steps + 2):
            stepped.append(harness.seconds_of(run))
            state = jax.block_until_ready(_moved(state, jax.random.key(number)))
            started = time.perf_counter()
            running.save(state, number)
            held.append(time.perf_counter() - started)
            running.wait()
            saved.append(time.perf_counter() - started)
            full.append(harness.seconds_of(functools.partial(plain.save, number, state, force=True)))
        blocks = list(range(int(running.partition.choices * FRACTION)))
        loads = harness.take_turns(
            {
                "full": lambda: plain.load(None, _shapes(state)),
                "part": lambda: running.recover(blocks, state).state,
                "all": lambda: running.recover([], state, policy="full").state,
            },
            steps,
        )
        size = sum(running.partition.sizes)
        parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
        written = running.bytes / (steps + 2) / FRACTION
        copies = sum(leaf.nbytes for leaf in running.copy.values()) / parameters
    plain.close()
    return {
        "step_seconds": statistics.median(stepped[2:]),
        "scar_blocks": running.partition.choices,
        "scar_held_up_seconds": statistics.median(held[2:]),
        "scar_held_up": harness.ratio(stepped[2:], held[2:]),
        "scar_bytes": written / size,
        "scar_save": harness.ratio(full[2:], saved[2:]),
        "scar_recover": harness.ratio(loads["full"], loads["part"]),
        "scar_recover_all": harness.ratio(loads["full"], loads["all"]),
        "scar_copies": copies,
    }


@jax.jit
def _moved(state: Any, key: jax.Array) -> Any:
    """Moves each row by a different amount, as training does."""

    def moved(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating) or not x.ndim:
            return x
        scale = jax.random.uniform(key, (x.shape[0], *[1] * (x.ndim - 1)), x.dtype)
        return x + scale * jnp.asarray(1e-3, x.dtype)

    return jax.tree.map(moved, state)


BENCHMARKS = {
    "record": harness.Benchmark(measure_record, {"share": 0.01}, devices=2),
    "report": harness.Benchmark(measure_report, {"seconds": 20.0, "megabytes": 500.0, "page_megabytes": 1.0}),
    "checkpoint": harness.Benchmark(measure_checkpoint, CHECKPOINT_BARS),
}
