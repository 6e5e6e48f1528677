"""Campaigns on the reference workload, run into a record that can be resumed."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from sdc.campaigns import ABFT, DETECTORS, SPIKE, VISIBLE, Campaign
from sdc.records import (
    Contents,
    Record,
    RecordError,
    check_deterministic,
    describe_devices,
    environment,
    on_mesh,
    read_manifest,
    read_record,
)
from sdc.settings import SettingError

from .cluster import Incomparable, changes
from .data import batches
from .loop import planned
from .programs import Placement, history_ratio, initial_state, place, place_batch, plain, sharded
from .specs import CampaignJob, Loaded

# A campaign is resumed only as it was started; it may be made longer.
SETTINGS = ("config", "seed", "steps", "follow", "where", "faults", "mesh", "data", "batch", "environment", "detectors")


def run_campaign(
    job: CampaignJob,
    *,
    loaded: Loaded | None = None,
    on_row: Callable[[Mapping[str, Any]], None] = lambda row: None,
    devices: Sequence[jax.Device] | None = None,
    command: Sequence[str] = (),
) -> Contents:
    """Runs a campaign into its folder. It neither prints nor ends the process.

    Args:
        job: what to run.
        loaded: what `job.load()` returned, where it was called before.
        on_row: called with each line of `injections.jsonl`.
        devices: the devices to use, all of them; by default as many as are needed.
        command: the command line that asks for the campaign, for the record.

    Returns:
        The record; `sdc.analysis.conclude` says what follows from it.

    Raises:
        ValueError: a setting makes no sense, or the record is damaged or of another campaign.
        NotDeterministic: the clean run does not repeat itself.
        Incomparable: the campaign is resumed where its clean run gives other numbers.
    """
    loaded = loaded or job.load()
    if job.folder is None:
        raise SettingError("folder", None, "a campaign needs a folder for its record; name a new one")
    folder = Path(job.folder).absolute()
    done = rows_done(job, folder)
    devices = jax.devices()[: math.prod(job.axes.values())] if devices is None else devices
    placement = place(twins=None, data=job.data, model=job.model, devices=devices)
    check_deterministic(environment())
    runner = make_campaign(job, loaded, placement)
    manifest = _manifest(job, loaded, placement, runner, command)
    if job.resume:
        _check_resumable(folder, manifest)
    with Record.resume(folder, manifest, at=done) if job.resume else Record.create(folder, manifest) as record:
        for row in runner.run(range(done, job.injections)):
            record.line(row)
            on_row(row)
        record.sync()
    return read_record(folder)


def rows_done(job: CampaignJob, folder: Path) -> int:
    """Injections on record, from the first on without a gap; looked at before anything is compiled."""
    if not job.resume:
        return 0
    rows = {row["injection"] for row in read_record(folder, "campaign").lines}
    done = next(number for number in range(len(rows) + 1) if number not in rows)
    if done > job.injections:
        raise SettingError(
            "injections", job.injections, f"{folder} holds {done} injections already; give {done} or more"
        )
    return done


def make_campaign(job: CampaignJob, loaded: Loaded, placement: Placement) -> Campaign:
    """The campaign, compiled, with the clean run done."""
    config, dataset = loaded
    work = sharded(config)
    source = batches(dataset, batch_size=config.batch_size, microsteps=config.microsteps)

    def observe(state: Any, metrics: Any) -> Mapping[str, Any]:
        history = history_ratio(config.optimizer, state.optimizer)
        return {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm, "history": history}

    return Campaign(
        plain(work, placement),
        initial_state(work, placement, job.workload.seed),
        [place_batch(next(source), placement) for _ in range(job.steps)],
        observe=observe,
        where=job.where,
        faults=job.faults,
        follow=job.follow,
        seed=job.workload.seed,
        batch=job.batch or (1 if jax.devices()[0].platform == "cpu" else 8),
        abft=job.abft,
    )


def _manifest(
    job: CampaignJob, loaded: Loaded, placement: Placement, runner: Campaign, command: Sequence[str]
) -> dict[str, Any]:
    return {
        **planned(job, loaded, placement, command),
        "injections": job.injections,
        "where": runner.where.text,
        "faults": list(job.faults),
        "follow": job.follow,
        "batch": runner.batch,
        "sites": len(runner.sites),
        "devices": on_mesh(describe_devices(), placement.mesh),
        "thresholds": {"spike": SPIKE, "visible": VISIBLE, **runner.limits._asdict()},
        "detectors": [*DETECTORS, *([ABFT] if job.abft else [])],
        "clean": {
            "loss": [step.loss for step in runner.clean],
            "gradient_norm": [step.gradient_norm for step in runner.clean],
            "digest": [f"{step.digest[0]:08x}{step.digest[1]:08x}" for step in runner.clean],
        },
        "suspect": {"name": "campaign", "simulated": True, "faults": list(job.faults)},
    }


def _check_resumable(folder: Path, manifest: Mapping[str, Any]) -> None:
    old, words = read_manifest(folder, "campaign"), ("the campaign had", "now")
    if changed := changes(old, manifest, SETTINGS, words):
        raise RecordError(
            f"{folder} is another campaign ({'; '.join(changed[:5])}); "
            "resume it with its own settings and on its own machine, or name another folder"
        )
    if changes(old, manifest, ["digests", "clean"], words):
        raise Incomparable(
            f"the clean run of {folder} gives other numbers here, so that injections before and after could not be "
            "compared; resume it on the machine and with the versions that it was started with"
        )
