"""Comparisons of hosts from their flags to their exit code: what `sdc pair` and `sdc pool` do alike."""

import contextlib
import dataclasses
import datetime
import json
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from sdc.burnin import FOLDERS, PAIR, POOL, Pair, Stage, TwinRow, write_pair
from sdc.records import Device, to_json
from sdc.settings import SettingError
from sdc.train import FullLoad, Peers

from .conduct import Joint, check_devices, check_folder, together, workload_of
from .errors import CommandError, Exit, usage_errors
from .pair_options import ComparedOptions
from .runtime import onward

Kind = Literal["pair", "pool"]
FILES: Mapping[Kind, str] = {"pair": PAIR, "pool": POOL}
STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
FLAGS = ("config", "model", "data", "dtype", "steps", "seed", "corpus", "tokenizer")
"""Flags that decide what is computed, for commands that compare more hosts in the same way."""


def compare(options: ComparedOptions, kind: Kind, twins: int) -> int:
    """Compares hosts and returns the exit code."""
    peers = Peers(
        coordinator=options.coordinator, processes=options.processes, process=options.process, timeout=options.timeout
    )
    job = FullLoad(
        workload=workload_of(options, options.dtype), steps=options.steps, data=options.data, model=options.model,
        twins=twins, suspect=options.suspect, faults=options.fault, folder=options.run,
    )  # fmt: skip
    with usage_errors():
        if options.devices is not None and options.devices < 1:
            raise SettingError("devices", options.devices, "expected a number of at least 1")
        peers.check()
        job.check()
        if options.processes is not None and options.processes > 1 and options.processes % twins:
            raise SettingError(
                "processes", options.processes, f"{twins} hosts with equally many processes each need a multiple of it"
            )
        check_devices(options.devices, job, options.processes or 1)
        if options.run is not None and options.coordinator is None:
            check_folder(options.run, False, kind, resumable=False)
        loaded = job.load()
    # Devices and peers from here on.
    from sdc.analysis import stage_differs
    from sdc.multihost import everyone
    from sdc.train import escalate

    result: _Result | None = None
    try:
        with together(options, job, peers, kind=kind, resumable=False) as joint:
            import jax

            _check_free(joint)
            result = _Result(options, kind, joint, twins)
            onward.last_words = result.last_words
            escalate(
                dataclasses.replace(job, folder=joint.folder), differs=stage_differs, loaded=loaded,
                devices=jax.devices(), command=["sdc", *sys.argv[1:]], stop=joint.stop.reached,
                watched=lambda stage: _watched(stage, job, joint),
            )  # fmt: skip
            joint.stop.over()
            asked = joint.stop.asked
            pair = result.write(None if asked is None else f"interrupted by {asked}") if joint.first else None
            code = int(everyone(str(pair.verdict.code if pair else ""))[0])
    except CommandError as error:
        if result is None or error.code is not Exit.INCONCLUSIVE:
            raise
        pair = result.write(str(error)) if result.first else result.judge(str(error))
        _say(f"sdc: inconclusive: {error}")
        code = pair.verdict.code
        pair = pair if result.first else None
    finally:
        onward.last_words = None
    if pair is not None and result is not None:
        _show(pair, result.file, as_json=options.json)
    return code


class _Result:
    """What is known so far, which any of the processes can write at any time, from any thread."""

    def __init__(self, options: ComparedOptions, kind: Kind, joint: Joint, twins: int) -> None:
        from sdc.analysis import Opening, judge_pair

        self._judge, self._started, self._lock = judge_pair, time.monotonic(), threading.Lock()
        self.first, self.file = joint.first, joint.folder / FILES[kind]
        hosts, processes = _hosts(twins)
        # `healthy` simulates nothing.
        faults = options.fault or ([options.suspect] if options.suspect not in (None, "healthy") else [])
        self._opening = Opening(
            kind=kind, id=uuid.uuid4().hex, created=_now(), hosts=hosts, processes=processes, steps=options.steps,
            settings={**_settings(options), "flags": _flags(options)}, faults=[str(fault) for fault in faults],
            command=["sdc", *sys.argv[1:]],
        )  # fmt: skip

    def judge(self, lost: str | None) -> Pair:
        """What follows from the records so far."""
        seconds = time.monotonic() - self._started
        return self._judge(self.file.parent, self._opening, ended=_now(), seconds=seconds, lost=lost)

    def write(self, lost: str | None) -> Pair:
        """The same, written."""
        pair = self.judge(lost)
        with self._lock:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_pair(self.file, pair)
        return pair

    def last_words(self, why: str) -> tuple[int, str]:
        """Writes what is known, since the process ends at once."""
        pair = self.write(why)
        return pair.verdict.code, f"{why}. {pair.verdict.sentences[0]}. The result is in {self.file}"


