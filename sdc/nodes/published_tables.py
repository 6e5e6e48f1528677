"""The study's published figures on its fifteen nodes, from its tables and plots: Ma et al. 2025 (arXiv:2502.12340)."""

from __future__ import annotations

import csv
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import TYPE_CHECKING

from sdc._lazy import np

if TYPE_CHECKING:
    from jaxtyping import Float64

SUBMODULES = ("fwd/attn", "fwd/ffn", "bwd/attn", "bwd/ffn")
"""Submodules that the study compared.

They are the outputs of attention and of the feed-forward network (`fwd`), and the gradients of their inputs (`bwd`).
"""
NODES = tuple(f"node{number}" for number in range(1, 16))

# The smallest frequency in tables 6 and 7. The next larger ones are multiples of it, so it corresponds to one element
# per run.
ONE_ELEMENT = 2.39e-14
# Number of elements of a submodule's output in a microstep, over all devices of a node. A run has 1/ONE_ELEMENT
# elements: 2.5 million times 2^24 (the tokens of a sequence times the width). With 32 times 2^24 elements in each of 16
# microsteps per step, these are the elements of 4,870 steps; the study states 4,500 steps.
ELEMENTS = 32 * 4096 * 4096
MICROSTEPS = 16  # per step under computation synchronization
LAST_BIT = 2.0**-9  # smallest relative change by the last bit of bfloat16; no mismatch is less severe
STEPS = 4500  # under computation synchronization (appendix B.3)
# Steps under parameter synchronization and without synchronization, with 256 microsteps per step and 32 layers rather
# than 16.
PARAMETER_STEPS = 2500


@dataclasses.dataclass(frozen=True)
class Published:
    """The study's figures for one submodule on one node."""

    frequency: float  # mean mismatch frequency over microsteps and layers (table 1)
    severity: float  # largest mismatch severity over microsteps and layers (table 2)


@dataclasses.dataclass(frozen=True)
class Layers:
    """The study's figures for one submodule on one node by decoder layer (tables 6 to 9)."""

    frequency: Float64[np.ndarray, "layers"]  # mean mismatch frequency in each layer
    severity: Float64[np.ndarray, "layers"]  # largest mismatch severity in each layer

    @property
    def counts(self) -> Float64[np.ndarray, "layers"]:
        """Number of mismatched elements of each layer in the whole run, computed from the frequency."""
        return self.frequency / ONE_ELEMENT


def published(name: str) -> dict[str, Published]:
    """Returns the figures of tables 1 and 2 for a node, by site.

    Args:
        name: `node1` to `node15`; a suffix, as in `node11:uniform`, is ignored.

    Raises:
        ValueError: there is no such node.
    """
    return {
        _site(row): Published(float(row["mean_mismatch_frequency"]), float(row["max_mismatch_severity"]))
        for row in _rows("sdc_nodes.csv", name)
    }


def published_layers(name: str) -> dict[str, Layers]:
    """Returns the figures of tables 6 to 9 for a node, by site, omitting sites without a mismatch.

    Raises:
        ValueError: there is no such node.
    """
    found: Mapping[str, list[tuple[int, float, float]]] = defaultdict(list)
    for row in _rows("sdc_node_layers.csv", name):
        figures = float(row["mismatch_frequency"]), float(row["max_mismatch_severity"])
        found[_site(row)].append((int(row["layer"]), *figures))
    tables = {site: np.asarray(sorted(rows)).T[1:] for site, rows in found.items()}
    return {site: Layers(*table) for site, table in tables.items() if table[0].any()}


def published_noise(name: str) -> float:
    """Returns the largest noise-to-signal ratio of a node's gradients over 2,500 steps (equation 5, figure 5).

    Raises:
        ValueError: there is no such node.
    """
    [row] = _rows("sdc_wcnts.csv", name)
    return float(row["worst_case_noise_to_signal"])


def published_disagreement(name: str) -> dict[str, float]:
    """Returns the share of test predictions that differ if a model is fine-tuned on a healthy node instead (table 5).

    Args:
        name: `node1` to `node15`, or `another order`, a healthy node with the questions in another order.

    Raises:
        ValueError: there is no such node.
    """
    return _finetuned(name, "_disagreement_pct")


def published_accuracy(name: str) -> dict[str, float]:
    """Returns the test accuracy of a model that was fine-tuned on a node (table 5).

    Args:
        name: `node1` to `node15`, `healthy`, or `another order`, a healthy node with the questions in another order.

    Raises:
        ValueError: there is no such node.
    """
    return _finetuned(name, "_test_accuracy")


_HEALTHY = {"healthy": "Healthy Node", "another order": "Healthy Node (other seed)"}


def _finetuned(name: str, ending: str) -> dict[str, float]:
    wanted = _HEALTHY.get(name) or f"Unhealthy Node {node_number(name)}"
    [row] = [row for row in read_table("sdc_finetune.csv") if row["configuration"] == wanted]
    return {key.removesuffix(ending): float(row[key]) / 100 for key in row if key.endswith(ending)}


def node_number(name: str) -> int:
    """Returns the number of a node from its name, which may have a suffix with a model and settings."""
    base = name.partition(",")[0].partition(":")[0]
    if base not in NODES:
        raise ValueError(f"unknown node {base!r}; expected one of {NODES[0]} ... {NODES[-1]}")
    return int(base.removeprefix("node"))


def _site(row: Mapping[str, str]) -> str:
    return f"{row['direction']}/{row['submodule']}"


def _rows(file: str, name: str) -> Iterator[dict[str, str]]:
    number = node_number(name)
    return (row for row in read_table(file) if int(row["node"]) == number)


def read_table(file: str) -> Iterator[dict[str, str]]:
    """Reads the rows of a table of this package."""
    text = (resources.files(__package__) / "data" / file).read_text(encoding="utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
