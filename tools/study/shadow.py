"""`sdc study shadow`: which faulty ranks a shadow replica finds, how soon, and whom it names."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sdc
from sdc.aggregation._judge import judge
from sdc.aggregation._shadow import init_shadow, shadow
from sdc.analysis.aggregation import Chart, Check, Findings, Grid, Line
from sdc.faults.fault import Fault, When
from sdc.faults.kinds import BitFlip

from .training import DATA, Method, Trained, Trainer
from .workloads import Workload

WORKERS = 5
STEPS = 60
"""Ranks: four that work and one to spare."""
FAULTY = 2
SITE = "gradient"


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of hardware.

    Attributes:
        name: for the record.
        faulty: the rank with faults, or None.
        spike: probability that a step is hit at all.
        once: only one step is hit.
        spares: ranks to spare.
    """

    name: str
    faulty: int | None
    spike: float = 1.0
    once: bool = False
    spares: int = 1


CASES = (
    Case("healthy", None),
    Case("always wrong", FAULTY),
    Case("wrong in every second step", FAULTY, spike=0.5),
    Case("wrong in every tenth step", FAULTY, spike=0.1),
    Case("wrong once", FAULTY, once=True),
    Case("the home spare always wrong", WORKERS - 1),
    Case("always wrong, two spares", FAULTY, spares=2),
    Case("wrong in every tenth step, two spares", FAULTY, spike=0.1, spares=2),
)
"""A shadow with two spares has one rank more."""


def count(workloads: list[Workload]) -> int:
    """Runs of the study, for the progress display."""
    return len(workloads) * len(CASES)


def study(workloads: list[Workload], *, steps: int, seed: int) -> Iterator[tuple[str, Findings]]:
    """Runs the study.

    Yields:
        What was done, and what has been found by it.
    """
    for workload in workloads:
        rows, lines, right = [], [], []
        for case in CASES:
            found = _run(workload, case, steps, seed)
            row, line, good = _judged(case, found)
            rows.append(row)
            right.append(good)
            if case.faulty is not None:
                lines.append(line)
            yield f"{workload.name}, {case.name}", Findings()
        grid = Grid(
            f"{workload.name}: a shadow replica watches training, {steps} steps",
            (
                "hardware", "steps corrupted", "of these compared", "found", "first corrupted", "first found",
                "verdict", "named",
            ),
            tuple(rows),
            "Each step compares a working rank with the spare one; roles go round. Compared: corrupted steps in which "
            "the faulty rank was one of the two (of three with two spares). A fault that strikes but once is never "
            "pinned on one rank by one spare.",
        )  # fmt: skip
        chart = Chart(
            f"{workload.name}: differences found over time",
            "Comparisons that differed, added up.",
            "step", "differences", tuple(lines),
        )  # fmt: skip
        yield (
            "",
            Findings(
                (grid,),
                (chart,),
                (
                    Check(
                        f"{workload.name}: every compared corruption is found, nothing else, and nobody else is named",
                        all(right),
                        f"{sum(right)} of {len(right)} kinds of hardware",
                    ),
                ),
            ),
        )


def _run(workload: Workload, case: Case, steps: int, seed: int) -> Trained:
    ranks = WORKERS + case.spares - 1
    # One in ten thousand elements: a step that is hit is hit in some element for sure.
    when = When(onset=steps // 3, end=steps // 3 + 1) if case.once else When(spike=case.spike)
    faults = [] if case.faulty is None else [
        Fault(BitFlip(field="exponent", count=1), 1e-3, site=f"fwd/{SITE}/*", at={DATA: case.faulty}, when=when)
    ]  # fmt: skip

    optimizer = workload.optimizer(steps)

    def gradient_of(params: Any, batch: Any) -> Any:
        gradient = jax.grad(workload.loss)(params, batch)
        return sdc.probe(gradient, SITE, directions=("fwd",))

    def step(params: Any, state: Any, batch: Any, number: Any, setting: Any) -> Any:
        inner, roles = state
        shadowed = sdc.inject(shadow(gradient_of, DATA, spares=case.spares), faults) if faults else None
        if shadowed is None:
            mean, roles, report = shadow(gradient_of, DATA, spares=case.spares)(roles, params, batch)
            changed = jnp.uint32(0)
        else:
            moment = sdc.Moment(jax.random.key(seed), number)
            (mean, roles, report), events = shadowed(moment, roles, params, batch)
            changed = jnp.sum(jnp.stack([jnp.sum(event.changed) for event in events.values()]))
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
    return Trainer(workload, method, workers=ranks, rows=rows)(steps=steps, seed=seed, looks=2)


def _judged(case: Case, found: Trained) -> tuple[tuple[Any, ...], Line, bool]:
    """A row of the table, a line of the figure, and whether all is as it should be."""
    verdict = judge(jax.tree.map(lambda leaf: leaf[0], found.state[1]))
    corrupted = found.reports["changed"].sum(axis=1) > 0
    differed = found.reports["differed"][:, 0].astype(bool)
    compared = found.reports["compared"][:, 0]
    seen = corrupted & (compared == (-1 if case.faulty is None else case.faulty)).any(axis=-1)
    first = [int(np.flatnonzero(mask)[0]) if mask.any() else None for mask in (corrupted, differed)]
    named = ", ".join(map(str, verdict.suspects)) or (
        " or ".join(map(str, verdict.undecided[0])) if verdict.undecided else "nobody"
    )
    row = (
        case.name, int(corrupted.sum()), int(seen.sum()), int(differed.sum()), first[0], first[1], verdict.verdict,
        named,
    )  # fmt: skip
    line = Line(case.name, list(range(1, len(differed) + 1)), np.cumsum(differed).astype(float).tolist())
    good = bool((seen == differed).all()) and set(verdict.suspects) <= {case.faulty}
    return row, line, good