def _hosts(twins: int) -> tuple[list[TwinRow], int]:
    """The twins as hosts with their devices; every process hears of all, as any may have to write the result."""
    from sdc.multihost import everyone
    from sdc.records import describe_devices

    said = [json.loads(text) for text in everyone(json.dumps(describe_devices()), at="which devices each has")]
    devices = [device for each in said for device in each]
    each = len(devices) // twins
    parts = [devices[twin * each : (twin + 1) * each] for twin in range(twins)]
    names = [" and ".join(dict.fromkeys(str(device.get("host")) for device in part)) for part in parts]
    rows = []
    for twin, (name, part) in enumerate(zip(names, parts, strict=True)):
        processes = sorted({int(device["process"]) for device in part})
        if names.count(name) > 1:  # one machine plays several hosts
            alone = len(said) >= twins
            name = f"{name} (process {processes[0]})" if alone else f"{name} (twin {twin})"
        rows.append(TwinRow(twin=twin, host=name, processes=processes, devices=msgspec.convert(part, list[Device])))
    return rows, len(said)


def _check_free(joint: Joint) -> None:
    """Looks, in all processes, whether the folder is a new one."""
    from sdc.multihost import together as agreed

    def look() -> None:
        if joint.first and joint.folder.is_dir() and any(joint.folder.iterdir()):
            raise SettingError("run", joint.folder, "exists already; name another folder")

    agreed(look)


@contextlib.contextmanager
def _watched(stage: Stage, job: FullLoad, joint: Joint) -> Iterator[Any]:
    from .progress import Progress

    if joint.first:
        _say(f"stage {list(FOLDERS).index(stage) + 1} of {len(FOLDERS)} at most: {stage}")
    with Progress(job.steps, show=joint.first) as progress:
        yield progress.update


def _settings(options: ComparedOptions) -> dict[str, Any]:
    found = {name: getattr(options, name) for name in (*FLAGS, "suspect")}
    return {**found, "corpus": list(options.corpus), "fault": list(options.fault)}


def _flags(options: ComparedOptions) -> list[str]:
    """The flags that are not as by default."""
    words: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in FLAGS and value != field.default:
            given = value if isinstance(value, tuple) else [value]
            words += [f"--{field.name}", *map(str, given)]
    return words


def _show(pair: Pair, file: Path, *, as_json: bool) -> None:
    from .output import Output, write

    if as_json:
        write(json.dumps(to_json(msgspec.to_builtins(pair)), allow_nan=False, indent=1))
        return
    console = Output()
    mark = "  (simulated faults)" if pair.verdict.simulated else ""
    console.print(f"{pair.verdict.word}{mark}", style=STYLES[pair.verdict.word], markup=False)
    for text in (*pair.verdict.sentences, *(f"next: {step}" for step in pair.next), f"result: {file}"):
        console.print(text, soft_wrap=True, markup=False)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def twins_of(options: ComparedOptions, given: int | None) -> int:
    """How many hosts there are: a flag, or the number of processes.

    Raises:
        CommandError: neither says so, or they are too few.
    """
    with usage_errors():
        count = options.processes if given is None else given
        if count is None:
            raise SettingError("twins", None, "says how many hosts are compared; give it, or --processes")
        if count < 3:
            name = "processes" if given is None else "twins"
            raise SettingError(name, count, "expected three hosts or more: two have no majority (sdc pair)")
        return count


def refuse_beside(options: Any, name: str, allowed: Sequence[str]) -> None:
    """Refuses flags that would be without effect beside another one.

    Raises:
        CommandError: there is one.
    """
    with usage_errors():
        for field in dataclasses.fields(options):
            if field.name not in (name, *allowed) and getattr(options, field.name) != field.default:
                raise SettingError(field.name, getattr(options, field.name), f"is without effect beside --{name}")
