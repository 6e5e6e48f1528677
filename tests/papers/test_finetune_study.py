"""The study of fine-tuning: its parts, resuming, and claims that fail for a method broken on purpose."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdc.analysis.studies import findings_of
from sdc.faults.kinds import Scale
from sdc.train import DataError, programs
from sdc.train.finetuning import HEALTHY, OTHER, FinetuneMeasured, FinetuneStudy, tuning
from sdc.train.studies import finish, scaled_faults

STUDY = FinetuneStudy(
    nodes=("node2", "node6", "node13"), seeds=3, steps=12, questions=60, batch=16, decoder="tiny", pretraining=40,
    dtype="float32", rate=1e-2,
)  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> FinetuneMeasured:
    done: list[str] = []
    found = finish(STUDY.run(), done.append)
    assert len(done) == STUDY.count() == 13, "nodes without published rates have no runs"
    return found


def test_runs_of_one_seed_share_the_order(measured: FinetuneMeasured) -> None:
    runs = {(run.node, run.seed): run for run in measured.runs}
    healthy = runs[HEALTHY, 1]
    assert (runs["node13", 1].losses == healthy.losses).all(), "clean until step 450"
    assert (runs["node13", 1].choices == healthy.choices).all()
    assert runs[OTHER, 1].losses[0] != healthy.losses[0]
    assert runs["node6", 1].losses[0] == pytest.approx(healthy.losses[0], rel=0.2)
    assert (runs["node6", 1].losses != healthy.losses).any()
    assert (runs[HEALTHY, 0].losses != healthy.losses).any()
    again = finish(dataclasses.replace(STUDY, nodes=("node2",)).run(), lambda _: None)
    for run in again.runs:
        assert (run.losses == runs[run.node, run.seed].losses).all(), "a study repeats bit for bit"


def failed(monkeypatch: pytest.MonkeyPatch, study: FinetuneStudy = STUDY, **replaced: Any) -> list[str]:
    for name, broken in replaced.items():
        monkeypatch.setattr(tuning, name, broken)
    found = findings_of(finish(study.run(), lambda _: None))
    return [check.claim.partition(" ")[0] + " " + check.claim.split()[1] for check in found.checks if not check.holds]


def test_claims_fail_for_broken_methods(measured: FinetuneMeasured, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = {check.claim: check.holds for check in findings_of(measured).checks}
    assert claims["fine-tuning raises the accuracy"] is True
    # No fault is injected: nobody disagrees.
    assert "predictions of" in failed(monkeypatch, scaled_faults=lambda *_, **__: [])
    # Nothing is learned.
    assert "fine-tuning raises" in failed(monkeypatch, dataclasses.replace(STUDY, rate=1e-9))

    def large(*given: Any, **more: Any) -> list[Any]:  # errors that ruin the accuracy
        return [dataclasses.replace(fault, what=Scale(-30.0)) for fault in scaled_faults(*given, **more)]

    lost = failed(monkeypatch, dataclasses.replace(STUDY, nodes=("node6",)), scaled_faults=large)
    assert np.isin(["no node"], lost).all()


def test_real_weights_are_those_of_another_implementation() -> None:
    """Tokens, perplexity and greedy continuations of transformers 5.24 (torch 2.14, float32); see `make data`."""
    told = json.loads((Path(__file__).parent / "smollm2.json").read_text())
    try:
        model = tuning.load(None, None)
    except DataError as error:
        pytest.skip(str(error))
    logits = jax.jit(tuning._alone(lambda params, tokens: programs.logits(model.config, params, tokens)))
    params, length = jax.tree.map(jnp.asarray, model.params), max(len(known["tokens"]) for known in told)
    for known in told:
        prompt = model.tokenizer.encode(known["prompt"])
        tokens = np.asarray(known["tokens"], np.int32)
        assert tokens[: len(prompt)].tolist() == prompt.tolist()
        padded = np.pad(tokens, (0, length - len(tokens)))  # later tokens change nothing before them
        found = np.asarray(logits(params, padded[None])[0, : len(tokens) - 1], np.float64)
        # Greedy continuations are equal if each token is the most probable one after the tokens before it.
        assert found.argmax(-1)[len(prompt) - 1 :].tolist() == tokens[len(prompt) :].tolist()
        chosen = found[np.arange(len(found)), tokens[1:]]
        perplexity = math.exp(np.mean(np.log(np.exp(found).sum(-1)) - chosen))
        assert abs(perplexity / known["perplexity"] - 1) < 1e-4
