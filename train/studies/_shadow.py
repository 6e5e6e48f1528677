"""The study of the shadow replica: which faulty ranks the replica detects, after how many steps, and which ranks it
identifies as faulty."""

import functools
import math
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sdc
from sdc.aggregation import init_shadow, judge, shadow
from sdc.faults import BitFlip, Fault, When

from ..programs import DATA
from .measurements import ShadowMeasured, Watched, WatchedTraining
from .parts import RecordedParts
from .settings import Hardware, ShadowStudy
from .workloads import Method, Task, Trainer

SITE = "gradient"


def experiment(
    study: ShadowStudy, workloads: Sequence[Task], kept: RecordedParts
) -> Generator[str, None, ShadowMeasured]:
    """Trains on each simulated set of ranks, and returns what the shadow replica detected."""
    trainings = []
    for workload in workloads:
        runs = []
        for hardware in study.kinds:
            title = f"{workload.name}, {hardware.name}"
            runs += kept(title, list[Watched], functools.partial(_watched, study, workload, hardware))
            yield title
        trainings.append(WatchedTraining(workload.name, workload.metric, tuple(runs)))
    return ShadowMeasured(**study.about(workloads), trainings=tuple(trainings))


def _watched(study: ShadowStudy, workload: Task, hardware: Hardware) -> list[Watched]:
    ranks = study.workers + hardware.spares - 1
    third = study.steps // 3
    when = When(onset=third, end=third + 1) if hardware.once else When(spike=hardware.spike)
    flip = BitFlip(field="exponent", count=1)
    optimizer = workload.optimizer(study.steps)

    def gradient_of(params: Any, batch: Any) -> Any:
        gradient = jax.grad(workload.loss)(params, batch)
        return sdc.probe(gradient, SITE, directions=("fwd",))

    watched = shadow(gradient_of, DATA, spares=hardware.spares)

    def step(params: Any, state: Any, batch: Any, number: Any, setting: Any, seed: Any) -> Any:
        inner, roles = state
        changed = jnp.uint32(0)
        if hardware.faulty is None:
            mean, roles, report = watched(roles, params, batch)
        else:
            fault = Fault(flip, study.rate, site=f"fwd/{SITE}/*", at={DATA: hardware.faulty}, when=when)
            moment = sdc.Moment(jax.random.key(seed), number)
            (mean, roles, report), events = sdc.inject(watched, [fault])(moment, roles, params, batch)
            changed = jnp.sum(jnp.stack([jnp.sum(event.changed) for event in events.values()]))
        # The update excludes corruption: the study measures detection, and training has to continue.
        whole = jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)) & (jnp.max(jnp.abs(leaf)) < 10), mean)
        sound = jnp.all(jnp.stack(jax.tree.leaves(whole)))
        updates, inner = optimizer.update(jax.tree.map(lambda leaf: jnp.where(sound, leaf, 0), mean), inner, params)
        compared = jnp.concatenate([report.watched[None], report.spares])
        reports = {"changed": changed, "differed": report.differed, "compared": compared}
        return optax.apply_updates(params, updates), (inner, roles), reports

    method = Method(lambda params, setting: (optimizer.init(params), init_shadow(ranks)), step)
    trainer = Trainer(workload, method, workers=ranks, rows=math.lcm(ranks, 4) * 4)
    rows = []
    for seed, found in zip(study.runs, trainer(steps=study.steps, seeds=study.runs, looks=2), strict=True):
        verdict = judge(jax.tree.map(lambda leaf: leaf[0], found.state[1]))
        rows.append(
            Watched(
                hardware.name, seed, hardware.faulty, corrupted=found.reports["changed"].sum(axis=1) > 0,
                differed=found.reports["differed"][:, 0].astype(bool),
                compared=np.asarray(found.reports["compared"][:, 0]), verdict=verdict.verdict,
                suspects=verdict.suspects, undecided=verdict.undecided,
            )
        )  # fmt: skip
    return rows
