"""Runs and campaigns of the reference workload; both can be resumed from their records.

`run` is the training loop: for each batch, it runs a step, applies the policies, writes a line of the record and, if
one is due, saves a checkpoint.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from sdc.campaigns import ABFT, DETECTORS, SPIKE, VISIBLE, Campaign
from sdc.costs import check_options, read_options
from sdc.multihost import everyone
from sdc.records import (
    Contents,
    Record,
    RecordError,
    check_deterministic,
    describe_devices,
    differences,
    environment,
    identify,
    now,
    on_mesh,
    read_manifest,
    read_record,
)
from sdc.settings import SettingError
from sdc.twins import ALGORITHM

from .checkpoints import Checkpoints, Unsaved
from .cluster import Incomparable, announce, as_read, changes, check_comparable, check_resumed, rows_in_order
from .data import batches
from .keeper import Keeper, Running, saved_step
from .policy import PATIENCE, Attempt, Decision, Golden, PolicyError, StepPolicy
from .programs import (
    Placement,
    Program,
    StepRows,
    after_end,
    history_ratio,
    initial_state,
    place,
    place_batch,
    plain,
    sharded,
)
from .specs import CampaignJob, Job, Loaded, Planned

# A run is resumed only with its original settings.
SETTINGS = (
    "kind", "config", "seed", "sync", "compare", "exchange", "placement", "mesh", "twins", "suspect", "data", "where",
    "abft", "aggregate", "against", "compiler_options", "guard", "running",
)  # fmt: skip
# A campaign is resumed only with its original settings, except that it may be extended.
CAMPAIGN_SETTINGS = (
    "config", "seed", "steps", "follow", "where", "faults", "mesh", "data", "batch", "environment", "detectors",
)  # fmt: skip


def run(
    job: Job,
    *,
    loaded: Loaded | None = None,
    policy: StepPolicy | None = None,
    on_step: Callable[[Mapping[str, Any]], None] = lambda row: None,
    devices: Sequence[jax.Device] | None = None,
    command: Sequence[str] = (),
    stop: Callable[[], bool] = lambda: False,
) -> Contents | None:
    """Executes a job, without printing or ending the process.

    If a run has several processes, every process calls this function with the same job, after
    `jax.distributed.initialize`.

    Args:
        job: `Training`, `Twins` or `Tracing`, with the folder of its record.
        loaded: the result of `job.load()`, if it was already called.
        policy: called after each step; decides how the run continues.
        on_step: called with each line of `steps.jsonl`.
        devices: the devices to use (default: as many as needed if the run has one process, otherwise all devices).
        command: the command line of the run, for the record.
        stop: called after each step; returns whether to end early. The result must be the same in all processes (see
            `sdc.train.stopping.Stop`). A run that ends early has saved a checkpoint and an unfinished record, so it can
            be resumed.

    Returns:
        The record in process 0, from which `sdc.analysis.conclude` derives the verdict; None in other processes.

    Raises:
        ValueError: a setting is invalid, the data cannot be read, the record or a checkpoint is damaged, or a GPU was
            started without the settings for determinism (`sdc.records.prepare`).
        Incomparable: the processes of a run, or a run and its resumption, differ in something that affects what they
            compute.

    Example:
        >>> import tempfile
        >>> from sdc.train import Training, run
        >>> record = run(Training(steps=2, folder=tempfile.mkdtemp() + "/run"))
        >>> [row["step"] for row in record.lines]
        [0, 1]
    """
    if policy is not None and not callable(policy):
        raise SettingError("policy", policy, "expected a function from an Attempt to a Decision")
    loaded = loaded or job.load()
    config, dataset = loaded
    if job.folder is None:
        raise SettingError("folder", None, "a run needs a folder for its record; give a new one")
    folder, start = Path(job.folder).absolute(), 0
    if job.resume:
        read_manifest(folder, job.kind)
        start = Checkpoints(folder / "checkpoints", every=1).latest or 0
        start = start if job.keeping is None else max(start, saved_step(folder))
    _check_intents(job, folder, start)
    options = read_options(job.compiler_options)
    check_options(options)
    if devices is None:
        devices = jax.devices() if jax.process_count() > 1 else jax.devices()[: math.prod(job.axes.values())]
    placement = place(
        twins=job.number, data=job.data, model=job.model, kind=job.layout, devices=devices, options=options
    )
    evidence = _evidence(placement.mesh)
    job.check_evidence(evidence)
    policies = [each for each in (job.policy(), policy) if each is not None]
    goldens = [each for each in policies if isinstance(each, Golden)]
    program = described = job.program(config, placement, donate=True)
    if policy is not None:  # the same program without donation of the state
        program = job.program(config, placement, donate=False)
    source = batches(dataset, batch_size=config.batch_size, microsteps=config.microsteps)
    manifest = {
        **planned(job, loaded, placement, command),
        "checkpoint_every": job.checkpoint_every,
        "layers": config.model.layers,
        "placement": job.layout,
        "twins": job.number,
        "processes": jax.process_count(),
        "program": None,  # computed below, since it takes longest
        **({"compiler_options": options} if options else {}),
        **job.manifest(config),
    }
    first = jax.process_index() == 0
    if job.resume:
        then = read_manifest(folder, job.kind)
        if changed := changes(then, manifest, SETTINGS, ("the run has", "asked is")):
            raise RecordError(
                f"{folder} contains a run with another configuration ({'; '.join(changed)}); "
                "resume it with its original settings, or give another folder"
            )
    elif first:
        Record.check_free(folder)
    check_deterministic(manifest["environment"])
    announce("lowering the program")
    manifest["program"] = described.fingerprint()
    check_comparable(manifest)
    for golden in goldens:
        golden.check(as_read(manifest))
    manifest |= evidence  # the evidence may differ between processes
    if job.resume and (
        changed := changes(then, manifest, ("program", "environment", "digests"), ("the run had", "now"))
    ):
        raise Incomparable(
            f"{folder} was recorded with another program, so new steps would not be comparable with its steps "
            f"({'; '.join(changed)}); restore the original environment, or start a new run"
        )
    checkpoints = (Unsaved if job.unsaved else Checkpoints)(folder / "checkpoints", every=job.checkpoint_every)
    record: Record | None = None
    keeper: Keeper | None = None
    finished = False
    try:
        announce("compiling the program")
        _ = program.executables
        everyone("compiled", at="while compiling the program")
        if job.keeping is not None and job.resume:
            # Roll back a running checkpoint from a later step before lines are removed from the record.
            keeper, state = _keeper(job, job.keeping, folder, program)
            state, start = _restarted(job, folder, program, checkpoints, source, keeper, state)
        elif job.keeping is None:  # before the record, which continues from the checkpoint that can be restored
            state, start = _state(job, program, checkpoints, source, start)
        if first:
            ended = read_record(folder).run_summary if job.resume else None
            record = (
                Record.resume(folder, manifest, at=start, expected=start)
                if job.resume
                else Record.create(folder, manifest)
            )
            for name, content in program.files().items():
                record.file(name, content)
        everyone("ready", at="before the first step")
        if keeper is None and job.keeping is not None:
            keeper, state = _keeper(job, job.keeping, folder, program)
        for golden in goldens if start else ():
            golden.recall(folder, before=start)
        with checkpoints:
            done = run_steps(
                program,
                state,
                steps=range(start, job.steps),
                batches=source,
                record=record,
                checkpoints=checkpoints,
                keeper=keeper,
                policies=policies,
                on_step=on_step,
                stop=stop,
            )
        finished = not done.stopped
        if finished:
            announce("comparing the final states")
            found: dict[str, Any] = {
                "steps": done.steps,
                "state_digest": program.digest(done.state),
                **program.conclude(done.state),
            }
            for golden in goldens:
                found |= golden.conclude()
            if done.reruns or done.rollbacks:
                found["judged"] = {"reruns": done.reruns, "rollbacks": done.rollbacks}
            if record is not None:
                if ended is not None and ended.guard is not None and "guard" in found:
                    found["guard"] = after_end(ended.guard, found["guard"])
                record.finish(found)
    finally:
        if keeper is not None:
            keeper.close(done=finished)
        if record is not None:
            record.close()
    return read_record(folder) if first else None


def planned(job: Planned, loaded: Loaded, placement: Placement, command: Sequence[str]) -> dict[str, Any]:
    """Returns the fields common to the manifests of runs and campaigns."""
    config, dataset = loaded
    return {
        "kind": job.kind,
        "command": list(command),
        "created": now(),
        "config": dataclasses.asdict(config),
        "steps": job.steps,
        "seed": job.workload.seed,
        "mesh": dict(placement.mesh.shape),
        "environment": environment(),
        "digests": ALGORITHM,
        "data": {**dataset.describe(), "tokenizer": job.workload.tokenizer},
    }


def _keeper(job: Job, settings: Running, folder: Path, program: Program) -> tuple[Keeper, Any]:
    """Opens the running checkpoint and the copies on each host, and returns them with the initial state."""
    again = functools.partial(program.init, job.workload.seed)
    state = again()
    return Keeper(settings, folder, state, again=again, checkpoint_every=job.checkpoint_every), state


def _restarted(
    job: Job, folder: Path, program: Program, checkpoints: Checkpoints, source: Any, keeper: Keeper, state: Any
) -> tuple[Any, int]:
    """Returns the state from which a run with a running checkpoint resumes, and the number of steps done."""
    lines = len(read_record(folder).lines) if jax.process_index() == 0 else 0
    words = everyone(json.dumps([checkpoints.latest or 0, lines]), at="when asked what the record contains")
    full, lines = json.loads(words[0])
    back = keeper.restart(state, after=full, lines=lines)
    if back is None:
        return _state(job, program, checkpoints, source, full) if full else (state, 0)
    _check_start(folder, back.step, job.steps)
    source.set_state(dict(back.position))
    return back.state, back.step


def _state(job: Job, program: Program, checkpoints: Checkpoints, source: Any, start: int) -> tuple[Any, int]:
    """Returns the state from which a run resumes (that of the newest undamaged checkpoint, or the initial state), and
    the step of this state."""
    if not start:
        return program.init(job.workload.seed), 0
    state, position, step = checkpoints.restore_newest(program.abstract())
    source.set_state(position)
    return state, step


def _check_intents(job: Job, folder: Path, start: int) -> None:
    """Checks that all processes are about to do the same work, before any of them waits for another on a device."""
    intent = {
        "kind": job.kind, "run": str(folder), "resume": job.resume, "from step": start, "steps": job.steps,
        "checkpoint_every": job.checkpoint_every,
    }  # fmt: skip
    said = everyone(json.dumps(intent), at="when asked what it is about to do")
    if lines := differences([json.loads(text) for text in said]):
        raise Incomparable(
            f"the processes are about to do different things ({'; '.join(line.describe() for line in lines)}); start "
            "all of them with the same flags, and with a shared folder"
        )
    _check_start(folder, start, job.steps)


def _check_start(folder: Path, start: int, steps: int) -> None:
    if start > steps:
        raise SettingError("steps", steps, f"{folder} already holds {start} steps; give at least {start}")


def _evidence(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Returns a description of the run's hardware: the devices and the number of hosts."""
    host = identify()
    mine = {"host": host.boot or f"{host.name} {host.machine}", "devices": describe_devices()}
    said = [json.loads(text) for text in everyone(json.dumps(mine), at="when asked which devices it has")]
    devices = [device for each in said for device in each["devices"]]
    return {"devices": on_mesh(devices, mesh), "hosts": len({each["host"] for each in said})}


