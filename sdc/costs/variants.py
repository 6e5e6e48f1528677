"""A step with each of the tools, for anybody's step: what an estimate compares with the plain one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import sdc
from sdc.settings import SettingError
from sdc.twins import Exchange

from ..faults import BitFlip
from ..program import Where, direction, holds_objects, is_array, primitive, traced
from ._estimate import mesh_of, on_mesh, sharding_of
from .targets import Tool

TOOLS: tuple[Tool, ...] = get_args(Tool)
TWIN = "twin"


class ToolVariant(NamedTuple):
    """A transformed step, and what it is called with."""

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
    """A step with one of the tools, as `estimate` takes it.

    Args:
        tool: `plain` for none; `lockstep` for twins, each on devices of its own; `inject` for a fault that never hits.
        step: the step.
        args: its arguments, or their shapes.
        devices: the target's.
        where: selects sites; by default probes, of `abft` all matrix products, of `inject` those of the
            backward pass.
        twins: how many, of `lockstep`.
        exchange: when they exchange digests, see `sdc.lockstep`.

    Raises:
        ValueError: no site is selected.
        SettingError: there are too few devices for the twins, or the step is on a mesh that it has from elsewhere than
            its arguments.
    """
    if tool == "fingerprint":
        return ToolVariant(sdc.fingerprint(step) if where is None else sdc.fingerprint(step, where), args)
    if tool == "abft":
        return ToolVariant(sdc.abft(step) if where is None else sdc.abft(step, where=where), args)
    if tool == "inject":
        fault = sdc.Fault(BitFlip(), 1e-9, primitive("dot_general") & direction("bwd") if where is None else where)
        injected = sdc.inject(step, [fault])
        moment = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), np.int32)
        return ToolVariant(lambda key, number, *args: injected(sdc.Moment(key, number), *args), (*moment, *args))
    if tool == "plain":
        return ToolVariant(step, args)
    selected: dict[str, Any] = {"exchange": exchange} | ({} if where is None else {"where": where})
    return _twins(step, args, devices, selected, twins)


def _twins(
    step: Callable[..., Any], args: Sequence[Any], devices: Sequence[Any], selected: Mapping[str, Any], twins: int
) -> ToolVariant:
    with on_mesh(args), traced(step, args, {}) as program:
        flat, inputs = jaxpr_as_fun(program.closed), program.inputs
    own = mesh_of(inputs)
    shape: Mapping[str, int] = {} if own is None else dict(own.shape)
    types = () if own is None else own.axis_types
    each = int(np.prod([*shape.values()], dtype=int))
    if twins * each > len(devices):
        raise SettingError(
            "twins",
            twins,
            f"of {each} devices need {twins * each}, and the target has {len(devices)}; give a larger one",
        )
    grid = np.asarray(devices[: twins * each], dtype=object).reshape(twins, *shape.values())
    mesh = Mesh(grid, (TWIN, *shape), axis_types=(AxisType.Auto, *types))

    def one(*leaves: Any) -> Any:
        local = [leaf[0] for leaf in leaves]
        # Traced on the mesh with one axis more: what is known from above belongs to the mesh of the arguments.
        run, given = (flat, local) if holds_objects(args) else (step, _refilled(args, local))
        found = sdc.lockstep(run, TWIN, **selected)(*given)
        return [leaf[None] for leaf in jax.tree.leaves(found) if is_array(leaf)]

    stacked = []
    for given in inputs:
        sharding = sharding_of(given)
        placed = NamedSharding(mesh, P(TWIN, *(() if sharding is None else sharding.spec)))
        stacked.append(jax.ShapeDtypeStruct((twins, *given.shape), given.dtype, sharding=placed))
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P(TWIN), out_specs=P(TWIN), axis_names={TWIN}, check_vma=False)
    return ToolVariant(mapped, stacked)


def _refilled(args: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """Arguments with other arrays in the place of their own."""
    leaves, structure = jax.tree.flatten(tuple(args))
    new = iter(arrays)
    return jax.tree.unflatten(structure, [next(new) if is_array(leaf) else leaf for leaf in leaves])
