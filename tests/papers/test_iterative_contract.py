"""What every iterative-convergent training keeps to: steps are pure; blocks, sizes and movements belong together."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.train.test_iterative_contract import assert_same, every_training
from tests.train.test_iterative_steps import example, make, start


@every_training
def test_a_step_depends_on_state_and_number_alone(name: str) -> None:
    task, step, loss = example(name)
    state, other = start(name), start(name, seed=1)
    found = step(state, 3)
    assert {leaf: (value.shape, value.dtype) for leaf, value in found.items()} == {
        leaf: (value.shape, value.dtype) for leaf, value in state.items()
    }
    value = loss(found)
    assert (value.shape, value.dtype) == ((), jnp.float32)
    assert np.isfinite(value)
    step(other, 4)
    assert_same(step(state, 3), found)
    assert loss(found) == value != loss(state)
    # A training that is made anew knows nothing of what the first one did.
    again = jax.jit(make(name).step)
    again(other, 7)
    assert_same(again(state, 3), found)
    assert any((again(other, 3)[leaf] != found[leaf]).any() for leaf in task.moving)
    same = all((again(state, 4)[leaf] == found[leaf]).all() for leaf in task.moving)
    assert same == (name == "factorization")  # all others go on to other examples, or draw other numbers


@every_training
def test_mapped_over_trials(name: str) -> None:
    """Trials go on together on accelerators, each at an iteration of its own."""
    task, step, loss = example(name)
    states, ks = [start(name, seed) for seed in range(3)], [0, 5, 2]
    stacked = {leaf: np.stack([state[leaf] for state in states]) for leaf in states[0]}
    found = jax.jit(jax.vmap(task.step))(stacked, np.array(ks, np.int32))
    losses = jax.jit(jax.vmap(task.loss))(found)
    for trial, (state, k) in enumerate(zip(states, ks, strict=True)):
        expected = step(state, k)
        for leaf, value in expected.items():
            # Batched products add in another order. Topics of tokens and their counts are the same, bit for bit.
            rtol, atol = (0, 0) if name == "topics" else (1e-4, 2e-5 if name == "factorization" else 2e-6)
            np.testing.assert_allclose(found[leaf][trial], value, rtol=rtol, atol=atol, err_msg=leaf)
        np.testing.assert_allclose(losses[trial], loss(expected), rtol=1e-5)