class StepFailed(RuntimeError):
    """A step raised an error that is due to the program, not to its input."""


class Done(NamedTuple):
    state: Any  # final state
    steps: int  # number of recorded steps, including those before a resumption
    reruns: int  # number of times that a policy repeated a step
    # pairs: the step after which the run rolled back, and the step to which it returned
    rollbacks: list[tuple[int, int]]
    stopped: bool  # whether the run was stopped early


def run_steps(
    program: Program,
    state: Any,
    *,
    steps: range,
    batches: Any,
    record: Record | None,
    checkpoints: Checkpoints,
    keeper: Keeper | None = None,
    policies: Sequence[StepPolicy] = (),
    on_step: Callable[[Mapping[str, Any]], None] = lambda row: None,
    stop: Callable[[], bool] = lambda: False,
) -> Done:
    """Runs the steps of a program. `batches` is an endless iterator over global batches, whose position can be
    saved."""
    number, reruns, impatient, stopped = steps.start, 0, 0, False
    rollbacks: list[tuple[int, int]] = []
    while number < steps.stop:
        announce(f"in step {number}")
        tokens = place_batch(next(batches), program.placement)
        attempt, decision = 0, Decision.RERUN
        while decision is Decision.RERUN:
            new, rows = _advance(program, state, tokens, number, attempt)
            decision = _decide(policies, Attempt(number, attempt, *rows))
            if record is not None and decision in (Decision.RERUN, Decision.ROLL_BACK):
                record.discard([rows.row], rows.details)
            attempt, impatient = attempt + 1, 0 if decision in (Decision.CONTINUE, Decision.STOP) else impatient + 1
            if impatient > PATIENCE:
                raise PolicyError(
                    f"the policy rejected steps {PATIENCE} times in a row, most recently step {number}; correct the "
                    "policy"
                )
        reruns += attempt - 1
        if decision is Decision.ROLL_BACK:
            if checkpoints.latest is None:
                raise PolicyError(f"the policy rolled the run back at step {number}, but there is no checkpoint yet")
            state, position, step = checkpoints.restore_newest(program.abstract())
            batches.set_state(position)
            rollbacks.append((number, step))
            number = step
            if record is not None:
                record.rewind(number)
            continue
        state = new
        if keeper is not None:
            state, losses = keeper.recovered(state, number)
            rows = rows._replace(row={**rows.row, **losses})
        if record is not None:
            record.line(*rows)
        announce(f"at the end of step {number}")
        stopped = stop()
        last = stopped or decision is Decision.STOP or number + 1 == steps.stop
        due = (checkpoints if keeper is None else keeper).due(number + 1)
        if record is not None and (last or due):
            record.sync()  # a run that resumes from the checkpoint needs the lines of all earlier steps
        if keeper is not None and due:
            keeper.save(state, number + 1, batches.get_state())
        if keeper is None or last:
            checkpoints.save(number + 1, state, batches.get_state(), force=last)
        on_step(rows.row)
        number += 1
        if last:
            break
    return Done(state, number, reruns, rollbacks, stopped and number < steps.stop)


