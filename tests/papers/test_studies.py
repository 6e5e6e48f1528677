"""The experiments of the studies, shrunk and on a linear model: what they measure is what the library computes."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from sdc.settings import SettingError
from sdc.train.data import ByteTokenizer, Corpus, make_dataset
from sdc.train.iterative.images import Images
from sdc.train.programs.config import get_config
from sdc.train.studies import (
    Calibration,
    DropComputeStudy,
    LossyStudy,
    PaftStudy,
    ProductsStudy,
    ShadowStudy,
    Study,
    Task,
    convnet,
    dropcompute,
    finish,
    linear,
    study,
    transformer,
)
from sdc.train.studies.measurements import DropComputeMeasured, LossyMeasured, Measured, PaftMeasured, ShadowMeasured
from sdc.train.studies.settings import KINDS, NOISES
from sdc.train.studies.theory import pair_drift

STEPS = 12


def run(chosen: Study[Any], workloads: list[Task]) -> Measured:
    """What a study measures; it tells of every part."""
    parts: list[str] = []
    found = study(chosen, workloads, progress=parts.append)
    assert len(parts) == len(set(parts)) == chosen.count(workloads), "the progress display counts what is done"
    assert found.study == chosen
    assert dict(found.sources) == {workload.name: workload.source for workload in workloads}
    return found


def test_paft() -> None:
    chosen = PaftStudy(steps=STEPS, seeds=3, variances=(0.01, 0.1), periods=(4,), bursts=(1.0,), burst_every=5)
    found = run(chosen, [linear(features=256)])
    assert isinstance(found, PaftMeasured)
    (training,) = found.trainings
    assert list(training.scores) == [
        "clean",
        "noisy",
        "paft_sync, H = 4",
        "paft",
        "paft, algorithm 2",
        "paft, state too",
    ]
    assert (training.scores["clean"] > 0.8).all()
    np.testing.assert_array_equal(*training.scores["clean"])
    assert all(values.shape == (2, 3) for values in training.scores.values())
    assert all(len({*values[1]}) > 1 for values in training.scores.values()), "seeds differ"
    assert [burst.method for burst in training.bursts] == ["noisy", "paft"]
    # A look at each step: the noisy run falls behind at its first burst, the fifth step, and paft is brought together.
    noisy, mended = training.bursts
    assert noisy.steps.tolist() == list(range(1, STEPS + 1))
    assert noisy.scores[:, -3:].mean() < mended.scores[:, -3:].mean()
    assert {drift.dimension for drift in found.drifts} == {2 * 256 + 2}
    free, together = found.drifts
    assert (free.period, together.period) == (None, 4)
    assert len(free.squares) == STEPS
    # Without synchronization replicas only part; with it the divergence starts anew after every fourth step.
    assert (np.diff(free.squares) > 0).all()
    assert together.squares[4] < together.squares[3]


def test_a_run_depends_on_its_seed_alone() -> None:
    """Runs that are trained together have the bits of runs that are trained apart."""
    few = {"steps": STEPS, "variances": (0.1,), "periods": (), "bursts": ()}
    together = study(PaftStudy(seeds=4, **few), [linear()]).trainings[0].scores["noisy"]
    later = study(PaftStudy(seeds=3, seed=1, **few), [linear()]).trainings[0].scores["noisy"]
    np.testing.assert_array_equal(together[:, 1:], later)


def test_dropcompute() -> None:
    chosen = DropComputeStudy(
        steps=STEPS, seeds=3, workers=2, fleets=(4, 64), threads=(2,), iterations=4, drops=(0.1, 0.3), unit=0.001,
        noisy_fleets=(4, 16), local_periods=(1, 8),
    )  # fmt: skip
    found = run(chosen, [linear()])
    assert isinstance(found, DropComputeMeasured)
    small, large = found.predicted
    assert 1 < small.speedup < large.speedup
    assert small.rates[0] == 0
    assert small.speedups[0] == pytest.approx(1)
    (clocked,) = found.clocked
    assert clocked.stopped_seconds < clocked.seconds
    runs = found.trainings[0].runs
    assert [(one.rate, one.compensation, one.correction) for one in runs] == [
        (0.0, "none", "none"), (0.1, "none", "none"), (0.3, "none", "none"), (0.1, "extra steps", "none"),
        (0.1, "larger batch", "none"), (0.1, "repetition", "none"), (0.1, "none", "rate"), (0.1, "none", "count"),
    ]  # fmt: skip
    assert runs[3].losses.shape[1] > STEPS
    assert runs[4].drop_rate == pytest.approx(1 - 12 / 14, abs=0.05)
    np.testing.assert_array_equal(runs[5].ends, runs[1].ends)
    assert (runs[5].losses != runs[1].losses).any()
    shares = found.trainings[0].shares
    assert {name: [*scores] for name, scores in shares.items()} == {
        "none": [0.0, 0.1, 0.3], "rate": [0.1, 0.3], "count": [0.1, 0.3],
    }  # fmt: skip
    assert [one.figure for one in found.noisy] == [*NOISES]
    for noisy in found.noisy:
        assert (noisy.ratios[0] > 1).all()
        assert (noisy.ratios[0] < noisy.ratios[1]).all()
    assert [(one.server, one.period) for one in found.local] == [(False, 1), (False, 8), (True, 1), (True, 8)]
    np.testing.assert_array_equal(found.local[0].local, 1)
    assert runs[0].drop_rate == 0 < runs[1].drop_rate < runs[2].drop_rate < 0.45
    ends = [one.ends[:, -1] for one in runs]
    assert (ends[0] > ends[1]).all()
    assert (ends[1] > ends[2]).all()
    assert len({*ends[0]}) == 3, "seeds differ"


def test_dropped_samples_return_until_they_are_used() -> None:
    """Of rows with numbers: none is used twice, and only those that wait for a batch are missing."""
    chosen = DropComputeStudy(workers=2, micro_batches=3)

    def numbered(rows: int, seed: int) -> Iterator[tuple[np.ndarray]]:
        return ((np.arange(start, start + rows),) for start in itertools.count(0, rows))

    task = dropcompute._repeating(chosen, dataclasses.replace(linear(), data=numbered), 2.0)
    batches = task.data(12, 5)
    used = []
    for number in range(40):
        (rows,) = next(batches)
        for worker, share in enumerate(rows.reshape(2, 3, 2)):
            ends = np.cumsum(dropcompute._latencies(chosen, 3, np.uint32(5), number, worker))
            used += share[ends < 2.0].ravel().tolist()
    assert len(used) == len({*used}) < 40 * 12
    assert len({*range(max(used))} - {*used}) < 24


def test_lossy() -> None:
    chosen = LossyStudy(
        steps=2 * STEPS,
        seeds=3,
        rates=(0.0, 0.3),
        stale_rates=(0.3,),
        packet_rates=(0.3,),
        burst_rates=(),
        mended_rates=(),
        walk_rates=(0.3,),
    )
    found = run(chosen, [linear()])
    assert isinstance(found, LossyMeasured)
    (training,) = found.trainings
    assert training.steps == STEPS
    assert all(values.shape == (3,) for scores in training.scores.values() for values in scores.values())
    assert {name: list(scores) for name, scores in training.scores.items()} == {
        "per shard": [0.0, 0.3], "per shard, stale (algorithm 1)": [0.0, 0.3], "per packet": [0.0, 0.3],
    }  # fmt: skip
    assert (training.losses[0.0] > 0).all()
    assert (training.losses[0.0] != training.losses[0.3]).all()
    assert training.drifts[0.0] == 0 < training.drifts[0.3]
    assert found.walks[0.3] == pytest.approx(pair_drift(0.3), rel=0.05)


def test_shadow() -> None:
    kinds = tuple(kind for kind in KINDS if kind.name in ("healthy", "always wrong", "wrong once"))
    found = run(ShadowStudy(steps=STEPS, seeds=3, kinds=kinds, rate=0.5), [linear()])
    assert isinstance(found, ShadowMeasured)
    assert [one.seed for one in found.trainings[0].runs] == [0, 1, 2] * 3
    healthy, wrong, once = found.trainings[0].runs[::3]
    assert (healthy.verdict, healthy.corrupted.any(), healthy.differed.any()) == ("clean", False, False)
    assert (wrong.verdict, wrong.suspects, wrong.corrupted.all()) == ("corrupt", (2,), True)
    np.testing.assert_array_equal(wrong.differed, (wrong.compared == 2).any(axis=1))
    assert wrong.differed.any()
    assert np.flatnonzero(once.corrupted).tolist() == [STEPS // 3]


@pytest.mark.parametrize("name", ["convnet", "transformer"])
def test_other_workloads_learn(name: str, tmp_path: Any) -> None:
    """Twenty steps on one batch, and the score says so."""
    if name == "convnet":
        generator = np.random.default_rng(0)
        labels = generator.integers(0, 2, 400).astype(np.int32)
        images = 0.3 * generator.random((400, 8, 8, 1), np.float32)
        images[labels == 1, :4] += 0.5
        images[labels == 0, 4:] += 0.5
        workload = convnet(Images(images[:320], labels[:320], images[320:], labels[320:], 2, "made up", "0"))
    else:
        (tmp_path / "text.txt").write_text("to be or not to be, " * 800)
        workload = transformer((str(tmp_path / "text.txt"),))
    batch = next(workload.data(8, 0))
    params = workload.init(jax.random.key(0))
    with jax.numpy_dtype_promotion("standard"):
        optimizer = workload.optimizer(20)
        state = optimizer.init(params)
        before = float(workload.score(params))
        step = jax.jit(lambda params, state: optimizer.update(jax.grad(workload.loss)(params, batch), state, params))
        for _ in range(20):
            updates, state = step(params, state)
            params = jax.tree.map(lambda p, u: p + u, params, updates)
    after = float(workload.score(params))
    assert after > before if workload.metric == "accuracy" else after < before / 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: study("paft", [], steps=9), "steps=9: expected at least 10"),
        (
            lambda: study("dropcompute", [], seeds=2),
            "seeds=2: expected 3 to 1,000; fewer do not suffice for an interval",
        ),
        (lambda: study("lossy", [], seed=-1), "seed=-1: expected an integer from 0 to"),
        (lambda: study("other", []), "study=other: expected one of paft, dropcompute, lossy, shadow"),
        (lambda: ProductsStudy(steps=0).check(), "steps=0: expected at least 1"),
        (lambda: Calibration(dtypes=()).check(), "dtypes: expected float32, bfloat16 or both"),
    ],
)
def test_settings_that_make_no_sense(call: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        call()


def test_a_selector_of_no_product_is_refused() -> None:
    config = get_config("tiny")
    dataset = make_dataset(Corpus(("some text, " * 500,), "made up"), ByteTokenizer(), config.sequence_length, seed=0)
    chosen = ProductsStudy(dtypes=("float32",), steps=1, where='scope("nowhere")')
    with pytest.raises(ValueError, match="nowhere"):
        finish(chosen.run(config, dataset))
