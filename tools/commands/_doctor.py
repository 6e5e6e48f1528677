"""`sdc doctor`: is this environment fit for bitwise comparison?"""

import msgspec

from sdc.records import MOST_DEVICES
from sdc.settings import SettingError
from sdc.train import get_config
from sdc.train.doctor import MOST_SECONDS, Examined, check_alike, examine, read_examined
from sdc.train.programs import check

from .. import DoctorOptions, usage_errors


def run(options: DoctorOptions) -> int:
    """Examines the environment and returns the exit code."""
    with usage_errors():
        against = _checked(options)
    from .. import StageProgress, show

    with StageProgress("doctor") as progress:
        found = examine(
            config=options.config,
            devices=options.devices,
            seconds=options.seconds,
            prepared=options.prepared,
            against=against,
            named=None if options.against is None else str(options.against),
            tell=progress.begin,
        )
    show("doctor", msgspec.to_builtins(found), as_json=options.json)
    return found.verdict.code


def _checked(options: DoctorOptions) -> Examined | None:
    """Everything that flags and files tell."""
    if options.config is not None:
        check(get_config(options.config), 1, 1)
    if options.devices is not None and not 1 <= options.devices <= MOST_DEVICES:
        raise SettingError("devices", options.devices, f"expected a number from 1 to {MOST_DEVICES:,}")
    if not 0 < options.seconds <= MOST_SECONDS:
        raise SettingError("seconds", options.seconds, f"expected a number above 0, at most {MOST_SECONDS:,.0f}")
    if options.against is None:
        return None
    against = read_examined(options.against)
    if problem := check_alike(against, config=options.config, devices=options.devices):
        raise SettingError("against", options.against, problem)
    return against
