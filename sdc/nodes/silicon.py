"""Simulations of faulty silicon as two studies describe it; these profiles complement the nodes of `simulated_nodes`.

`silicon:gpu` reproduces the outcomes of stuck-at faults in the gates of a data-center GPU (Tung et al., *The Anatomy of
Silent Data Corruption: GPU Error Pattern Study and Modeling Guidance*, DSN 2026 industry track, arXiv:2605.04213). The
other three profiles reproduce the signatures of permanent faults in Tyagi et al. (*LLM-PRISM: Characterizing Silent
Data Corruption from Permanent GPU Faults in LLM Training*, arXiv:2604.10390, section III-B and figure 3). A table in
docs/faults.md distinguishes published figures, figures known only from quotations, and our own assumptions.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Mapping

from ..faults import BitFlip, Fault, FaultKind, Mixed, One, Row, Stride, Tile
from ..program import Where
from .published_tables import SUBMODULES

# Probability that a hit starts at an element: about ten hits per site in twenty steps of the configuration `tiny`. If
# all elements of a hit are counted, the frequency is in the range of those published for nodes 1, 7 and 9.
RATE = 1e-6
WARP = 32
PERIODS = (2, 4, 8, 16)
# Shares of 1 to 4 flipped bits, each 0.7 times the one before. The ratio 0.7 is the smallest two-digit number for which
# the share of single bits is below 40 %.
FLIPS = (0.39, 0.28, 0.19, 0.14)
FMA_FLIPS = (0.6, 0.4)


@dataclasses.dataclass(frozen=True)
class PublishedShare:
    """A published share of the corruptions, with its uncertainty."""

    share: float  # the published share, or the published bound on it
    # The interval in which the profile's share must lie: exact 95 % limits, rounded outward, for 25,000 faults, the
    # number that caused the study's 600 million corruptions, if all corrupt equally many elements. Corruptions by one
    # fault are similar, so limits computed from the number of corruptions would be too narrow.
    low: float
    high: float
    quoted: bool = False  # whether the figure is known only from quotations of the study, and not from its abstract


# Shares of arXiv:2605.04213 that `silicon:gpu` reproduces.
SHARES: Mapping[str, PublishedShare] = {
    "zero": PublishedShare(0.5068, 0.5005, 0.5131, quoted=True),
    "flips": PublishedShare(0.4831, 0.4768, 0.4894, quoted=True),
    "special": PublishedShare(0.0101, 0.0088, 0.0115),
    "one bit of flips": PublishedShare(0.40, 0.0, 0.40),
}

_GPU = Mixed(SHARES["zero"].share, SHARES["special"].share, FLIPS)
_PROFILES: Mapping[str, tuple[FaultKind, tuple[One, ...]]] = {
    "silicon:gpu": (_GPU, tuple(Stride(WARP // period, period, WARP) for period in PERIODS)),
    "silicon:tensor-core": (BitFlip(bits=(6,)), (Tile(3, 3),)),
    "silicon:fma": (Mixed(flips=FMA_FLIPS), (One(),)),
    "silicon:cache-line": (BitFlip(field="exponent"), (Row(),)),
}
SILICON = tuple(_PROFILES)
"""Names of the profiles."""


def silicon_faults(
    name: str, *, layers: int, at: Mapping[str, int] | None = None, where: Callable[[str], Where] = str
) -> list[Fault]:
    """Returns the faults of a device with faulty silicon; the arguments are those of `node_faults`."""
    what, patterns = _profile(name)
    if layers < 1:
        raise ValueError(f"layers={layers}: expected at least 1")
    rate, places = RATE / len(patterns), itertools.product(map(where, SUBMODULES), patterns)
    return [Fault(what, rate, site, at=dict(at or {}), pattern=pattern) for site, pattern in places]


def silicon_frequency(name: str) -> dict[str, float]:
    """Returns the share of elements that a profile corrupts, by site: the counterpart of `expected_frequency`.

    Tensors are assumed to be large enough that the clipping of patterns at the edges of a tensor is negligible. The
    result is empty for `silicon:cache-line`, which corrupts rows: a row is as long as the last axis, whose length is
    unknown here.
    """
    _, patterns = _profile(name)
    if Row() in patterns:
        return {}
    frequency = RATE / len(patterns) * sum(pattern.size(()) for pattern in patterns)
    return dict.fromkeys(SUBMODULES, frequency)


def _profile(name: str) -> tuple[FaultKind, tuple[One, ...]]:
    if name not in _PROFILES:
        near = difflib.get_close_matches(name, SILICON, 1, 0.75)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown profile {name!r}; expected one of {', '.join(SILICON)}{hint}")
    return _PROFILES[name]
