"""Simulation of faulty silicon as described in two studies: profiles in addition to the nodes of `simulated_nodes`.

`silicon:gpu` has the outcomes of stuck-at faults in the gates of a data-center GPU (Tung et al., *The Anatomy of Silent
Data Corruption: GPU Error Pattern Study and Modeling Guidance*, DSN 2026 industry track, arXiv:2605.04213); the other
three are the signatures of permanent faults of Tyagi et al. (*LLM-PRISM: Characterizing Silent Data Corruption from
Permanent GPU Faults in LLM Training*, arXiv:2604.10390, section III-B and figure 3). A table in docs/faults.md
distinguishes published figures, figures that only others quote, and our own assumptions.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Mapping

from ..faults import BitFlip, Fault, FaultKind, Mixed, One, Row, Stride, Tile
from ..program import Where
from .published_tables import SUBMODULES

# Probability that a hit starts at an element: about ten hits per site in twenty steps of the configuration `tiny`.
# Counting all elements of a hit, it is in the range of the frequencies published for nodes 1, 7 and 9.
RATE = 1e-6
WARP = 32
PERIODS = (2, 4, 8, 16)
# Shares of 1 to 4 flipped bits, each 0.7 times the last: the smallest two-digit factor with single bits below 40 %.
FLIPS = (0.39, 0.28, 0.19, 0.14)
FMA_FLIPS = (0.6, 0.4)


@dataclasses.dataclass(frozen=True)
class PublishedShare:
    """A published share of the corruptions, with its precision."""

    share: float  # as published; for a bound, the bound
    # The interval for the profile's share. Exact 95 % limits for 25,000 independent faults, which caused the study's
    # 600 million corruptions: corruptions by one fault are similar, so limits from their number would be too narrow.
    low: float
    high: float
    quoted: bool = False  # whether the figure is known only from quotations of the study, not from its abstract


# Shares of arXiv:2605.04213 that `silicon:gpu` reproduces.
SHARES: Mapping[str, PublishedShare] = {
    "zero": PublishedShare(0.5068, 0.5006, 0.5130, quoted=True),
    "flips": PublishedShare(0.4831, 0.4769, 0.4893, quoted=True),
    "special": PublishedShare(0.0101, 0.0089, 0.0114),
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
    """Returns the faults of a device with faulty silicon; arguments are those of `node_faults`."""
    what, patterns = _profile(name)
    if layers < 1:
        raise ValueError(f"layers={layers}: expected at least 1")
    rate, places = RATE / len(patterns), itertools.product(map(where, SUBMODULES), patterns)
    return [Fault(what, rate, site, at=dict(at or {}), pattern=pattern) for site, pattern in places]


def silicon_frequency(name: str) -> dict[str, float]:
    """Returns the share of the elements that a profile hits, by site: the counterpart of `expected_frequency`.

    Tensors are assumed to be large, since patterns are clipped at their edges. The length of a row is that of the last
    axis, which is unknown here, so the result is empty for `silicon:cache-line`.
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
