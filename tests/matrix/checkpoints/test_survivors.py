"""Two processes, each with four of the eight devices: what each holds again after one lost its copies, or a save was
cut off."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tests.pairs import run_pair

CHILD = """
import json, shutil, sys, time
import jax
from etils import epath
from pathlib import Path
folder, process, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
from sdc.checkpoints import RunningCheckpoint, scar
from sdc.checkpoints import copies as module
from sdc.checkpoints.copies import Copies
from sdc.checkpoints.store import Store, last_save
from sdc.multihost import everyone
from tests.matrix.checkpoints.test_survivors import contents, state

module.CHUNK = 64  # so that what is sent goes in several parts
running = RunningCheckpoint(folder / "running", state(0), fraction=1.0, rows=2, moving="params")
running.save(state(3), 3)
running.wait()
own = Copies(folder / f"process-{process}", "run", state(0))
for step in (2, 4):
    own.save(state(step), step, {"next_index": step})
own.wait()
told = []

def gathered():
    everyone("written")
    found = module.agree(own, after=0, until=9)
    if found is None:
        return told.append(None)
    got = module.gather(state(9), found, running.partition, running.reader())
    shares = [{way: tuple(share.values()) for way, share in each.items()} for each in got.shares]
    told.append([
        found.step, list(found.processes), dict(found.note), found.mine is not None, contents(got.recovered.state),
        shares, len(got.lost), got.bytes, sorted(set(got.recovered.steps.values())),
    ])

gathered()  # nothing is lost
if process == 0:  # of the newest a byte is another: all take the one before
    pieces = own.folder / "4" / "pieces"
    content = pieces.read_bytes()
    pieces.write_bytes(content[:7] + bytes([content[7] ^ 1]) + content[8:])
gathered()
if process == 0:  # nor is there one before: what it held is lost
    shutil.rmtree(own.folder / "2")
gathered()
if process == 0:
    pieces.write_bytes(content)
if process == 1:
    shutil.rmtree(own.folder)
gathered()
if process == 0:
    shutil.rmtree(own.folder)
gathered()
running.close()
own.close()

# A save is cut off when the first process has written its part, and the second has not.
everyone("closed")
if process == 0:
    store = Store(epath.Path(folder / "running"), 0)
    store.versions = store.manifest(1).blocks
    store.write(2, 4, {})
everyone("cut off")
scar.WAIT_MS = 5_000
with RunningCheckpoint(folder / "running", state(0), fraction=1.0, rows=2, moving="params") as running:
    running.save(state(5), 5)
    told.append([running.wait(), last_save(running.folder).oldest.step])
    everyone("read")
    running.save(state(6), 6)
    told.append([running.wait(), last_save(running.folder).oldest.step])

    # A device dies below the second process's part: both have to learn of it at once, and to go on.
    def died(*_):
        raise jax.errors.JaxRuntimeError("the device is gone")
    write, running._store.write = running._store.write, died if process == 1 else running._store.write
    started = time.monotonic()
    running.save(state(7), 7)
    told.append([running.wait(), last_save(running.folder).oldest.step, time.monotonic() - started < 5])
    running._store.write = write
    running.save(state(8), 8)
    told.append([running.wait(), last_save(running.folder).oldest.step])
print(json.dumps(told), flush=True)
"""
ODD = np.array([0x80000000, 0x7FC01234], np.uint32).view(np.float32)
"""-0.0, and a NaN with a payload."""
SPECS = {"over": P("x"), "within": P(None, "y"), "both": P("y", "x"), "everywhere": P(), "half": P("y")}
"""The axis x goes over the processes, and y lies within each."""


def arrays(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    found = {name: draw.normal(size=(8, 8)).astype(np.float32) for name in SPECS}
    found["within"][:, :2] = found["everywhere"][:, :2] = ODD
    return {**found, "half": found["half"].astype(jnp.bfloat16), "count": np.asarray(step, np.int32)}


def state(step: int) -> dict[str, Any]:
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("x", "y"))
    placed = {
        name: jax.make_array_from_callback(
            whole.shape, NamedSharding(mesh, SPECS.get(name, P())), lambda index, whole=whole: whole[index]
        )
        for name, whole in arrays(step).items()
    }
    count = placed.pop("count")
    key = jax.jit(lambda: jax.random.key(step), out_shardings=NamedSharding(mesh, P()))()
    return {"params": placed, "count": count, "key": key}


def contents(tree: Any) -> dict[str, list[str]]:
    """The bytes of this process's shards, by array, in the order of its devices."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path[-1:], simple=True, separator="/")
        bits = jax.random.key_data(leaf) if name == "key" else leaf
        shards = sorted(bits.addressable_shards, key=lambda shard: shard.device.id)
        found[name] = [np.asarray(shard.data).tobytes().hex() for shard in shards]
    return found


