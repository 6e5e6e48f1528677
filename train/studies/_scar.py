"""The study of SCAR (Qiao et al., ICML 2019): the cost of perturbations and failures for training algorithms that
recover from them."""

import contextlib
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float

from sdc.checkpoints import (
    POLICIES,
    Policy,
    RunningCheckpoint,
    iteration_cost_bound,
    iterations_bound,
    squared_distance,
)
from sdc.records import Contents, environment, read_record
from sdc.schema import Criterion, FailureCase, Failures, LossCosts, Overhead, PartRow, Perturbed, RecoveringRun
from sdc.settings import SettingError

from .. import DataError
from ..iterative import (
    By,
    ImagesError,
    Iterative,
    State,
    convolutional_network,
    logistic_regression,
    matrix_factorization,
    most_active,
    read_documents,
    read_ratings,
    read_table,
    rows_of,
    shortened,
    topic_model,
    transformer_decoder,
)
from . import trials
from .parts import open_parts
from .settings import ScarStudy, Sources
from .trials import DoesNotConverge, Failure, Held, How, Trajectory, finite
from .workloads import halved, images_of


@dataclasses.dataclass(frozen=True)
class Subject:
    """A training algorithm, and the number of iterations after which it counts as converged.

    Attributes:
        name: name of the algorithm on the command line.
        task: the algorithm.
        iterations: number of iterations; the convergence criterion is the mean loss of all starts after these
            iterations.
        interval: number of iterations in which a checkpoint writes everything once.
    """

    name: str
    task: Iterative
    iterations: int
    interval: int = 8


@contextlib.contextmanager
def _named(setting: str) -> Iterator[None]:
    """Reports data errors under the name of the setting that selects the data."""
    try:
        yield
    except DataError as error:
        raise SettingError(setting, error.given, error.problem) from error


