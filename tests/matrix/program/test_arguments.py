"""What steps are given and return as people write them: objects that are changed in place, and what is no array."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.sdc.program.test_arguments import TOOLS, X, train_step, training


def arrays_of(*objects: Any) -> Any:
    state = nnx.to_pure_dict(nnx.state(objects))
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state)


@functools.cache
def trained() -> tuple[Any, Any]:
    """Three plain steps: the losses, and what became of model, optimizer and metrics."""
    objects = training()
    step = nnx.jit(train_step)
    losses = [step(*objects, X) for _ in range(3)]
    return losses, arrays_of(*objects)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("form", ["nnx.jit(tool(step))", "tool(nnx.jit(step))"])
def test_objects_are_changed_as_by_the_plain_step(tool: str, form: str) -> None:
    transform = TOOLS[tool]
    step = nnx.jit(transform(train_step)) if form.startswith("nnx") else transform(nnx.jit(train_step))
    objects = training()
    model = objects[0]
    results = [step(*objects, X) for _ in range(3)]
    losses, after = trained()
    chex.assert_trees_all_close([out for out, _ in results], losses, rtol=1e-5)
    chex.assert_trees_all_close(arrays_of(*objects), after, rtol=1e-4, atol=1e-6)
    assert model.tied is model.shared
    assert int(model.calls[...]) == 3
    reports = results[0][1]
    directions = {site.direction for site in reports.sites if site.primitive == "dot_general"}
    assert {"fwd", "bwd"} <= directions
    if tool == "fingerprint":
        names = set(reports)
        assert {"arg/0/shared/kernel", "arg/3", "out/arg/0/shared/kernel", "out/arg/1/step", "out"} <= names
