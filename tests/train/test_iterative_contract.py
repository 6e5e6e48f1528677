"""What every iterative-convergent training keeps to: steps are pure; blocks, sizes and movements belong together."""

from typing import Any

import jax
import numpy as np
import pytest

from .test_iterative_steps import NAMES, example, start

every_training = pytest.mark.parametrize("name", NAMES)


def assert_same(one: Any, other: Any) -> None:
    """The same arrays of the same types, bit for bit."""
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@every_training
def test_one_program_for_all_iterations(name: str) -> None:
    task, traced = example(name)[0], []

    def counted(state: Any, k: Any) -> Any:
        traced.append(k)
        return task.step(state, k)

    step, state = jax.jit(counted), start(name)
    for k in range(3):
        state = step(state, np.int32(k))
    assert len(traced) == 1
    assert_same(state, example(name)[1](example(name)[1](example(name)[1](start(name), 0), 1), 2))


@every_training
def test_first_states_come_from_the_key(name: str) -> None:
    task = example(name)[0]
    init = jax.jit(task.init)
    assert_same(init(jax.random.key(1)), init(jax.random.key(1)))
    one, other = init(jax.random.key(1)), init(jax.random.key(2))
    assert any((one[leaf] != other[leaf]).any() for leaf in task.moving)
    for leaf, value in one.items():
        if leaf.startswith(("mu/", "nu/")):
            assert not value.any()


@every_training
def test_every_row_is_of_a_block(name: str) -> None:
    task, state = example(name)[0], start(name)
    assert {leaf: len(ids) for leaf, ids in task.blocks.items()} == {leaf: len(value) for leaf, value in state.items()}
    assert set(task.moving) <= set(state)
    seen = sorted({int(block) for ids in task.blocks.values() for block in ids})
    assert seen == list(range(task.count))
    # As each training says of its blocks.
    blocks = {leaf: ids.tolist() for leaf, ids in task.blocks.items()}
    if name == "regression":
        assert blocks == {"weights": [0, 1, 2, 3, 4]}
    elif name == "factorization":
        assert blocks == {"users": list(range(7)), "items": list(range(7, 16))}
    elif name == "topics":
        assert blocks == {"counts": list(range(8)), "assigned": list(range(8))}
    else:
        first, together = 0, name == "cnn-layers"
        assert [leaf.partition("/")[0] for leaf in task.moving] == ["params"] * (len(state) // 3)
        for leaf in task.moving:
            rows = len(state[leaf])
            expected = [first] * rows if together else list(range(first, first + rows))
            for kind in ("params", "mu", "nu"):
                assert blocks[leaf.replace("params", kind, 1)] == expected
            first += 1 if together else rows
        assert task.count == first


@every_training
def test_sizes_are_those_of_what_moves(name: str) -> None:
    task, state = example(name)[0], start(name)
    sizes = [0] * task.count
    for leaf in task.moving:
        for row, block in zip(np.asarray(state[leaf]), task.blocks[leaf], strict=True):
            sizes[block] += row.nbytes
    assert task.sizes(state).tolist() == sizes
    assert sum(sizes) == sum(state[leaf].nbytes for leaf in task.moving)
    assert min(sizes) > 0


@every_training
def test_only_the_block_of_a_changed_row_has_moved(name: str) -> None:
    task, moved = example(name)[0], jax.jit(example(name)[0].moved)
    state = example(name)[1](start(name), 0)
    np.testing.assert_array_equal(moved(state, state), np.zeros(task.count))
    for leaf, value in state.items():
        for row in {0, len(value) // 2, len(value) - 1}:
            changed = np.array(value)
            changed.reshape(len(value), -1)[row, 0] += 1
            found = np.asarray(moved(state | {leaf: changed}, state))
            expected = np.arange(task.count) == task.blocks[leaf][row]
            np.testing.assert_array_equal(found > 0, expected & (leaf in task.moving), err_msg=f"{leaf} {row}")
            if leaf == "counts":  # a token more of the first topic: what that takes from the shares of the others
                counts = np.asarray(value, np.float64)[row]
                others = counts[1:].sum()
                np.testing.assert_allclose(found[row], others / (counts.sum() + 1), rtol=1e-4)
            elif leaf in task.moving:
                np.testing.assert_allclose(found.sum(), 1, rtol=1e-5)
