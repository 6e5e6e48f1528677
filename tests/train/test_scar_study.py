"""The study of SCAR on a small training: it goes on where it stopped; its checks fail on methods that are broken."""

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from sdc.analysis.studies import _scar as findings_of_scar
from sdc.schema import PartRow
from sdc.settings import SettingError
from sdc.train.iterative import logistic_regression
from sdc.train.studies import ScarStudy, Subject, _scar, trials
from sdc.train.studies._scar import record_study
from sdc.train.studies.trials import DoesNotConverge, Failure, Held

STUDY = ScarStudy(trials=40, starts=5, perturbations=50)


@functools.cache
def subject() -> Subject:
    """A regression in which one of eight features matters, so that one of eight blocks moves."""
    rng = np.random.default_rng(1)
    scales = np.where(np.arange(256) % 8 == 0, 0.5, 0.003)
    x = (rng.normal(size=(96, 256)) * scales).astype(np.float32)
    y = (x @ rng.normal(size=(256, 3))).argmax(axis=1).astype(np.int32)
    return Subject("regression", logistic_regression(x, y, source="made up", batch=96, rate=0.2), 40)


def test_subjects_leave_the_devices_to_the_command(tmp_path: Path) -> None:
    """`sdc study scar` asks for several devices once the data of all workloads are read."""
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"{'abc'[number % 3] * 4} {'de'[number % 2] * 4}\n" * 40)
    code = (
        "import sys, pathlib\n"
        "from sdc.records import prepare\n"
        "from sdc.train.studies import Sources, subjects\n"
        "sources = Sources(documents=pathlib.Path(sys.argv[1]))\n"
        "subjects(('regression', 'topics', 'cnn-layers', 'cnn-shards', 'transformer'), sources)\n"
        "prepare(cpu_devices=2, cpu_threads=2)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env={**os.environ, "XLA_FLAGS": ""})


def row(what: str, workload: str, found: Any, start: int | None = None) -> PartRow:
    """A line of what was found."""
    return PartRow(part=0, what=what, workload=workload, start=start, found=msgspec.to_builtins(found))


def rows(study: ScarStudy = STUDY, *kinds: str) -> list[PartRow]:
    """What is on record of the parts of these kinds, or of all."""
    found: list[PartRow] = []
    for part in study.parts([subject()]):
        if not kinds or part.what in kinds:
            found.append(row(part.what, part.workload, part.run(found), start=part.start))
    return found


def checks(found: list[PartRow]) -> Mapping[str, bool]:
    return {check.claim: check.holds for check in findings_of_scar.findings(found).checks}


def broken_wrong_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery gives back, of a few blocks that were lost, all others."""
    right = trials.recover

    def wrong(failure: Failure, held: Held, *, everything: bool = False) -> Any:
        return right(failure if everything else Failure(failure.after, ~failure.lost), held, everything=everything)

    monkeypatch.setattr(trials, "recover", wrong)


def broken_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called priority is drawn."""
    right = trials.hold

    def wrong(trajectory: Any, fraction: float, interval: int, policy: Any, **more: Any) -> Held:
        held = right(trajectory, fraction, interval, "random" if policy == "priority" else policy, **more)
        return Held(held.steps, right(trajectory, fraction, interval, policy, **more).outlooks)

    monkeypatch.setattr(trials, "hold", wrong)


def broken_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions are of steps five times as long."""
    right = _scar._predictions

    def wrong(*arguments: Any) -> dict[str, list[float | None]]:
        told = right(*arguments)
        return told | {"predicted": [one and 5 * one for one in told["predicted"]]} if told else {}

    monkeypatch.setattr(_scar, "_predictions", wrong)


def broken_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound leaves out that later perturbations count for more."""
    right = _scar.iteration_cost_bound

    def wrong(distance: float, c: float, each: Mapping[int, float]) -> float:
        return right(distance, c, {0: next(iter(each.values()))})

    monkeypatch.setattr(_scar, "iteration_cost_bound", wrong)


def broken_adversary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adversary pushes towards the optimum."""
    right = _scar._beside

    def wrong(trajectory: Any, c: float, after: Any, starts: Any) -> Any:
        here = {name: trajectory.states[name][int(after[0])] for name in starts}
        return right(trajectory, c, after, {name: 2 * here[name] - leaf for name, leaf in starts.items()})

    monkeypatch.setattr(_scar, "_beside", wrong)


FAILURES = ("criterion", "failures")


@pytest.mark.parametrize(
    ("broken", "kinds", "claims"),
    [
        (broken_wrong_blocks, FAILURES, ("partial recovery costs at least", "theorem 4.2")),
        (broken_random, FAILURES, ("at least 78 % less", "than with random")),
        (broken_predictions, FAILURES, ("within a factor of two",)),
        (broken_bound, ("quadratic",), ("no perturbation costs more iterations",)),
        (broken_adversary, ("perturbations",), ("away from the optimum",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_checks_fail_on_methods_that_are_broken(
    broken: Any, kinds: tuple[str, ...], claims: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    found = checks(rows(STUDY, *kinds))
    for claim in claims:
        assert [bool(holds) for said, holds in found.items() if claim in said] == [False], (claim, found)


def test_what_does_not_converge_is_said_and_not_priced(tmp_path: Path) -> None:
    task = dataclasses.replace(subject().task, step=lambda state, k: {"weights": 1.1 * state["weights"]})
    record = record_study(STUDY, [Subject("other", task, 20)], tmp_path / "study")
    found = findings_of_scar.findings(record.parts)
    grid = next(grid for grid in found.grids if grid.caption == "Training runs that did not converge")
    assert len(grid.rows) == 1 + STUDY.starts
    assert "other does not converge: its loss was" in grid.rows[0][3]
    assert not any("Figure 7" in grid.caption for grid in found.grids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"starts": 4}, "starts=4: expected at least 5"),
        ({"trials": 7, "starts": 5}, "trials=7: expected a multiple of 5, the number of starts"),
        ({"trials": 0}, "trials=0: expected a multiple"),
        ({"seed": -1}, "seed=-1: expected a whole number from 0"),
    ],
)
def test_bad_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ScarStudy(**settings).check()


def test_a_criterion_that_is_never_met() -> None:
    part = next(part for part in STUDY.parts([subject()]) if part.what == "failures")
    told = [row("criterion", "regression", {"failed": "never"})]
    with pytest.raises(DoesNotConverge, match="has no convergence criterion"):
        part.run(told)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": {}}, "blocks are given for \\[\\]"),
        ({"blocks": {"weights": np.arange(255)}}, "weights has shape \\(256, 3\\)"),
        ({"blocks": {"weights": np.arange(256) / 2}}, "expected a whole number for each row"),
        ({"blocks": {"weights": np.arange(256) - 1}}, "block numbers are \\[-1, 0"),
        ({"blocks": {"weights": 2 * np.arange(256)}}, "block numbers are \\[0, 2"),
        ({"moving": ()}, "moving arrays are \\[\\]"),
        ({"moving": ("other",)}, "moving arrays are \\['other'\\]"),
        ({"step": lambda state, k: {}}, "step returns \\{\\}"),
        ({"loss": lambda state: state["weights"]}, "expected a single number"),
    ],
)
def test_a_training_that_is_put_together_wrongly(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        STUDY.parts([Subject("mine", dataclasses.replace(subject().task, **changes), 20)])


def test_a_loss_that_goes_up_again_is_no_convergence() -> None:
    """Lower than at the start, but not at its lowest in the end."""
    task = dataclasses.replace(
        subject().task, loss=lambda state: jnp.square(jnp.linalg.norm(state["weights"]) - 0.8).sum()
    )
    part = STUDY.parts([Subject("other", task, 40)])[1]
    with pytest.raises(DoesNotConverge, match="was lowest after"):
        part.run([])
