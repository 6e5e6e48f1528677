"""Every numeric flag takes sensible numbers, and refuses all others in one line before JAX starts."""

import types
import typing
from pathlib import Path
from typing import Any

import pytest

from sdc.tools import cli, parse
from sdc.tools.bench.command import BenchOptions
from sdc.tools.commands import burnin, doctor, estimates, fleet, golden, pairs, reports, runs, studies
from sdc.verdict import Exit

ABSURD = ("nan", "-inf", "inf", "1e300", "1e400", "-1", str(2**31), str(2**63), str(10**30), 5_000 * "9", "0x10", "")
SENSIBLE = ("0", "٣")
"""Python parses the digits of any script."""
SENSIBLE_FOR = {
    "least_elements": (str(2**31),),
    "BurninSettings.seed": (str(2**31),),
    "CheckpointCommand.rate": (str(2**31),),
}
GOLDEN = Path(__file__).parents[1] / "sdc" / "burnin" / "schema_1.golden"
COMMANDS = {
    runs.TwinCommand: "twin --corpus {text}",
    runs.TrainCommand: "train --corpus {text}",
    runs.TraceCommand: "trace {folder}/run --corpus {text}",
    runs.CampaignCommand: "campaign --corpus {text} --run {folder}/run",
    studies.PaftCommand: "study paft",
    studies.DropComputeCommand: "study dropcompute",
    studies.LossyCommand: "study lossy",
    studies.ShadowCommand: "study shadow",
    studies.ScarStudyCommand: "study scar --workload regression --images digits --run {folder}/run",
    studies.NodesStudyCommand: "study nodes --run {folder}/run",
    studies.FinetuneCommand: "study finetune --run {folder}/run",
    studies.ProductsStudyCommand: "abft study --corpus {text}",
    studies.CalibrateCommand: "abft calibrate --corpus {text} --out {folder}/out",
    BenchOptions: "bench transform",
    reports.CheckpointCommand: "checkpoint scrub {folder}",
    burnin.BurninCommand: "burnin --devices 4 --run {folder}/run",
    golden.RecordCommand: "golden record {folder}/new.golden",
    golden.VerifyCommand: f"golden verify {GOLDEN}",
    doctor.DoctorCommand: "doctor",
    pairs.PairCommand: "pair --corpus {text} --run {folder}/run",
    pairs.PoolCommand: "pool --corpus {text} --run {folder}/run --twins 3",
    fleet.ScheduleCommand: "fleet schedule a b --rounds 1",
    fleet.SimulateCommand: "fleet simulate --hosts 9",
    estimates.EstimateCommand: "estimate --target 64xv5p:16x16x16 --config tiny --run {folder}/run",
}
BESIDE = {
    "least_coverage": "--abft",
    "guard_budget": "--guard",
    "processes": "--coordinator 127.0.0.1:1 --process 0",
    "process": "--coordinator 127.0.0.1:1 --processes 2",
    "checkpoint_fraction": "--checkpoint scar",
}
"""Flags without which another flag would be refused for any value."""


class Started(BaseException):
    """Raised where devices would start: the flags are valid."""


def takes_a_number(hint: Any) -> bool:
    if typing.get_origin(hint) in (types.UnionType, typing.Union, typing.Annotated):
        return any(map(takes_a_number, typing.get_args(hint)))
    return hint in (int, float)


def flags() -> dict[str, tuple[str, str, str]]:
    """Returns each flag once, by `Class.field` of the declaring class, with the first command that has it."""
    found: dict[str, tuple[str, str, str]] = {}
    for kind, command in COMMANDS.items():
        for owner, path, flag in parse.flags(kind):
            if takes_a_number(flag.type):
                place = f"{owner.__name__}.{path[-1]}"
                found.setdefault(place, (command, place, flag.name))
    return found


def test_no_command_with_numbers_is_left_out() -> None:
    commands = (studies.AbftChoice, studies.StudyChoice, golden.Subcommand, fleet.Subcommand)
    below = [each for command in commands for each in typing.get_args(command)]
    every = [*map(parse.spec_of, parse.COMMANDS), *(typing.get_args(each)[0] for each in below)]
    numbers = {kind for kind in every if any(takes_a_number(each.flag.type) for each in parse.offered(kind)[0])}
    assert numbers == set(COMMANDS)


@pytest.mark.parametrize(("command", "place", "name"), flags().values(), ids=flags())
def test_a_number_is_sensible_or_refused(
    command: str,
    place: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*_: object, **__: object) -> None:
        raise Started

    for function in (
        "sdc.analysis.fleet.srun_lines",
        "sdc.analysis.fleet.pair_schedule.proportion_interval",
        "sdc.records.prepare",
        "sdc.tools.commands.doctor.examine",
        "sdc.tools.commands.estimates._process",
        "sdc.tools.commands.reports._Scrub.run",
        "sdc.train.joined",
        "sdc.train.studies.chosen_tasks",
    ):
        monkeypatch.setattr(function, start)
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(10_000 * "x")
    words = [*command.format(text=text, folder=tmp_path).split(), *BESIDE.get(name, "").split()]
    for value in (*ABSURD, *SENSIBLE):
        try:
            code = cli.run([*words, f"--{name.replace('_', '-')}", value])
        except Started:
            assert value in (*SENSIBLE, *SENSIBLE_FOR.get(name, ()), *SENSIBLE_FOR.get(place, ())), value
            continue
        captured = capsys.readouterr()
        assert code == Exit.USAGE, (value, captured.err)
        assert captured.out == ""
        assert captured.err.startswith("sdc: error: ")
        assert captured.err.count("\n") == 1
        assert len(captured.err) < 5_000
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
