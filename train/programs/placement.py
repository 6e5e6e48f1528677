"""The layout of twins and ranks: each on its own device of a mesh, or all twins of a rank on one device under `vmap`.

A per-device function `fn(stacked, shared)` performs the computation of one twin on one rank. `Placement.map` turns `fn`
into a function of global arrays. Arrays that are separate for each twin (`stacked`, and all outputs) have a leading
twin axis; shared arrays (the batch) do not. Without twins, there is no twin axis.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from sdc.costs import Value

from .model import DATA, MODEL

TWIN = "twin"
Kind: TypeAlias = Literal["mesh", "vmap"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mapping of twins and ranks to devices."""

    mesh: Mesh  # axes `data` and `model`, preceded by `twin` if twins have their own devices
    twins: int | None  # number of twins; None without twins
    # compiler options by name
    options: Mapping[str, Value] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def stacked(self) -> tuple[str | None, ...]:
        """First entries of the partition of a per-twin array."""
        if self.twins is None:
            return ()
        return (TWIN,) if TWIN in self.mesh.axis_names else (None,)

    @property
    def ranks(self) -> P:
        return P(*self.stacked, DATA, MODEL)

    def spec(self, tree: Any) -> Any:
        return jax.tree.map(lambda spec: P(*self.stacked, *spec), tree)

    def sharding(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def stack(self, tree: Any) -> Any:
        """Replicates a tree of global arrays over the twins."""
        twins = self.twins
        if twins is None:
            return tree
        return jax.tree.map(lambda x: jax.numpy.broadcast_to(x[None], (twins, *x.shape)), tree)

    def map(self, fn: Callable[..., Any], *, stacked: Any, shared: Any, out: Any) -> Callable[[Any, Any], Any]:
        """Converts a per-device `fn(stacked, shared)` to a function of global arrays. Partitions refer to one twin;
        `RANKS` takes the place of a partition for a report with one row per rank."""

        def expand(outputs: Any, twin_axes: int) -> Any:
            """Adds the axes `data` and `model` to reports, after the twin axis."""
            place = (twin_axes, twin_axes + 1)
            return jax.tree.map(
                lambda spec, tree: (
                    jax.tree.map(lambda x: jax.lax.expand_dims(x, place), tree) if spec is RANKS else tree
                ),
                out,
                outputs,
                is_leaf=lambda spec: spec is RANKS,
            )

        def one(stacked: Any, shared: Any) -> Any:
            return expand(fn(stacked, shared), 0)

        def on_mesh(stacked: Any, shared: Any) -> Any:
            outputs = one(jax.tree.map(lambda x: x[0], stacked), shared)
            return jax.tree.map(lambda x: x[None], outputs)

        def on_one_device(stacked: Any, shared: Any) -> Any:
            return expand(jax.vmap(fn, (0, None), axis_name=TWIN, axis_size=self.twins)(stacked, shared), 1)

        body = one if self.twins is None else on_mesh if self.stacked == (TWIN,) else on_one_device
        out_specs = jax.tree.map(
            lambda spec: self.ranks if spec is RANKS else P(*self.stacked, *spec),
            out,
            is_leaf=lambda spec: spec is RANKS or isinstance(spec, P),
        )
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=(self.spec(stacked), shared), out_specs=out_specs, check_vma=False
        )

    def jit(self, fn: Callable[..., Any], *, donate: bool) -> jax.stages.Wrapped:
        """Jits a function of global arrays with the compiler options; if `donate` is true, the first argument is
        donated."""
        return jax.jit(fn, donate_argnums=0 if donate else (), compiler_options=dict(self.options) or None)


RANKS = object()  # used instead of a partition for a report with one row per rank


def place(
    *,
    twins: int | None,
    data: int,
    model: int,
    kind: Kind = "mesh",
    devices: Sequence[jax.Device] | None = None,
    options: Mapping[str, Value] | None = None,
) -> Placement:
    """Lays out twins and ranks over devices, process by process, so that the ranks of a twin are adjacent."""
    devices = jax.devices() if devices is None else devices
    axes = {DATA: data, MODEL: model}
    if twins is not None and kind == "mesh":
        axes = {TWIN: twins, **axes}
    needed = math.prod(axes.values())
    if len(devices) != needed:
        product = " × ".join(f"{size} {name}" for name, size in axes.items())
        raise ValueError(
            f"{len(devices)} devices were given, but {product} needs {needed}; "
            "change --twins, --data, --model, or --devices (simulated CPU devices)"
        )
    grid = np.asarray(devices).reshape(tuple(axes.values()))
    mesh = Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return Placement(mesh, twins, dict(options or {}))


def fetch(tree: Any) -> Any:
    """Returns global arrays as NumPy arrays in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
