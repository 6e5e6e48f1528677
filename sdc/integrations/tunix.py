"""A guard in Tunix: `guard_trainer` watches the steps of a `PeftTrainer`, or of a trainer that derives from it."""

import functools
from collections.abc import Callable
from typing import Any

from ..guarding import Watch, guard

NEEDED = ("create_train_step_fn", "jit_train_and_eval_step", "model", "optimizer")
TESTED = "0.1.7"


def guard_trainer(trainer: Any, mesh: Any = None, **settings: Any) -> Watch[..., Any]:
    """Watches the training steps of a Tunix trainer for corruption.

    The trainer compiles its step as before, but donates nothing else, and calls it through the guard. Gradient
    accumulation is part of the optimizer, so each microstep is a step.

    Args:
        trainer: a `tunix.PeftTrainer`, or a trainer that derives from it, before `train` is called.
        mesh: the devices, as for `sdc.guard`.
        settings: other settings of `sdc.guard`.

    Returns:
        The guard; `verdict()` and `report()` say what was found.

    Raises:
        TypeError: the trainer is of another package, or of a version with another interface.
        ValueError: the trainer has compiled its step already, or a setting is wrong.

    Example:
        >>> from sdc.integrations import guard_trainer
        >>> guard_trainer(object())
        Traceback (most recent call last):
        TypeError: object has no create_train_step_fn; expected a trainer of google-tunix (tested with 0.1.7)
    """
    for name in NEEDED:
        if not hasattr(trainer, name):
            raise TypeError(
                f"{type(trainer).__name__} has no {name}; expected a trainer of google-tunix (tested with {TESTED})"
            )
    if getattr(trainer, "_jitted_train_step_fn", None) is not None:
        raise ValueError("the trainer has compiled its step already; guard it before train is called")
    from flax import nnx

    step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
    watch = guard(step, mesh, **settings)
    prepare: Callable[..., tuple[Any, Any]] = trainer.jit_train_and_eval_step

    def prepared(skip_jit: bool = False, cache_nnx_graph: bool = False) -> tuple[Any, Any]:
        evaluate = prepare(skip_jit, cache_nnx_graph)[1]
        return functools.partial(_Step(watch, step), trainer.model, trainer.optimizer), evaluate

    trainer.jit_train_and_eval_step = prepared
    return watch


class _Step:
    """A guarded step that has the attributes of its compiled step, which the trainer reads."""

    def __init__(self, watch: Watch[..., Any], step: Any) -> None:
        self._watch, self._step = watch, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)
