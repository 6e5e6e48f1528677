"""Guards in the training loops of other packages: Tunix and MaxText."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..guarding import Watch, guard

NEEDED = ("create_train_step_fn", "jit_train_and_eval_step", "clear_jit_cache", "model", "optimizer")
CACHE = "_jitted_train_step_fn"  # None after `clear_jit_cache`, which a new loss function or a new input calls
TESTED = "0.1.7"
MAXTEXT, PREPARES = "0.2.5", "jit_train_and_eval_step"  # tested version, and its function that compiles a step


def guard_trainer(trainer: Any, mesh: Any = None, **settings: Any) -> Watch[..., Any]:
    """Watches the training steps of a Tunix trainer for corruption.

    The trainer's own step is compiled as before, and called through the guard. Gradient accumulation is part of the
    optimizer, so each microstep is a step.

    Args:
        trainer: a `tunix.PeftTrainer`, or a trainer that derives from it, before `train` is called.
        mesh: the devices, as for `sdc.guard`.
        settings: other settings of `sdc.guard`.

    Returns:
        The guard; `verdict()` and `report()` say what was found. It watches one step: after a new loss function or
        input function, guard the trainer again.

    Raises:
        TypeError: the trainer is of another package, or of a version with another interface.
        ValueError: the trainer is guarded already, has compiled its step already, or a setting is wrong.

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
    prepare = trainer.jit_train_and_eval_step
    if isinstance(prepare, _Prepared):
        if not prepare.is_outdated():
            raise ValueError("the trainer is guarded already; use the guard that guard_trainer returned")
        prepare = prepare.prepare
    elif getattr(trainer, CACHE, None) is not None:
        raise ValueError("the trainer has compiled its step already; guard it before train is called")
    from flax import nnx

    step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
    watch = guard(step, mesh, **settings)
    trainer.jit_train_and_eval_step = _Prepared(trainer, prepare, _Step(watch, step))
    return watch


@contextlib.contextmanager
def guard_maxtext(train: Any, **settings: Any) -> Iterator[list[Watch[..., Any]]]:
    """Watches the training steps of MaxText for corruption, if it trains inside the `with` block.

    MaxText's own step is compiled as before, and called through the guard, on MaxText's mesh.

    Args:
        train: the module `maxtext.trainers.pre_train.train`.
        settings: settings of `sdc.guard` other than the mesh. `axis` is by default `data` or `fsdp`, the one with more
            devices.

    Yields:
        A list to which each step that MaxText compiles adds its guard: one, or several with dropless experts or after
        an elastic restart.

    Raises:
        TypeError: the argument is another module, or of a version with another interface, or a setting is unknown.
        ValueError: a setting is wrong.

    Example:
        >>> from sdc.integrations import guard_maxtext
        >>> with guard_maxtext(object()) as watches:
        ...     pass
        Traceback (most recent call last):
        TypeError: object has no train_utils.jit_train_and_eval_step; expected maxtext.trainers.pre_train.train of 0.2.5
    """
    utils = getattr(train, "train_utils", None)
    prepare = getattr(utils, PREPARES, None)
    if prepare is None:
        raise TypeError(
            f"{getattr(train, '__name__', type(train).__name__)} has no train_utils.{PREPARES}; expected "
            f"maxtext.trainers.pre_train.train of {MAXTEXT}"
        )
    guard(lambda: None, **settings)  # raises an error for wrong settings before MaxText starts
    watches: list[Watch[..., Any]] = []

    @functools.wraps(prepare)
    def prepared(config: Any, model: Any, mesh: Any, *rest: Any, **others: Any) -> tuple[Any, Any]:
        step, evaluate = prepare(config, model, mesh, *rest, **others)
        axis = max(("data", "fsdp"), key=lambda name: mesh.shape.get(name, 0))
        watches.append(guard(step, mesh, **{"axis": axis, **settings}))
        return _Step(watches[-1], step), evaluate

    setattr(utils, PREPARES, prepared)
    try:
        yield watches
    finally:
        setattr(utils, PREPARES, prepare)


class _Prepared:
    """`jit_train_and_eval_step` of a trainer, with a guarded step."""

    def __init__(self, trainer: Any, prepare: Callable[..., tuple[Any, Any]], step: "_Step") -> None:
        self._trainer, self.prepare, self._step = trainer, prepare, step
        self._used = False

    def is_outdated(self) -> bool:
        """Returns whether the trainer was given another step since it trained."""
        return self._used and getattr(self._trainer, CACHE, None) is None

    def __call__(self, skip_jit: bool = False, cache_nnx_graph: bool = False) -> tuple[Any, Any]:
        if skip_jit:
            raise ValueError("skip_jit: a guarded step is compiled; leave the argument out")
        if self.is_outdated():
            raise ValueError("the trainer's step has changed since it was guarded; call guard_trainer again")
        evaluate = self.prepare(skip_jit, cache_nnx_graph)[1]
        self._used = True
        return functools.partial(self._step, self._trainer.model, self._trainer.optimizer), evaluate


class _Step:
    """A guarded step that has the attributes of its compiled step, which training loops read."""

    def __init__(self, watch: Watch[..., Any], step: Any) -> None:
        self._watch, self._step = watch, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)
