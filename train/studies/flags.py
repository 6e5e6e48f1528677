"""How often the checksum of Ma et al. 2025 (equation 6, arXiv:2502.12340) would flag the errors of a simulated node.

The paper flags a product C = A·B, with w = (1, ..., 1), if

    ||C w - A (B w)||_inf > k u ||A||_inf ||B||_inf                                          (6)

in float32 (u = 2^-24). Figure 10 has the share of flags in the output projection of attention, in a model of eight
layers. Here, errors of a node strike the results of that product, k = 4,096: a row is flagged if its errors sum to more
than the right side. A and B have standard normal elements, and an element of C has the standard deviation sqrt(k).
"""

import functools
import math
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.stats import norm

from sdc.faults import SMALLEST, Tailed
from sdc.nodes import ELEMENTS, STEPS, node_faults

SITE, LAYERS = "fwd/attn", 8
WIDTH = 4096  # of the study's model; k and the length of a row
ROWS = ELEMENTS // WIDTH  # rows of the product in a microstep, over all devices
DRAWS = 4000  # sampled steps of a layer
STEP, POINTS = 20, 4096  # levels per power of ten of the number of struck elements of a row; points of a distribution
LEAST = 1e-3  # the least of these numbers for which a distribution is computed
SAMPLED = 2048  # rows of A from which its norm is computed


def threshold(seed: int = 0) -> float:
    """Returns the right side of equation 6, in standard deviations of an element of C."""
    rng = np.random.default_rng(seed)
    rows = [np.abs(rng.standard_normal((size, WIDTH), np.float32)).sum(1).max() for size in (SAMPLED, WIDTH)]
    return WIDTH * 2.0**-24 * float(rows[0] * rows[1]) / math.sqrt(WIDTH)


def probability(
    struck: Float[np.ndarray, "draws"], mean: Float[np.ndarray, "draws"], limit: float, rows: int = ROWS
) -> Float[np.ndarray, "draws"]:
    """Returns the probability that any row of a product is flagged.

    Args:
        struck: expected number of struck elements.
        mean: V; an element changes by a share of itself that is uniform in (0, 2 V], with a random sign.
        limit: sum of the changes of a row from which the row is flagged, in standard deviations of an element.
        rows: number of rows.
    """
    each, found = struck / rows, np.zeros(len(struck))
    levels = np.floor(STEP * np.log10(np.clip(each, LEAST, None))).astype(int)
    for level in np.unique(levels):
        here = levels == level
        below, above = (10.0 ** (edge / STEP) for edge in (level, level + 1))
        share = np.clip((each[here] - below) / (above - below), 0, 1)
        tails = [np.interp(limit / mean[here], *_tail(edge), right=0.0) for edge in (int(level), int(level) + 1)]
        # Below the least number, rows with several struck elements are negligible.
        tail = (tails[0] + share * (tails[1] - tails[0])) * np.minimum(each[here] / LEAST, 1)
        found[here] = -np.expm1(rows * np.log1p(-np.minimum(tail, 1 - 1e-12)))
    return found


@functools.cache
def _tail(level: int) -> tuple[Float[np.ndarray, "points"], Float[np.ndarray, "points"]]:
    """Returns many x, and the probability that the changes of a row sum to more than x.

    This is a compound Poisson distribution on a grid; V = 1, and 10^(level / STEP) elements are struck on average.
    """
    struck = 10.0 ** (level / STEP)
    reach = 16 + 9 * math.sqrt(struck * 4 / 3)
    width = 2 * reach / POINTS
    edges = (np.arange(POINTS + 1) - POINTS / 2 - 0.5) * width  # of cells with the centers 0, ±width, ...
    shares = 2 * (np.arange(200) + 0.5) / 200
    one = np.diff(norm.cdf(np.divide.outer(edges, shares)).mean(-1))
    whole = np.fft.ifft(np.exp(struck * (np.fft.fft(np.fft.ifftshift(one)) - 1))).real
    half = np.maximum(whole[: POINTS // 2], 0.0)
    beyond = 2 * (half[::-1].cumsum()[::-1] - half)  # of both signs, beyond each point
    return width * (np.arange(POINTS // 2) + 0.5), beyond


def flagged_share(node: str, *, seed: int = 0) -> float | None:
    """Returns the share of the products, over steps, microsteps and layers, that equation 6 would flag on a node.

    A node without errors in these products has None.
    """
    faults = [fault for fault in node_faults(node, layers=16) if str(fault.site) == SITE]
    if not faults:
        return None
    rng, limit = np.random.default_rng([seed, 6]), threshold(seed)
    found = 0.0
    for layer in range(LAYERS):
        clean = 1.0
        for fault in faults:
            rate, severity = (
                float(np.broadcast_to(np.asarray(x, np.float64), 16)[layer])
                for x in (fault.rate, fault.what.severity)  # type: ignore[attr-defined] # faults of nodes are `Relative`
            )
            # Steps in which the device is struck, and the course of its rate over these.
            spike = fault.when.spike
            course: Any = 1 / spike
            if spike == 1:
                course = rng.choice([fault.when.mean(step) for step in range(STEPS)], DRAWS)
            mean, share = np.full(DRAWS, severity / 2), np.ones(DRAWS)
            if isinstance(fault.what, Tailed):
                u = np.maximum(rng.random(DRAWS), SMALLEST)
                mean, share = severity * u**-fault.what.tail, (1 + fault.what.few) * u**fault.what.few
            struck = np.minimum(rate * course * share, 1.0) * ELEMENTS
            clean *= 1 - spike * float(probability(struck, mean, limit).mean())
        found += (1 - clean) / LAYERS
    return found
