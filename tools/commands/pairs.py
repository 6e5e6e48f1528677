"""`sdc pair` and `sdc pool` compare hosts with each other, and identify wrong hosts from the results of several
pairs."""

import contextlib
import dataclasses
import json
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from sdc.burnin import FOLDERS, PAIR, PAIR_FORMAT, POOL, Pair, Stage, TwinRow
from sdc.faults import parse_fault
from sdc.nodes import parse_suspect
from sdc.records import RecordError, identify, now
from sdc.schema import Device
from sdc.settings import SettingError
from sdc.standing import ledger_path, standing_here
from sdc.train import FullLoad
from sdc.verdict import Exit, Verdict

from .. import CommandError, JobCommand, Joint, Only, check_job, given, onward, together, usage_errors
from .burnin import LedgerAccount

if TYPE_CHECKING:
    from sdc.analysis import Opening, Resolution

# Flags that determine the computation; commands for further comparisons repeat them.
FLAGS = ("config", "model", "data", "dtype", "steps", "seed", "corpus", "tokenizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonCommand(JobCommand):
    """The job that the hosts run, their processes, and simulated faults."""

    job: Annotated[FullLoad, Only("workload", "steps", "data", "model", "folder", "suspect", "faults")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairCommand(ComparisonCommand):
    """Compares two hosts, and locates the operation that differs.

    Example: sdc pair --steps 200 --run /shared/pair-17 --coordinator 10.0.0.1:4321 --processes 2 --process 0
    Example: sdc pair --resolve pair-17/pair.json pair-18/pair.json pair-19/pair.json

    The comparison starts at full load; if the hosts differ, it is repeated in more and more detail. Writes pair.json
    into the run folder. A difference between two hosts does not show which of them is wrong; to find out, compare a
    third host (sdc pool), or several pairs (--resolve). Exit codes: 0 PASS (no bit differed), 1 FAIL (the hosts
    differ), 2 bad usage, 3 INCONCLUSIVE.
    """

    resolve: tuple[Path, ...] = ()
    """Results of several pairs (files or folders), which together identify wrong hosts. No other flag except --json can
    be given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolCommand(ComparisonCommand):
    """Compares three or more hosts and identifies the minority.

    Example: sdc pool --steps 200 --run /shared/rack-3 --coordinator 10.0.0.1:4321 --processes 8 --process 0
    Example: sdc pool --twins 4 --suspect node11

    Writes pool.json into the run folder. If a host is lost, the other hosts report what is known so far. Exit codes: 0
    PASS (no bit differed), 1 FAIL (hosts differ), 2 bad usage, 3 INCONCLUSIVE.
    """

    twins: int | None = None
    """Number of hosts to compare; by default, the value of --processes."""


def pair(command: PairCommand) -> int:
    if not command.resolve:
        return compare(command, "pair", 2)
    with usage_errors():
        for name, value in given(command).items():
            if name not in ("resolve", "json"):
                raise SettingError(name, value, "has no effect with --resolve; leave it out")
        from sdc.analysis import resolve_pairs

        found = resolve_pairs([PAIR_FORMAT.read(file) for file in command.resolve])
    whole = {**dataclasses.asdict(found), "code": found.verdict.code}
    return _show(found, found.sentences, whole if command.json else None)


def pool(command: PoolCommand) -> int:
    """Compares three or more hosts, by default one for each process; returns the exit code."""
    with usage_errors():
        count = command.peers.processes if command.twins is None else command.twins
        if count is None:
            raise SettingError("twins", None, "expected the number of hosts; give --twins or --processes")
        if count < 3:
            name = "processes" if command.twins is None else "twins"
            raise SettingError(name, count, "expected at least three hosts; compare two with sdc pair")
    return compare(command, "pool", count)


def compare(command: ComparisonCommand, kind: Literal["pair", "pool"], twins: int) -> int:
    job, peers = dataclasses.replace(command.job, twins=twins), command.peers
    with usage_errors():
        if peers.processes is not None and peers.processes > 1 and peers.processes % twins:
            raise SettingError(
                "processes",
                peers.processes,
                f"expected a multiple of {twins}, because every host runs the same number of processes",
            )
    loaded = check_job(job, peers, command.devices, kind=kind)
    # From here on peers and devices are needed.
    from sdc.analysis import Opening, stage_differs
    from sdc.multihost import everyone, together as agreed
    from sdc.train import escalate

    result: SharedResult | None = None
    try:
        with together(job, peers, command.devices, kind=kind) as joint:
            import jax

            def look() -> None:
                if joint.first and joint.folder.is_dir() and any(joint.folder.iterdir()):
                    raise SettingError("run", joint.folder, "exists already; choose another folder")

            agreed(look)  # all processes check that the folder is new
            hosts, processes = _hosts(twins)
            workload = {name: getattr(job.workload, name, getattr(job, name, None)) for name in (*FLAGS, "suspect")}
            settings = {**workload, "corpus": list(job.workload.corpus), "fault": list(job.faults)}
            # `healthy` simulates nothing.
            suspects = [str(parse_suspect(job.suspect))] if job.suspect and job.suspect != "healthy" else []
            faults = [str(parse_fault(str(fault))) for fault in job.faults] or suspects
            (id, *_) = everyone(uuid.uuid4().hex)
            opening = Opening(
                kind=kind, id=id, created=now(), hosts=hosts, processes=processes, steps=job.steps,
                settings={**settings, "flags": _flags(command)}, faults=faults,
                command=["sdc", *sys.argv[1:]], on_record=_on_record() if processes > 1 else (),
            )  # fmt: skip
            account = LedgerAccount(ledger_path()) if processes > 1 else None  # a single process compares no hosts
            file = joint.folder / (PAIR if kind == "pair" else POOL)
            with contextlib.suppress(OSError):  # the first record reports it
                joint.folder.mkdir(parents=True, exist_ok=True)  # if it is missing later, so may be results in it
            for error in account.begin(kind, simulated=bool(faults), file=file) if account else ():
                print(f"sdc: the ledger of this host will not contain this {kind}: {error}", file=sys.stderr)
            result = SharedResult(opening, file, account)
            onward.last_words = result.last_words
            escalate(
                dataclasses.replace(job, folder=joint.folder), differs=stage_differs, loaded=loaded,
                devices=jax.devices(), command=["sdc", *sys.argv[1:]], stop=joint.stop.reached,
                watched=lambda stage: _watched(stage, job, joint),
            )  # fmt: skip
            joint.stop.over()
            asked = joint.stop.asked
            pair = result.write(None if asked is None else f"interrupted by {asked}") if joint.first else None
            (text, *_) = everyone(PAIR_FORMAT.encode(pair).decode() if pair else "")
            result.enter(found := PAIR_FORMAT.decode(text.encode(), str(result.file)))
            code = found.verdict.code
    except CommandError as error:
        if result is None:
            raise
        if error.code is not Exit.INCONCLUSIVE:
            result.enter(result.judge(str(error)))
            raise
        pair = result.write(str(error)) if joint.first else result.judge(str(error))
        result.enter(pair)
        print(f"sdc: inconclusive: {error}", file=sys.stderr, flush=True)
        code = pair.verdict.code
        pair = pair if joint.first else None
    finally:
        onward.last_words = None
    if pair is not None and result is not None:
        sentences = [*pair.sentences, *(f"next: {step}" for step in pair.next), f"result: {result.file}"]
        _show(pair, sentences, pair if command.json else None)
    return code


class SharedResult:
    """The result so far, which any process can write at any time, from any thread.

    Each process writes a file of its own, and derives the result from the files of all: a process that was suspended
    and goes on does not replace what the others have seen.
    """

    def __init__(self, opening: "Opening", file: Path, account: LedgerAccount | None) -> None:
        from sdc.analysis import combine_results, judge_pair

        self._judge, self._combine, self._started = judge_pair, combine_results, time.monotonic()
        self._lock, self._account = threading.Lock(), account
        self._opening, self.file = opening, file
        self._own = file.with_name(f"{file.stem}-{identify().process}.json")

    def judge(self, lost: str | None) -> Pair:
        seconds = time.monotonic() - self._started
        return self._judge(self.file.parent, self._opening, ended=now(), seconds=seconds, lost=lost)

    def write(self, lost: str | None) -> Pair:
        own = self.judge(lost)
        with self._lock:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            PAIR_FORMAT.write(self._own, own)
            before, others = None, self._others()
            while others != before:  # another process may write at the same time
                pair = self._combine([own, *_readable(others)])
                PAIR_FORMAT.write(self.file, pair)
                before, others = others, self._others()
        return pair

    def _others(self) -> list[Path]:
        """Returns the files that the other processes have written."""
        return sorted({*self.file.parent.glob(f"{self.file.stem}-*.json")} - {self._own})

    def enter(self, pair: Pair) -> None:
        """Adds the verdict on this process's devices to the ledger of its host, or prints why that is impossible."""
        if self._account is not None:
            self._account.add(pair, self.file, process=identify().process or 0)
            if self._account.problem is not None:
                print(f"sdc: host {identify().name}: {self._account.problem}", file=sys.stderr)

    def last_words(self, why: str) -> tuple[int, str]:
        """Writes the result so far, because the process is about to end; returns the exit code and a message."""
        pair = self.write(why)
        self.enter(pair)
        found = pair.sentences[0]
        return (
            pair.verdict.code,
            f"{found if found.startswith(why) else f'{why}. {found}'}. The result is in {self.file}",
        )


def _readable(files: Iterable[Path]) -> Iterator[Pair]:
    for file in files:
        with contextlib.suppress(RecordError):
            yield PAIR_FORMAT.read(file)


def _hosts(twins: int) -> tuple[list[TwinRow], int]:
    """Returns the twins as hosts with their devices, and the number of processes.

    Every process receives all hosts, because any process may have to write the result.
    """
    from sdc.multihost import everyone
    from sdc.records import describe_devices

    described = [json.loads(text) for text in everyone(json.dumps(describe_devices()), at="which devices each has")]
    devices = [device for each in described for device in each]
    each = len(devices) // twins
    parts = [devices[twin * each : (twin + 1) * each] for twin in range(twins)]
    names = [" and ".join(dict.fromkeys(str(device.get("host")) for device in part)) for part in parts]
    rows = []
    for twin, (name, part) in enumerate(zip(names, parts, strict=True)):
        processes = sorted({int(device["process"]) for device in part})
        if names.count(name) > 1:  # one machine simulates several hosts
            alone = len(described) >= twins
            name = f"{name} (process {processes[0]})" if alone else f"{name} (twin {twin})"
        rows.append(TwinRow(twin=twin, host=name, processes=processes, devices=msgspec.convert(part, list[Device])))
    return rows, len(described)


def _on_record() -> list[str]:
    """Returns a sentence for each host whose ledger holds a difference that nobody has acknowledged."""
    from sdc.multihost import everyone

    standing, me = standing_here(ledger_path()), identify().name
    mine = f"on record for host {me}: FAIL, {standing.reason}" if standing.verdict is Verdict.CORRUPT else ""
    return [*dict.fromkeys(filter(None, everyone(mine)))]


@contextlib.contextmanager
def _watched(stage: Stage, job: FullLoad, joint: Joint) -> Iterator[Any]:
    if joint.first:
        number = f"{list(FOLDERS).index(stage) + 1} of {len(FOLDERS)} at most"
        print(f"stage {number}: {stage}", file=sys.stderr, flush=True)
    from .. import Progress

    with Progress(job.steps, show=joint.first) as progress:
        yield progress.update


def _flags(command: ComparisonCommand) -> list[str]:
    chosen = {name: value for name, value in given(command).items() if name in FLAGS}
    return [
        str(word)
        for name, value in chosen.items()
        for word in (f"--{name}", *(value if isinstance(value, tuple) else [value]))
    ]


def _show(found: "Pair | Resolution", sentences: Sequence[str], whole: Any) -> int:
    """Prints `whole` as JSON, or the sentences if `whole` is None; returns the exit code."""
    from sdc.analysis.report import Text

    from .. import print_parts, write_json

    if whole is not None:
        write_json(whole)
    else:
        mark = "(simulated faults)" if found.simulated else ""
        print_parts([Text(mark, lead=found.verdict.acceptance, tone=found.verdict), *sentences])
    return found.verdict.code
