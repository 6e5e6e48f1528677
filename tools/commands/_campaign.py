"""`sdc campaign`: thousands of single simulated faults in the reference workload."""

import sys

from sdc.train import CampaignJob

from .. import (
    CampaignOptions,
    Exit,
    check_devices,
    check_folder,
    new_folder,
    onward,
    prepare_devices,
    run_errors,
    settings_of,
    usage_errors,
)


def run(options: CampaignOptions) -> int:
    """Runs a campaign and returns the exit code."""
    folder = options.run.absolute() if options.run else new_folder("campaign")
    job = CampaignJob(
        **{**settings_of(options), "folder": folder}, injections=options.injections, steps=options.steps,
        follow=options.follow, where=options.where, faults=options.faults, abft=options.abft, batch=options.batch,
    )  # fmt: skip
    with usage_errors():
        job.check()
        devices = check_devices(options.devices, job, 1)
        check_folder(folder, options.resume, "campaign")
        loaded = job.load()
    from sdc.analysis import conclude
    from sdc.train import rows_done, run_campaign

    from .. import InjectionProgress, show

    with usage_errors():
        done = rows_done(job, folder)
        prepare_devices(options, devices)
    onward.folder = folder
    with run_errors(folder), InjectionProgress(options.injections, first=done) as progress:
        run_campaign(job, loaded=loaded, on_row=progress.update, command=["sdc", *sys.argv[1:]])
        summary = conclude(folder)
    show("campaign", summary, as_json=options.json)
    return int(Exit.CLEAN)
