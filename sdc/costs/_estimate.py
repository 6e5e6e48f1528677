"""Estimates of the cost of a step on other chips, with any of the tools, based on the program that the compiler of
these chips generates."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import sdc
from sdc.checksums import Settings, screened
from sdc.settings import SettingError
from sdc.twins import Exchange

from ..faults import BitFlip
from ..program import Where, compiling_for, direction, holds_objects, is_array, primitive, products, traced
from ..schema import Estimate
from .cycles import cycles_of, estimated, replaced_products
from .hlo import Instruction, collectives_of, is_kernel, parse_module, traffic_of
from .targets import Tool, devices_of, find_target, forget_schedules, refuse_unknown, schedules

MOST = 12  # number of operations that are listed
_MEMORY = (
    re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm"),
    re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)"),
)


class DoesNotFit(ValueError):
    """A program needs more memory than the chips have.

    Attributes:
        needed: bytes that the program needs on each device.
        there: bytes of memory that each device has.
    """

    def __init__(self, target: str, needed: float, there: float) -> None:
        self.needed, self.there = needed, there
        much, has, over = (size / 2**30 for size in (needed, there, needed - there))
        super().__init__(
            f"the step needs {much:.1f} GiB on each device of {target}, which has {has:.1f} GiB ({over:.1f} GiB too "
            f"little); shard the state over at least {-(-needed // there):.0f} times as many devices"
        )


def estimate(
    step: Callable[..., Any],
    *args: Any,
    target: str,
    donate: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Estimate:
    """Compiles a step for other chips and estimates its cost on these chips.

    Call `prepare_compilers` first, in a process that starts no device.

    Args:
        step: any function that JAX can trace, transformed or not. The step's arguments may include Flax NNX objects.
        *args: arguments of the step: arrays, or their shapes (`jax.ShapeDtypeStruct`). A `NamedSharding` over the
            target's devices (`devices_of`) is kept; if no argument has such a sharding, the step runs on the first
            device.
        target: name of the target (see `find_target`).
        donate: positions of arguments whose memory the step may reuse for its outputs.
        options: compiler options by name.
        **kwargs: keyword arguments of the step.

    Raises:
        SettingError: the target or an option is unknown, the compiler is not installed, or arguments are on a mesh of
            other devices.
        DoesNotFit: the step needs more memory than the devices have.
        Uncharged: the cost of a kernel is unknown.

    Example:
        >>> import importlib.util, jax, jax.numpy as jnp
        >>> from sdc.costs import estimate, prepare_compilers
        >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
        >>> if importlib.util.find_spec("libtpu"):  # the extra `targets`
        ...     prepare_compilers()
        ...     assert estimate(lambda x: x @ x, x, target="v5e:1x1").cycles > 0
    """
    whole = _mesh_of((args, kwargs)) is None
    platform, devices = find_target(target).chip.platform, devices_of(target)
    with compiling_for(platform, whole=whole, kind=str(devices[0].device_kind)), _on_mesh((args, kwargs)):
        if not holds_objects((args, kwargs)) and all(map(is_array, jax.tree.leaves((args, kwargs)))):
            given, named = _placed((args, kwargs), devices)
            lowered = jax.jit(step, donate_argnums=tuple(donate)).lower(*given, **named)
        else:
            with traced(step, args, kwargs) as program:
                given = _placed(program.inputs, devices)
                donated = _donated(args, kwargs, donate, len(program.inputs))
                lowered = jax.jit(jaxpr_as_fun(program.closed), donate_argnums=donated).lower(*given)
    return measure(lowered, target, options=options)


def measure(
    lowered: jax.stages.Lowered,
    target: str,
    *,
    options: Mapping[str, Any] | None = None,
) -> Estimate:
    """Estimates the cost of a lowered program for devices of the target.

    Args:
        lowered: the result of `jax.jit(...).lower(...)`.
        target: name of the target (see `find_target`).
        options: compiler options by name.

    Raises:
        SettingError: an option is unknown.
        DoesNotFit: see `estimate`.
        Uncharged: see `estimate`.
    """
    about = find_target(target)
    chip = about.chip
    forget_schedules()
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=dict(options or {}))
    except Exception as error:  # of a type that is jaxlib's own, with messages that differ by platform
        refuse_unknown(error, about.name)
        if found := next(filter(None, (form.search(str(error)) for form in _MEMORY)), None):
            needed, there = (float(found[at]) * 2 ** (10 * (1 + "KMGT".index(found[at + 1]))) for at in (1, 3))
            raise DoesNotFit(about.name, needed, there) from error
        raise
    compile_seconds = time.perf_counter() - started
    module, stats = parse_module(compiled.as_text() or ""), compiled.memory_analysis()
    mesh, devices = _mesh(compiled)
    assert stats is not None
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    whole = stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes
    memory = max(getattr(stats, "peak_memory_in_bytes", 0), 0) or whole
    if memory > chip.memory:
        raise DoesNotFit(about.name, memory, chip.memory)

    def takes(one: Instruction) -> float:
        if chip.platform == "tpu":
            return estimated(one) / chip.clock
        return module.moved(one) / chip.bandwidth if is_kernel(one) else 0.0

    collectives = collectives_of(module, chip, devices, mesh, takes)
    waiting = sum(each.seconds for each in collectives)
    cycles: int | None = None
    kernels: int | None = None
    charged = alone = moved = 0
    if chip.platform == "tpu":
        cost = cycles_of(module, chip, schedules(), replaced_products(module, about.name))
        cycles, charged, alone = (
            cost.operations + cost.kernels + round(waiting * chip.clock),
            cost.kernels,
            cost.scheduled,
        )
        seconds, parts, unit = cycles / chip.clock, cost.parts, float(cycles)
    else:
        traffic = traffic_of(module, chip)
        kernels, moved, seconds, parts = traffic.kernels, traffic.moved, traffic.seconds + waiting, traffic.parts
        unit = seconds * chip.bandwidth
    return Estimate(
        target=about.name, devices=len(devices), cycles=cycles, kernel_cycles=charged, kernel_instructions=alone,
        kernels=kernels, moved=moved, seconds=seconds,
        parts={name: part / unit for name, part in parts.most_common(MOST)},
        collectives=collectives, arguments=stats.argument_size_in_bytes, outputs=outputs,
        temporaries=stats.temp_size_in_bytes, memory=memory, capacity=chip.memory,
        code=stats.generated_code_size_in_bytes, compile_seconds=compile_seconds,
    )  # fmt: skip


def _placed(tree: Any, devices: Sequence[Any]) -> Any:
    """Places shapes on the target's devices; arrays without a sharding are replicated over the mesh or, without a mesh,
    placed on one device."""
    mesh = _mesh_of(tree)
    if mesh is not None and not set(mesh.devices.flat) <= set(devices):
        other = mesh.devices.flat[0]
        raise SettingError(
            "step", str(other), "its arguments are on a mesh of devices other than the target's; give shapes with "
            "shardings over sdc.costs.devices_of(target), which the function that builds the step receives as devices"
        )  # fmt: skip
    alone: Any = SingleDeviceSharding(devices[0]) if mesh is None else NamedSharding(mesh, P())

    def placed(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding_of(leaf) or alone)

    return jax.tree.map(placed, tree)


def _donated(args: Sequence[Any], kwargs: Mapping[str, Any], donate: Sequence[int], inputs: int) -> list[int]:
    """Returns the positions of the donated arguments' arrays among all input arrays."""
    counts = [sum(is_array(leaf) for leaf in jax.tree.leaves(one)) for one in (*args, kwargs)]
    if not donate:
        return []
    if sum(counts) != inputs or not all(0 <= number < len(args) for number in donate):
        raise SettingError(
            "donate", list(donate), f"expected positions below {len(args)}, and arguments that contain only arrays"
        )
    return [sum(counts[:number]) + leaf for number in donate for leaf in range(counts[number])]


