"""`campaign`: single faults in anybody's training step, in one call."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sdc.settings import SettingError

from ..faults import Fault, What
from ..program import Where, arithmetic
from .runner import Campaign


def campaign(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Any],
    injections: int = 100,
    where: Where = arithmetic,
    faults: Sequence[Fault | What | str] = ("bitflip",),
    follow: int = 5,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Injects single faults into a training step and classifies what becomes of training.

    Args:
        step: `(state, batch) -> (state, metrics)`, any function that JAX can trace. Objects of Flax NNX in its state
            may be changed in place, and are returned.
        state: state before the first step, which stays as it is.
        batches: batches of data, one for each step of the clean run.
        loss: `(state, metrics) -> loss`, of what the step returns.
        injections: number of faults to inject.
        where: selects the sites; by default everything that computes floating-point numbers.
        faults: which, each a `Fault`, just its kind, or its text (see `as_fault`). Where and when they hit is the
            campaign's affair.
        follow: steps that are followed after the struck one.
        seed: another seed, other injections.

    Returns:
        One row per injection: the site, what was changed there, and what `classify` says of it.

    Raises:
        ValueError: nothing is selected, or there are too few batches.
        NotDeterministic: the clean run does not repeat itself.

    Example:
        >>> import jax, jax.numpy as jnp, sdc
        >>> def step(w, x):
        ...     value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1.0) ** 2))(w)
        ...     return w - 0.1 * gradient, value
        >>> batches = [jnp.full((2, 3), 0.1 * n) for n in range(1, 9)]
        >>> rows = sdc.campaign(step, jnp.zeros(3), batches, loss=lambda state, value: value, injections=20)
        >>> len(rows), {row["outcome"] for row in rows} <= {"masked", "benign", "spike", "divergence", "nonfinite"}
        (20, True)
    """
    if injections < 1:
        raise SettingError("injections", injections, "expected at least 1")
    if not callable(loss) or not _takes_two(loss):
        raise SettingError("loss", repr(loss), "expected a function of (state, metrics)")
    runner = Campaign(
        step, state, list(batches), observe=lambda state, metrics: {"loss": loss(state, metrics)}, where=where,
        faults=faults, follow=follow, seed=seed,
    )  # fmt: skip
    return list(runner.run(range(injections)))


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # builtins do not tell
        pass
    return True
