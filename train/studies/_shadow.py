"""The study of the shadow replica: which faulty ranks it finds, how soon, and whom it names."""

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sdc
from sdc.aggregation import init_shadow, judge, shadow
from sdc.faults import BitFlip, Fault, When

from ..programs import DATA
from .measurements import ShadowMeasured, Watched, WatchedTraining
from .protocol import Study
from .workloads import Method, Task, Trained, Trainer

SITE = "gradient"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A kind of hardware.

    Attributes:
        name: name for the record.
        faulty: the rank with faults, or None.
        spike: probability that a step is hit at all.
        once: whether only one step is hit.
        spares: ranks to spare.
    """

    name: str
    faulty: int | None
    spike: float = 1.0
    once: bool = False
    spares: int = 1


KINDS = (
    Hardware("healthy", None),
    Hardware("always wrong", 2),
    Hardware("wrong in every second step", 2, spike=0.5),
    Hardware("wrong in every tenth step", 2, spike=0.1),
    Hardware("wrong once", 2, once=True),
    Hardware("the home spare always wrong", 4),
    Hardware("always wrong, two spares", 2, spares=2),
    Hardware("wrong in every tenth step, two spares", 2, spike=0.1, spares=2),
)
"""Of five ranks: four that work and one to spare."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowStudy(Study[ShadowMeasured]):
    """Which faulty ranks a shadow replica finds, how soon, and whom it names.

    Attributes:
        workers: ranks, one of them to spare; with two spares there is one rank more.
        kinds: kinds of hardware.
        rate: share of the elements of a gradient that a fault hits, in a step that is hit: so many that it hits one.

    Example:
        >>> from sdc.train.studies import ShadowStudy, finish, linear
        >>> from sdc.train.studies._shadow import KINDS
        >>> found = finish(ShadowStudy(steps=12, kinds=KINDS[:2], rate=0.5).run([linear()]))
        >>> [run.verdict for run in found.trainings[0].runs]
        ['clean', 'corrupt']
    """

    name: ClassVar[str] = "shadow"
    workers: int = 5
    steps: int = 60
    kinds: tuple[Hardware, ...] = KINDS
    rate: float = 1e-3

    def count(self, workloads: Sequence[Task]) -> int:
        return len(workloads) * len(self.kinds)

    def run(self, workloads: Sequence[Task]) -> Generator[str, None, ShadowMeasured]:
        trainings = []
        for workload in workloads:
            runs = []
            for hardware in self.kinds:
                runs.append(_watched(hardware, self._run(workload, hardware)))
                yield f"{workload.name}, {hardware.name}"
            trainings.append(WatchedTraining(workload.name, workload.metric, tuple(runs)))
        return ShadowMeasured(**self.about(workloads), trainings=tuple(trainings))

    def _run(self, workload: Task, hardware: Hardware) -> Trained:
        ranks = self.workers + hardware.spares - 1
        third = self.steps // 3
        when = When(onset=third, end=third + 1) if hardware.once else When(spike=hardware.spike)
        flip = BitFlip(field="exponent", count=1)
        faults = [] if hardware.faulty is None else [
            Fault(flip, self.rate, site=f"fwd/{SITE}/*", at={DATA: hardware.faulty}, when=when)
        ]  # fmt: skip
        optimizer = workload.optimizer(self.steps)

        def gradient_of(params: Any, batch: Any) -> Any:
            gradient = jax.grad(workload.loss)(params, batch)
            return sdc.probe(gradient, SITE, directions=("fwd",))

        watched = shadow(gradient_of, DATA, spares=hardware.spares)

        def step(params: Any, state: Any, batch: Any, number: Any, setting: Any) -> Any:
            inner, roles = state
            if faults:
                moment = sdc.Moment(jax.random.key(self.seed), number)
                (mean, roles, report), events = sdc.inject(watched, faults)(moment, roles, params, batch)
                changed = jnp.sum(jnp.stack([jnp.sum(event.changed) for event in events.values()]))
            else:
                mean, roles, report = watched(roles, params, batch)
                changed = jnp.uint32(0)
            # What is corrupted is left out of the update: the study looks at detection, and training is to go on.
            whole = jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)) & (jnp.max(jnp.abs(leaf)) < 10), mean)
            sound = jnp.all(jnp.stack(jax.tree.leaves(whole)))
            updates, inner = optimizer.update(jax.tree.map(lambda leaf: jnp.where(sound, leaf, 0), mean), inner, params)
            told = {
                "changed": changed, "differed": report.differed,
                "compared": jnp.concatenate([report.watched[None], report.spares]),
            }  # fmt: skip
            return optax.apply_updates(params, updates), (inner, roles), told

        method = Method(lambda params, setting: (optimizer.init(params), init_shadow(ranks)), step)
        rows = math.lcm(ranks, 4) * 4
        return Trainer(workload, method, workers=ranks, rows=rows)(steps=self.steps, seed=self.seed, looks=2)


def _watched(hardware: Hardware, found: Trained) -> Watched:
    verdict = judge(jax.tree.map(lambda leaf: leaf[0], found.state[1]))
    return Watched(
        hardware.name,
        hardware.faulty,
        corrupted=found.reports["changed"].sum(axis=1) > 0,
        differed=found.reports["differed"][:, 0].astype(bool),
        compared=np.asarray(found.reports["compared"][:, 0]),
        verdict=verdict.verdict,
        suspects=verdict.suspects,
        undecided=verdict.undecided,
    )
