"""Every flag that takes a number takes sensible ones, and refuses all others in one line before JAX starts."""

import dataclasses
import inspect
import types
import typing
from pathlib import Path
from typing import Any

import pytest

from sdc.tools import (
    burnin_options,
    cli,
    doctor_options,
    estimate_options,
    fleet_options,
    golden_options,
    options,
    pair_options,
    parse,
    study_options,
)
from sdc.tools.bench import options as bench_options
from sdc.tools.errors import Exit

ABSURD = ("nan", "-inf", "inf", "1e300", "1e400", "-1", str(2**31), str(2**63), str(10**30), 5_000 * "9", "0x10", "")
SENSIBLE = ("0", "٣")
"""Python reads the digits of any script."""
SENSIBLE_FOR = {"least_elements": (str(2**31),), "LoadOptions.seed": (str(2**31),)}
GOLDEN = Path(__file__).parents[1] / "sdc" / "burnin" / "schema_1.golden"
AGGREGATION = (
    study_options.PaftOptions,
    study_options.DropComputeOptions,
    study_options.LossyOptions,
    study_options.ShadowOptions,
)
COMMANDS = {
    options.TwinOptions: "twin --corpus {text}",
    options.TrainOptions: "train --corpus {text}",
    options.TraceOptions: "trace {folder}/run --corpus {text}",
    options.CampaignOptions: "campaign --corpus {text} --run {folder}/run",
    **{kind: f"study {kind.study}" for kind in AGGREGATION},
    study_options.ScarStudyOptions: "study scar --workload regression --images digits --run {folder}/run",
    study_options.NodesStudyOptions: "study nodes --run {folder}/run",
    study_options.ProductsStudyOptions: "abft study --corpus {text}",
    study_options.CalibrateOptions: "abft calibrate --corpus {text} --out {folder}/out",
    bench_options.BenchOptions: "bench transform",
    burnin_options.BurninOptions: "burnin --devices 4 --run {folder}/run",
    golden_options.GoldenRecordOptions: "golden record {folder}/new.golden",
    golden_options.GoldenVerifyOptions: f"golden verify {GOLDEN}",
    doctor_options.DoctorOptions: "doctor",
    pair_options.PairOptions: "pair --corpus {text} --run {folder}/run",
    pair_options.PoolOptions: "pool --corpus {text} --run {folder}/run --twins 3",
    fleet_options.ScheduleOptions: "fleet schedule a b --rounds 1",
    fleet_options.SimulateOptions: "fleet simulate --hosts 9",
    estimate_options.EstimateOptions: "estimate --target 64xv5p:16x16x16 --config tiny --run {folder}/run",
}
BESIDE = {
    "least_coverage": "--abft",
    "processes": "--coordinator 127.0.0.1:1 --process 0",
    "process": "--coordinator 127.0.0.1:1 --processes 2",
}
"""Flags without which another would be refused whatever its value."""


class Started(BaseException):
    """Everything was found to be in order."""


def takes_a_number(hint: Any) -> bool:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(map(takes_a_number, typing.get_args(hint)))
    return hint in (int, float)


def flags() -> dict[str, tuple[str, str, str]]:
    """Each flag once, with the first command that has it: `Class.field` of the class that says what it means."""
    found: dict[str, tuple[str, str]] = {}
    for kind, command in COMMANDS.items():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            owner = next(base for base in kind.__mro__ if field.name in inspect.get_annotations(base))
            if takes_a_number(hints[field.name]):
                place = f"{owner.__name__}.{field.name}"
                found.setdefault(place, (command, place, field.name))
    return found


def test_no_command_with_numbers_is_left_out() -> None:
    commands = (
        study_options.AbftCommand,
        study_options.StudyCommand,
        golden_options.GoldenCommand,
        fleet_options.FleetCommand,
    )
    below = [each for command in commands for each in typing.get_args(command)]
    subcommands = [typing.get_args(each)[0] for each in below]
    every = [*map(parse.options_of, parse.COMMANDS), *subcommands]
    numbers = {kind for kind in every if any(map(takes_a_number, typing.get_type_hints(kind).values()))}
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
        "sdc.analysis.fleet.launching.srun_lines",
        "sdc.analysis.fleet.naming.make_schedule",
        "sdc.records.determinism.prepare",
        "sdc.tools.commands._doctor.examine",
        "sdc.tools.bench.command.prepare",
        "sdc.tools.commands._estimate._process",
        "sdc.train.cluster.joined",
        "sdc.train.studies.workloads.chosen_tasks",
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
