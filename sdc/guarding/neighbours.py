"""Evidence from other devices: a step runs with its devices rotated, so that each computes its neighbour's part."""

import contextlib
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from sdc.bits import has_bits

from ..program import traced
from .evidence import EARLY, Call, Detection, Layer, device_names, settled
from .state import device_digests


class Ring(Layer):
    """Runs the step twice, the second time on a mesh whose devices are rotated along an axis, and compares results.

    Results that depend on the order of a reduction over devices may have other bits on healthy devices; calibration
    excludes them.
    """

    name = "ring"
    sees = "a device that computes other bits than its neighbour, whether or not its fault repeats"
    blind = "faults that all devices have alike, and results that calibration excludes"
    share = 0.2
    computations = 2

    def __init__(self, mesh: Mesh | None, axis: str) -> None:
        super().__init__()
        self.mesh, self.axis = mesh, axis
        self.compared: list[bool] = []
        self.sizes: list[int] = []  # elements of each result
        self.checks = 0

    def prepare(self, call: Call) -> None:
        self.why_not = self._problem(call)
        if self.why_not:
            return
        assert self.mesh is not None
        place = self.mesh.axis_names.index(self.axis)
        self.rotated = Mesh(np.roll(self.mesh.devices, 1, place), self.mesh.axis_names, axis_types=self.mesh.axis_types)
        try:
            self.run = self._compiled(call, None)
            self.run_rotated = self._compiled(call, (self.mesh, self.rotated))
            self.sizes = [out.size for out in jax.eval_shape(self.run, *call.arrays)]
            first, again = (self._digests(call)[0] for _ in range(2))
            rotated = self._digests(call)[1]
        except (ValueError, TypeError, jax.errors.JAXTypeError) as error:
            self.why_not = f"the step does not run on rotated devices: {str(error).splitlines()[0]}"
            return
        if not all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)):
            self.why_not = "the step computes other bits from the same inputs; see sdc doctor"
            return
        self._compare([np.array_equal(a, b) for a, b in zip(first, rotated, strict=True)])

    def _compare(self, compared: list[bool]) -> None:
        """Compares these results from now on."""
        self.compared = compared
        alike = sum(size for size, known in zip(self.sizes, compared, strict=True) if known)
        self.coverage, self.about = alike / max(sum(self.sizes), 1), f"{sum(compared)} of {len(compared)} results"
        if not any(compared):
            self.why_not = "every result depends on the order of a reduction over devices"

    def _problem(self, call: Call) -> str:
        if self.mesh is None:
            return "there is no mesh; pass mesh= and axis= to sdc.guard"
        if self.axis not in self.mesh.shape:
            return f"the mesh has no axis {self.axis!r}, but {', '.join(self.mesh.axis_names)}; pass axis= to sdc.guard"
        if self.mesh.shape[self.axis] < 2:
            return f"the mesh has one device along {self.axis!r}, which has no neighbour"
        if jax.process_count() > 1:
            return "devices of several processes cannot be rotated"
        if not any(isinstance(getattr(array, "sharding", None), NamedSharding) for array in call.arrays):
            return "the arguments are not on the mesh; place them with jax.device_put(x, NamedSharding(mesh, ...))"
        for array in call.arrays:
            alone = not isinstance(array, jax.Array) or len(array.sharding.device_set) == 1
            if not alone and not isinstance(array.sharding, NamedSharding):
                return f"an argument of shape {array.shape} has a sharding without a mesh"
        return ""

    def _compiled(self, call: Call, moved: tuple[Mesh, Mesh] | None) -> Any:
        given = call.run  # without the arrays of the call
        with traced(lambda *arrays: given(arrays), call.arrays, {}, moved=moved) as program:
            run = jaxpr_as_fun(program.closed)
        return jax.jit(lambda *arrays: [out for out in run(*arrays) if has_bits(out.dtype)])

    def _digests(self, call: Call) -> tuple[list[Any], list[Any]]:
        """Returns the digests of the results, by device coordinates: computed in place, and on rotated devices."""
        first = device_digests(settled(self.run(*call.arrays)))
        arrays = call.arrays
        here = contextlib.nullcontext() if jax.sharding.get_mesh().empty else jax.set_mesh(self.rotated)
        with here:
            moved = settled([jax.device_put(array, self._rotated(array)) for array in arrays])
            return first, device_digests(settled(self.run_rotated(*moved)))

    def _rotated(self, array: Any) -> NamedSharding:
        spec = array.sharding.spec if isinstance(getattr(array, "sharding", None), NamedSharding) else ()
        return NamedSharding(self.rotated, jax.sharding.PartitionSpec(*spec))

    def before(self, call: Call) -> Any:
        return self._digests(call)

    def judge(self, found: Any, step: int) -> list[Detection]:
        assert self.mesh is not None
        self.checks += 1
        differing = [
            np.argwhere((np.asarray(first) != np.asarray(rotated)).any(-1))
            for first, rotated in zip(*found, strict=True)
        ]
        if self.checks <= EARLY:
            self._compare([known and not len(places) for known, places in zip(self.compared, differing, strict=True)])
        wrong = [places for known, places in zip(self.compared, differing, strict=True) if known and len(places)]
        if not wrong:
            return []
        places = np.concatenate(wrong)
        touched = {*device_names(self.mesh, places), *device_names(self.rotated, places)}
        # A reduction carries an error to all devices.
        devices = tuple(sorted(touched)) if len(touched) < self.mesh.size else ()
        return [Detection(self.name, step, f"{len(wrong)} results differ between neighbours", devices)]
