"""One run from its flags to its summary: everything that `sdc twin` and `sdc train` do alike."""

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from sdc.analysis.report import write_report
from sdc.analysis.summary import summarize
from sdc.record.determinism import differences, environment, prepare
from sdc.record.records import MANIFEST, RunWriter, read_run
from sdc.train.checkpoints import Checkpoints
from sdc.train.config import TrainConfig, check, get_config
from sdc.train.corpus import read_corpus
from sdc.train.data import Dataset, batches, make_dataset
from sdc.train.loop import run_steps
from sdc.train.placement import Kind, Placement, place
from sdc.train.tokenizer import load_tokenizer, padded_vocab
from sdc.twins._lockstep import Compare

from .cluster import everyone, joined
from .errors import CommandError, Exit, storage_errors, usage_errors
from .options import RunOptions, WorkloadOptions
from .programs import Programs
from .progress import Progress

# A run is resumed only with the settings that it was started with.
SETTINGS = (
    "kind", "config", "seed", "sync", "compare", "placement", "mesh", "twins", "suspect", "data", "where", "abft",
    "aggregate",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """What kind of run this is.

    Attributes:
        kind: `twin`, `train` or `trace`.
        twins: number of twins, or None.
        placement: see `place`.
        programs: what runs, for a configuration and a placement.
        manifest: what the kind adds to the manifest, for a model of so many layers.
        sync: see `Programs`.
        compare: see `Programs`.
    """

    kind: str
    programs: Callable[[TrainConfig, Placement], Programs]
    twins: int | None = None
    placement: Kind = "mesh"
    manifest: Callable[[int], Mapping[str, Any]] = lambda layers: {}
    sync: str | None = None
    compare: Compare = "gated"


def execute(options: RunOptions, plan: Plan) -> dict[str, Any]:
    """Runs it all.

    Returns:
        The summary, with the run folder under `run`.

    Raises:
        CommandError: with the exit code that the command ends with.
    """
    _check_numbers(options)

    def start(processes: int) -> None:
        with usage_errors():
            prepare(
                cpu_devices=_cpu_devices(options, plan, processes),
                # The same for one process and several, for twins (up to four) and `sdc train`: their bits are compared.
                cpu_threads=max(os.cpu_count() or 1, 4 * options.data * options.model, options.devices or 0),
                only_cpu=options.devices is not None,
            )

    with joined(options.coordinator, options.processes, options.process, options.timeout, start):
        with usage_errors():
            config, dataset = workload(options)
            check(config, options.data, options.model)
            placement = place(twins=plan.twins, data=options.data, model=options.model, kind=plan.placement)
            programs = plan.programs(config, placement)
            source = batches(dataset, batch_size=config.batch_size, microsteps=config.microsteps)
            key = jax.random.key(options.seed + 1)
            program = programs.fingerprint()
        manifest = {
            "kind": plan.kind,
            "command": ["sdc", *sys.argv[1:]],
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "config": dataclasses.asdict(config),
            "checkpoint_every": options.checkpoint_every,
            "steps": options.steps,
            "seed": options.seed,
            "layers": config.model.layers,
            "sync": plan.sync,
            "compare": plan.compare,
            "placement": plan.placement,
            "twins": plan.twins,
            "mesh": dict(placement.mesh.shape),
            "processes": jax.process_count(),
            "environment": environment(),
            "program": program,
            "data": {
                "source": dataset.source, "documents": dataset.documents, "tokens": dataset.tokens,
                "digest": dataset.digest, "tokenizer": options.tokenizer,
            },
            **plan.manifest(config.model.layers),
        }  # fmt: skip
        _check_comparable(manifest)
        return _run(options, plan, manifest, programs, source, key)


def _run(
    options: RunOptions, plan: Plan, manifest: dict[str, Any], programs: Programs, source: Any, key: Any
) -> dict[str, Any]:
    first_process = jax.process_index() == 0
    folder = _folder(options, plan)
    with usage_errors():
        checkpoints = Checkpoints(folder / "checkpoints", every=options.checkpoint_every)
    step, resumed = 0, False
    if options.resume:
        _check_resumable(folder, manifest)
        resumed = checkpoints.latest is not None
    if resumed:
        with usage_errors():
            state, position = checkpoints.restore(programs.abstract_state())
        source.set_state(position)
        step = checkpoints.latest or 0
    else:
        state = programs.initial_state(options.seed)
    if step > options.steps:
        raise CommandError(f"{folder} holds {step} steps already; give --steps {step} or more")

    writer = _open_record(options, folder, manifest, step, programs.details) if first_process else None
    with usage_errors():
        programs.begin(manifest, folder if first_process else None)
    everyone("ready")
    with storage_errors(folder), Progress(options.steps, first=step, show=first_process) as progress:
        state = run_steps(
            state,
            lambda state, tokens, step: programs.advance(state, tokens, key, step),
            steps=range(step, options.steps),
            batches=source,
            placement=programs.placement,
            writer=writer,
            checkpoints=checkpoints,
            on_step=progress.update,
            ended=programs.ended,
        )
    digest, conclusion = programs.state_digest(state), programs.conclusion(state)
    summary: dict[str, Any] = {}
    if writer is not None:
        with storage_errors(folder):
            writer.close()
            run = read_run(folder)
            summary = {**summarize(run.manifest, run.steps, run.mismatches), "state_digest": digest}
            summary |= conclusion
            writer.summary(summary)
            summary |= {"run": str(folder), "report": str(write_report(folder))}
    return {**summary, "verdict": json.loads(everyone(json.dumps(summary.get("verdict")))[0])}


def _check_numbers(options: RunOptions) -> None:
    for name in ("steps", "data", "model", "checkpoint_every", "devices", "processes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise CommandError(f"--{name.replace('_', '-')} {value}: expected a number of at least 1")
    if options.seed < 0 or options.seed >= 2**31 - 1:
        raise CommandError(f"--seed {options.seed}: expected a number from 0 to {2**31 - 2}")
    if not options.timeout > 0:
        raise CommandError(f"--timeout {options.timeout}: expected a number of seconds above 0")
    if options.resume and options.run is None:
        raise CommandError("--resume continues the run in the folder that --run names; give --run DIR")


def _cpu_devices(options: RunOptions, plan: Plan, processes: int) -> int:
    """Simulated devices of this process, where there are no real ones."""
    twins = plan.twins if plan.twins is not None and plan.placement == "mesh" else 1
    devices = options.devices or twins * options.data * options.model
    if devices % processes:
        raise ValueError(f"--devices {devices} is not divisible by {processes} processes; give a multiple")
    return devices // processes


def workload(options: WorkloadOptions) -> tuple[TrainConfig, Dataset]:
    """The configuration and the data that the flags ask for.

    Raises:
        ValueError: one of them is unknown or cannot be read.
    """
    config = get_config(options.config)
    if options.dtype is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=options.dtype))
    tokenizer = load_tokenizer(options.tokenizer)
    vocabulary = padded_vocab(tokenizer)
    if vocabulary > config.model.vocab_size:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocabulary))
    corpus = read_corpus(options.corpus if len(options.corpus) > 1 else options.corpus[0])
    return config, make_dataset(corpus, tokenizer, config.sequence_length, seed=options.seed)


