"""`sdc campaign`: thousands of single simulated faults in the reference workload."""

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from sdc.analysis.campaign import summarize_campaign
from sdc.analysis.report import write_report
from sdc.campaigns.outcomes import ABFT, DETECTORS, SPIKE, VISIBLE
from sdc.campaigns.runner import Campaign, NotDeterministic
from sdc.faults.language import parse_kind
from sdc.program.selectors import parse_selector
from sdc.record.determinism import differences, environment, prepare
from sdc.record.files import to_json
from sdc.record.records import INJECTIONS, MANIFEST, RunWriter, read_campaign
from sdc.train.config import TrainConfig, check
from sdc.train.data import Dataset, batches
from sdc.train.loop import place_batch
from sdc.train.optimizer import history_ratio
from sdc.train.placement import Placement, place
from sdc.train.step import Metrics, TrainState

from .errors import CommandError, Exit, storage_errors, usage_errors
from .options import CampaignOptions
from .output import show_campaign
from .programs import Programs
from .progress import InjectionProgress
from .session import workload

# A campaign is resumed only as it was started; it may be made longer.
SETTINGS = ("config", "seed", "steps", "follow", "where", "faults", "mesh", "data", "batch", "environment", "detectors")


def campaign(options: CampaignOptions) -> int:
    """Runs a campaign and returns the exit code."""
    _check_numbers(options)
    with usage_errors():
        for text in options.faults:
            parse_kind(text)
        parse_selector(options.where)
        prepare(
            cpu_devices=options.devices or options.data * options.model,
            cpu_threads=max(os.cpu_count() or 1, 4 * options.data * options.model, options.devices or 0),
            only_cpu=options.devices is not None,
        )
        config, dataset = workload(options)
        check(config, options.data, options.model)
        placement = place(twins=None, data=options.data, model=options.model)
    batch = options.batch or (1 if jax.devices()[0].platform == "cpu" else 8)
    folder = (
        options.run or Path("runs") / f"campaign-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    ).absolute()
    done = _rows_done(options, folder)
    try:
        with usage_errors():
            runner = make_campaign(options, config, dataset, placement, batch)
    except NotDeterministic as error:
        raise CommandError(str(error), Exit.INCONCLUSIVE) from error
    manifest = _manifest(options, config, dataset, placement, runner)
    with storage_errors(folder):
        writer = _open_record(options, folder, manifest, done)
        with writer, InjectionProgress(options.injections, first=done) as progress:
            for row in runner.run(range(done, options.injections)):
                writer.step(row)
                progress.update(row)
            record = read_campaign(folder)
            summary = summarize_campaign(record.manifest, record.injections)
            writer.summary(summary)
        report = write_report(folder)
    show_campaign({**summary, "run": str(folder), "report": str(report)}, as_json=options.json)
    return int(Exit.CLEAN)


def make_campaign(
    options: CampaignOptions, config: TrainConfig, dataset: Dataset, placement: Placement, batch: int
) -> Campaign:
    """The campaign that the flags ask for: compiled, with the clean run done."""
    programs = Programs(config, placement)
    source = batches(dataset, batch_size=config.batch_size, microsteps=config.microsteps)

    def observe(state: TrainState, metrics: Metrics) -> Mapping[str, Any]:
        history = history_ratio(config.optimizer, state.optimizer)
        return {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm, "history": history}

    return Campaign(
        programs.plain,
        programs.initial_state(options.seed),
        [place_batch(next(source), placement) for _ in range(options.steps)],
        observe=observe,
        where=parse_selector(options.where),
        faults=options.faults,
        follow=options.follow,
        seed=options.seed,
        batch=batch,
        abft=options.abft,
    )


def _check_numbers(options: CampaignOptions) -> None:
    for name in ("injections", "steps", "data", "model", "devices", "batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise CommandError(f"--{name} {value}: expected a number of at least 1")
    if not 0 <= options.follow < options.steps:
        raise CommandError(
            f"--follow {options.follow}: expected a number from 0 to {options.steps - 1} (below --steps)"
        )
    if options.seed < 0 or options.seed >= 2**31 - 1:
        raise CommandError(f"--seed {options.seed}: expected a number from 0 to {2**31 - 2}")
    if not options.faults:
        raise CommandError("--faults needs at least one kind, as in --faults bitflip nan")
    if options.resume and options.run is None:
        raise CommandError("--resume continues the campaign in the folder that --run names; give --run DIR")


def _rows_done(options: CampaignOptions, folder: Path) -> int:
    """Injections on record, from the first on without a gap; looked at before anything is compiled."""
    if not options.resume:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CommandError(
                f"run folder {folder} exists already; name another with --run, or continue that one with --resume"
            )
        return 0
    with usage_errors():
        rows = {row["injection"] for row in read_campaign(folder).injections}
    done = next(number for number in range(len(rows) + 1) if number not in rows)
    if done > options.injections:
        raise CommandError(f"{folder} holds {done} injections already; give --injections {done} or more")
    return done


def _manifest(
    options: CampaignOptions, config: TrainConfig, dataset: Dataset, placement: Placement, runner: Campaign
) -> dict[str, Any]:
    return {
        "kind": "campaign",
        "command": ["sdc", *sys.argv[1:]],
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": dataclasses.asdict(config),
        "steps": options.steps,
        "injections": options.injections,
        "where": runner.where.text,
        "faults": list(options.faults),
        "follow": options.follow,
        "seed": options.seed,
        "batch": runner.batch,
        "mesh": dict(placement.mesh.shape),
        "sites": len(runner.sites),
        "environment": environment(),
        "data": {
            "source": dataset.source, "documents": dataset.documents, "tokens": dataset.tokens,
            "digest": dataset.digest, "tokenizer": options.tokenizer,
        },
        "thresholds": {"spike": SPIKE, "visible": VISIBLE, **runner.limits._asdict()},
        "detectors": [*DETECTORS, *([ABFT] if options.abft else [])],
        "clean": {
            "loss": [step.loss for step in runner.clean],
            "gradient_norm": [step.gradient_norm for step in runner.clean],
            "digest": [f"{step.digest[0]:08x}{step.digest[1]:08x}" for step in runner.clean],
        },
        "suspect": {"name": "campaign", "simulated": True, "faults": list(options.faults)},
    }  # fmt: skip


def _open_record(options: CampaignOptions, folder: Path, manifest: Mapping[str, Any], done: int) -> RunWriter:
    with usage_errors():
        if not (options.resume and (folder / MANIFEST).is_file()):
            return RunWriter.create(folder, manifest, None, lines=INJECTIONS)
        old = read_campaign(folder).manifest
    then, now = ({key: m.get(key) for key in SETTINGS} for m in (old, json.loads(json.dumps(to_json(manifest)))))
    if found := differences([json.loads(json.dumps(to_json(then))), now]):
        changed = "; ".join(each.describe(("the campaign had", "now")) for each in found[:5])
        raise CommandError(
            f"{folder} is another campaign ({changed}); resume it with its own flags and on its own machine, or name "
            "another folder with --run"
        )
    if differences([json.loads(json.dumps(to_json({"clean": m["clean"]}))) for m in (old, manifest)]):
        raise CommandError(
            f"the clean run of {folder} gives other numbers here, so that injections before and after could not be "
            "compared; resume it on the machine and with the versions that it was started with",
            Exit.INCONCLUSIVE,
        )
    return RunWriter.resume(folder, done, manifest, None, lines=INJECTIONS, key="injection")
