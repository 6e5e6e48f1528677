"""`sdc train --checkpoint scar`: after the loss of a host, all processes restart with the data that is left."""

import json
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from sdc.checkpoints.blocks import within
from sdc.checkpoints.copies import DESCRIPTIONS
from sdc.checkpoints.partitions import Fragment, named_leaves, shards_here
from sdc.checkpoints.store import Store, last_save
from sdc.records import read_record
from sdc.train import Training
from sdc.train.programs.placement import place
from tests.tools.command import lines, sdc, several, wait
from tests.train.runs import MINI, WORKLOAD

TRAIN = ("train", "--config", "mini", "--checkpoint", "scar", "--checkpoint-fraction", 0.5, "--timeout", 30)
Part = tuple[Fragment, bytes]


def copied(place: Path) -> Iterator[Part]:
    """Yields the parts of the state in a copy on a host."""
    content = (place / "pieces").read_bytes()
    for held in DESCRIPTIONS.read(place / "copy.json").held:
        yield held, content[: held.bytes]
        content = content[held.bytes :]


def saved(folder: Path, *, save: int | None = None) -> Iterator[Part]:
    """Yields the parts in the stores of both processes: the newest of each block, or those of one save."""
    last = last_save(epath.Path(folder))
    assert last is not None
    for store in (Store(epath.Path(folder), process) for process in range(2)):
        for block, versions in store.manifest(last.save).versions.items():
            content = store.read(int(block), versions[0])
            for held in store.layout().blocks[block] if save in (None, versions[0].save) else ():
                yield held, content[: held.bytes]
                content = content[held.bytes :]


def initial(axes: Mapping[str, int]) -> Iterator[Part]:
    """Yields the parts of the initial state of a run."""
    job = Training(workload=WORKLOAD, **axes)
    spread = place(twins=None, data=job.data, model=job.model, kind=job.layout, devices=jax.devices()[:2])
    state = job.program(MINI, spread, donate=False).init(0)
    for held, data in shards_here(named_leaves(state)).items():
        yield held, np.asarray(data).tobytes()


class Canvas:
    """The expected bytes of a state, according to files."""

    def __init__(self, start: Sequence[Part]) -> None:
        ends: dict[str, tuple[Any, int]] = {}
        for held, _ in start:
            stops = [stop for _, stop in held.box]
            ends[held.name] = (np.maximum(stops, ends.get(held.name, (stops, 0))[0]), jnp.dtype(held.dtype).itemsize)
        self._bytes = {name: np.zeros((*shape, size), np.uint8) for name, (shape, size) in ends.items()}
        self.paint(start)

    def at(self, part: Part) -> tuple[np.ndarray, np.ndarray]:
        """Returns the expected and the actual bytes of a part."""
        held, content = part
        whole = self._bytes[held.name]
        there = whole[within(held.box, tuple((0, size) for size in whole.shape[:-1]))]
        return there, np.frombuffer(content, np.uint8).reshape(there.shape)

    def paint(self, parts: Iterable[Part]) -> None:
        for part in parts:
            there, content = self.at(part)
            there[:] = content

    def agrees(self, parts: Iterator[Part]) -> set[str]:
        """Asserts that all parts are as expected, and returns the names of their arrays."""
        names = set()
        for part in parts:
            assert np.array_equal(*self.at(part)), part[0]
            names.add(part[0].name)
        return names


def place_of(folder: Path, process: int) -> Path:
    """Returns the folder of a process's copies, which is of no use to other users and named at random."""
    record = folder / "run" / "running" / f"process-{process}" / "copies.json"
    return Path(json.loads(record.read_text())["folder"]) if record.exists() else folder / "none"


def copies(folder: Path, process: int) -> list[int]:
    places = place_of(folder, process).glob("*/copy.json")
    return sorted(int(place.parent.name) for place in places if place.parent.name.isdecimal())


