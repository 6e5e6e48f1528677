"""The study of SCAR (Qiao et al., ICML 2019): what perturbations and failures cost trainings that recover."""

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdc.checkpoints import (
    POLICIES,
    Policy,
    RecoveryPolicy,
    RunningCheckpoint,
    iteration_cost_bound,
    iterations_bound,
    squared_distance,
)
from sdc.records import Contents, Record, RecordError, environment, read_manifest, read_record

from .. import changes
from ..iterative import Iterative, State, rows_of
from . import trials
from .scar_workloads import Subject
from .settings import ScarSettings
from .trials import DoesNotConverge, Failure, Held, How, Trajectory, finite

AFTER, ITERATIONS = 50, 100
"""Iterations after which trainings are perturbed, and after which they count as converged."""
DIMENSIONS = 4
SPECTRUM = (0.1, 1.0)
"""Smallest and largest curvature of the quadratic program."""


def quadratic_program(count: int, seed: int) -> dict[str, Any]:
    """Figure 3: gradient descent on x^T A x / 2, perturbed once at any iteration, in any direction."""
    curvature = np.linspace(*SPECTRUM, DIMENSIONS).astype(np.float32)
    rate = 2 / sum(SPECTRUM)  # the best: the error shrinks by c in the slowest directions
    c = (SPECTRUM[1] - SPECTRUM[0]) / sum(SPECTRUM)
    task = Iterative(
        name="quadratic program",
        source="made up",
        init=lambda key: {"x": jax.random.normal(key, (DIMENSIONS,))},
        step=lambda state, k: {"x": state["x"] * (1 - rate * curvature)},
        loss=lambda state: jnp.linalg.norm(state["x"]),
        blocks={"x": rows_of(DIMENSIONS)[0]},
        moving=("x",),
    )
    trajectory = trials.train(task, 2 * AFTER, seed=seed)
    trajectory = trials.until(trajectory, float(trajectory.losses[AFTER]))
    rng = np.random.default_rng([seed, 3])
    after = rng.integers(1, AFTER, count)
    directions = rng.normal(size=(count, DIMENSIONS))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    # Of the order of the error at that iteration, or less.
    sizes = trajectory.losses[after] * 10 ** rng.uniform(-1, 0.5, count)
    at = np.asarray(trajectory.states["x"])[after]
    starts = {"x": jnp.asarray(at + sizes[:, None] * directions, jnp.float32)}
    return _beside(trajectory, c, after, starts)


def classes_of_perturbations(subject: Subject, count: int, seed: int) -> dict[str, Any]:
    """Figure 5: perturbations in random directions, and away from the optimum, of the same sizes."""
    trajectory, optimum, c = _measured(subject, seed)
    rng = np.random.default_rng([seed, 5])
    here = {name: trajectory.states[name][AFTER] for name in subject.task.moving}
    away = {name: here[name] - optimum[name] for name in here}
    sizes = trajectory.losses[AFTER] * 10 ** rng.uniform(-2, -0.5, count)
    after = np.full(count, AFTER)
    found = {}
    for kind in ("random", "adversarial"):
        starts: State = {}
        deltas = {
            name: rng.normal(size=(count, *leaf.shape)) if kind == "random" else np.asarray(leaf)[None].repeat(count, 0)
            for name, leaf in away.items()
        }
        norms = np.sqrt(sum(np.square(delta).reshape(count, -1).sum(axis=1) for delta in deltas.values()))
        for name, delta in deltas.items():
            scale = (sizes / norms).reshape(-1, *[1] * (delta.ndim - 1))
            starts[name] = here[name] + jnp.asarray(scale * delta, jnp.float32)
        found[kind] = _beside(trajectory, c, after, starts)
    return found


