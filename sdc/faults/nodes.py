"""The fifteen unhealthy nodes of the study as simulated suspects.

Frequencies and severities by layer are the published ones (Ma et al. 2025, arXiv:2502.12340, tables 1, 2 and 6 to 9).
What the study does not publish is modelled, and said here:

- A mismatched element is off by a relative difference uniform in (0, 2 severity], with a random sign, so that the mean
  over the mismatched elements of a microstep, which is what severity means (equation 3), is the published one. The
  study publishes the largest of all microsteps only; here every microstep is that severe.
- Layers are resampled where a model has not 16: each takes the mean frequency and the largest severity of the published
  layers that it covers, so that the mean over the layers (equation 2) and their maximum (equation 4) stay.
- In time (figures 3 to 6): nodes 10 and 11 begin with a burst that decays, 7 and 14 show isolated spikes, 13 is clean
  until step 450. The published frequency is taken as the level after the burst, and as the mean over the spikes.
- Nodes 2, 3 and 12 showed nothing under computation synchronization, so nothing is injected for them.
"""

import csv
import dataclasses
import itertools
from collections import defaultdict
from importlib import resources

import numpy as np
from jaxtyping import Float64

from sdc.program.selectors import Selector, direction, products as matrix_products, scope
from sdc.program.site import Direction

from .fault import Fault, When
from .kinds import Relative

SITES = ("fwd/attn", "fwd/ffn", "bwd/attn", "bwd/ffn")
HEALTHY = "healthy"
NODES = tuple(f"node{number}" for number in range(1, 16))

_WHEN = {
    7: When(spike=1 / 50),
    10: When(burst=4.0, decay=5.0),
    11: When(burst=4.0, decay=5.0),
    13: When(onset=450),
    14: When(spike=1 / 4500),
}


@dataclasses.dataclass(frozen=True)
class Published:
    """The study's figures for one submodule of one node.

    Attributes:
        frequency: mean mismatch frequency over microsteps and layers (table 1).
        severity: largest mismatch severity of any microstep and layer (table 2).
    """

    frequency: float
    severity: float


def published(name: str) -> dict[str, Published]:
    """Tables 1 and 2 for a node, by site.

    Raises:
        ValueError: there is no such node.
    """
    number = _number(name)
    return {
        f"{row['direction']}/{row['submodule']}": Published(
            float(row["mean_mismatch_frequency"]), float(row["max_mismatch_severity"])
        )
        for row in _rows("sdc_nodes.csv")
        if int(row["node"]) == number
    }


def profile(name: str, *, layers: int, twin: int | None = 1, products: bool = False) -> list[Fault]:
    """The faults of a simulated suspect.

    Args:
        name: `node1` to `node15`, or `healthy`.
        layers: number of layers of the model that it will run.
        twin: index of the suspect on the twin axis; None where there is no such axis.
        products: whether the matrix products of a submodule are corrupted, rather than its output and its input's
            gradient. The rates are the same for each.

    Returns:
        One fault per submodule that the study saw corrupted, its rates and severities by layer; none for `healthy`.

    Raises:
        ValueError: there is no such suspect.

    Example:
        >>> from sdc.faults import profile
        >>> len(profile("node11", layers=16)), profile("healthy", layers=16)
        (4, [])
    """
    if name == HEALTHY:
        return []
    number = _number(name)
    by_site: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for row in _rows("sdc_node_layers.csv"):
        if int(row["node"]) == number:
            site = f"{row['direction']}/{row['submodule']}"
            by_site[site].append(
                (int(row["layer"]), float(row["mismatch_frequency"]), float(row["max_mismatch_severity"]))
            )
    faults = []
    for site, rows in by_site.items():
        _, frequency, severity = np.asarray(sorted(rows)).T
        if not frequency.any():
            continue
        what = Relative(tuple((2 * largest_by_layer(severity, layers)).tolist()))
        rates = tuple(mean_by_layer(frequency, layers).tolist())
        at = {} if twin is None else {"twin": twin}
        faults.append(Fault(what, rates, _inside(site) if products else site, at=at, when=_WHEN.get(number, When())))
    return faults


def _inside(site: str) -> Selector:
    """The products of a submodule, in the layers: what is recomputed belongs to the backward pass."""
    way, _, submodule = site.partition("/")
    passes: tuple[Direction, ...] = ("fwd",) if way == "fwd" else ("bwd", "remat")
    return matrix_products & direction(*passes) & scope(f"*/{submodule}/*", f"*/{submodule}")


def expected_frequency(name: str, steps: int) -> dict[str, float]:
    """What the frequency of a simulated suspect comes to on average over its first `steps` steps, by site."""
    if name == HEALTHY:
        return {}
    when = _WHEN.get(_number(name), When())
    level = sum(when.mean(step) for step in range(steps)) / max(steps, 1)
    return {site: figures.frequency * level for site, figures in published(name).items()}


def mean_by_layer(values: Float64[np.ndarray, "published"], layers: int) -> Float64[np.ndarray, "layers"]:
    """Resamples figures by layer to another number of layers so that their mean stays."""
    edges = np.linspace(0, len(values), layers + 1)
    totals = np.interp(edges, np.arange(len(values) + 1), np.concatenate([[0.0], np.cumsum(values)]))
    return np.diff(totals) / np.diff(edges)


def largest_by_layer(values: Float64[np.ndarray, "published"], layers: int) -> Float64[np.ndarray, "layers"]:
    """Resamples figures by layer to another number of layers so that their maximum stays."""
    edges = np.linspace(0, len(values), layers + 1)
    return np.asarray([values[int(a) : int(np.ceil(b))].max() for a, b in itertools.pairwise(edges)])


def _number(name: str) -> int:
    if name not in NODES:
        raise ValueError(f"unknown suspect {name!r}; expected {HEALTHY} or one of {NODES[0]} ... {NODES[-1]}")
    return int(name.removeprefix("node"))


def _rows(file: str) -> list[dict[str, str]]:
    text = (resources.files(__package__) / "data" / file).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
