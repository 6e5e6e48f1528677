"""Evidence from the step itself, run again with comparisons or checksums in it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .. import program
from ..checksums import abft, coverage
from ..multihost import first_line
from ..twins import first_difference
from .evidence import EARLY, Call, Detection, Layer, device_names, gathered, settled
from .recomputation import WitnessCalibration, Witnessed, calibrated, comparable, witnessed_share
from .spikes import RANKS, RankValues

LEAST_MARGIN = 0.01  # residuals, as shares of their bounds, below which their size means nothing
LEAST_SPREAD = 0.1  # of the logarithms of residuals


class Recomputation(Layer):
    """Runs the forward pass and its recomputation, and compares the two (`witness`)."""

    name = "witness"
    sees = "a product, kernel or reduction that was wrong in one of four computations"
    blind = "operations that run once, values that are saved for the backward pass, and faults that recur"
    share = 0.5
    computations = 2

    def __init__(
        self, where: program.Where = comparable, *, last: bool | None = None, mesh: Mesh | None = None
    ) -> None:
        """Creates the layer; see `witness`. By default, accelerators compare only the last operations of a chain. With
        the mesh on which XLA shards the step, findings name devices."""
        super().__init__()
        self.mesh = mesh
        self.undivided = frozenset[str]()  # operations of which whole results are compared
        self.where, self.last = where, last
        self.covered = 0.0  # share of the forward pass, if nothing recurs
        self.checks, self.recurring = 0, frozenset[str]()  # what differs in the same way in two runs
        self.calibration: WitnessCalibration | None = None

    def prepare(self, call: Call) -> None:
        last = program.compiled_for().platform != "cpu" if self.last is None else self.last
        run = call.run  # without the arrays of the call
        runs = [(call.arrays, call.arrays)]
        devices = 1 if self.mesh is None else self.mesh.size
        self.calibration = calibrated(
            lambda *arrays: run(arrays), runs, self.where, last=last, alone=True, devices=devices
        )
        self.undivided = self.calibration.whole
        if not self.calibration.names:
            self.why_not = "the step computes nothing twice that could be compared; put jax.checkpoint around layers"
            if program.compiled_for().platform == "cpu":
                self.why_not += ", and these into a lax.scan: on CPUs, XLA merges the two computations otherwise"
        witnessed = jax.eval_shape(self.calibration.run, *call.arrays)[1]
        self.coverage = self.covered = witnessed_share(witnessed)
        excluded = f", {len(self.calibration.differing)} excluded by calibration" if self.calibration.differing else ""
        self.about = f"{len(self.calibration.names)} operations, {self.coverage:.0%} of the forward pass{excluded}"

    def before(self, call: Call) -> Any:
        """Runs twice, for a difference that recurs need not be due to the hardware."""
        assert self.calibration is not None
        return [settled(gathered(self.calibration.run(*call.arrays)[1])) for _ in range(2)]

    def judge(self, found: Any, step: int) -> list[Detection]:
        self.checks += 1
        runs = [jax.device_get(one) for one in found]
        unlike = [name for name, one in runs[0].items() if not _equal(one, runs[1][name])]
        alike = [name for name, one in runs[0].items() if name not in unlike and np.any(one.differs)]
        new, self.recurring = sorted({*alike} - self.recurring), self.recurring | {*alike}
        if new:  # what differs without a fault says nothing about one
            left = sum(site.work for site in runs[0].sites if site.name not in self.recurring)
            self.coverage = self.covered * left / max(sum(site.work for site in runs[0].sites), 1)
        if unlike:
            return [self._intermittent(runs, step)]
        if not new or self.checks <= EARLY:
            return []
        site = next(site for site in runs[0].sites if site.name == new[0])
        what = (
            f"{site.name} ({site.source}) and its recomputation differ in the same way in two runs: XLA computes them "
            "differently for these numbers, or the fault recurs; they are compared no more"
        )
        return [Detection(self.name, step, what, proof=False)]

    def _intermittent(self, runs: Any, step: int) -> Detection:
        """Returns where two runs from the same inputs first differ."""
        sides = [program.Reports(one.sites, [_sides(each) for each in one.values()]) for one in runs]
        first = first_difference(*sides)
        assert first is not None
        devices = tuple(" ".join(f"{axis}={index}" for axis, index in one.items()) for one in first.devices if one)
        if not first.site.mesh and first.site.name not in self.undivided:
            devices = self._of_shards(*(np.asarray(side[first.site.name]) for side in sides))
        place = f", iteration {', '.join(map(str, first.iteration))}" if first.iteration else ""
        what = f"{first.site.name}{place} ({first.site.source}) has other bits in one of its computations"
        return Detection(self.name, step, what, devices)

    def _of_shards(self, digests: np.ndarray, others: np.ndarray) -> tuple[str, ...]:
        """Returns the devices whose shards differ; none if all do."""
        if self.mesh is None:
            return ()
        rows = np.unique(np.argwhere((digests != others).any(-1))[:, -1] % self.mesh.size)
        if len(rows) == self.mesh.size:
            return ()
        return device_names(self.mesh, np.stack(np.unravel_index(rows, self.mesh.devices.shape), -1))


def _sides(one: Witnessed) -> np.ndarray:
    """Returns the digests of an operation and of its recomputations, as those of the outputs of one operation."""
    again = np.asarray(one.again)
    return np.concatenate([np.asarray(one.first), again.reshape(*again.shape[:-3], -1, 2)], axis=-2)


def _equal(one: Witnessed, other: Witnessed) -> bool:
    return np.array_equal(one.first, other.first) and np.array_equal(one.again, other.again)


class Checksums(Layer):
    """Runs the step with checksums at its matrix products (`sdc.abft`)."""

    name = "abft"
    sees = "wrong matrix products, forward and backward, whether or not the fault repeats"
    blind = "other operations, and errors near the roundoff of float32"
    share = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.residuals: dict[tuple[str, ...], RankValues] = {}

    def prepare(self, call: Call) -> None:
        try:
            run = call.run  # without the arrays of the call
            checked = abft(lambda *arrays: run(arrays))
            self.run = jax.jit(lambda *arrays: jax.tree.map(jnp.asarray, checked(*arrays)[1]))
            flags = gathered(self.run(*call.arrays))
        except ValueError as error:
            self.why_not = f"no product can be checked ({first_line(error)})"
            return
        self.coverage = coverage(flags)
        self.about = f"{len(flags)} products, {self.coverage:.0%} of the products' operations"

    def before(self, call: Call) -> Any:
        return gathered(self.run(*call.arrays))

    def judge(self, found: Any, step: int) -> list[Detection]:
        wrong = [site for site, flag in zip(found.sites, found.values(), strict=True) if np.asarray(flag.flagged).any()]
        if not wrong:
            return self._unusual(found, step)
        rows = sum(int(np.asarray(flag.flagged).sum()) for flag in found.values())
        more = f" and {len(wrong) - 1} more products" if len(wrong) > 1 else ""
        what = f"{rows} rows of {wrong[0].name} ({wrong[0].source}){more} disagree with their checksums"
        return [Detection(self.name, step, what, _ranks(wrong[0], np.asarray(found[wrong[0].name].flagged)))]

    def _unusual(self, found: Any, step: int) -> list[Detection]:
        """Compares residuals, which are below their bounds, between the devices of a mesh: a suspicion."""
        largest: dict[tuple[str, ...], list[Any]] = {}
        for site, flag in zip(found.sites, found.values(), strict=True):
            dims, margin = site.dims, np.asarray(flag.first_margin, np.float64)
            axes = tuple(name for name in dims if name != "scan")
            if axes and margin.size and np.isfinite(margin).all():
                across = tuple(axis for axis in range(margin.ndim) if dims[axis] == "scan")
                largest.setdefault(axes, []).append(margin.max(across))
        findings = []
        for axes, margins in largest.items():
            values = np.log(np.maximum(np.mean(margins, 0), LEAST_MARGIN)).ravel()
            if values.size < RANKS:
                continue
            known = self.residuals.setdefault(axes, RankValues(least=LEAST_SPREAD))
            for rank, distance in known.outliers(values).items():
                if values[rank] < np.median(values):
                    continue  # small residuals are no cause for suspicion
                place = " ".join(
                    f"{a}={i}" for a, i in zip(axes, np.unravel_index(rank, margins[0].shape), strict=True)
                )
                what = f"residuals of checksums are {distance:.3g} median deviations from those of other devices"
                findings.append(Detection(self.name, step, what, (place,), proof=False))
        return findings


def _ranks(site: program.Site, flagged: Any) -> tuple[str, ...]:
    """Returns the coordinates on the mesh of the devices that flagged rows."""
    axes = [axis for axis, name in enumerate(site.dims) if name != "scan"]
    if not axes:
        return ()
    across = tuple(axis for axis in range(flagged.ndim) if axis not in axes)
    places = np.argwhere(flagged.any(across))
    return tuple(" ".join(f"{site.dims[a]}={i}" for a, i in zip(axes, place, strict=True)) for place in places)