def _regression(sources: Sources) -> Subject:
    if sources.table is not None:
        with _named("table"):
            table = read_table(sources.table)
        features, labels, source = table.features[:10_000], table.labels[:10_000], table.source
    else:
        images = halved(images_of(sources.images))
        features, labels = images.train_images[:10_000], images.train_labels[:10_000]
        features, source = features.reshape(len(features), -1), images.source
    task = logistic_regression(features, labels, source=source, batch=max(1, len(labels) // 5), rate=0.3)
    return Subject("regression", task, 60)


def _factorization(sources: Sources) -> Subject:
    with _named("ratings"):
        ratings = read_ratings(sources.ratings, sources.archives)
    users, items = ratings.shape
    if users > 300 and items > 500:
        ratings = most_active(ratings, users=300, items=500)
    return Subject("factorization", matrix_factorization(ratings, factors=10, decay=1.0), 20)


def _topics(sources: Sources) -> Subject:
    with _named("documents"):
        documents = read_documents(sources.documents, sources.archives)
    return Subject("topics", topic_model(shortened(documents, tokens=128)), 16)


def _network(name: str, by: By, sources: Sources) -> Subject:
    try:
        return Subject(name, convolutional_network(halved(images_of(sources.images)), by=by), 20)
    except ImagesError:
        raise
    except ValueError as error:
        raise SettingError("images", sources.images, str(error)) from error


SUBJECTS: Mapping[str, Callable[[Sources], Subject]] = {
    "regression": _regression,
    "factorization": _factorization,
    "topics": _topics,
    "cnn-layers": functools.partial(_network, "cnn-layers", "layers"),
    "cnn-shards": functools.partial(_network, "cnn-shards", "shards"),
    "transformer": lambda sources: Subject("transformer", transformer_decoder(sources.corpus), 20),
}


def subjects(names: Sequence[str], sources: Sources) -> list[Subject]:
    """Returns training algorithms by name, with their data.

    Raises:
        SettingError: a name is unknown, or data are missing or damaged.
    """
    for name in names:
        if name not in SUBJECTS:
            raise SettingError("workload", name, f"expected one of {', '.join(SUBJECTS)}")
    if sources.table is not None and "regression" not in names:
        raise SettingError("table", sources.table, "applies only to the workload regression; add this workload")
    return [SUBJECTS[name](sources) for name in dict.fromkeys(names)]


AFTER, ITERATIONS = 50, 100  # iterations before the perturbation, and until convergence
DIMENSIONS = 4
SPECTRUM = (0.1, 1.0)  # smallest and largest curvature of the quadratic program


def quadratic_program(count: int, seed: int) -> Perturbed:
    """Simulates figure 3: gradient descent on x^T A x / 2, perturbed once at a random iteration in a random
    direction."""
    curvature = np.linspace(*SPECTRUM, DIMENSIONS).astype(np.float32)
    rate = 2 / sum(SPECTRUM)  # the optimal rate: the error shrinks by a factor of c in the slowest directions
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
    # The sizes are at most of the order of the error at that iteration.
    sizes = trajectory.losses[after] * 10 ** rng.uniform(-1, 0.5, count)
    at = np.asarray(trajectory.states["x"])[after]
    starts = {"x": jnp.asarray(at + sizes[:, None] * directions, jnp.float32)}
    return _beside(trajectory, c, after, starts)


def classes_of_perturbations(subject: Subject, count: int, seed: int) -> dict[str, Perturbed]:
    """Simulates figure 5: perturbations of the same sizes in random directions and away from the optimum."""
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


def resets(subject: Subject, count: int, seed: int) -> Perturbed:
    """Simulates figure 6: a random fraction of the blocks is reset to the initial values."""
    trajectory, _, c = _measured(subject, seed)
    rng = np.random.default_rng([seed, 6])
    blocks, at = subject.task.count, min(AFTER, len(trajectory.losses) // 4)
    gone = [rng.random(blocks) < fraction for fraction in rng.uniform(0.02, 1, count)]
    starts = trials.recovered(trajectory, [np.where(lost, 0, at) for lost in gone])
    return _beside(trajectory, c, np.full(count, at), starts)


def _measured(subject: Subject, seed: int) -> tuple[Trajectory, State, float]:
    """Returns a run whose loss is the distance from the optimum, the optimum itself, and the factor by which the
    distance shrinks in an iteration.

    The optimum is the final state of another run, which is twenty times as long; for a sampler, it is the mean over the
    last half of a run that is four times as long. The factor is the largest of all iterations or, if the distance does
    not shrink in every iteration, their geometric mean.
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
        total = _total(task, state, optimum)
        return jnp.sqrt(total) if task.distance is squared_distance else total

    apart = dataclasses.replace(task, loss=distance)
    trajectory = trials.train(apart, 2 * iterations, seed=seed)
    errors = trajectory.losses[: iterations + 1]
    trajectory = trials.until(trajectory, float(errors[-1]))
    factors = errors[1:] / errors[:-1]
    c = float(factors.max()) if (factors < 1).all() else float((errors[-1] / errors[0]) ** (1 / iterations))
    return trajectory, optimum, c


def _beside(trajectory: Trajectory, c: float, after: Float[np.ndarray, "trials"], starts: State) -> Perturbed:
    """Measures the cost of perturbations, and the bounds on it.

    The theorem compares upper bounds: from the number of iterations of a perturbed run, `beyond` subtracts kappa(x) =
    log(||x_0 - x*|| / epsilon) / log(1/c), and `costs` subtracts the number of iterations of the unperturbed run.
    """
    outcome = trials.go_on(trajectory, after.tolist(), starts)
    task, distance = trajectory.task, float(trajectory.losses[0])
    before = {name: trajectory.states[name][jnp.asarray(after)] for name in task.moving}
    moved = {name: starts[name] for name in task.moving}
    sizes = np.asarray(jax.vmap(functools.partial(_total, task))(moved, before), float)
    if task.distance is squared_distance:
        sizes = np.sqrt(sizes)
    kappa = iterations_bound(distance, c, float(trajectory.criteria[0]))
    return Perturbed(
        c=c, distance=distance, iterations=float(trajectory.iterations[0]), kappa=kappa,
        after=after.tolist(), sizes=sizes.tolist(),
        bounds=[iteration_cost_bound(distance, c, {int(k): float(s)}) for k, s in zip(after, sizes, strict=True)],
        costs=finite(outcome.costs),
        beyond=finite(outcome.costs + trajectory.iterations[0] - kappa),
    )  # fmt: skip


def _total(task: Iterative, new: State, old: State) -> Array:
    """Returns the sum of the distances between all arrays of two states, as the training algorithm measures
    distance."""
    rows = [jnp.sum(task.distance(new[name], old[name])) for name in task.moving]
    return sum(rows, jnp.float32(0))


SAVED_AFTER, SAVED_ITERATIONS = 7, 24  # iterations before half of the blocks are lost, and in total
# Fraction of the bytes per save, iterations between saves, and kind of recovery.
WAYS: Mapping[str, tuple[float, int, Literal["partial", "full"]]] = {
    "SCAR": (0.25, 1, "partial"),
    "traditional": (1.0, 4, "full"),
}


def overhead(subject: Subject, seed: int) -> Overhead:
    """Trains three times: without a failure, with SCAR, and with full checkpoints and full recovery.

    All arrays of the algorithm have the same rows, which are its blocks, so the arrays are concatenated and saved
    together.
    """
    task = subject.task

    @jax.jit
    def one(state: Any, k: Any) -> Any:
        new = task.step(state, k)
        return new, task.loss(new)

    first = state = task.init(jax.random.key(seed))
    start = float(task.loss(first))
    jax.block_until_ready(one(first, 0))
    undisturbed = [start]
    for k in range(SAVED_ITERATIONS):
        state, loss = one(state, k)
        undisturbed.append(float(loss))
    ways: dict[str, RecoveringRun] = {}
    (moving,) = task.moving
    lost = np.random.default_rng([seed, 9]).permutation(task.count)[: task.count // 2].tolist()
    names = sorted(first)
    ends = np.cumsum([first[name].shape[1] for name in names])[:-1].tolist()

    def joined(state: State) -> State:
        """Concatenates all arrays, so that all data of a row are lost and saved together."""
        return {"rows": jnp.concatenate([state[name].astype(jnp.float32) for name in names], axis=1)}

    def split(rows: Array) -> State:
        """Splits concatenated rows into arrays of the original types."""
        parts = zip(names, jnp.split(rows, ends, axis=1), strict=True)
        return {name: part.astype(first[name].dtype) for name, part in parts}

    for way, (fraction, every, policy) in WAYS.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            RunningCheckpoint(
                folder, joined(first), fraction=fraction, rows=1,
                distance=lambda new, old: task.distance(split(new)[moving], split(old)[moving]),
            ) as running,
        ):  # fmt: skip
            state, losses, steps, saves = first, [start], [], []
            for k in range(SAVED_ITERATIONS):
                began = time.perf_counter()
                state, loss = one(state, k)
                losses.append(float(loss))
                steps.append(time.perf_counter() - began)
                if k + 1 == SAVED_AFTER:
                    state = split(running.recover(lost, joined(state), policy=policy).state["rows"])
                    losses[-1] = float(task.loss(state))
                elif (k + 1) % every == 0:
                    began = time.perf_counter()
                    running.save(joined(state), k + 1)
                    saves.append(time.perf_counter() - began)
            ways[way] = RecoveringRun(
                losses=losses, step_seconds=float(np.median(steps)), save_seconds=float(np.median(saves)),
                saved_every=every, fraction=fraction, bytes=int(sum(running.partition.sizes[:-1])),
            )  # fmt: skip
    if not all(np.isfinite(way.losses).all() for way in ways.values()):
        raise DoesNotConverge(f"{subject.name}: a loss after the failure is not finite")
    return Overhead(after=SAVED_AFTER, undisturbed=undisturbed, scar=ways["SCAR"], traditional=ways["traditional"])


EIGHTH = 0.125
HALF = 0.5

Found: TypeAlias = Perturbed | dict[str, Perturbed] | Overhead | Criterion | Failures


class Case(NamedTuple):
    """A save policy, and the kind of blocks that a failure takes."""

    policy: Policy  # selection of blocks
    fraction: float  # fraction of the bytes that a save writes
    lost: float  # fraction of the blocks that a failure takes
    how: How  # selection of lost blocks


CASES = (
    *(Case("priority", 1.0, lost, how) for lost in (0.25, 0.5, 0.75) for how in ("random", "contiguous")),  # figure 7
    *(Case(policy, fraction, HALF, "random") for fraction in (0.5, 0.25, 0.125) for policy in POLICIES),  # figure 8
    *(Case("priority", EIGHTH, lost, "random") for lost in (EIGHTH, 1.0)),  # for testing advice
)


class Part(NamedTuple):
    """A part of the study."""

    what: str  # name of the experiment
    workload: str  # its workload; empty if it has none
    start: int | None  # index of the initial state; None for all
    run: Callable[[Sequence[PartRow]], Found]  # runs it, given the findings of earlier parts

    @property
    def title(self) -> str:
        """Title for display."""
        start = "" if self.start is None else f"start {self.start}"
        return " ".join(filter(None, (self.what, self.workload, start)))


def parts_of(study: ScarStudy, subjects: Sequence[Subject]) -> list[Part]:
    """Returns the parts of a study in order."""
    seed = study.seed
    parts = [Part("quadratic", "", None, _alone(functools.partial(quadratic_program, study.perturbations, seed)))]
    for subject in subjects:
        subject.task.check()
    for subject in subjects:
        runs: dict[str, Callable[[], Found]] = {"criterion": functools.partial(_criterion, study, subject)}
        if subject.name == "regression":
            runs["perturbations"] = functools.partial(classes_of_perturbations, subject, study.trials, seed)
        if subject.name in ("regression", "topics"):
            runs["resets"] = functools.partial(resets, subject, study.trials, seed)
        if subject.name == "topics":
            runs["overhead"] = functools.partial(overhead, subject, seed)
        parts += [Part(what, subject.name, None, _alone(run)) for what, run in runs.items()]
        parts += [
            Part("failures", subject.name, start, functools.partial(_failures, study, subject, start))
            for start in range(study.starts)
        ]
    return parts


def _criterion(study: ScarStudy, subject: Subject) -> Criterion:
    """Returns the losses at which a run counts as converged: the losses in the last quarter of the iterations, averaged
    over all starts."""
    losses = np.stack([_train(study, subject, start).losses for start in range(study.starts)])
    mean = losses.mean(axis=0)
    last = max(1, subject.iterations // 4)
    criteria = np.minimum.accumulate(mean[subject.iterations - last + 1 : subject.iterations + 1]).tolist()
    criterion = criteria[-1]
    best = int(np.argmin(mean[: subject.iterations + 1]))
    if criteria[0] >= mean[0] or best < subject.iterations - last:
        raise DoesNotConverge(
            f"{subject.name} does not converge: its loss was {mean[0]:.4g} at the start and "
            f"{criterion:.4g} after {subject.iterations} iterations, and was lowest after {best} iterations, so costs "
            "are undefined"
        )
    return Criterion(
        criteria=criteria, iterations=subject.iterations, interval=subject.interval, blocks=subject.task.count,
        source=subject.task.source, losses=mean.tolist(),
    )  # fmt: skip


def _train(study: ScarStudy, subject: Subject, start: int) -> Trajectory:
    return trials.train(subject.task, 2 * subject.iterations, seed=study.seed + start)


def _alone(run: Callable[[], Found]) -> Callable[[Sequence[PartRow]], Found]:
    """Adapts a function to the `run` of a part that does not depend on earlier parts."""
    return lambda _: run()


def _failures(study: ScarStudy, subject: Subject, start: int, done: Sequence[PartRow]) -> Failures:
    part = next(one for one in done if (one.workload, one.what) == (subject.name, "criterion"))
    if part.failed is not None:
        raise DoesNotConverge(f"{subject.name} has no convergence criterion; see its part 'criterion'")
    trajectory = trials.until(_train(study, subject, start), *part.read(Criterion).criteria)
    seed, count = [study.seed, start], study.trials // study.starts
    hit = {
        (lost, how): trials.failures(count, trajectory, lost, how, seed=seed)
        for lost, how in dict.fromkeys((case.lost, case.how) for case in CASES)
    }
    held = {
        key: trials.hold(trajectory, key[1], subject.interval, key[0], seed=study.seed + 1000 * start)
        for key in dict.fromkeys((case.policy, case.fraction) for case in CASES)
    }
    # One program continues all recoveries of all cases.
    recovered, after = list[Any](), list[int]()
    for case in CASES:
        for one in hit[case.lost, case.how]:
            recovered.append(trials.recover(one, held[case.policy, case.fraction]))
            after.append(one.after)
    outcome = trials.go_on(trajectory, after, trials.recovered(trajectory, recovered))
    costs, sizes = (np.split(array, len(CASES)) for array in (outcome.costs, outcome.sizes))
    rows = []
    for n, case in enumerate(CASES):
        row = FailureCase(**case._asdict(), costs=finite(costs[n]), sizes=sizes[n].tolist())
        prediction = _predictions(case, hit, held)
        row.predicted, row.one_rate = prediction.get("predicted", []), prediction.get("one_rate", [])
        rows.append(row)
    # A full restore, including batches and random numbers, costs exactly the number of iterations by which it goes
    # back.
    half, whole = hit[HALF, "random"], held["priority", 1.0]
    before = trials.recovered(trajectory, [trials.recover(one, whole, everything=True) for one in half])
    now = {name: trajectory.states[name][np.asarray([one.after for one in half])] for name in trajectory.task.moving}
    squares = sum(np.square(np.asarray(now[name] - before[name], float)).reshape(count, -1).sum(1) for name in now)
    full = [float(one.after - whole.steps[one.after].max()) for one in half]
    # The share of the squared movement in the middle of the training that is due to the most active eighth of the
    # blocks.
    known = [one for one in held["priority", EIGHTH].outlooks if one is not None]
    speeds = np.sort(known[len(known) // 2].speeds)[::-1]
    busiest = float(speeds[: max(1, round(EIGHTH * len(speeds)))].sum() / speeds.sum())
    return Failures(
        iterations=trajectory.iterations.tolist(), after=after[:count], cases=rows,
        full=LossCosts(costs=list(full), sizes=np.sqrt(squares).tolist()), busiest=busiest,
    )  # fmt: skip


def _predictions(
    case: Case, hit: Mapping[Any, Sequence[Failure]], held: Mapping[tuple[Policy, float], Held]
) -> dict[str, list[float | None]]:
    """Returns, for each failure, the cost that the outlook just before the failure predicted; None if there was no
    outlook."""
    if case.policy != "priority" or case.fraction == 1:
        return {}
    outlooks = [held[case.policy, case.fraction].outlooks[one.after] for one in hit[case.lost, case.how]]
    losses = [None if outlook is None else outlook.loss(case.lost) for outlook in outlooks]
    return {
        "predicted": [None if one is None else one.steps for one in losses],
        "one_rate": [None if one is None else one.one_rate for one in losses],
    }


KIND = "scar study"


def record_study(
    study: ScarStudy,
    subjects: Sequence[Subject],
    folder: Path,
    *,
    resume: bool = False,
    command: Sequence[str] = (),
    on_part: Callable[[str], object] = lambda title: None,
) -> Contents:
    """Runs a study of SCAR and writes its record, without printing or ending the process.

    Args:
        study: the study.
        subjects: its training algorithms.
        folder: folder of the record.
        resume: whether to resume the study in the folder.
        command: the command line of the study, for the record.
        on_part: called with the title of each completed part.

    Returns:
        The record, from which `sdc.analysis.conclude` makes the summary.

    Raises:
        RecordError: the folder contains something else, or a study with other settings.
    """
    parts = study.parts(subjects)
    manifest = {
        "kind": KIND, "command": list(command), "study": "scar", "settings": dataclasses.asdict(study),
        "parts": len(parts), "seed": study.seed, "environment": environment(),
        "workloads": {one.name: f"{one.task.source}, {one.iterations} iterations" for one in subjects},
    }  # fmt: skip
    record, found = open_parts(folder, manifest, resume=resume)
    with record:
        for row in found:
            on_part(parts[row.part].title)

        def done(row: PartRow) -> None:
            record.line(msgspec.to_builtins(row))  # with a start of `null`
            on_part(parts[row.part].title)

        finish_parts(parts, found, done)
        record.sync()
    return read_record(folder)


def finish_parts(
    parts: Sequence[Part], before: Sequence[PartRow] = (), on_row: Callable[[PartRow], object] = lambda row: None
) -> list[PartRow]:
    """Runs the parts of a study and keeps their findings in memory.

    Args:
        parts: all parts of the study.
        before: findings of the first parts from an earlier run.
        on_row: called with the findings of each part, as a line of the record.

    Returns:
        A line for each part; if a run does not converge, `failed` contains the reason.
    """
    found = list(before)
    for number, part in enumerate(parts[len(found) :], len(found)):
        began = time.perf_counter()
        try:
            finding = msgspec.to_builtins(part.run(found))
        except DoesNotConverge as error:
            finding = {"failed": str(error)}
        row = PartRow(
            part=number, what=part.what, workload=part.workload, start=part.start,
            seconds=round(time.perf_counter() - began, 2), found=finding,
        )  # fmt: skip
        found.append(row)
        on_row(row)
    return found
