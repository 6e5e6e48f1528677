"""A register of golden digests, with the hosts that recorded them and the properties that determine the bits.

The key of a digest contains everything that determines the bits of a workload's outputs. Digests with different keys
are never compared. If hosts recorded different digests for one key, the register lists all of these digests as
disputed, and none of them is used.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from sdc.records import RecordError

from ..records import Format, Host
from ..schema import Device, Fields, Header, about
from .identity import is_another
from .results import BurninResult

MARK = 12  # number of hexadecimal digits of the SHA-256 that identifies an environment in a key
SHOWN = 3  # maximum number of reasons to list
# The error for a path that is a folder.
A_FOLDER = "is a folder, not the file of a golden register; give a file, or create one with sdc golden record FILE"
DIGEST = re.compile(r"[0-9a-f]{16}")
_KEY = re.compile(
    r"(?P<workload>.+?)(?: device (?P<shard>\d{1,9}))? \| seed (?P<seed>-?\d{1,18}) \| (?P<program>[^|]+) \| "
    r"(?P<algorithm>[^|]+) \| (?P<kind>[^|]+) \| (?P<environment>[^|]+)"
)
Agreed: TypeAlias = Literal["repeat", "vote"]


class Recording(Fields, kw_only=True):
    """A burn-in whose digests were recorded."""

    host: Annotated[Host, about("host on which the burn-in ran")]
    devices: Annotated[list[Device], about("devices of the burn-in, and their hardware")]
    created: Annotated[str, about("when the digests were recorded, UTC")]
    version: Annotated[str, about("version of jax-sdc")]
    level: Annotated[str, about("`quick`, `prejob`, `acceptance` or `soak`")]
    dtypes: Annotated[list[str], about("floating-point types")]
    rounds: Annotated[int, about("rounds completed")]


class Seen(msgspec.Struct, kw_only=True, frozen=True):
    """The devices and runs of one burn-in that produced a digest."""

    recording: Annotated[str, about("name of the burn-in in `recordings`")]
    devices: Annotated[tuple[int, ...], about("devices that produced the digest, by their position in the recording")]
    runs: Annotated[int, about("number of runs of these devices")]
    agreed: Annotated[
        tuple[Agreed, ...], about("which runs agreed: those of one device (`repeat`) or of several devices (`vote`)")
    ]


class GoldenSubject(msgspec.Struct, kw_only=True, frozen=True):
    """The computation to which a digest belongs; healthy devices produce equal bits if all fields are equal."""

    workload: Annotated[str, about("name: family, type, sizes, data")]
    shard: Annotated[int | None, about("number of the device if each device has its own outputs; otherwise `null`")]
    seed: Annotated[int, about("seed of the data")]
    program: Annotated[str, about("SHA-256 of the program's text")]
    algorithm: Annotated[str, about("algorithm of the digests")]
    kind: Annotated[str, about("platform and model of the device")]
    environment: Annotated[str, about("name of the environment in `environments`")]

    @property
    def key(self) -> str:
        """All fields as one text: `ordering/int32/64/random | seed 0 | 5feb... | one | cpu cpu | e3b0c442...`."""
        place = "" if self.shard is None else f" device {self.shard}"
        parts = (f"{self.workload}{place}", f"seed {self.seed}", self.program, self.algorithm, self.kind)
        return " | ".join([*parts, self.environment])


def parse_key(key: str) -> GoldenSubject:
    """Parses the key of a golden digest; raises ValueError if the text is not a key."""
    found = _KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"{key!r} is not the key of a golden digest; take one from a register")
    return msgspec.convert(found.groupdict(), GoldenSubject, strict=False)


class GoldenEntry(msgspec.Struct, kw_only=True, frozen=True):
    """A golden digest, with the burn-ins that recorded it."""

    subject: Annotated[GoldenSubject, about("computation to which the digest belongs")]
    digest: Annotated[str, about("digest of the outputs, 16 hexadecimal digits")]
    seen: Annotated[tuple[Seen, ...], about("burn-ins that recorded the digest")]


class Disputed(msgspec.Struct, kw_only=True, frozen=True):
    """A computation for which hosts recorded different digests; none of these digests is used."""

    subject: Annotated[GoldenSubject, about("the computation")]
    claims: Annotated[dict[str, tuple[Seen, ...]], about("burn-ins that recorded each digest")]


class Register(Header, kw_only=True, tag="jax-sdc golden"):
    """The file of a golden register."""

    environments: Annotated[
        dict[str, dict[str, str]], about("versions, flags and options that determine bits, by name")
    ]
    recordings: Annotated[dict[str, Recording], about("recorded burn-ins, by random name")]
    entries: Annotated[list[GoldenEntry], about("golden digests, sorted by subject")]
    disputed: Annotated[list[Disputed], about("computations on which hosts disagree, sorted by subject")] = []


def mark_of(environment: Mapping[str, str]) -> str:
    """Returns the name of an environment: the first digits of a SHA-256 of its contents."""
    text = json.dumps(dict(sorted(environment.items())), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:MARK]


def lookup(register: Register) -> dict[str, str]:
    """Returns the undisputed digests by key, in the form that `burn_in(golden=...)` accepts."""
    return {entry.subject.key: entry.digest for entry in register.entries}


def contradictions(register: Register) -> Iterator[str]:
    for mark, environment in register.environments.items():
        if mark_of(environment) != mark:
            yield f"environment {mark} does not match its name"
    keys: set[str] = set()
    for subject, claims in _claims(register):
        if subject.key in keys:
            yield f"{subject.key} is listed twice"
        keys.add(subject.key)
        if subject.environment not in register.environments:
            yield f"environment {subject.environment} is not described"
        for digest, seen in claims.items():
            if not DIGEST.fullmatch(digest):
                yield f"{digest!r} is not a digest"
            if not seen:
                yield f"no burn-in recorded {subject.key}"
            for each in seen:
                recording = register.recordings.get(each.recording)
                if recording is None:
                    yield f"burn-in {each.recording} is not described"
                elif not each.devices or not all(0 <= device < len(recording.devices) for device in each.devices):
                    yield f"burn-in {each.recording} has no devices {', '.join(map(str, each.devices))}"
                elif not each.agreed or each.runs < 1:
                    yield f"no runs agreed on {subject.key} in burn-in {each.recording}"
    if any(len(disputed.claims) < 2 for disputed in register.disputed):
        yield "a disputed entry has fewer than two digests"


GOLDEN = Format(
    type=Register,
    noun="register of golden digests",
    remedy="restore it or record it again",
    source="create one with sdc golden record",
    contradictions=contradictions,
)


def shortfall(register: Register, keys: Iterable[str], environment: Mapping[str, str]) -> str | None:
    """Returns why the register's digests do not support a PASS, or None if every key that ran has a digest."""
    here = set(keys)
    found = here & set(lookup(register))
    if not here:
        return "no workload ran whose outputs could be compared with a digest"
    if found == here:
        return None
    reasons = foreign(register, here, environment)
    more = [f"and {len(reasons) - SHOWN} more reasons"] if len(reasons) > SHOWN else []
    what = "none" if not found else f"only {len(found)}"
    listed = "; ".join([*reasons[:SHOWN], *more])
    return f"{what} of the {len(here)} digests that this host needs are in the file: {listed}"


