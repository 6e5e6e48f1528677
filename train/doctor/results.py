"""The output of `sdc doctor --json`, as types. Reading and checking this output does not import JAX."""

import os
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec

from sdc.records import AnyPath, Format, RecordError
from sdc.schema import Environment, Fields, Header, about
from sdc.verdict import Verdict

TRAINING = "training step"  # name of the operation that takes longest
Outcome: TypeAlias = Literal["ok", "differs", "risk", "information", "not applicable", "could not be run"]


class Measured(Fields, kw_only=True):
    """Measurement of an operation in one process."""

    operation: Annotated[str, about("name of the operation")]
    program: Annotated[str, about("first 16 digits of the SHA-256 of its StableHLO text")] = ""
    inputs: Annotated[str, about("first 16 digits of the SHA-256 of its arguments")] = ""
    digests: Annotated[list[str], about("first 16 digits of the SHA-256 of its outputs, for each run")] = msgspec.field(
        default_factory=list
    )
    devices: Annotated[int, about("number of devices on which the operation ran")] = 1
    permuted: Annotated[
        str | None, about("digest with the devices in reverse order; `null` for an operation on one device")
    ] = None
    problem: Annotated[str | None, about("reason why the operation could not be run, or `null`")] = None


class Answer(Fields, kw_only=True):
    """Measurements of a child process."""

    format: Literal["jax-sdc doctor child"]
    environment: Environment
    operations: list[Measured]
    hits: int
    """Number of programs read from the persistent compilation cache."""
    seconds: float


class HostPart(Fields, kw_only=True):
    """Properties of the host, apart from libraries, that may affect bits."""

    cores: Annotated[int, about("logical processors")]
    allowed: Annotated[int, about("logical processors that this process may use (affinity)")]
    quota: Annotated[
        float | None, about("limit of the control group on processor time, in processors; `null`: no limit")
    ] = None
    features: Annotated[
        list[str], about("features of the processor that compiled programs may use, as the kernel names them")
    ]
    siblings: Annotated[bool | None, about("whether threads share cores; `null` if not reported")] = None


class Check(Fields):
    """A check and its result."""

    name: Annotated[str, about("name of the check")]
    kind: Annotated[
        Literal["run", "environment", "host"],
        about("what the check did: run programs, inspect settings or compare hosts"),
    ]
    outcome: Annotated[
        Outcome,
        about(
            "`ok`; `differs`: bits differed; `risk`: bits may differ between runs or hosts; `information`: a property "
            "to keep equal; `not applicable`; `could not be run`"
        ),
    ]
    sentence: Annotated[str, about("result, as a sentence")]
    operations: Annotated[list[str], about("operations that differ")] = msgspec.field(default_factory=list)
    causes: Annotated[list[str], about("settings or components that were found to cause the result")] = msgspec.field(
        default_factory=list
    )
    lines: Annotated[list[str], about("shell lines that apply the remedy")] = msgspec.field(default_factory=list)


class Asked(Fields, kw_only=True):
    config: Annotated[
        str | None, about("configuration of the training step; `null` for the doctor's own tiny configuration")
    ] = None
    devices: Annotated[int | None, about("number of simulated CPU devices; `null` for the existing devices")] = None
    runs: Annotated[int, about("number of runs of each operation in a process")]
    prepared: Annotated[bool, about("whether the settings of the commands of sdc were added to the environment")] = (
        False
    )
    against: Annotated[str | None, about("path of the other host's results")] = None


class Examined(Header, kw_only=True, tag="jax-sdc doctor"):
    """The doctor's results for a host."""

    created: Annotated[str, about("time of the examination, UTC")]
    seconds: Annotated[float, about("duration in seconds")]
    verdict: Annotated[Verdict, about("`clean` (fit), `corrupt` (not fit) or `inconclusive`")]
    sentence: Annotated[str, about("reason for the verdict")]
    asked: Annotated[Asked, about("settings of the examination")]
    checks: Annotated[list[Check], about("all checks")]
    operations: Annotated[list[Measured], about("measurements of the first process; empty if it failed")]
    environment: Annotated[Environment | None, about("environment of that process; `null` if it failed")] = None
    settings: Annotated[
        dict[str, str], about("environment variables that may affect bits, and each flag of `XLA_FLAGS` separately")
    ]
    machine: Annotated[HostPart, about("properties of the host that may affect bits")]


DOCTOR = Format(
    type=Examined, noun="result of sdc doctor", remedy="write it with: sdc doctor --json > FILE", sealed=False
)


def read_examined(path: AnyPath) -> Examined:
    """Reads the doctor's results from another host."""
    read = DOCTOR.read(path)
    if not any(each.digests for each in read.operations) or read.environment is None:
        raise RecordError(
            f"{os.fspath(path)} contains no digests: sdc doctor could run no operation on the host that wrote it; "
            f"{DOCTOR.remedy}"
        )
    return read


def by_name(answer: Answer | Examined) -> dict[str, Measured]:
    """Returns the measurements of each operation that ran, by name."""
    return {row.operation: row for row in answer.operations if row.digests and row.problem is None}


def digests_of(row: Measured) -> set[str]:
    """Returns all digests of an operation's outputs; an operation that repeats itself has one."""
    return {*row.digests, *([] if row.permuted is None else [row.permuted])}


def different(one: Answer, other: Answer) -> list[str]:
    """Returns the operations that ran in both processes and whose first runs gave different digests."""
    here, there = by_name(one), by_name(other)
    return [name for name in here if name in there and here[name].digests[0] != there[name].digests[0]]


def steady(answers: Sequence[Answer], *, order: bool) -> frozenset[str]:
    """Returns the operations with equal digests in all runs of all answers and, with `order`, in reverse device order
    as well."""
    digests: dict[str, set[str]] = {}
    for row in (row for each in answers for row in by_name(each).values()):
        digests.setdefault(row.operation, set()).update(digests_of(row) if order else row.digests)
    return frozenset(name for name, found in digests.items() if len(found) == 1)
