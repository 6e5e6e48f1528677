"""Updates that set parameters, in optax's form.

`optax.apply_updates` adds, and `parameter + (target - parameter)` is not `target` to the last bit. A method that makes
replicas equal must set them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Shaped

Tree = Any
"""A pytree of arrays."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Assignment:
    """An update that sets: `parameter + Assignment(value)` is `value`, bit for bit.

    `optax.apply_updates` and whatever else computes `parameter + update` therefore take it as it is. Other arithmetic
    is refused: a transform that scales updates belongs inside the optimizer that is wrapped, not behind it.

    Attributes:
        value: the new parameter.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from sdc.aggregation.assignment import Assignment
        >>> optax.apply_updates({"w": jnp.float32(1.0)}, {"w": Assignment(jnp.float32(1e-30))})["w"].item() > 0
        True
    """

    value: Shaped[Array, "*shape"]

    __array_ufunc__ = None  # NumPy's arrays leave the sum to this class too

    def __radd__(self, parameter: Any) -> Shaped[Array, "*shape"]:
        if jnp.shape(parameter) != jnp.shape(self.value):
            raise ValueError(
                f"an update of shape {jnp.shape(self.value)} cannot set a parameter of shape {jnp.shape(parameter)}; "
                "give apply_updates the parameters that were given to update"
            )
        return self.value


def assign(values: Tree) -> Tree:
    """Updates that set parameters to these values."""
    return jax.tree.map(Assignment, values)


def stepped(
    optimizer: optax.GradientTransformationExtraArgs, gradient: Tree, state: optax.OptState, params: Tree, **extra: Any
) -> tuple[Tree, optax.OptState]:
    """The parameters after one step of an optimizer, and its state."""
    updates, state = optimizer.update(gradient, state, params, **extra)
    return optax.apply_updates(params, updates), state
