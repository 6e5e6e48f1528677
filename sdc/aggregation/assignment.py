"""Optax updates that set parameters instead of adding to them.

`optax.apply_updates` adds updates to parameters, but `parameter + (target - parameter)` is not bitwise equal to
`target`. A method that makes replicas equal must therefore set their parameters.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Shaped

from ..bits import as_bits, from_bits

Tree = Any  # a pytree of arrays


@jax.tree_util.register_pytree_node_class
class Assignment:
    """An update that sets a parameter: `parameter + Assignment(value)` is `value`, bit for bit.

    `optax.apply_updates` and any other code that computes `parameter + update` therefore accept it. Other arithmetic
    raises an error: a transform that scales updates belongs inside the wrapped optimizer, not after it.

    An assignment is a pytree, so `jit` and `vmap` accept it, and `jax.tree.map` applies its function to the leaf. The
    leaf holds the bits of the value in a type on which JAX rejects arithmetic with a TypeError. Code that replaces an
    assignment with another array, or selects between an assignment and zeros, is not detected.

    Attributes:
        value: the new parameter.
    """

    __array_ufunc__ = None  # make NumPy arrays defer the sum to this class too
    _leaf: Any
    _dtype: Any

    def __init__(self, value: Shaped[Array, "*shape"]) -> None:
        value = jnp.asarray(value)
        # Random keys already reject arithmetic, and elements narrower than 8 bits cannot be converted to bits.
        key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
        hide = not key and (value.dtype == np.bool_ or jax.dtypes.itemsize_bits(value.dtype) >= 8)
        self._leaf, self._dtype = (_hidden(value), value.dtype) if hide else (value, None)

    @property
    def value(self) -> Shaped[Array, "*shape"]:
        return self._leaf if self._dtype is None else _shown(self._leaf, self._dtype)

    def __radd__(self, parameter: Any) -> Shaped[Array, "*shape"]:
        if jnp.shape(parameter) != jnp.shape(self._leaf):
            raise ValueError(
                f"an update of shape {jnp.shape(self._leaf)} cannot set a parameter of shape {jnp.shape(parameter)}; "
                "pass the same parameters to apply_updates as to update"
            )
        return self.value

    def __repr__(self) -> str:
        return f"Assignment({self._leaf!r})"

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self._leaf,), self._dtype

    @classmethod
    def tree_unflatten(cls, dtype: Any, leaves: tuple[Any]) -> "Assignment":
        made = object.__new__(cls)
        made._leaf, made._dtype = leaves[0], dtype
        return made


def assign(values: Tree) -> Tree:
    """Returns updates that set parameters to these values."""
    return jax.tree.map(Assignment, values)


def assigns(updates: Tree) -> bool:
    """Returns whether any of these updates is an assignment."""

    leaves = jax.tree.leaves(updates, is_leaf=lambda x: isinstance(x, Assignment))
    return any(isinstance(leaf, Assignment) for leaf in leaves)


def checked_optimizer(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Returns an optax optimizer whose `update` takes extra arguments.

    Raises:
        ValueError: it has no `init` and `update`.
    """
    if isinstance(optimizer, type) or not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise ValueError(
            f"optimizer={optimizer!r}: expected an optax optimizer, with init(params) and update(gradient, state, "
            "params), such as optax.adam(1e-3)"
        )
    return optax.with_extra_args_support(optimizer)


def stepped(
    optimizer: optax.GradientTransformationExtraArgs, gradient: Tree, state: optax.OptState, params: Tree, **extra: Any
) -> tuple[Tree, optax.OptState]:
    """Returns the parameters and the optimizer state after one step; boolean parameters and random keys are
    unchanged.

    Raises:
        ValueError: the optimizer does not return an update for each parameter, and its state.
    """

    def apply(path: Any, parameter: Any, update: Any) -> Any:
        if parameter is None:
            return None
        place, shape = jax.tree_util.keystr(path), jnp.shape(parameter)
        if update is None:
            raise ValueError(f"the optimizer returned no update for params{place}; {remedy}")
        if not isinstance(update, Assignment) and jnp.shape(update) not in (shape, ()):
            raise ValueError(
                f"the optimizer returned an update of shape {jnp.shape(update)} for params{place} of shape {shape}; "
                f"{remedy}"
            )
        dtype = jnp.result_type(parameter)
        fixed = dtype == np.bool_ or jnp.issubdtype(dtype, jax.dtypes.extended)
        nothing = getattr(update, "dtype", None) == jax.dtypes.float0
        return parameter if fixed or nothing else optax.apply_updates(parameter, update)

    remedy = "update(gradient, state, params) must return (updates, state), with an update of each parameter's shape"
    found: Any = optimizer.update(gradient, state, params, **extra)
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"the optimizer returned {type(found).__name__}; {remedy}")
    whole: Any = jax.tree.structure(params, is_leaf=lambda x: x is None)
    try:
        whole.flatten_up_to(found[0])
    except (TypeError, ValueError) as error:
        raise ValueError(f"the optimizer returned updates for other parameters; {remedy}") from error
    return jax.tree.map_with_path(apply, params, found[0], is_leaf=lambda x: x is None), found[1]


def check_update(state: Any, kind: type, params: Tree) -> None:
    """Raises ValueError unless `update` received parameters and a state that the same optimizer's `init` returned."""
    if params is None:
        raise ValueError("no parameters were given; call update(gradient, state, params)")
    if not isinstance(state, kind):
        raise ValueError(
            f"a state of type {type(state).__name__} does not belong to this optimizer; expected the {kind.__name__} "
            "that its init returns"
        )


@functools.cache
def _type(words: int) -> Any:
    """Returns a key type of `words` 32-bit words; drawing random numbers with such a key raises an error."""

    def refuse(*_: Any) -> Any:
        raise TypeError("an Assignment is not a random key")

    nothing = {"seed": refuse, "split": refuse, "random_bits": refuse, "fold_in": refuse}
    return define_prng_impl(key_shape=(words,), name=f"Assignment{words}", tag="Assignment", **nothing)


def _hidden(value: Shaped[Array, "*shape"]) -> Any:
    """Returns a key array whose words are the bits of a value."""
    bits = as_bits(value)
    words = lax.bitcast_convert_type(bits, jnp.uint32) if bits.dtype.itemsize == 8 else bits.astype(jnp.uint32)
    if words.ndim == value.ndim:
        words = words[..., None]
    elif words.ndim > value.ndim + 1:  # complex128
        words = words.reshape(*value.shape, 4)
    return jax.random.wrap_key_data(words, impl=_type(words.shape[-1]))


def _shown(hidden: Any, dtype: Any) -> Shaped[Array, "*shape"]:
    """Inverts `_hidden`."""
    like: Any = jax.ShapeDtypeStruct(hidden.shape, dtype)
    bits = jax.eval_shape(as_bits, like)
    words = jax.random.key_data(hidden)
    if bits.dtype.itemsize == 8:
        words = lax.bitcast_convert_type(words.reshape(*bits.shape, 2), jnp.uint64)
    elif bits.ndim == hidden.ndim:
        words = words[..., 0]
    return from_bits(words.astype(bits.dtype), like)