def _mesh(compiled: jax.stages.Compiled) -> tuple[Mapping[str, int], Sequence[Any]]:
    """Returns the mesh of a program's inputs, and the devices of the program in the order of the mesh."""
    shardings = [*jax.tree.leaves(compiled.input_shardings), *jax.tree.leaves(compiled.output_shardings)]
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            return dict(sharding.mesh.shape), list(sharding.mesh.devices.flat)
    devices = next((list(sharding.device_set) for sharding in shardings), [])
    return {}, sorted(devices, key=lambda device: int(device.id))


def _sharding_of(one: Any) -> NamedSharding | None:
    """Returns the sharding of an array over a mesh, or None if the array is not on a mesh."""
    found = getattr(one, "sharding", None)
    return found if isinstance(found, NamedSharding) else None


def _mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh of the first array that is on a mesh."""
    found = (_sharding_of(leaf) for leaf in jax.tree.leaves(tree))
    return next((each.mesh for each in found if each is not None and isinstance(each.mesh, Mesh)), None)


@contextlib.contextmanager
def _on_mesh(tree: Any) -> Iterator[None]:
    """Sets the mesh of the arguments during tracing if that mesh has explicit axes, like programs that set their mesh
    once."""
    mesh = _mesh_of(tree)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


TWIN = "twin"


class ToolVariant(NamedTuple):
    """A transformed step, with its arguments."""

    step: Callable[..., Any]
    args: Sequence[Any]


def with_tool(
    tool: Tool,
    step: Callable[..., Any],
    args: Sequence[Any],
    devices: Sequence[Any],
    *,
    where: Where | None = None,
    twins: int = 2,
    exchange: Exchange = "probe",
) -> ToolVariant:
    """Transforms a step with one of the tools, for `estimate`.

    Args:
        tool: name of the tool: `plain` for no tool; `lockstep` for twins, each on its own devices; `abft_again` for the
            program that runs at every step if suspicious steps are examined again; `inject` for a fault that never
            strikes.
        step: the step.
        args: arguments of the step, or their shapes.
        devices: devices of the target.
        where: selects sites (default: probes; for checks, all matrix products; for `inject`, matrix products of the
            backward pass).
        twins: number of twins for `lockstep`.
        exchange: when twins exchange digests (see `sdc.lockstep`).

    Raises:
        ValueError: no site is selected.
        SettingError: there are too few devices for the twins, or the step uses a mesh other than that of its arguments.
    """
    if tool == "fingerprint":
        return ToolVariant(sdc.fingerprint(step) if where is None else sdc.fingerprint(step, where), args)
    if tool == "abft":
        return ToolVariant(sdc.abft(step) if where is None else sdc.abft(step, where=where), args)
    if tool == "abft_again":
        return ToolVariant(screened(step, products if where is None else where, Settings()), args)
    if tool == "witness":
        return ToolVariant(sdc.witness(step) if where is None else sdc.witness(step, where), args)
    if tool == "inject":
        fault = sdc.Fault(BitFlip(), 1e-9, primitive("dot_general") & direction("bwd") if where is None else where)
        injected = sdc.inject(step, [fault])
        moment = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), np.int32)
        return ToolVariant(lambda key, number, *args: injected(sdc.Moment(key, number), *args), (*moment, *args))
    if tool == "plain":
        return ToolVariant(step, args)
    selected: dict[str, Any] = {"exchange": exchange} | ({} if where is None else {"where": where})
    with _on_mesh(args), traced(step, args, {}) as program:
        flat, inputs = jaxpr_as_fun(program.closed), program.inputs
    own = _mesh_of(inputs)
    shape: Mapping[str, int] = {} if own is None else dict(own.shape)
    types = () if own is None else own.axis_types
    each = int(np.prod([*shape.values()], dtype=int))
    if twins * each > len(devices):
        needed = f"need {twins * each} devices ({each} each), but the target has {len(devices)}; give a larger target"
        raise SettingError("twins", twins, needed)
    grid = np.asarray(devices[: twins * each], dtype=object).reshape(twins, *shape.values())
    mesh = Mesh(grid, (TWIN, *shape), axis_types=(AxisType.Auto, *types))

    def one(*leaves: Any) -> Any:
        local = [leaf[0] for leaf in leaves]
        run, given = flat, local
        if not holds_objects(args):
            # The step is traced again, on the mesh with an additional axis: the program above uses the arguments' mesh.
            whole, structure = jax.tree.flatten(tuple(args))
            new = iter(local)
            run = step
            given = jax.tree.unflatten(structure, [next(new) if is_array(leaf) else leaf for leaf in whole])
        found = sdc.lockstep(run, TWIN, **selected)(*given)
        return [leaf[None] for leaf in jax.tree.leaves(found) if is_array(leaf)]

    stacked = []
    for given in inputs:
        sharding = _sharding_of(given)
        placed = NamedSharding(mesh, P(TWIN, *(() if sharding is None else sharding.spec)))
        stacked.append(jax.ShapeDtypeStruct((twins, *given.shape), given.dtype, sharding=placed))
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P(TWIN), out_specs=P(TWIN), axis_names={TWIN}, check_vma=False)
    return ToolVariant(mapped, stacked)
