"""Reads results of burn-ins, pairs and pools from external files, checks them, counts each result once, and reports
files and folders that are not counted."""

import dataclasses
import datetime
import itertools
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import msgspec

from sdc.burnin import (
    BURN_IN,
    PAIR,
    PAIR_FORMAT,
    POOL,
    RESULT,
    BurninResult,
    CheckedDevice,
    Ended,
    Finding,
    Tally,
    candidates,
)
from sdc.records import AnyPath, RecordError, reason
from sdc.settings import SettingError
from sdc.verdict import Verdict

LONGEST = 300


class HostKey(NamedTuple):
    """A machine and its name. Two machines with the same name count as two hosts, as does one machine that has used two
    names."""

    name: str
    machine: str | None


class WorkloadResult(NamedTuple):
    """The result of a workload on a device; see `sdc.burnin.results.Tally`."""

    workload: str
    device: int
    context: str | None  # everything that determines the bits: the key of the row; None if not stated
    digest: str | None
    differences: int
    runs: int
    standard: int  # of these runs, those with the digest's data
    rate: float | None  # throughput, if judged
    unit: str
    void: bool


class DeviceResult(CheckedDevice, kw_only=True):
    """A checked device and its possible identities."""

    kind: str
    identity: str
    names: tuple[str, ...]  # possible identities, the most reliable first
    errors: tuple[str, ...]  # errors that the device's driver reported during the test


@dataclasses.dataclass(frozen=True, slots=True)
class HostResult:
    file: str
    host: HostKey
    id: str
    level: str
    created: str
    ended: str
    verdict: Verdict
    simulated: bool
    stopped: str | None
    under_way: bool
    sentences: tuple[str, ...]
    parts: dict[int, DeviceResult]
    rows: tuple[WorkloadResult, ...]
    findings: tuple[Finding, ...]
    unfinished: tuple[Ended, ...]


class Refused(msgspec.Struct, frozen=True):
    """A file or folder that is not counted, and the reason."""

    file: str
    reason: str


class Duplicate(msgspec.Struct, frozen=True):
    """A file whose result had already been read from another file."""

    file: str
    of: str


class ComparedHosts(msgspec.Struct, frozen=True):
    """The result of a pair or pool."""

    file: str
    hosts: list[str]
    verdict: Verdict
    simulated: bool
    ended: str
    sentence: str


class ResultFiles(NamedTuple):
    files: list[Path]
    refused: tuple[Refused, ...]


@dataclasses.dataclass(frozen=True)
class Collection:
    results: tuple[HostResult, ...]
    pairs: tuple[ComparedHosts, ...] = ()
    refused: tuple[Refused, ...] = ()
    duplicates: tuple[Duplicate, ...] = ()
    doubtful: tuple[
        str, ...
    ] = ()  # identities that two hosts claimed at the same time, and which therefore identify no device


def find_results(paths: Iterable[AnyPath]) -> ResultFiles:
    """Returns the given files, and the results in the given folders and their subfolders.

    Folders that cannot be read are refused, as are links to folders elsewhere, which are not followed.
    """
    files: list[Path] = []
    refused: list[Refused] = []
    roots: list[Path] = []
    links: list[Path] = []

    def refuse(error: OSError) -> None:
        refused.append(Refused(os.fspath(error.filename), reason(error)))

    for path in map(Path, paths):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError) as error:
            problem = "no such file or folder; pass result files or run folders of sdc burnin"
            raise SettingError("FILES", path, problem) from error
        except OSError as error:
            refuse(error)
            continue
        if not path.is_dir():
            files.append(path)
            continue
        before = len(files) + len(refused) + len(links)
        roots.append(path.resolve())
        for folder, below, names in os.walk(path, onerror=refuse):
            below.sort()
            places = [Path(folder, name) for name in sorted((*below, *names))]
            files += [place for place in places if place.name in (RESULT, PAIR, POOL) and os.path.exists(place)]
            links += [place for place in places if place.is_symlink()]
        if len(files) + len(refused) + len(links) == before:
            raise SettingError(
                "FILES",
                path,
                f"this folder and its subfolders contain no {RESULT}, {PAIR} or {POOL}; pass another folder, or files",
            )
    for link in links:
        try:
            target = link.resolve(strict=True)
        except (OSError, RuntimeError):  # Python raises RuntimeError for links in a circle
            refused.append(Refused(os.fspath(link), "is a link that leads nowhere"))
            continue
        if target.is_dir() and not any(target.is_relative_to(root) for root in roots):
            refused.append(
                Refused(os.fspath(link), f"is a link to the folder {target}, which was not read; pass that folder too")
            )
    return ResultFiles(files, tuple(refused))


