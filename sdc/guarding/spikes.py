"""Suspicion from the metrics of training: it makes checks more frequent, and is never a verdict.

Corruption seldom shows in the loss: 3 of 18 incidents in production did (Lei et al., OSDI 2026, section 7).
"""

from collections import defaultdict, deque
from typing import Any

import jax
import numpy as np

from .evidence import Call, Detection, Layer, names_in

WINDOW = 64
LIMIT = 12.0  # deviations from the median, in units of the median deviation, that are suspicious


class Spikes(Layer):
    """Compares each scalar that the step returns with its median over the last 64 steps."""

    name = "metrics"
    sees = "a loss, a gradient norm or another scalar far outside of its recent values, or not finite"
    blind = "most corruption, which does not show in them"
    share = 0.0
    bounds = runs_step = False

    def __init__(self, limit: float = LIMIT) -> None:
        super().__init__()
        self.limit = limit
        self.structure: Any = None
        self.names: dict[int, str] = {}
        self.wrong: dict[str, bool] = defaultdict(bool)  # whether the last value was not finite
        self.recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def prepare(self, call: Call) -> None:
        self.about = f"{WINDOW} steps"

    def after(self, out: Any, given: Any) -> Any:
        leaves, structure = jax.tree.flatten(out)
        if self.structure is None or structure != self.structure:
            self.structure, names = structure, names_in(structure)
            self.names = {place: names[place] for place, leaf in enumerate(leaves) if _is_scalar(leaf)}
        return {name: leaves[place] for place, name in self.names.items() if _is_scalar(leaves[place])} or None

    def judge(self, found: Any, step: int) -> list[Detection]:
        findings = []
        for name, array in found.items():
            if array.is_deleted():  # donated to the next step: it belongs to the state
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
        spread = 1.4826 * float(np.median(np.abs(known - middle)))  # of a normal distribution
        return abs(value - middle) / (spread or abs(middle) or 1.0)


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.ndim == 0 and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
