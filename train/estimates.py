"""Programs whose cost is estimated for chips that are not present: steps of the reference workload, or any other
step."""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from sdc import costs
from sdc._lazy import jax
from sdc.costs import Tool, find_target
from sdc.nodes import Load
from sdc.program import as_selector, compiling_for
from sdc.settings import SettingError, Within, check_fields

from . import programs
from .programs import DType, Remat, check, get_config
from .specs import Compare, Exchange


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """Settings of the compiled program: the reference workload's step or a user's own, and its twins."""

    config: str | None = None
    """Model configuration of the reference workload: tiny, bench, smollm2_135m, llama3_8b_16l or llama3_8b."""
    step: str | None = None
    """Your own step: MODULE:FUNCTION, a function that returns (step, *arguments); arguments may be shapes. If the
    function has a parameter `devices`, it receives the devices of the target (of each twin, if there are twins) and can
    make a mesh."""
    dtype: DType | None = None
    """Data type of activations and compute parameters (default: that of the configuration)."""
    remat: Remat | None = None
    """Part of each layer that the backward pass computes again: ffn or layer (default: that of the configuration)."""
    where: str | None = None
    """Selector of sites (default: probes; for checks, all matrix products; for inject, matrix products of the backward
    pass)."""
    sync: Load = "compute"
    """Synchronization between the twins inside a step (only with a model configuration)."""
    compare: Compare = "gated"
    """Exchange tensors only if their digests differ (gated), or always."""
    exchange: Exchange = "probe"
    """Exchange digests at every probe, once per microstep (step) or once per step (call); step and call repeat the
    computation if a digest differs."""
    twins: Annotated[int, Within(2, 1 << 16)] = 2
    """Number of twins."""
    data: int = 1
    """Number of data-parallel ranks (of each twin, if there are twins)."""
    model: int = 1
    """Number of tensor-parallel ranks (of each twin, if there are twins)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject(Compiled):
    """A program to estimate.

    Example:
        >>> from sdc.train import Subject
        >>> Subject(target="v5p:2x2x4", config="llama3_8b_16l", tool="lockstep", model=8).check()
    """

    target: str
    """Target chips; see `sdc.costs.find_target`."""
    tool: Tool = "plain"
    """Tool that transforms the step; see `sdc.costs.with_tool`."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Compiler options by name."""

    @property
    def needed(self) -> int:
        """Number of devices that the program needs."""
        return self.data * self.model * (self.twins if self.tool == "lockstep" else 1)

    def check(self) -> None:
        """Checks every setting that can be checked without a compiler.

        Raises:
            SettingError: a setting is wrong, or the target has too few devices.
            ValueError: the selector cannot be read.
        """
        check_fields(self)
        target = find_target(self.target)
        if (self.config is None) is (self.step is None):
            raise SettingError("step", self.step, "expected either config or step; give exactly one of them")
        if self.where is not None:
            as_selector(self.where)
        if self.config is not None:
            check(get_config(self.config), self.data, self.model)
            if self.needed > target.devices:
                what = f"{self.twins} twin × " if self.tool == "lockstep" else ""
                problem = f"has {target.devices} devices, but {what}{self.data} data × {self.model} model needs"
                problem += f" {self.needed}; choose a larger target or fewer ranks"
                raise SettingError("target", self.target, problem)
        elif not all(str(self.step).partition(":")):
            raise SettingError("step", self.step, "expected MODULE:FUNCTION, as in mymodel:train_step")


def estimate_subject(subject: Subject) -> costs.Estimate:
    """Compiles a program and returns its `sdc.costs.Estimate`.

    Args:
        subject: the program, and the target chips.

    Raises:
        SettingError: a setting is wrong (see `Subject.check`), the step cannot be found, or an option is unknown.
        DoesNotFit: the step needs more memory than the chips have.
        Uncharged: the step has a kernel without a schedule.
    """
    subject.check()
    tool, devices = subject.tool, costs.devices_of(subject.target)
    if subject.config is None:
        step, args = _imported(str(subject.step), devices)
        variant = costs.with_tool(
            tool, step, args, devices, where=subject.where, twins=subject.twins, exchange=subject.exchange
        )
        return costs.estimate(variant.step, *variant.args, target=subject.target, options=subject.options)
    with compiling_for(find_target(subject.target).chip.platform, whole=False, kind=str(devices[0].device_kind)):
        config = get_config(subject.config)
        work = programs.sharded(config.of_type(subject.dtype, subject.remat))
        devices = devices[: subject.needed]
        twins = subject.twins if tool == "lockstep" else None
        placement = programs.place(twins=twins, data=subject.data, model=subject.model, devices=devices)
        if tool == "lockstep":
            program = programs.TwinProgram(
                work, placement, sync=subject.sync, compare=subject.compare, exchange=subject.exchange
            )
            lowered = program.compiled.lower(*program.inputs)
        else:
            state = programs.described(work.abstract(), placement.sharding(placement.spec(work.state_specs)))
            inputs = state, programs.described_batch(work.config, placement)
            variant = costs.with_tool(tool, programs.plain(work, placement), inputs, devices, where=subject.where)
            donated = len(variant.args) - len(inputs)
            lowered = jax.jit(variant.step, donate_argnums=donated).lower(*variant.args)
    return costs.measure(lowered, subject.target, options=subject.options)


def _imported(name: str, devices: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        here = not isinstance(error, ModuleNotFoundError) or error.name == module
        remedy = "give MODULE:FUNCTION with a module on Python's path" if here else f"it needs {error.name}"
        raise SettingError("step", name, f"cannot be imported ({error}): {remedy}") from error
    if not callable(function):
        raise SettingError("step", name, "is not a function; give one that returns (step, *arguments)")
    given = {"devices": devices} if "devices" in inspect.signature(function).parameters else {}
    found = function(**given)
    if not isinstance(found, tuple) or len(found) < 2 or not callable(found[0]):
        raise SettingError("step", name, f"returned {type(found).__name__}; expected a tuple (step, *arguments)")
    return found[0], found[1:]