def collect(found: ResultFiles, progress: Callable[[str], None] = lambda _: None) -> Collection:
    """Reads results, and refuses files that are damaged, have an unknown layout or contradict themselves.

    Two files with the same id and the same contents count once. If their contents differ, both files are refused, since
    either may be wrong.
    """
    refused = [*found.refused]
    duplicates: list[Duplicate] = []
    results: dict[str, HostResult] = {}
    pairs: dict[str, ComparedHosts] = {}
    conflicts: dict[str, list[str]] = {}
    visited: dict[Path, str] = {}
    for path in found.files:
        file = os.fspath(path)
        try:
            real = Path(os.path.realpath(path))  # also of a link in a circle
            if real in visited:
                duplicates.append(Duplicate(file, visited[real]))
                continue
            visited[real] = file
            if path.name in (PAIR, POOL):
                pair = PAIR_FORMAT.read(path)
                pairs.setdefault(
                    f"{pair.id} {pair.verdict}",
                    ComparedHosts(
                        file, [row.host for row in pair.hosts], pair.verdict, pair.simulated, pair.ended,
                        next(iter(pair.sentences), ""),
                    ),
                )  # fmt: skip
                continue
            report = BURN_IN.read(path)
            if problem := next(_impossible(report), None):
                raise RecordError(f"contradicts itself: {problem}; run the burn-in again")
        except (RecordError, OSError) as error:
            said = reason(error) if isinstance(error, OSError) else str(error)
            refused.append(Refused(file, said.removeprefix(f"{file} ").removeprefix("is ")))
            continue
        finally:
            progress(file)
        first = results.get(report.id)
        if report.id in conflicts:
            conflicts[report.id].append(file)
        elif first is None:
            results[report.id] = reduced(file, report)
        elif BURN_IN.read(first.file) == report:
            duplicates.append(Duplicate(file, first.file))
        else:
            conflicts[report.id] = [first.file, file]
    for id, same in conflicts.items():
        del results[id]
        for file in same:
            others = ", ".join(other for other in same if other != file)
            refused.append(
                Refused(
                    file,
                    f"has the same id as {others} but different contents, so either may be wrong; pass only the "
                    "correct one",
                )
            )
    ordered = sorted(
        results.values(), key=lambda each: (each.host.name, each.host.machine or "", each.created, each.id)
    )
    settled, doubtful = _settled(ordered)
    return Collection(tuple(settled), tuple(pairs.values()), tuple(refused), tuple(duplicates), doubtful)


def _impossible(report: BurninResult) -> Iterator[str]:
    """Yields a description of each impossible count in a report, so that false counts cannot distort the totals of a
    fleet."""
    indices = [device.index for device in report.devices]
    if len(set(indices)) < len(indices):
        yield "a device is listed twice"
    rows: list[CheckedDevice | Tally] = [*report.devices, *report.workloads]
    for row in rows:
        if min(row.elements, row.runs) < 0 or not 0 <= row.seconds < math.inf:
            yield f"it reports {row.elements} elements, {row.runs} runs and {row.seconds} seconds"
    for each in report.workloads:
        if each.differences < 0 or not 0 <= (each.rate or 0) < math.inf:
            yield f"it reports {each.differences} differences at a throughput of {each.rate}"


