"""`sdc doctor`: checks whether this environment is fit for bitwise comparison."""

import dataclasses
from collections.abc import Iterator

from sdc import tools
from sdc.analysis import report as pages
from sdc.records import to_json
from sdc.train.doctor import Examination, Examined, examine

from .. import ResultCommand, usage_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorCommand(ResultCommand):
    """Checks whether this environment is fit for bitwise comparison.

    Example: sdc doctor --json > host-a.json
    Example: sdc doctor --against host-a.json

    Runs a small training step and single operations repeatedly: twice in one process, in several processes, with an
    empty and a warm compilation cache, and with the devices in reverse order. Checks flags, environment variables and
    libraries. To find the cause of a difference, repeats whatever differed with other settings. Exit codes: 0 fit, 1
    bits differed, 2 bad usage, 3 inconclusive.
    """

    asked: Examination = dataclasses.field(default_factory=Examination)


def run(options: DoctorCommand) -> int:
    with usage_errors():
        options.asked.check()
    with tools.StageProgress("doctor") as progress:
        found = examine(options.asked, report=progress.begin)
    tools.show(to_json(found), _parts(found), as_json=options.json)
    return int(found.verdict.code)


def _parts(found: Examined) -> "Iterator[pages.Part]":
    """Yields the checks, the environment variables to set, and the verdict."""
    to_set: dict[str, str] = {}  # lines by variable; those that match this host to another come last
    tones = {"differs": "corrupt", "ok": "clean", "not applicable": "quiet", "information": "known"}
    for each in found.checks:
        tone = tones.get(each.outcome, "inconclusive")
        yield pages.Text(f"{each.name}: {each.sentence}", lead=f"{each.outcome:<14}", tone=tone)
        if each.outcome not in ("ok", "not applicable"):
            to_set |= {line.partition("=")[0].split()[-1]: line for line in each.lines}
    if to_set:
        yield pages.Text("to make bits comparable, set:")
        yield from (pages.Text(f"  {line}") for line in to_set.values())
    yield pages.Text(found.sentence, lead=found.verdict.fitness, tone=found.verdict.value)