def left_over(keys: Iterable[str], workloads: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits unused keys into those of other programs or devices, and those of workloads that were not selected.

    A burn-in of one family can use a register of all families, and does not need the digests of the other families.
    """
    other: list[str] = []
    unneeded: list[str] = []
    for key in sorted(keys):
        try:
            needed = parse_key(key).workload in workloads
        except ValueError:  # callers of `burn_in` may pass any text
            needed = True
        (other if needed else unneeded).append(key)
    return tuple(other), tuple(unneeded)


def foreign(register: Register, keys: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """Returns the reasons why the register lacks digests for some keys, with the most frequent reason first."""
    known, disputed = lookup(register), {each.subject.key for each in register.disputed}
    recorded: dict[tuple[str, int | None], list[GoldenSubject]] = {}
    for entry in register.entries:
        recorded.setdefault((entry.subject.workload, entry.subject.shard), []).append(entry.subject)
    reasons: Counter[str] = Counter()
    for key in set(keys) - set(known):
        if key in disputed:
            reasons["hosts disagree on the digest"] += 1
            continue
        subject = parse_key(key)
        near = [
            _differences(register, subject, other, environment)
            for other in recorded.get((subject.workload, subject.shard), [])
        ]
        reasons["no digest was recorded" if not near else min(near, key=lambda each: (len(each), each))[0]] += 1
    ranked = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return [f"{reason} ({count} {'workload' if count == 1 else 'workloads'})" for reason, count in ranked]


def _differences(
    register: Register, here: GoldenSubject, there: GoldenSubject, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Describes the differences between two subjects, first together in one text, and then one by one."""
    named = {"kind": "device", "algorithm": "digest algorithm", "seed": "seed"}
    pairs = [(words, getattr(here, name), getattr(there, name)) for name, words in named.items()]
    if here.environment != there.environment:
        theirs = register.environments[there.environment]
        pairs += [
            (name, environment.get(name, "nothing"), theirs.get(name, "nothing"))
            for name in sorted({*environment, *theirs})
        ]
    texts = [f"{words} {mine} on this host, {other} in the register" for words, mine, other in pairs if mine != other]
    if not texts and here.program != there.program:
        texts = [f"program {here.program[:12]} on this host, {there.program[:12]} in the register"]
    return (", ".join(texts), *texts)


def itself_alone(register: Register, result: BurninResult) -> str | None:
    """Returns a warning if some of the digests were not certainly recorded on another device than the tested one, and
    otherwise None.

    A fault that repeats itself would also affect such digests, so these digests prove no more than repetition does.
    """
    entries = {entry.subject.key: entry for entry in register.entries}
    tested = {device.index: device for device in result.devices}
    alone = {
        tally.key
        for tally in result.workloads
        if tally.key in entries
        and not any(
            is_another(result.host, tested[tally.device], recording.host, recording.devices[place])
            for each in entries[tally.key].seen
            for recording in [register.recordings[each.recording]]
            for place in each.devices
        )
    }
    if not alone:
        return None
    were = "was" if len(alone) == 1 else "were"
    return (
        f"{len(alone)} of the golden digests {were} recorded only on the tested device itself, or on devices that "
        "cannot be distinguished from it, so a fault that repeats itself would affect them too; give a register that "
        "was recorded on other devices, or none"
    )


def merge(registers: Iterable[Register]) -> Register:
    """Merges registers into one; digests on which the registers disagree become `disputed`.

    The result does not depend on the order of the registers, on earlier merges, or on duplicates. A disputed digest
    remains disputed when further registers are merged. To resolve a dispute, leave out the wrong register and merge the
    other registers again.
    """
    environments: dict[str, dict[str, str]] = {}
    recordings: dict[str, Recording] = {}
    heard: dict[GoldenSubject, dict[str, set[Seen]]] = {}
    for register in registers:
        environments |= register.environments  # names are hashes of the contents
        for name, recording in register.recordings.items():
            if recordings.setdefault(name, recording) != recording:
                raise RecordError(
                    f"burn-in {name} is described differently in two of these files; leave out the wrong file"
                )
        for subject, claims in _claims(register):
            known = heard.setdefault(subject, {})
            for digest, seen in claims.items():
                known.setdefault(digest, set()).update(seen)
    merged = Register(
        environments=dict(sorted(environments.items())), recordings=dict(sorted(recordings.items())), entries=[]
    )
    for subject in sorted(heard, key=lambda subject: subject.key):
        claims = {
            digest: tuple(sorted(seen, key=lambda each: (each.recording, each.devices, each.runs)))
            for digest, seen in sorted(heard[subject].items())
        }
        if len(claims) > 1:
            merged.disputed.append(Disputed(subject=subject, claims=claims))
        else:
            ((digest, by),) = claims.items()
            merged.entries.append(GoldenEntry(subject=subject, digest=digest, seen=by))
    return merged


def _claims(register: Register) -> Iterator[tuple[GoldenSubject, Mapping[str, tuple[Seen, ...]]]]:
    yield from ((entry.subject, {entry.digest: entry.seen}) for entry in register.entries)
    yield from ((disputed.subject, disputed.claims) for disputed in register.disputed)


def describe_dispute(register: Register, disputed: Disputed) -> str:
    claims = []
    for digest, seen in disputed.claims.items():
        parts = []
        for each in seen:
            recording = register.recordings[each.recording]
            named = [(f"device {place}", recording.devices[place]) for place in each.devices]
            devices = ", ".join(
                f"{name}{device.mark and f' {device.mark}'}{' (simulated)' if device.simulated else ''}"
                for name, device in named
            )
            parts.append(f"{recording.host.name} ({devices}; {each.runs} runs, {recording.created})")
        claims.append(f"{digest} by {' and '.join(parts)}")
    return f"{disputed.subject.key}: {'; '.join(claims)}"