def resets(subject: Subject, count: int, seed: int) -> dict[str, Any]:
    """Figure 6: a random fraction of the blocks is as it was at the start."""
    trajectory, _, c = _measured(subject, seed)
    rng = np.random.default_rng([seed, 6])
    blocks, at = subject.task.count, min(AFTER, len(trajectory.losses) // 4)
    gone = [rng.random(blocks) < fraction for fraction in rng.uniform(0.02, 1, count)]
    starts = trials.recovered(trajectory, [np.where(lost, 0, at) for lost in gone])
    return _beside(trajectory, c, np.full(count, at), starts)


def _measured(subject: Subject, seed: int) -> tuple[Trajectory, State, float]:
    """A training whose loss is its distance from the optimum, the optimum, and the factor by which it shrinks.

    The optimum is where a training ends that takes twenty times as long; of a sampler, the mean of where it is in the
    last half of one that takes four times as long. The factor is the largest of those seen in an iteration, or where
    distances do not shrink in each, that of all iterations together.
    """
    task = subject.task
    sampled = "assigned" in task.blocks
    iterations = 4 * subject.iterations if sampled else ITERATIONS
    long = trials.train(task, (4 if sampled else 20) * iterations, seed=seed)
    half = len(long.losses) // 2
    optimum = {
        name: jnp.mean(leaf[half:], axis=0) if sampled else leaf[-1]
        for name, leaf in long.states.items()
        if name in task.moving
    }

    def distance(state: State) -> Array:
        rows = [jnp.sum(task.distance(state[name], optimum[name])) for name in task.moving]
        total = sum(rows, jnp.float32(0))
        return jnp.sqrt(total) if task.distance is squared_distance else total

    apart = dataclasses.replace(task, loss=distance)
    trajectory = trials.train(apart, 2 * iterations, seed=seed)
    errors = trajectory.losses[: iterations + 1]
    trajectory = trials.until(trajectory, float(errors[-1]))
    factors = errors[1:] / errors[:-1]
    c = float(factors.max()) if (factors < 1).all() else float((errors[-1] / errors[0]) ** (1 / iterations))
    return trajectory, optimum, c


def _beside(trajectory: Trajectory, c: float, after: Float[np.ndarray, "trials"], starts: State) -> dict[str, Any]:
    """What perturbations cost, beside their bounds.

    The theorem compares upper bounds: `beyond` is by how many iterations a perturbed training took longer than kappa(x)
    = log(||x_0 - x*|| / epsilon) / log(1/c), `costs` by how many it took longer than the one that was not perturbed.
    """
    outcome = trials.go_on(trajectory, after.tolist(), starts)
    distance = float(trajectory.losses[0])
    before = {name: trajectory.states[name][jnp.asarray(after)] for name in trajectory.task.moving}
    sizes = _sizes(trajectory.task, starts, before)
    kappa = iterations_bound(distance, c, float(trajectory.criteria[0]))
    return {
        "c": c, "distance": distance, "iterations": float(trajectory.iterations[0]), "kappa": kappa,
        "after": after.tolist(), "sizes": sizes.tolist(),
        "bounds": [iteration_cost_bound(distance, c, {int(k): float(s)}) for k, s in zip(after, sizes, strict=True)],
        "costs": finite(outcome.costs),
        "beyond": finite(outcome.costs + trajectory.iterations[0] - kappa),
    }  # fmt: skip


def _sizes(task: Iterative, starts: State, before: State) -> Float[np.ndarray, "trials"]:
    """Sizes of perturbations, in the norm in which the training's distances are."""

    def one(new: State, old: State) -> Array:
        rows = [jnp.sum(task.distance(new[name], old[name])) for name in task.moving]
        return sum(rows, jnp.float32(0))

    total = np.asarray(jax.vmap(one)({name: starts[name] for name in task.moving}, before), float)
    return np.sqrt(total) if task.distance is squared_distance else total


SAVED_AFTER, SAVED_ITERATIONS = 7, 24
"""Iterations after which half is lost, and of the whole training."""
WAYS = {"SCAR": (0.25, 1), "traditional": (1.0, 4)}
"""Fraction of the bytes that a save writes, and iterations from one to the next."""


def overhead(subject: Subject, seed: int) -> dict[str, Any]:
    """Trains three times: without a failure, with SCAR, and with full checkpoints that are restored as a whole.

    All arrays of the training have the same rows, which are its blocks: they are saved side by side.
    """
    task = subject.task

    @jax.jit
    def one(state: Any, k: Any) -> Any:
        new = task.step(state, k)
        return new, task.loss(new)

    first = task.init(jax.random.key(seed))
    jax.block_until_ready(one(first, 0))
    found: dict[str, Any] = {"after": SAVED_AFTER, "undisturbed": _train(one, first, float(task.loss(first)))}
    (moving,) = task.moving
    lost = np.random.default_rng([seed, 9]).permutation(task.count)[: task.count // 2].tolist()
    for name, (fraction, every) in WAYS.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            RunningCheckpoint(
                folder, _joined(first), fraction=fraction, rows=1,
                distance=lambda new, old: task.distance(_split(new, first)[moving], _split(old, first)[moving]),
            ) as running,
        ):  # fmt: skip
            state, losses, steps, saves = first, [float(task.loss(first))], [], []
            for k in range(SAVED_ITERATIONS):
                began = time.perf_counter()
                state, loss = one(state, k)
                losses.append(float(loss))
                steps.append(time.perf_counter() - began)
                if k + 1 == SAVED_AFTER:
                    policy: RecoveryPolicy = "partial" if name == "SCAR" else "full"
                    state = _split(running.recover(lost, _joined(state), policy=policy).state["rows"], first)
                    losses[-1] = float(task.loss(state))
                elif (k + 1) % every == 0:
                    began = time.perf_counter()
                    running.save(_joined(state), k + 1)
                    saves.append(time.perf_counter() - began)
            found[name] = {
                "losses": losses, "step_seconds": float(np.median(steps)), "save_seconds": float(np.median(saves)),
                "saved_every": every, "fraction": fraction, "bytes": int(sum(running.partition.sizes[:-1])),
            }  # fmt: skip
    if not all(np.isfinite(found[name]["losses"]).all() for name in WAYS):
        raise DoesNotConverge(f"{subject.name}: a loss after the failure is no number")
    return found


def _joined(state: State) -> State:
    """All arrays side by side: what belongs to a row is lost and saved with it."""
    return {"rows": jnp.concatenate([leaf.astype(jnp.float32) for _, leaf in sorted(state.items())], axis=1)}


def _split(rows: Array, like: State) -> State:
    """The arrays again, of their own types."""
    ends = np.cumsum([leaf.shape[1] for _, leaf in sorted(like.items())])
    parts = jnp.split(rows, ends[:-1].tolist(), axis=1)
    return {name: part.astype(like[name].dtype) for name, part in zip(sorted(like), parts, strict=True)}


def _train(one: Any, state: Any, first: float) -> list[float]:
    losses = [first]
    for k in range(SAVED_ITERATIONS):
        state, loss = one(state, k)
        losses.append(float(loss))
    return losses


FRACTIONS = (1.0, 0.5, 0.25, 0.125)
LOST = (0.25, 0.5, 0.75)
EIGHTH = 0.125
HALF = 0.5

Found = Mapping[str, Any]


class Case(NamedTuple):
    """A way of saving, and a loss.

    Attributes:
        policy: how blocks are chosen.
        fraction: of the bytes that a save writes.
        lost: fraction of the blocks that a failure takes.
        how: which those are.
    """

    policy: Policy
    fraction: float
    lost: float
    how: How


CASES = (
    *(Case("priority", 1.0, lost, how) for lost in LOST for how in ("random", "contiguous")),  # figure 7
    *(Case(policy, fraction, HALF, "random") for fraction in FRACTIONS[1:] for policy in POLICIES),  # figure 8
    *(Case("priority", EIGHTH, lost, "random") for lost in (EIGHTH, 1.0)),  # what advice is held against
)


class Part(NamedTuple):
    """A part of the study.

    Attributes:
        what: which experiment.
        workload: what it trains; empty if nothing of the workloads.
        start: which of the first states; None if it is of all.
        run: does it, given what the parts before found.
    """

    what: str
    workload: str
    start: int | None
    run: Callable[[Sequence[Found]], Found]

    @property
    def title(self) -> str:
        """For people."""
        return " ".join(
            filter(None, (self.what, self.workload, f"start {self.start}" if self.start is not None else ""))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScarStudy(ScarSettings):
    """Figures 3 and 5 to 9 of Qiao et al., ICML 2019, with so many trials of the quadratic program.

    Raises:
        SettingError: there are too few trials for an interval, or the seed is none.

    Example:
        >>> import numpy as np
        >>> from sdc.train.iterative import logistic_regression
        >>> from sdc.train.studies import ScarStudy, Subject
        >>> points = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
        >>> task = logistic_regression(points, np.int32(points[:, 0] > 0), source="made up", batch=64, rate=0.3)
        >>> study = ScarStudy(trials=5, starts=5, perturbations=10)
        >>> [part.what for part in study.parts([Subject("regression", task, 20)])][:3]
        ['quadratic', 'criterion', 'perturbations']
    """

    perturbations: int = 1000

    def __post_init__(self) -> None:
        self.check()

    def parts(self, subjects: Sequence[Subject]) -> list[Part]:
        """The parts, in their order.

        Raises:
            ValueError: see `Iterative.check`.
        """
        for subject in subjects:
            subject.task.check()
        found = [Part("quadratic", "", None, lambda _: quadratic_program(self.perturbations, self.seed))]
        for subject in subjects:
            found.extend(self._of(subject))
        return found

    def _of(self, subject: Subject) -> Iterator[Part]:
        yield Part("criterion", subject.name, None, lambda _: self._criterion(subject))
        if subject.name == "regression":
            run = functools.partial(classes_of_perturbations, subject, self.trials, self.seed)
            yield Part("perturbations", subject.name, None, lambda _: run())
        if subject.name in ("regression", "topics"):
            reset = functools.partial(resets, subject, self.trials, self.seed)
            yield Part("resets", subject.name, None, lambda _: reset())
        if subject.name == "topics":
            yield Part("overhead", subject.name, None, lambda _: overhead(subject, self.seed))
        for start in range(self.starts):
            yield Part("failures", subject.name, start, functools.partial(self._failures, subject, start))

    def _criterion(self, subject: Subject) -> Found:
        """Losses at which a training counts as converged: the means of all starts in the last quarter."""
        losses = np.stack([self._train(subject, start).losses for start in range(self.starts)])
        mean = losses.mean(axis=0)
        last = max(1, subject.iterations // 4)
        criteria = np.minimum.accumulate(mean[subject.iterations - last + 1 : subject.iterations + 1]).tolist()
        criterion = criteria[-1]
        best = int(np.argmin(mean[: subject.iterations + 1]))
        if criteria[0] >= mean[0] or best < subject.iterations - last:
            raise DoesNotConverge(
                f"{subject.name} does not converge: its loss was {mean[0]:.4g}, is {criterion:.4g} after "
                f"{subject.iterations} iterations, and was lowest after {best}; there is no cost to tell"
            )
        return {
            "criteria": criteria, "iterations": subject.iterations, "interval": subject.interval,
            "blocks": subject.task.count, "source": subject.task.source, "losses": mean.tolist(),
        }  # fmt: skip

    def _train(self, subject: Subject, start: int) -> Trajectory:
        return trials.train(subject.task, 2 * subject.iterations, seed=self.seed + start)

    def _failures(self, subject: Subject, start: int, before: Sequence[Found]) -> Found:
        told = next(one for one in before if one["workload"] == subject.name and one["what"] == "criterion")["found"]
        if "failed" in told:
            raise DoesNotConverge(f"{subject.name} has no criterion; see there")
        trajectory = trials.until(self._train(subject, start), *told["criteria"])
        seed, count = [self.seed, start], self.trials // self.starts
        hit = {
            (lost, how): trials.failures(count, trajectory, lost, how, seed=seed)
            for lost, how in dict.fromkeys((case.lost, case.how) for case in CASES)
        }
        held = {
            key: trials.hold(trajectory, key[1], subject.interval, key[0], seed=self.seed + 1000 * start)
            for key in dict.fromkeys((case.policy, case.fraction) for case in CASES)
        }
        # All recoveries of all cases go on in one program.
        recovered, after = list[Any](), list[int]()
        for case in CASES:
            for one in hit[case.lost, case.how]:
                recovered.append(trials.recover(one, held[case.policy, case.fraction]))
                after.append(one.after)
        outcome = trials.go_on(trajectory, after, trials.recovered(trajectory, recovered))
        costs, sizes = (np.split(array, len(CASES)) for array in (outcome.costs, outcome.sizes))
        rows = [
            {**case._asdict(), "costs": finite(costs[n]), "sizes": sizes[n].tolist()} | _told(case, hit, held)
            for n, case in enumerate(CASES)
        ]
        return {
            "iterations": trajectory.iterations.tolist(), "after": after[:count], "cases": rows,
            "full": _full(trajectory, hit[HALF, "random"], held["priority", 1.0]),
            "busiest": _busiest(held["priority", EIGHTH]),
        }  # fmt: skip


def _told(
    case: Case, hit: Mapping[Any, Sequence[Failure]], held: Mapping[tuple[Policy, float], Held]
) -> dict[str, list[float | None]]:
    """What an outlook said of each failure before it happened, if there was one."""
    if case.policy != "priority" or case.fraction == 1:
        return {}
    outlooks = [held[case.policy, case.fraction].outlooks[one.after] for one in hit[case.lost, case.how]]
    losses = [None if outlook is None else outlook.loss(case.lost) for outlook in outlooks]
    return {
        "predicted": [None if one is None else one.steps for one in losses],
        "bound": [None if one is None else one.bound for one in losses],
    }


def _full(trajectory: Trajectory, hit: Sequence[Failure], held: Held) -> dict[str, list[float]]:
    """A restore of everything, batches and random numbers too: it costs what it goes back, bit for bit."""
    before = trials.recovered(trajectory, [trials.recover(one, held, everything=True) for one in hit])
    now = {name: trajectory.states[name][np.asarray([one.after for one in hit])] for name in trajectory.task.moving}
    squares = sum(np.square(np.asarray(now[name] - before[name], float)).reshape(len(hit), -1).sum(1) for name in now)
    return {
        "costs": [float(one.after - held.steps[one.after].max()) for one in hit],
        "sizes": np.sqrt(squares).tolist(),
    }


def _busiest(held: Held) -> float:
    """Share of the squared movement that the busiest eighth of the blocks has, in the middle of the training."""
    known = [one for one in held.outlooks if one is not None]
    speeds = np.sort(known[len(known) // 2].speeds)[::-1]
    return float(speeds[: max(1, round(EIGHTH * len(speeds)))].sum() / speeds.sum())


KIND = "scar study"
SETTINGS = ("study", "settings", "workloads", "environment")
"""A study is resumed only as it was started."""


def record_study(
    study: ScarStudy,
    subjects: Sequence[Subject],
    folder: Path,
    *,
    resume: bool = False,
    command: Sequence[str] = (),
    on_part: Callable[[str], object] = lambda title: None,
) -> Contents:
    """Runs a study of SCAR into its folder. It neither prints nor ends the process.

    Args:
        study: the study.
        subjects: what it trains.
        folder: of the record.
        resume: whether to go on with what is in it.
        command: the command line that asks for it, for the record.
        on_part: told of each part that is done.

    Returns:
        The record; `sdc.analysis.conclude` says what follows from it.

    Raises:
        RecordError: the folder holds something else, or a study with other settings.
    """
    parts = study.parts(subjects)
    manifest = {
        "kind": KIND, "command": list(command), "study": "scar", "settings": dataclasses.asdict(study),
        "parts": len(parts), "seed": study.seed, "environment": environment(),
        "workloads": {one.name: f"{one.task.source}, {one.iterations} iterations" for one in subjects},
    }  # fmt: skip
    found: list[Mapping[str, Any]] = []
    if resume:
        found = _done(folder, manifest)
        record = Record.resume(folder, manifest, at=len(found))
    else:
        record = Record.create(folder, manifest)
    with record:
        for row in found:
            on_part(parts[row["part"]].title)

        def done(row: Mapping[str, Any]) -> None:
            record.line(row)
            on_part(parts[row["part"]].title)

        finish_parts(parts, found, done)
        record.sync()
    return read_record(folder)


def finish_parts(
    parts: Sequence[Part], before: Sequence[Found] = (), on_row: Callable[[Found], object] = lambda row: None
) -> list[Found]:
    """Runs the parts of a study, and keeps what they find in memory.

    Args:
        parts: all parts of the study.
        before: what the first of them found already.
        on_row: told of what each finds, as it stands in a record.

    Returns:
        All that was found. A part whose training does not converge says so in `failed`.
    """
    found = list(before)
    for number, part in enumerate(parts[len(found) :], len(found)):
        began = time.perf_counter()
        try:
            told = part.run(found)
        except DoesNotConverge as error:
            told = {"failed": str(error)}
        row = {
            "part": number, "what": part.what, "workload": part.workload, "start": part.start,
            "seconds": round(time.perf_counter() - began, 2), "found": told,
        }  # fmt: skip
        found.append(row)
        on_row(row)
    return found


def _done(folder: Path, manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts on record, from the first on without a gap."""
    old = read_manifest(folder, KIND)
    if changed := changes(old, manifest, SETTINGS, ("the study had", "now")):
        raise RecordError(
            f"{folder} is another study ({'; '.join(changed[:5])}); resume it with its own settings and on its own "
            "machine, or name another folder"
        )
    rows = {row["part"]: row for row in read_record(folder, KIND).lines}
    return [rows[number] for number in range(next(n for n in range(len(rows) + 1) if n not in rows))]
