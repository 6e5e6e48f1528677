"""The fifteen unhealthy nodes of the study, simulated.

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

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from sdc.program.site import Where

from .fault import Fault, When
from .kinds import Relative

if TYPE_CHECKING:
    from jaxtyping import Float64

SUBMODULES = ("fwd/attn", "fwd/ffn", "bwd/attn", "bwd/ffn")
"""What the study looked at: outputs of attention and feed-forward network, and the gradients of their inputs."""
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
    return {
        submodule: Published(float(row["mean_mismatch_frequency"]), float(row["max_mismatch_severity"]))
        for submodule, row in _rows("sdc_nodes.csv", _number(name))
    }


def node_faults(
    name: str, *, layers: int, at: Mapping[str, int] | None = None, where: Callable[[str], Where] = str
) -> list[Fault]:
    """The faults of a simulated node.

    Args:
        name: `node1` to `node15`, or `healthy`.
        layers: number of layers of the model that it will run.
        at: the device that is the node, such as `{"twin": 1}`; by default every device.
        where: which sites stand for a submodule of the study (see `SUBMODULES`). By default its name is a pattern of
            names of probes: outputs named `attn` and `ffn` by `sdc.probe`.

    Returns:
        One fault per submodule that the study saw corrupted, its rates and severities by layer; none for `healthy`.

    Raises:
        ValueError: there is no such node.

    Example:
        >>> from sdc.faults import node_faults
        >>> len(node_faults("node11", layers=16)), node_faults("healthy", layers=16)
        (4, [])
        >>> [fault, *_] = node_faults("node11", layers=2, at={"host": 3}, where=lambda name: f'probed("my_{name[4:]}")')
        >>> fault.site, fault.at
        ('probed("my_attn")', {'host': 3})
    """
    if name == HEALTHY:
        return []
    number = _number(name)
    by_submodule: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for submodule, row in _rows("sdc_node_layers.csv", number):
        by_submodule[submodule].append(
            (int(row["layer"]), float(row["mismatch_frequency"]), float(row["max_mismatch_severity"]))
        )
    faults = []
    for submodule, rows in by_submodule.items():
        _, frequency, severity = np.asarray(sorted(rows)).T
        if not frequency.any():
            continue
        what = Relative(tuple((2 * largest_by_layer(severity, layers)).tolist()))
        rates = tuple(mean_by_layer(frequency, layers).tolist())
        faults.append(Fault(what, rates, where(submodule), at=dict(at or {}), when=_WHEN.get(number, When())))
    return faults


def expected_frequency(name: str, steps: int) -> dict[str, float]:
    """What the frequency of a simulated suspect comes to on average over its first `steps` steps, by site."""
    if name == HEALTHY:
        return {}
    when = _WHEN.get(_number(name), When())
    level = when.average(steps)
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


def _rows(file: str, number: int) -> Iterator[tuple[str, dict[str, str]]]:
    """The lines of a table that are of a node, each with the name of its submodule."""
    text = (resources.files(__package__) / "data" / file).read_text(encoding="utf-8")
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        if int(row["node"]) == number:
            yield f"{row['direction']}/{row['submodule']}", row
