"""Evidence from the step itself, run again with comparisons or checksums in it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import program
from ..checksums import abft, coverage
from .evidence import Call, Detection, Layer
from .recomputation import WitnessCalibration, calibrate, comparable, first_mismatch, witnessed_share


class Recomputation(Layer):
    """Runs the forward pass and its recomputation, and compares the two (`witness`)."""

    name = "witness"
    sees = "a product, kernel or reduction that was wrong in one of two computations"
    blind = "operations that run once, values that are saved for the backward pass, and faults that repeat"
    share = 0.5

    def __init__(self, where: program.Where = comparable, *, last: bool | None = None) -> None:
        """Creates the layer; see `witness`. By default, accelerators compare only the last operations of a chain."""
        super().__init__()
        self.where, self.last = where, last
        self.calibration: WitnessCalibration | None = None

    def prepare(self, call: Call) -> None:
        last = program.compiled_for().platform != "cpu" if self.last is None else self.last
        self.calibration = calibrate(lambda *arrays: call.run(arrays), [call.arrays], self.where, last=last, alone=True)
        if not self.calibration.names:
            self.why_not = "the step computes nothing twice that could be compared; put jax.checkpoint around layers"
        witnessed = jax.eval_shape(self.calibration.run, *call.arrays)[1]
        excluded = f", {len(self.calibration.differing)} excluded by calibration" if self.calibration.differing else ""
        self.about = (
            f"{len(self.calibration.names)} operations, {witnessed_share(witnessed):.0%} of the forward pass{excluded}"
        )

    def before(self, call: Call) -> Any:
        assert self.calibration is not None
        return self.calibration.run(*call.arrays)[1]

    def judge(self, found: Any, step: int) -> list[Detection]:
        first = first_mismatch(found)
        if first is None:
            return []
        devices = tuple(" ".join(f"{axis}={index}" for axis, index in one.items()) for one in first.devices if one)
        place = f", iteration {', '.join(map(str, first.iteration))}" if first.iteration else ""
        what = f"{first.site.name}{place} ({first.site.source}) and its recomputation have other bits"
        return [Detection(self.name, step, what, devices)]


class Checksums(Layer):
    """Runs the step with checksums at its matrix products (`sdc.abft`)."""

    name = "abft"
    sees = "wrong matrix products, forward and backward, whether or not the fault repeats"
    blind = "other operations, and errors near the roundoff of float32"
    share = 0.2

    def prepare(self, call: Call) -> None:
        try:
            checked = abft(lambda *arrays: call.run(arrays))
            self.run = jax.jit(lambda *arrays: jax.tree.map(jnp.asarray, checked(*arrays)[1]))
            flags = self.run(*call.arrays)
        except ValueError as error:
            self.why_not = str(error)
            return
        self.about = f"{len(flags)} products, {coverage(flags):.0%} of the products' operations"

    def before(self, call: Call) -> Any:
        return self.run(*call.arrays)

    def judge(self, found: Any, step: int) -> list[Detection]:
        wrong = [site for site, flag in zip(found.sites, found.values(), strict=True) if np.asarray(flag.flagged).any()]
        if not wrong:
            return []
        rows = sum(int(np.asarray(flag.flagged).sum()) for flag in found.values())
        more = f" and {len(wrong) - 1} more products" if len(wrong) > 1 else ""
        what = f"{rows} rows of {wrong[0].name} ({wrong[0].source}){more} disagree with their checksums"
        return [Detection(self.name, step, what, _ranks(wrong[0], np.asarray(found[wrong[0].name].flagged)))]


def _ranks(site: program.Site, flagged: Any) -> tuple[str, ...]:
    """Returns the coordinates on the mesh of the devices that flagged rows."""
    axes = [axis for axis, name in enumerate(site.dims) if name != "scan"]
    if not axes:
        return ()
    across = tuple(axis for axis in range(flagged.ndim) if axis not in axes)
    places = np.argwhere(flagged.any(across))
    return tuple(" ".join(f"{site.dims[a]}={i}" for a, i in zip(axes, place, strict=True)) for place in places)