def _advance(program: Program, state: Any, tokens: Array, number: int, attempt: int) -> tuple[Any, StepRows]:
    """Runs one step and returns its lines for the record."""
    started = time.perf_counter()
    try:
        new, out = program.step(state, tokens, number)
        new, seen = program.observe(new, out)
        row, details = program.rows(number, out, seen)
    except ValueError as error:
        raise StepFailed(f"step {number} failed: {error}") from error
    again = {"attempts": attempt + 1} if attempt else {}
    return new, StepRows({"step": number, **row, **again, "seconds": time.perf_counter() - started}, details)


def _decide(policies: Sequence[StepPolicy], attempt: Attempt) -> Decision:
    """Returns the first decision other than CONTINUE, if there is one; all processes use the decision of process 0."""
    if not policies:
        return Decision.CONTINUE
    decisions = [policy(attempt) for policy in policies]
    for decision in decisions:
        if not isinstance(decision, Decision):
            raise PolicyError(f"the policy returned {decision!r} at step {attempt.step}; expected a Decision")
    others = [decision for decision in decisions if decision is not Decision.CONTINUE]
    return Decision(everyone((others or decisions)[0].value)[0])


def run_campaign(
    job: CampaignJob,
    *,
    loaded: Loaded | None = None,
    on_row: Callable[[Mapping[str, Any]], None] = lambda row: None,
    devices: Sequence[jax.Device] | None = None,
    command: Sequence[str] = (),
) -> Contents:
    """Runs a campaign and writes its record, without printing or ending the process.

    Args:
        job: the campaign.
        loaded: the result of `job.load()`, if it was already called.
        on_row: called with each line of `injections.jsonl`.
        devices: the devices to use (default: as many as needed).
        command: the command line of the campaign, for the record.

    Returns:
        The record, from which `sdc.analysis.conclude` derives the verdict.

    Raises:
        ValueError: a setting is invalid, or the record is damaged or belongs to another campaign.
        NotDeterministic: two clean runs give different results.
        Incomparable: the campaign is resumed in an environment where its clean run gives different results.
    """
    loaded = loaded or job.load()
    if job.folder is None:
        raise SettingError("folder", None, "a campaign needs a folder for its record; give a new one")
    folder = Path(job.folder).absolute()
    done = rows_done(job, folder)
    devices = jax.devices()[: math.prod(job.axes.values())] if devices is None else devices
    placement = place(twins=None, data=job.data, model=job.model, devices=devices)
    check_deterministic(environment())
    runner = make_campaign(job, loaded, placement)
    faults = [str(fault) for fault in runner.faults]
    manifest = {
        **planned(job, loaded, placement, command),
        "injections": job.injections,
        "where": runner.where.text,
        "faults": faults,
        "follow": job.follow,
        "batch": runner.batch,
        "sites": len(runner.sites),
        "devices": on_mesh(describe_devices(), placement.mesh),
        "thresholds": {"spike": SPIKE, "visible": VISIBLE, **runner.limits._asdict()},
        "detectors": [*DETECTORS, *([ABFT] if job.abft else [])],
        "clean": {
            "loss": [step.loss for step in runner.clean],
            "gradient_norm": [step.gradient_norm for step in runner.clean],
            "digest": [f"{step.digest[0]:08x}{step.digest[1]:08x}" for step in runner.clean],
        },
        "suspect": {"name": "campaign", "simulated": True, "faults": faults},
    }
    if job.resume:
        old = read_manifest(folder, job.kind)
        check_resumed(folder, job.kind, old, manifest, CAMPAIGN_SETTINGS)
        if changes(old, manifest, ["digests", "clean"]):
            raise Incomparable(
                f"the clean run of {folder} now gives different results, so earlier and later injections would not be "
                "comparable; resume the campaign on the original machine with the original versions of the software"
            )
    with Record.resume(folder, manifest, at=done) if job.resume else Record.create(folder, manifest) as record:
        for row in runner.run(range(done, job.injections)):
            record.line(row)
            on_row(row)
        record.sync()
    return read_record(folder)


def rows_done(job: CampaignJob, folder: Path) -> int:
    """Returns the number of injections recorded before the first gap; this function is called before anything is
    compiled."""
    if not job.resume:
        return 0
    done = len(rows_in_order(folder, job.kind, "injection"))
    if done > job.injections:
        problem = f"{folder} already holds {done} injections; give at least {done}"
        raise SettingError("injections", job.injections, problem)
    return done


def make_campaign(job: CampaignJob, loaded: Loaded, placement: Placement) -> Campaign:
    """Compiles the campaign and performs its clean run."""
    config, dataset = loaded
    work = sharded(config)
    source = batches(dataset, batch_size=config.batch_size, microsteps=config.microsteps)

    def observe(state: Any, metrics: Any) -> Mapping[str, Any]:
        history = history_ratio(config.optimizer, state.optimizer)
        return {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm, "history": history}

    return Campaign(
        plain(work, placement),
        initial_state(work, placement, job.workload.seed),
        [place_batch(next(source), placement) for _ in range(job.steps)],
        observe=observe,
        where=job.where,
        faults=job.faults,
        follow=job.follow,
        seed=job.workload.seed,
        batch=job.batch or (1 if jax.devices()[0].platform == "cpu" else 8),
        abft=job.abft,
    )