@pytest.mark.parametrize(("axis", "every"), [("data", False), ("model", True)])
def test_a_host_is_lost_and_the_run_goes_on(axis: str, every: bool, tmp_path: Path) -> None:
    """One process is killed and the other ends by itself, or both are killed; the second host's copies are gone."""
    run, running = tmp_path / "run", tmp_path / "run" / "running"
    flags = (*TRAIN, f"--{axis}", 2, "--run", run, "--local-copies", tmp_path / "copies")
    processes = several(2, *flags, "--checkpoint-every", 4, "--steps", 100_000)
    wait(processes[0], lambda: all(max(copies(tmp_path, process), default=0) >= 8 for process in range(2)))
    processes[1].kill()
    if every:
        processes[0].kill()
    else:
        code, _, err = processes[0].end()
        assert code == 3, err[-2000:]
        assert "process 1 was lost" in err
    assert not (run / "checkpoints").exists() or not list((run / "checkpoints").iterdir())

    here, lost = (place_of(tmp_path, process) for process in range(2))
    assert here.parent == lost.parent == tmp_path / "copies"
    step, done = copies(tmp_path, 0)[-1], len(read_record(run, "train").lines)
    must = Canvas(list(initial({axis: 2})))  # some blocks were never saved and keep their initial values
    must.paint(saved(running))
    must.paint(copied(here / str(step)))
    shutil.rmtree(lost)
    # From here on only the restart itself copies or saves anything.
    processes = several(2, *flags, "--checkpoint-every", 100_000, "--steps", 100_000, "--resume")
    wait(processes[0], lambda: any("restarted" in row for row in lines(run)))
    processes[0].send(signal.SIGTERM)
    for process in processes:
        code, _, err = process.end()
        assert code == 3, err[-2000:]
        assert f"resumes from step {step}, so {done - step} steps are lost" in err

    # What both processes copied and saved of their states: the survivor's bits, and saved bits for the rest.
    assert "params/embedding" in must.agrees(copied(place_of(tmp_path, 1) / str(step)))
    assert must.agrees(saved(running, save=max(Store(epath.Path(running), 0).saves())))
    assert copies(tmp_path, 0) == [step - 4, step]
    rows = lines(run)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    (restart,) = [row["restarted"] for row in rows if "restarted" in row]
    assert rows[step]["restarted"] is restart
    assert (restart["simulated"], restart["step"], restart["steps_lost"]) == (False, step, done - step)
    first, second = restart["processes"]
    assert first["own"]["bytes"] == (here / str(step) / "pieces").stat().st_size
    assert first["peers"]["bytes"] == first["running"]["bytes"] == second["own"]["bytes"] == 0
    assert second["peers"]["bytes"] > 0
    assert second["running"]["bytes"] == restart["bytes"] > 0
    assert 0 < restart["lost"] <= restart["blocks"]
    for found in [row["outlook"] for row in rows if "outlook" in row][:5]:  # the first process writes those of all
        half, everything = found["losses"][1:]
        assert 0 < half["steps"] < everything["steps"] <= found["step"]
    assert not any("outlook" in row for row in rows[step:])  # nothing was saved after the restart
    assert sum("outlook" in row for row in rows[:step]) == step // 2

    if every:
        return
    for process in several(2, *flags, "--steps", len(rows) + 1, "--resume"):
        code, _, err = process.end()
        assert code == 0, err[-2000:]
    record = read_record(run, "train")
    assert record.ended
    assert [row["step"] for row in record.lines] == list(range(len(rows) + 1))
    assert list((tmp_path / "copies").iterdir()) == []
    words = f"restarted at step {step}: {restart['lost']} of {restart['blocks']} blocks"
    assert words in (run / "report.html").read_text()


def test_flags_that_would_have_no_effect(tmp_path: Path) -> None:
    for flag, value in (("--lose-shards", "shards,step=1"), ("--checkpoint-fraction", 0.5), ("--local-copies", "here")):
        code, _, err = sdc("train", "--config", "mini", flag, value, "--run", tmp_path / "run")
        assert code == 2
        assert "--checkpoint scar" in err
    assert not (tmp_path / "run").exists()
