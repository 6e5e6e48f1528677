"""A register of golden digests as a file: what healthy devices computed, who saw it, and what decides the bits.

A key names everything that decides the bits of a workload's outputs. Digests of another key are never compared.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from sdc.records import RecordError

from ..records import AnyPath, Device, Fields, Host, about, identify, package_version, read_json, write_sealed

FORMAT = "jax-sdc golden"
SCHEMA = 1
"""Version of the layout. It changes with every change that an older reader would misread."""
READABLE = (1,)
MARK = 12
"""Hexadecimal digits of the SHA-256 by which a key names an environment."""
A_FOLDER = (
    "is a folder, expected the file of a golden register; name the file, or write one with sdc golden record FILE"
)
"""What is wrong with a path that is one."""
DIGEST = re.compile(r"[0-9a-f]{16}")
_KEY = re.compile(
    r"(?P<workload>.+?)(?: device (?P<shard>\d+))? \| seed (?P<seed>-?\d+) \| (?P<program>[^|]+) \| "
    r"(?P<algorithm>[^|]+) \| (?P<kind>[^|]+) \| (?P<environment>[^|]+)"
)
Agreed: TypeAlias = Literal["repeat", "vote"]


class Recording(Fields, kw_only=True):
    """A burn-in whose digests were recorded."""

    host: Annotated[Host, about("where it ran")]
    devices: Annotated[list[Device], about("its devices, and the hardware behind them")]
    created: Annotated[str, about("when it was recorded, UTC")]
    version: Annotated[str, about("version of jax-sdc")]
    level: Annotated[str, about("`quick`, `prejob`, `acceptance` or `soak`")]
    dtypes: Annotated[list[str], about("types of floating-point numbers")]
    rounds: Annotated[int, about("rounds that were completed")]


class Seen(msgspec.Struct, kw_only=True, frozen=True):
    """Who saw a digest, and how often."""

    recording: Annotated[str, about("name of the burn-in in `recordings`")]
    devices: Annotated[tuple[int, ...], about("devices of it that had this digest, by their place there")]
    runs: Annotated[int, about("runs that had it, of all these devices")]
    agreed: Annotated[tuple[Agreed, ...], about("which runs agreed: of one device (`repeat`), of several (`vote`)")]


class Subject(msgspec.Struct, kw_only=True, frozen=True):
    """What a digest is of: with all of this equal, healthy devices have equal bits."""

    workload: Annotated[str, about("name: family, type, sizes, data")]
    shard: Annotated[int | None, about("number of the device, where each has outputs of its own; else `null`")]
    seed: Annotated[int, about("from which data are made")]
    program: Annotated[str, about("SHA-256 of the program's text")]
    algorithm: Annotated[str, about("algorithm of the digests")]
    kind: Annotated[str, about("platform and model of the device")]
    environment: Annotated[str, about("name of the environment in `environments`")]

    @property
    def key(self) -> str:
        """All of it as one text.

        Example:
            >>> from sdc.burnin.golden import Subject
            >>> parts = {"seed": 0, "program": "5feb", "algorithm": "one", "kind": "cpu cpu", "environment": "e3b0c442"}
            >>> Subject(workload="ordering/int32/64/random", shard=None, **parts).key
            'ordering/int32/64/random | seed 0 | 5feb | one | cpu cpu | e3b0c442'
        """
        place = "" if self.shard is None else f" device {self.shard}"
        parts = (f"{self.workload}{place}", f"seed {self.seed}", self.program, self.algorithm, self.kind)
        return " | ".join([*parts, self.environment])


def parse_key(key: str) -> Subject:
    """What a digest is of, from its key.

    Raises:
        ValueError: the text is no key.

    Example:
        >>> from sdc.burnin.golden import parse_key
        >>> subject = parse_key("collectives/psum/4x16 device 2 | seed 0 | 5feb | one | cpu cpu | e3b0c442")
        >>> subject.workload, subject.shard, subject.kind
        ('collectives/psum/4x16', 2, 'cpu cpu')
    """
    found = _KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"{key!r} is no key of a golden digest")
    shard = found["shard"]
    return Subject(
        workload=found["workload"],
        shard=None if shard is None else int(shard),
        seed=int(found["seed"]),
        program=found["program"],
        algorithm=found["algorithm"],
        kind=found["kind"],
        environment=found["environment"],
    )


class Entry(msgspec.Struct, kw_only=True, frozen=True):
    """A golden digest."""

    subject: Annotated[Subject, about("what it is of")]
    digest: Annotated[str, about("of the outputs, 16 hexadecimal digits")]
    seen: Annotated[tuple[Seen, ...], about("who saw it")]


class Disputed(msgspec.Struct, kw_only=True, frozen=True):
    """Outputs of which hosts recorded different digests: none of them is used."""

    subject: Annotated[Subject, about("what they are of")]
    claims: Annotated[dict[str, tuple[Seen, ...]], about("who saw each digest")]


class Register(Fields, kw_only=True):
    """The file."""

    format: Annotated[Literal["jax-sdc golden"], about("`jax-sdc golden`")] = "jax-sdc golden"
    schema: Annotated[int, about("version of this layout, 1")] = SCHEMA
    version: Annotated[str, about("version of jax-sdc that wrote the file")] = msgspec.field(
        default_factory=lambda: package_version("jax-sdc")
    )
    host: Annotated[Host, about("who wrote the file")] = msgspec.field(default_factory=identify)
    environments: Annotated[dict[str, dict[str, str]], about("versions, flags and options that decide bits, by name")]
    recordings: Annotated[dict[str, Recording], about("burn-ins, by random names")]
    entries: Annotated[list[Entry], about("golden digests, in the order of what they are of")]
    disputed: Annotated[list[Disputed], about("what hosts disagree on, in the same order")] = msgspec.field(
        default_factory=list
    )


def mark_of(environment: Mapping[str, str]) -> str:
    """The name of an environment: the beginning of a SHA-256, equal for equal ones.

    Example:
        >>> from sdc.burnin.golden import mark_of
        >>> mark_of({"jax": "0.10.2", "driver": "550.1"}) == mark_of({"driver": "550.1", "jax": "0.10.2"})
        True
        >>> mark_of({"driver": "545.2", "jax": "0.10.2"}) == mark_of({"driver": "550.1", "jax": "0.10.2"})
        False
    """
    text = json.dumps(dict(sorted(environment.items())), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:MARK]


def lookup(register: Register) -> dict[str, str]:
    """The digests by their keys, as `burn_in(golden=...)` takes them. What is disputed is not among them."""
    return {entry.subject.key: entry.digest for entry in register.entries}


def write_golden(path: AnyPath, register: Register) -> None:
    """Writes a register with its checksum, whole or not at all.

    Raises:
        OSError: it cannot be written.
        ValueError: it contradicts itself.
    """
    if problem := next(contradictions(register), None):
        raise ValueError(f"this register contradicts itself: {problem}")
    write_sealed(path, msgspec.to_builtins(register))


def read_golden(path: AnyPath) -> Register:
    """Reads a register, and looks whether it is whole and says one thing.

    Raises:
        RecordError: it is not there, damaged, of another format or layout, or contradicts itself; the message says
            which.
    """
    name = os.fspath(path)
    if not os.path.exists(name):
        raise RecordError(f"there is no {name}; sdc golden record {name} writes one")
    if os.path.isdir(name):
        raise RecordError(f"{name} {A_FOLDER}")
    try:
        value = read_json(path, sealed=True)
    except RecordError as error:
        raise RecordError(str(error).replace("start the run anew", "record it anew")) from error
    if value.get("format") != FORMAT:
        raise RecordError(f"{name} is no register of golden digests (its format is {value.get('format')!r})")
    if value.get("schema") not in READABLE:
        raise RecordError(
            f"{name} has layout {value.get('schema')!r}, this version of jax-sdc reads {', '.join(map(str, READABLE))}"
        )
    try:
        register = msgspec.convert(value, Register)
    except msgspec.ValidationError as error:
        raise RecordError(f"{name} is damaged ({error}); restore it or record it anew") from error
    if problem := next(contradictions(register), None):
        raise RecordError(f"{name} contradicts itself: {problem}; restore it or record it anew")
    return register


def contradictions(register: Register) -> Iterator[str]:
    """What in a register cannot be so, in words."""
    for mark, environment in register.environments.items():
        if mark_of(environment) != mark:
            yield f"environment {mark} is another one than its name says"
    keys: set[str] = set()
    rows: list[tuple[Subject, Mapping[str, tuple[Seen, ...]]]] = [
        *((entry.subject, {entry.digest: entry.seen}) for entry in register.entries),
        *((disputed.subject, disputed.claims) for disputed in register.disputed),
    ]
    for subject, claims in rows:
        if subject.key in keys:
            yield f"{subject.key} stands there twice"
        keys.add(subject.key)
        if subject.environment not in register.environments:
            yield f"environment {subject.environment} is not described"
        for digest, seen in claims.items():
            if not DIGEST.fullmatch(digest):
                yield f"{digest!r} is no digest"
            yield from _unseen(register, subject, seen)
    if any(len(disputed.claims) < 2 for disputed in register.disputed):
        yield "hosts are said to disagree on one digest"


def _unseen(register: Register, subject: Subject, seen: tuple[Seen, ...]) -> Iterator[str]:
    if not seen:
        yield f"nobody saw {subject.key}"
    for each in seen:
        recording = register.recordings.get(each.recording)
        if recording is None:
            yield f"burn-in {each.recording} is not described"
        elif not each.devices or not all(0 <= device < len(recording.devices) for device in each.devices):
            yield f"burn-in {each.recording} has no devices {', '.join(map(str, each.devices))}"
        elif not each.agreed or each.runs < 1:
            yield f"nothing agreed on {subject.key} in burn-in {each.recording}"