def reduced(file: str, report: BurninResult) -> HostResult:
    """Returns the parts of a report that later stages use. Strings are interned, since the results of a fleet repeat
    each of them about a thousand times."""
    named = [candidates(report, device) for device in report.devices]
    parts: dict[int, DeviceResult] = {}
    for device, name, names in zip(report.devices, identities(named), named, strict=True):
        errors: list[str] = []
        if (course := device.sensors) is not None:
            errors += course.events
            if (new := (course.after.uncorrected or 0) - (course.before.uncorrected or 0)) > 0:
                errors.append(f"{new} memory errors that ECC could not correct")
        known = msgspec.structs.asdict(device)
        known.update(kind=device.kind or report.environment.device_kind or "unknown", sensors=None)
        parts[device.index] = DeviceResult(**known, identity=name, names=names, errors=tuple(errors))
    rows = []
    for row in report.workloads:
        context = None if row.key is None else sys.intern(row.key)
        digest, rate = row.digest and sys.intern(row.digest), row.rate if row.share is not None else None
        name, unit = sys.intern(row.workload), sys.intern(row.unit)
        standard = row.standard if report.seed is not None else row.runs
        rows.append(
            WorkloadResult(name, row.device, context, digest, row.differences, row.runs, standard, rate, unit, row.void)
        )
    return HostResult(
        file, HostKey(report.host.name, report.host.machine), report.id, report.settings.level, report.created,
        report.ended, report.verdict, report.simulated, report.stopped, report.under_way,
        report.sentences, parts, tuple(rows), tuple(report.findings), tuple(report.unfinished),
    )  # fmt: skip


def _settled(results: Sequence[HostResult]) -> tuple[list[HostResult], tuple[str, ...]]:
    """Replaces every identity that two hosts claim at the same time with the next candidate of its device."""
    claims: dict[str, list[tuple[datetime.datetime, datetime.datetime, HostKey]]] = defaultdict(list)
    for result in results:
        try:
            times = (datetime.datetime.fromisoformat(text) for text in (result.created, result.ended))
            began, ended = (time.replace(tzinfo=time.tzinfo or datetime.UTC) for time in times)
        except ValueError:
            continue
        if began <= ended:  # otherwise the host's clock jumped back
            for name in (name for part in result.parts.values() for name in part.names[:-1]):
                claims[name].append((began, ended, result.host))
    doubtful = set()
    for name, each in claims.items():
        each.sort(key=lambda claim: claim[:2])
        if any(a[2] != b[2] and b[0] < a[1] for a, b in itertools.pairwise(each)):
            doubtful.add(name)
    if not doubtful:
        return list(results), ()
    settled = []
    for result in results:
        chosen = identities([part.names for part in result.parts.values()], doubtful)
        parts = {
            part.index: msgspec.structs.replace(part, identity=name)
            for part, name in zip(result.parts.values(), chosen, strict=True)
        }
        settled.append(dataclasses.replace(result, parts=parts))
    return settled, tuple(sorted(doubtful))


def printable(text: str, longest: int = LONGEST) -> str:
    """Makes external text safe to display: escapes control characters and changes of writing direction, and truncates
    long text."""
    shown = text if len(text) <= longest else f"{text[:longest]}..."
    if shown.isprintable():
        return shown
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)


def identities(named: Sequence[Sequence[str]], doubtful: Set[str] = frozenset()) -> list[str]:
    """Returns, for each device of a result, the first candidate that is unique in the result and not doubtful.

    Devices on the same board share its serial number, and some drivers report the same serial number for all devices.
    """
    counts = Counter(name for names in named for name in names)
    return [
        next((name for name in names[:-1] if counts[name] == 1 and name not in doubtful), names[-1]) for names in named
    ]
