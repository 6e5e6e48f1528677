"""Runs from Python objects: what is injected is measured, wherever twins run and however a run ends."""

import dataclasses
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sdc
from sdc.analysis import conclude
from sdc.nodes.simulated_nodes import SUBMODULES, behaviour, expected_frequency, fitted
from sdc.records import FolderTaken, RecordError, read_manifest
from sdc.records.format import write_sealed
from sdc.settings import SettingError
from sdc.train import Checks, Incomparable, Training, Twins, run
from tests.train.runs import MINI, WORKLOAD, execute, lines, loaded

STEPS = 5


TWINS = Twins(workload=WORKLOAD, steps=STEPS, model=2)


CORRUPT = dataclasses.replace(TWINS, suspect="node11")


ELEMENTS = 2 * 2 * MINI.batch_size * MINI.sequence_length * MINI.model.width * MINI.model.layers
"""Elements of a submodule's outputs in a step: two microsteps, two ranks."""


@pytest.fixture(scope="module")
def corrupt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "corrupt"
    return folder, execute(dataclasses.replace(CORRUPT, folder=folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_suspect_is_clean_and_fully_checked(dtype: Any, tmp_path: Path) -> None:
    workload = dataclasses.replace(WORKLOAD, dtype=dtype)
    found = execute(dataclasses.replace(TWINS, workload=workload, suspect="healthy", steps=2, folder=tmp_path / "run"))
    assert found["verdict"] == "clean"
    for site in SUBMODULES:
        row = found["submodules"][site]
        assert (row["checked"], row["mismatched"], row["injected"]) == (2 * ELEMENTS, 0, 0)
    assert found["state"]["checked"] > 0
    assert found["state"]["mismatched"] == 0


def test_measured_equals_injected_by_site_layer_and_step(corrupt: tuple[Path, dict[str, Any]]) -> None:
    folder, found = corrupt
    assert found["verdict"] == "corrupt"
    assert found["simulated"] is True
    for site in SUBMODULES:
        row = found["submodules"][site]
        assert row["mismatched"] == row["injected"] > 0 or site == "bwd/ffn"
        assert row["mismatched"] == row["injected"]
    totals: dict[tuple[int, str], int] = defaultdict(int)
    layers = set()
    for row in lines(folder, "mismatches.jsonl"):
        assert row["mismatched"] == row["injected"] == sum(rank["mismatched"] for rank in row["ranks"]) > 0
        assert {rank["twin"] for rank in row["ranks"]} == {1}
        totals[row["step"], row["site"]] += row["mismatched"]
        layers.add(row["layer"])
    assert layers == {0, 1}
    for row in lines(folder):
        for site in SUBMODULES:
            assert row["sites"][site]["mismatched"] == row["sites"][site]["injected"] == totals[row["step"], site]
        assert row["loss"][0] == row["loss"][1]
        assert row["state"]["mismatched"] == 0


def test_frequencies_agree_with_the_profile(corrupt: tuple[Path, dict[str, Any]]) -> None:
    """To five standard deviations; the published figures have three digits (0.5 %).

    Rates are multiplied by (1 + few) u^few in each step and layer, which has the variance few^2 / (2 few + 1).
    """
    _, found = corrupt
    few = fitted()["few"].value
    course = np.asarray([behaviour("node11").mean(step) for step in range(STEPS)])
    scatter = few**2 / (2 * few + 1) * np.sum(course**2) / np.sum(course) ** 2 / MINI.model.layers
    for site, frequency in expected_frequency("node11", STEPS).items():
        row = found["submodules"][site]
        deviation = math.sqrt(frequency / row["checked"] + frequency**2 * scatter)
        # By layer the study prints three digits, and their mean differs from its table 1 by up to 1 %.
        assert abs(row["frequency"] - frequency) < 5 * deviation + 0.015 * frequency
        assert found["expected"][site] == pytest.approx(frequency)


def test_twins_on_one_device_give_the_same_counts(corrupt: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    found = execute(dataclasses.replace(CORRUPT, placement="vmap", folder=tmp_path / "run"))
    for site in SUBMODULES:
        for key in ("injected", "mismatched"):
            assert found["submodules"][site][key] == corrupt[1]["submodules"][site][key]


def test_parameter_synchronization(tmp_path: Path) -> None:
    job = Twins(workload=WORKLOAD, sync="params", steps=3, suspect="node1", folder=tmp_path / "run")
    found = execute(job)
    assert len(set(found["state_digest"])) == 1
    assert found["worst_noise_to_signal"] > 0
    for row in lines(tmp_path / "run"):
        assert row["gradient_difference"][0] == 0.0
        if row["gradient"]["mismatched"]:
            assert row["gradient_difference"][1] > 0
            assert row["parameter_difference"][1] > 0
        assert row["sites"]["fwd/attn"]["checked"] == 0
    assert found["submodules"]["fwd/attn"]["frequency"] is None


def test_free_twins_drift_and_the_healthy_one_is_a_plain_run(tmp_path: Path) -> None:
    plain = execute(Training(workload=WORKLOAD, steps=STEPS, folder=tmp_path / "plain"))
    assert plain["verdict"] is None
    free = Twins(workload=WORKLOAD, sync="none", steps=STEPS, suspect="node11", folder=tmp_path / "free")
    found, rows = execute(free), lines(tmp_path / "free")
    assert [row["loss"][0] for row in rows] == [row["loss"][0] for row in lines(tmp_path / "plain")]
    drift = [row["parameter_difference"][1] for row in rows]
    assert 0 < drift[0] < drift[-1]
    assert found["state_digest"][0] == plain["state_digest"][0] != found["state_digest"][1]


def test_faults_three_twins_and_comparing_always(tmp_path: Path) -> None:
    faults = ("bitflip,rate=1e-3,site=fwd/ffn,layer=1", sdc.Fault(sdc.faults.Stuck(math.nan), 1e-4, "bwd/attn"))
    found = execute(
        Twins(
            workload=WORKLOAD, twins=3, steps=2, compare="always", data=2, folder=tmp_path / "run",
            faults=(faults[0], dataclasses.replace(faults[1], at={"twin": 2})),  # type: ignore[type-var]
        )
    )  # fmt: skip
    for site in SUBMODULES:
        assert found["submodules"][site]["mismatched"] == found["submodules"][site]["injected"]
    assert found["submodules"]["bwd/attn"]["nonfinite"] > 0
    for row in lines(tmp_path / "run", "mismatches.jsonl"):
        assert row["site"] != "fwd/ffn" or row["layer"] == 1
        assert {rank["twin"] for rank in row["ranks"]} == {2}  # the odd one out


class Crash(Exception):
    """What a crash is in this process."""


def test_a_run_that_crashed_resumes_to_the_same_bits(corrupt: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    job = dataclasses.replace(CORRUPT, folder=tmp_path / "run", checkpoint_every=2)

    def crash(row: Any) -> None:
        if row["step"] == 3:
            raise Crash

    with pytest.raises(Crash):
        run(job, loaded=loaded(WORKLOAD), on_step=crash)
    folder = Path(str(job.folder))
    assert len(lines(folder)) == 4
    with (folder / "steps.jsonl").open("a") as file:
        file.write('{"step": 4, "los')  # a line that a crash cut off
    assert conclude(folder)["verdict"] == "corrupt"  # what is known so far
    assert not (folder / "summary.json").exists()

    resumed = execute(dataclasses.replace(job, resume=True))
    assert resumed["state_digest"] == corrupt[1]["state_digest"]
    assert resumed["submodules"] == corrupt[1]["submodules"]
    assert lines(folder) == lines(corrupt[0])
    assert lines(folder, "mismatches.jsonl") == lines(corrupt[0], "mismatches.jsonl")

    again = dataclasses.replace(job, resume=True)
    other = dataclasses.replace(again, workload=dataclasses.replace(WORKLOAD, seed=7))
    with pytest.raises(RecordError, match=r"another configuration .*data\.digest"):
        run(other, loaded=loaded(other.workload))
    with pytest.raises(SettingError, match="already holds 5 steps; give at least 5"):
        run(dataclasses.replace(again, steps=3), loaded=loaded(WORKLOAD))
    manifest = read_manifest(folder)
    write_sealed(folder / "manifest.json", {**manifest, "program": {"step": "another", "observe": "too"}})
    with pytest.raises(Incomparable, match="was recorded with another program"):
        run(again, loaded=loaded(WORKLOAD))


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("seed", {"workload": dataclasses.replace(WORKLOAD, seed=1)}),
        ("config", {"workload": dataclasses.replace(WORKLOAD, dtype="bfloat16")}),
        ("mesh", {"data": 2}),
        ("sync", {"sync": "params"}),
        ("compare", {"compare": "always"}),
        ("placement", {"placement": "vmap"}),
        ("twins", {"twins": 3, "model": 1}),
        ("suspect", {"suspect": "node1"}),
        ("abft", {"checks": Checks()}),
    ],
)
def test_a_run_is_resumed_with_its_own_settings(
    key: str, other: dict[str, Any], corrupt: tuple[Path, dict[str, Any]]
) -> None:
    """Told before anything is compiled."""
    job = dataclasses.replace(CORRUPT, folder=corrupt[0], resume=True, **other)
    with pytest.raises(RecordError, match=rf"another configuration \((.*; )?{key}\b.*: the run has"):
        run(job, loaded=loaded(job.workload))


def test_a_folder_is_never_overwritten(corrupt: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(RecordError, match="already exists"):
        run(dataclasses.replace(CORRUPT, folder=corrupt[0]), loaded=loaded(WORKLOAD))


def test_a_checked_run_resumes_and_its_folder_is_taken(tmp_path: Path) -> None:
    """Its manifest holds an infinity, which JSON has not. A folder in use is told before anything is compiled."""
    job = Training(workload=WORKLOAD, steps=1, checks=Checks(where='products & scope("*/ffn/*")'), folder=tmp_path)
    execute(job)
    assert len(execute(dataclasses.replace(job, resume=True))) > 0
    assert len(lines(tmp_path)) == 1
    with pytest.raises(FolderTaken):
        run(job, loaded=loaded(WORKLOAD))
    other = dataclasses.replace(job, workload=dataclasses.replace(WORKLOAD, seed=1), resume=True)
    with pytest.raises(RecordError, match=r"another configuration \(.*seed: the run has 0, asked is 1"):
        run(other, loaded=loaded(WORKLOAD))
