"""Flips: changes bits in the live memory of a process from outside, while twins run in two processes.

Half of the flips strike arrays of the state, at addresses that a hook in the struck process reports, so that the
changed array is known. The other half strike any writable memory of the process.
"""

import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from sdc.records import read_record
from tests.tools.command import CONTEXT, several

from .tally import Tally, verdict_of

SYNCS = ("compute", "params", "none")
STEPS, STRUCK = 12, 5
LIMIT = 120.0
"""Time limit in seconds for both processes; they take twenty without a flip."""
HOOK = "SDC_STORM_HOOK"
"""Names the folder in which a process reports the addresses of its state and waits for the flip."""
TURN = "SDC_STORM_TURN"
"""Number of the workload before whose first run a burn-in reports the addresses of its data."""


def run(count: int, seed: int) -> Tally:
    """Makes `count` flips, with each `--sync`, in either process."""
    CONTEXT.set_forkserver_preload(["tests.tools.warm", "tests.storms.hooked"])
    tally, draw = Tally("flips"), random.Random(seed)
    whole = {sync: _run(Path(tempfile.mkdtemp()), sync, None, draw, tally) for sync in SYNCS}
    for sync, each in whole.items():
        assert each["verdict"] == "clean", (sync, each)
    for number in range(count):
        sync, state, victim = SYNCS[number % 3], number // 3 % 2 == 0, number // 6 % 2
        folder = Path(tempfile.mkdtemp())
        found = _run(folder, sync, (victim, state), draw, tally)
        _judge(tally, found, whole[sync], f"--sync {sync}, {found['struck']}, {folder}", state)
        tally.trials += 1
    return tally


def _judge(tally: Tally, found: dict[str, Any], whole: dict[str, Any], where: str, state: bool) -> None:
    kind = "state" if state else "anywhere"
    same = found["digest"] is not None and set(found["digest"]) == set(whole["digest"])
    tally.note(f"{kind}: {found['verdict']}{', the same bits in the end' if same else ''}")
    if found["verdict"] == "clean" and not same:
        tally.fail("false clean", f"{found['digest']} instead of {whole['digest']}: {where}")
    if found["verdict"] == "corrupt" and found["struck"] is None:
        tally.fail("false corrupt", where)


def _run(folder: Path, sync: str, strike: tuple[int, bool] | None, draw: random.Random, tally: Tally) -> dict[str, Any]:
    os.environ[HOOK] = str(folder)
    words = ("twin", "--config", "mini", "--steps", STEPS, "--checkpoint-every", 4, "--sync", sync)
    processes = several(2, *words, "--run", folder / "run")
    struck: str | None = None
    try:
        for number in range(2):
            wait_for(folder / f"here-{number}", processes)
        if strike is not None:
            victim, state = strike
            pid = processes[victim].process.pid
            assert pid is not None
            places = json.loads((folder / f"here-{victim}").read_text())
            struck = f"process {victim}: " + (flip_state(pid, places, draw) if state else _flip_anywhere(pid, draw))
        for number in range(2):
            (folder / f"go-{number}").touch()
        deadline = time.monotonic() + LIMIT
        for process in processes:
            process.process.join(max(0.1, deadline - time.monotonic()))
            if not process.ended:
                tally.fail("hang", f"{struck}, --sync {sync}, {folder}")
                process.kill()
            tally.read(process.err.read_text(), f"{struck}, {folder}")
    finally:
        for process in processes:
            process.kill()
    record_folder = folder / "run"
    if not (record_folder / "manifest.json").is_file():
        return {"verdict": "nothing", "digest": None, "struck": struck}
    verdict = verdict_of(record_folder)
    record = read_record(record_folder) if verdict != "refused" else None
    digest = None if record is None or record.summary is None else record.summary.get("state_digest")
    return {"verdict": verdict, "digest": digest, "struck": struck}


def wait_for(file: Path, processes: list[Any]) -> None:
    deadline = time.monotonic() + LIMIT
    while not file.is_file():
        assert time.monotonic() < deadline, [process.err.read_text()[-1000:] for process in processes]
        assert not any(process.ended for process in processes), [
            process.err.read_text()[-2000:] for process in processes
        ]
        time.sleep(0.02)


def flip(pid: int, address: int, bit: int) -> None:
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(address)
        (byte,) = memory.read(1)
        memory.seek(address)
        memory.write(bytes([byte ^ (1 << bit)]))


def flip_state(pid: int, places: list[list[Any]], draw: random.Random) -> str:
    name, address, size = draw.choice([place for place in places if place[2]])
    offset, bit = draw.randrange(size), draw.randrange(8)
    flip(pid, address + offset, bit)
    return f"bit {bit} of byte {offset} of {name} ({size} bytes)"


def _flip_anywhere(pid: int, draw: random.Random) -> str:
    regions = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        ends, rights, *_ = line.split()
        if rights.startswith("rw") and "[v" not in line:
            first, last = (int(end, 16) for end in ends.split("-"))
            regions.append((first, last - first))
    for _ in range(1000):
        first, size = draw.choices(regions, weights=[size for _, size in regions])[0]
        address, bit = first + draw.randrange(size), draw.randrange(8)
        try:
            with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pages:
                pages.seek(address // 4096 * 8)
                if not int.from_bytes(pages.read(8), "little") >> 63:
                    continue  # not in memory: the process has not written it
            flip(pid, address, bit)
        except OSError:
            continue
        return f"bit {bit} at {address:#x}"
    raise AssertionError("no memory to strike")


def hook() -> None:
    """Makes twins report the addresses of their state at one step, and burn-ins those of their data before one turn of
    a workload, and wait for the flip."""
    import jax

    from sdc.burnin import rounds
    from sdc.train.programs import TwinProgram

    step, turn = TwinProgram.step, rounds._BurnIn._turn

    def addresses(name: Any, leaf: jax.Array) -> list[list[Any]]:
        shards = (shard.data for shard in jax.block_until_ready(leaf).addressable_shards)
        return [[name, shard.unsafe_buffer_pointer(), shard.nbytes] for shard in shards]

    def report(found: list[list[Any]]) -> None:
        folder, me = Path(os.environ[HOOK]), jax.process_index()
        partial = folder / f".here-{me}"
        partial.write_text(json.dumps(found))
        partial.rename(folder / f"here-{me}")
        while not (folder / f"go-{me}").exists():
            time.sleep(0.01)

    def struck(self: Any, state: Any, batch: Any, number: int) -> Any:
        if number == STRUCK and HOOK in os.environ:
            leaves = jax.tree_util.tree_leaves_with_path(state)
            report([place for path, leaf in leaves for place in addresses(jax.tree_util.keystr(path), leaf)])
        return step(self, state, batch, number)

    def struck_turn(self: Any, workload: Any, *, standard: bool) -> None:
        if self.result.rounds == 0 and [each.name for each in self.workloads].index(workload.name) == int(
            os.environ.get(TURN, -1)
        ):
            report(
                [
                    place
                    for (name, _), ready in self.programs._ready.items()
                    for number, leaf in enumerate(jax.tree.leaves(ready.arguments))
                    for place in addresses((name, number), leaf)
                ]
            )
        turn(self, workload, standard=standard)

    TwinProgram.step = struck  # type: ignore[method-assign]  # the hook
    rounds._BurnIn._turn = struck_turn  # type: ignore[method-assign]  # the hook
