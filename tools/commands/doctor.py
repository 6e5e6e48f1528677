"""`sdc doctor`: is this environment fit for bitwise comparison?"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from sdc.records import MOST_DEVICES
from sdc.settings import SettingError, Within
from sdc.train import get_config
from sdc.train.doctor import MOST_SECONDS, Examined, check_alike, examine, read_examined
from sdc.train.programs import check

from .. import usage_errors

if TYPE_CHECKING:
    from sdc.analysis.report import Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Says whether this environment is fit for bitwise comparison, and if not, which setting or operation is why.

    Example: sdc doctor --json > host-a.json, then on another host: sdc doctor --against host-a.json

    Runs a small training step and single operations twice in one process, in several, from an empty and a warm
    compilation cache, and with the devices in the opposite order; looks at flags, variables and libraries; narrows down
    what differs by running it again with other settings. Exit codes: 0 fit, 1 bits differed, 2 bad usage, 3 it could
    not be found out.
    """

    config: str | None = None
    """Configuration of the training step: tiny, bench, smollm2_135m, ...; by default one that compiles in seconds."""
    devices: Annotated[int | None, Within(1, MOST_DEVICES)] = None
    """Simulate this many CPU devices; by default what there is."""
    prepared: bool = False
    """Look at the environment as the commands of sdc set it up (flags of GPUs, NPROC), instead of as it is."""
    against: Path | None = None
    """What sdc doctor --json wrote on another host: says what differs between the two, operation by operation."""
    seconds: Annotated[float, Within(0, MOST_SECONDS, above=True)] = 300.0
    """How long it may take; what was not found out until then is told as such."""
    json: bool = False
    """Print the result as JSON, and nothing else, on standard output."""


def run(options: DoctorCommand) -> int:
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
    show(msgspec.to_builtins(found), _parts(found), as_json=options.json)
    return int(found.verdict.code)


def _parts(found: Examined) -> "Iterator[Part]":
    """Checks that say something, what to set, and the verdict."""
    from sdc.analysis.report import Text

    to_set: dict[str, str] = {}  # by variable: what makes this host like another one comes last
    tones = {"differs": "corrupt", "ok": "clean", "not applicable": "quiet", "information": "known"}
    for each in found.checks:
        tone = tones.get(each.outcome, "inconclusive")
        yield Text(f"{each.name}: {each.sentence}", lead=f"{each.outcome:<14}", tone=tone)
        if each.outcome not in ("ok", "not applicable"):
            to_set |= {line.partition("=")[0].split()[-1]: line for line in each.lines}
    if to_set:
        yield Text("to make bits comparable, set")
        yield from (Text(f"  {line}") for line in to_set.values())
    yield Text(found.sentence, lead=found.verdict.fitness, tone=found.verdict.value)


def _checked(options: DoctorCommand) -> Examined | None:
    """Everything that flags and files tell."""
    if options.config is not None:
        check(get_config(options.config), 1, 1)
    if options.against is None:
        return None
    against = read_examined(options.against)
    if problem := check_alike(against, config=options.config, devices=options.devices):
        raise SettingError("against", options.against, problem)
    return against
