"""Relative errors: of one size, or of severities with a heavy tail."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sdc._lazy import jax, jnp
from sdc.bits import as_bits, from_bits, select

from .changes import Change, by_layer, neutral
from .kind import Kind

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Array, Float32, Int, PRNGKeyArray, Shaped

SMALLEST = 2.0**-24
"""Draws are not below this, so that no severity is infinite."""


@dataclasses.dataclass(frozen=True)
class Relative(Kind):
    """The element x becomes x (1 + s u) with a random sign s and u uniform in (0, 1] times `severity`.

    A change that rounding would undo becomes a change of the last bit, so that a hit element is always another number.
    Zeros, NaNs and infinities stay as they are. (The bare `change` does neither.) Severity, the mean relative size of
    an error, is what Ma et al. (arXiv:2502.12340) measured on unhealthy nodes.

    Attributes:
        severity: the largest relative change; one number, or one per layer.

    Raises:
        ValueError: a severity that is negative, infinite or no number.
    """

    severity: float | tuple[float, ...]

    def __post_init__(self) -> None:
        if isinstance(self.severity, float | int | tuple) and not all(
            0 <= x < np.inf for x in np.atleast_1d(self.severity)
        ):
            raise ValueError(f"severity={self.severity}: expected a relative change from 0 on, or one for each layer")

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        size, sign = jax.random.split(key)
        u = 1.0 - jax.random.uniform(size, shape)
        severity = by_layer(self.severity, layer)
        change = jnp.where(jax.random.bernoulli(sign, shape=shape), 1.0, -1.0) * u * severity
        return neutral()._replace(factor=(1.0 + change).astype(jnp.float32))

    def __call__(
        self,
        key: PRNGKeyArray,
        x: Shaped[Array, "*groups n"],
        layer: Int[Array, ""],
        count: Int[Array, "*#groups"] | None = None,
    ) -> Shaped[Array, "*groups n"]:
        changed = super().__call__(key, x, layer, count)
        neighbour = from_bits(as_bits(x) ^ jnp.ones((), as_bits(x).dtype), x)
        changed = select(as_bits(changed) == as_bits(x), neighbour, changed)
        finite = jnp.isfinite(x) if jnp.issubdtype(x.dtype, jnp.floating) else True
        return select((x == 0) | ~jnp.asarray(finite), x, changed)


@dataclasses.dataclass(frozen=True)
class Tailed(Relative):
    """`Relative` with a severity that is drawn anew in each step and layer, from a distribution with a heavy tail.

    With u uniform in (0, 1), drawn for the step and the layer and the same for all elements, microsteps and devices:

    - the mean relative change is V = severity u^-tail: a Pareto tail of index 1/tail, and `severity` is the least.
      Single elements are off by anything uniform in (0, 2 V], at least the last bit;
    - the rate is multiplied by (1 + few) u^few, whose mean is 1: the more severe a step, the fewer elements it hits.

    It is the law of the simulated nodes (`sdc.faults.node_faults`), which says how `tail` and `few` were fitted. Where
    the fault hits once (`strike_on`), u is drawn for it alone.

    Attributes:
        severity: the least mean relative change of a step; one number, or one per layer.
        tail: inverse of the tail's index; 0 for a steady severity.
        few: how much rarer elements are in severe steps; 0 for a steady rate.

    Raises:
        ValueError: a severity, tail or few that is negative, infinite or no number.

    Example:
        >>> from sdc.faults import Tailed
        >>> kind = Tailed(severity=0.5, tail=1.0, few=2.0)
        >>> float(kind.level(0.1)), round(float(kind.share(0.1)), 3)
        (5.0, 0.03)
    """

    draws: ClassVar[bool] = True
    tail: float = 0.0
    few: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("tail", self.tail), ("few", self.few)):
            if not 0 <= value < np.inf:
                raise ValueError(f"{name}={value}: expected a number from 0 on")

    def level(self, u: Float32[ArrayLike, ""] | float, layer: Any = 0) -> Float32[Array, ""]:
        """The mean relative change of a step and layer with the draw u."""
        return by_layer(self.severity, layer) * u**-self.tail

    def share(self, u: Float32[ArrayLike, ""] | float) -> Any:
        return (1 + self.few) * u**self.few

    def largest_share(self) -> float:
        return 1 + self.few

    def draw(self, key: PRNGKeyArray) -> Float32[Array, ""]:
        return jax.random.uniform(key, minval=SMALLEST)

    def on(self, u: Float32[ArrayLike, ""], layer: Int[Array, ""]) -> Relative:
        return Relative(2 * self.level(u, layer))  # type: ignore[arg-type] # a number that is drawn

    def change(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any, layer: Int[Array, ""]) -> Change:
        own, elements = jax.random.split(key)
        return self.on(self.draw(own), layer).change(elements, shape, dtype, layer)