def shards(process: int, survivor: int, step: Callable[[bool], int]) -> dict[str, list[str]]:
    """What a process must hold: each shard as after a step, which depends on whether the survivor has it."""
    found = {}
    for name in (*SPECS, "count"):
        spec = SPECS.get(name, P())

        def parts(place: dict[str, int], name: str = name, spec: Any = spec) -> Iterator[slice]:
            for size, axis in zip(np.shape(arrays(0)[name]), (*spec, None, None), strict=False):
                count = {"x": 2, "y": 4, None: 1}[axis]
                length, number = size // count, place.get(axis, 0)
                yield slice(number * length, (number + 1) * length)

        kept = process == survivor or "x" not in spec
        whole = arrays(step(kept))[name]
        found[name] = [whole[tuple(parts({"x": process, "y": y}))].tobytes().hex() for y in range(4)]
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any]]:
    """What both processes say, one thing after the other."""
    return list(zip(*run_pair(CHILD, tmp_path_factory.mktemp("pair")), strict=True))


def test_saves_go_on_after_one_was_cut_off(told: list[tuple[Any, Any]]) -> None:
    """Both have to number their saves alike, or each waits for a part of the other that does not come."""
    assert told[5:7] == [([True, 5], [True, 5]), ([True, 6], [True, 6])]


def test_a_device_that_dies_below_a_save_keeps_no_other_process_waiting(told: list[tuple[Any, Any]]) -> None:
    assert told[7:] == [([False, 6, True], [False, 6, True]), ([True, 8], [True, 8])]


def test_each_process_holds_what_is_left(told: list[tuple[Any, Any]]) -> None:
    all_left, damaged, first_lost, second_lost, none_left = told[:5]
    for told, step in ((all_left, 4), (damaged, 2)):
        for process, (found, processes, note, mine, held, shares, lost, size, _) in enumerate(told):
            assert (found, processes, note, mine) == (step, [0, 1], {"next_index": step}, True)
            held.pop("key")
            assert held == shards(process, 0, lambda _, step=step: step)
            assert (lost, size) == (0, 0)
            assert all(each["peers"] == each["running"] == [0, 0] for each in shares)
    for survivor, told in enumerate((second_lost, first_lost)):
        keys, gone = [], 8 * 8 * 4  # half of `over` and of `both`
        for process, (found, processes, note, mine, held, shares, lost, size, read) in enumerate(told):
            assert (found, processes, note, mine) == (4, [survivor], {"next_index": 4}, process == survivor)
            keys.append(held.pop("key"))
            # What the survivor does not have is that of the running checkpoint; replicas have the survivor's bits.
            assert held == shards(process, survivor, lambda kept: 4 if kept else 3)
            assert (size, read) == (gone, [3])
            assert lost == 2 + 4  # 4 rows of `over`, and all of `both`, two rows a block
            own = sum(len(bytes.fromhex(part)) for part in _once(held)) + 8  # and the key
            assert shares[survivor]["own"][1] == own
            assert shares[1 - survivor]["own"] == [0, 0]
            assert shares[1 - survivor]["running"] == [1 + 4, gone]
            assert shares[1 - survivor]["peers"][1] == own - gone
        assert len({bits for held in keys for bits in held}) == 1
    assert none_left == (None, None)


def _once(held: dict[str, list[str]]) -> list[str]:
    """Without replicas in a process."""
    return [part for name, parts in held.items() for part in (parts if "y" in SPECS.get(name, ()) else parts[:1])]
