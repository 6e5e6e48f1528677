"""Suspicion from the metrics of training: it makes checks more frequent, and is never a verdict.

Corruption seldom shows in the loss: 3 of 18 incidents in production did (Lei et al., OSDI 2026, section 7).
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np

from .evidence import Call, Detection, Layer, gathered, names_in

WINDOW = 64
LIMIT = 12.0  # deviations from the median, in units of the median deviation, that are suspicious
RANKS = 4  # least number of ranks of which one can be far from the others


def spread_of(deviations: np.ndarray, middle: float, least: float = 0.0) -> float:
    """Returns the standard deviation of normal numbers with these absolute deviations from their median; if it is zero,
    the size of the median."""
    return max(1.4826 * float(np.median(deviations)), least) or abs(middle) or 1.0


class RankValues:
    """Values of ranks that compute alike; those of the last 64 calls show how far a rank is usually from the others."""

    def __init__(self, limit: float = LIMIT, least: float = 0.0) -> None:
        """Creates the values; `least` is the smallest median deviation to expect."""
        self.limit, self.least = limit, least
        self.recent: deque[np.ndarray] = deque(maxlen=WINDOW)
        self.wrong: set[int] = set()

    def outliers(self, values: np.ndarray) -> dict[int, float]:
        """Returns the ranks that have become outliers, with their distances in median absolute deviations."""
        finite = np.isfinite(values)
        if not finite.any():
            return {}
        middle = float(np.median(values[finite]))
        apart = np.where(finite, np.abs(values - middle), np.inf)
        spread = np.inf  # unknown
        if len(self.recent) >= WINDOW // 2:
            spread = spread_of(np.concatenate(self.recent), middle, self.least)
        self.recent.append(np.minimum(apart, np.max(apart[finite])))
        distance = np.where(finite, np.where(finite, apart, 0.0) / spread, np.inf)
        wrong = {int(rank) for rank in np.flatnonzero(distance > self.limit)}
        new, self.wrong = wrong - self.wrong, wrong
        return {rank: float(distance[rank]) for rank in sorted(new)}


class Spikes(Layer):
    """Compares each scalar that the step returns with its median over the last 64 steps."""

    name = "metrics"
    sees = (
        "a loss, a gradient norm or another scalar far outside of its recent values, or not finite; on request, a rank "
        "whose value is far from those of other ranks"
    )
    blind = "most corruption, which does not show in them"
    share = 0.0
    bounds = runs_step = False

    def __init__(self, limit: float = LIMIT, ranks: Sequence[str] = ()) -> None:
        """Creates the layer.

        Args:
            limit: distance from the median that is suspicious, in median absolute deviations.
            ranks: patterns of the paths of results with one element for each rank, such as `1/growth`: of all local
                losses, or of the growth of the residual stream.
        """
        super().__init__()
        self.limit, self.patterns = limit, tuple(ranks)
        self.structure: Any = None
        self.names: dict[int, str] = {}
        self.wrong: dict[str, bool] = defaultdict(bool)  # whether the last value was not finite
        self.recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self.ranks: dict[str, RankValues] = defaultdict(lambda: RankValues(limit))

    def prepare(self, call: Call) -> None:
        self.about = f"{WINDOW} steps"

    def after(self, out: Any, given: Any) -> Any:
        leaves, structure = jax.tree.flatten(out)
        if self.structure is None or structure != self.structure:
            self.structure, names = structure, names_in(structure)
            self.names = {
                place: name for place, name in enumerate(names)
                if _is_scalar(leaves[place]) or any(fnmatchcase(name, pattern) for pattern in self.patterns)
            }  # fmt: skip
        found = {name: leaves[place] for place, name in self.names.items()}
        apart = {name: x for name, x in found.items() if _is_float(x) and x.ndim == 1 and x.size >= RANKS}
        return {**{name: x for name, x in found.items() if _is_scalar(x)}, **gathered(apart)} or None

    def judge(self, found: Any, step: int) -> list[Detection]:
        findings = []
        for name, array in found.items():
            if array.is_deleted():  # donated to the next step: it belongs to the state
                continue
            if array.ndim:
                for rank, distance in self.ranks[name].outliers(np.asarray(array, np.float64)).items():
                    what = f"{name} of a rank is {distance:.3g} median deviations from those of the others"
                    findings.append(Detection(self.name, step, what, (f"rank {rank}",), proof=False))
                continue
            value = float(np.asarray(array))
            new, self.wrong[name] = not self.wrong[name], not np.isfinite(value)
            if (deviation := self.deviation(name, value)) > self.limit and new:
                what = f"{name} = {value:.6g} is {deviation:.3g} median deviations from its median"
                findings.append(Detection(self.name, step, what, proof=False))
        return findings

    def deviation(self, name: str, value: float) -> float:
        """Returns the distance of a value from the median of the values before it, in median absolute deviations."""
        recent = self.recent[name]
        known = np.asarray(recent)
        recent.append(value if np.isfinite(value) else (float(np.median(known)) if known.size else 0.0))
        if not np.isfinite(value):
            return np.inf
        if known.size < WINDOW // 2:
            return 0.0
        middle = float(np.median(known))
        return abs(value - middle) / spread_of(np.abs(known - middle), middle)


def _is_scalar(leaf: Any) -> bool:
    return _is_float(leaf) and leaf.ndim == 0


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