def _check_comparable(manifest: Mapping[str, Any]) -> None:
    """Twins on several processes must agree on everything that decides what they compute."""
    own = {key: value for key, value in manifest.items() if key not in ("command", "created")}
    lines = differences([json.loads(text) for text in everyone(json.dumps(own))])
    if lines:
        raise CommandError(
            "the processes are not comparable, so that no difference between them would mean anything:\n  "
            + "\n  ".join(lines)
            + "\nmake them equal and start again",
            Exit.INCONCLUSIVE,
        )


def _folder(options: RunOptions, plan: Plan) -> Path:
    """The run folder, as process 0 names it."""
    name = f"{plan.kind}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    return Path(everyone(str((options.run or Path("runs") / name).absolute()))[0])


def _check_resumable(folder: Path, manifest: Mapping[str, Any]) -> None:
    with usage_errors():
        old = read_run(folder).manifest
    new = json.loads(json.dumps(manifest))
    then, now = ({key: m.get(key) for key in SETTINGS} for m in (old, new))
    if lines := differences([then, now]):
        changed = "; ".join(
            line.replace("process 0 has", "the run has").replace("process 1 has", "asked is") for line in lines
        )
        raise CommandError(
            f"{folder} is a run of another configuration ({changed}); "
            "resume it with its own flags, or name another folder with --run"
        )
    programs = [{key: m.get(key) for key in ("program", "environment")} for m in (old, new)]
    if lines := differences(programs):
        changed = "; ".join(
            line.replace("process 0 has", "the run had").replace("process 1 has", "now") for line in lines
        )
        raise CommandError(
            f"{folder} was run by another program, so that its steps could not be compared ({changed}); "
            "restore that environment, or start a new run",
            Exit.INCONCLUSIVE,
        )


def _open_record(options: RunOptions, folder: Path, manifest: Mapping[str, Any], step: int, details: str) -> RunWriter:
    with usage_errors():
        if options.resume and (folder / MANIFEST).is_file():
            return RunWriter.resume(folder, step, manifest, details)
        return RunWriter.create(folder, manifest, details)
