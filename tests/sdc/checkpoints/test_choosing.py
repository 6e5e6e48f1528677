"""How a state is cut into blocks, how far they moved, and which of them a save takes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from sdc.checkpoints import RunningCheckpoint, choose, partition, squared_distance, total_variation
from sdc.settings import SettingError

from .states import start


def test_infinities_that_stay_do_not_starve_the_rest(tmp_path: Path) -> None:
    state = {"mask": jnp.full((4, 8), -jnp.inf), "nan": jnp.full((4, 8), jnp.nan), "w": jnp.zeros((4, 8))}
    with RunningCheckpoint(tmp_path, state, rows=4, fraction=0.34) as running:
        (chosen,) = running.save(state | {"w": state["w"] + 1}, 1)
        assert running.partition.of(["w"]) == [chosen]


def test_an_array_goes_with_the_parameter_of_the_longest_path() -> None:
    params = {"kernel": jnp.zeros((4, 4)), "out": {"kernel": jnp.zeros((4, 4))}}
    cut = partition({"params": params, "mu": params}, moving="params")
    assert [[piece.name for piece in block] for block in cut.blocks] == [
        ["params/kernel", "mu/kernel"], ["params/out/kernel", "mu/out/kernel"], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.0}, "expected more than 0 and at most 1"),
        ({"fraction": 1.5}, "expected more than 0 and at most 1"),
        ({"policy": "best"}, "expected one of priority, round-robin, random"),
        ({"moving": "weights"}, "no floating-point array matches"),
        ({"by": "heads"}, "expected one of rows, shards, experts, layers, arrays"),
        ({"rows": 0}, "expected at least 1"),
    ],
)
def test_wrong_options(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        RunningCheckpoint(tmp_path, start(), **options)


def test_blocks_by_layers() -> None:
    layers = {f"layer{number}": {"kernel": jnp.zeros((4, 4)), "bias": jnp.zeros(4)} for number in range(3)}
    cut = partition({"params": layers, "step": jnp.int32(0)}, moving="params", by="layers")
    assert [[piece.name for piece in block] for block in cut.blocks] == [
        *([f"params/layer{number}/bias", f"params/layer{number}/kernel"] for number in range(3)),
        ["step"],
    ]
    assert cut.sizes == [80, 80, 80, 4]
    assert cut.of(["params/layer1"]) == [1]


def test_blocks_by_experts_and_by_shards() -> None:
    """Expert by expert with its weights, bias and moments; what is no stack stays whole."""
    moe = {"up": jnp.zeros((4, 8, 16)), "bias": jnp.zeros((4, 16)), "router": jnp.zeros((8, 4))}
    state = {"params": {"moe": moe, "norm": jnp.ones(8)}, "mu": {"moe": moe}}
    cut = partition(state, moving="params", by="experts")
    assert [sorted(piece.name for piece in block) for block in cut.blocks] == [
        *[["mu/moe/bias", "mu/moe/up", "params/moe/bias", "params/moe/up"]] * 4,
        ["mu/moe/router", "params/moe/router"], ["params/norm"], [],
    ]  # fmt: skip
    assert {(piece.start, piece.stop) for piece in cut.blocks[2]} == {(2, 3)}
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    w = jax.device_put(jnp.zeros((16, 2)), NamedSharding(mesh, P("data")))
    shards = partition({"w": w, "b": jnp.zeros(6), "scale": jnp.float32(1)}, by="shards")
    assert [tuple(block[0]) for block in shards.blocks[:-1]] == [
        ("b", 0, 6), ("scale", 0, 1), *(("w", start, start + 4) for start in range(0, 16, 4)),
    ]  # fmt: skip


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    fraction=st.floats(0.01, 1.0),
    policy=st.sampled_from(["priority", "round-robin", "random"]),
    seed=st.integers(0, 9),
)
def test_no_more_than_the_fraction_is_chosen(sizes: list[int], fraction: float, policy: Any, seed: int) -> None:
    moves = np.random.default_rng(seed).exponential(size=len(sizes))
    budget = fraction * sum(sizes)
    chosen, _ = choose(policy, budget, sizes, moves, cursor=seed % len(sizes), seed=seed)
    assert len(set(chosen)) == len(chosen) > 0
    assert len(chosen) == 1 or sum(sizes[one] for one in chosen) <= budget


def test_round_robin_comes_round_and_what_failed_comes_first() -> None:
    cursor, seen = 0, []
    for _ in range(4):
        chosen, cursor = choose("round-robin", 4, [1] * 8, np.zeros(8), cursor=cursor)
        seen += chosen
    assert sorted(seen) == sorted([*range(8)] * 2)
    for policy in ("priority", "round-robin", "random"):
        assert choose(policy, 2, [1] * 8, np.asarray([0.0] * 5 + [np.inf, 1, 2]))[0][0] == 5
    assert choose("priority", 2, [1] * 8, np.asarray([0.0] * 5 + [np.nan, 1, 2]))[0][0] == 5


def test_what_a_save_leaves_over_is_for_the_next_ones(tmp_path: Path) -> None:
    """Blocks of 128 bytes, and 200 for each save: the bytes are those of the fraction all the same."""
    state = {"w": jnp.zeros((32, 8))}
    with RunningCheckpoint(tmp_path, state, rows=4, fraction=200 / 1024) as running:
        counts = []
        for step in range(1, 17):
            state = {"w": state["w"] + 1}
            counts.append(len(running.save(state, step)))
    assert set(counts) == {1, 2}
    assert sum(counts) * 128 == 16 * 200 // 128 * 128
    with RunningCheckpoint(tmp_path / "large", state, by="arrays", fraction=0.25) as running:
        assert [len(running.save({"w": state["w"] + step}, step)) for step in range(1, 9)] == [1, 0, 0, 0] * 2


def test_distances() -> None:
    """Against NumPy; total variation is between 0 and the length of the document."""
    draw = np.random.default_rng(0)
    new, old = draw.random((5, 7), np.float32), draw.random((5, 7), np.float32)
    np.testing.assert_allclose(
        squared_distance(jnp.asarray(new), jnp.asarray(old)), ((new - old) ** 2).sum(1), rtol=1e-5
    )
    lengths = np.arange(1.0, 6.0, dtype=np.float32)
    found = total_variation(jnp.asarray(lengths))(jnp.asarray(new), jnp.asarray(old))
    share = lambda x: x / x.sum(1, keepdims=True)  # noqa: E731
    np.testing.assert_allclose(found, lengths * 0.5 * np.abs(share(new) - share(old)).sum(1), rtol=1e-4)
    ends = jnp.asarray([[1.0, 0.0], [0.0, 0.0]]), jnp.asarray([[0.0, 1.0], [0.0, 0.0]])
    np.testing.assert_array_equal(total_variation()(*ends), [1.0, 0.0])
