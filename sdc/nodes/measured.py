"""What the study of the nodes measures: numbers, before anybody makes tables, figures or claims of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from .comparing import Compared
from .fitting import Predicted
from .simulated_nodes import FittedValue

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class Response:
    """How the gradients of a small model answer to errors.

    Attributes:
        model: the model in words.
        rounding: noise-to-signal ratio where a few last bits are wrong in every microstep.
        linear: by submodule, the squared ratio over the mean square of the relative errors (those of elements that are
            right being zero).
    """

    model: str
    rounding: float
    linear: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Drifting:
    """A small model trained on a simulated node.

    Attributes:
        node: the node.
        model: the model in words.
        noise: noise-to-signal ratios of the gradients, parameters being synchronized after each step.
        distances: distances of the parameters from the healthy ones, nothing being synchronized.
        losses: relative differences of the losses, nothing being synchronized.
    """

    node: str
    model: str
    noise: Float[np.ndarray, "steps"]
    distances: Float[np.ndarray, "steps"]
    losses: Float[np.ndarray, "steps"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesMeasured:
    """What the study of the nodes found; `sdc.train.studies.NodesStudy` makes it.

    Attributes:
        nodes: the nodes.
        seed: decides all draws.
        rows: published figures beside simulated ones.
        predicted: by node, the noise that the other nodes predict.
        estimates: parameters as fitted now.
        used: parameters that the simulated nodes have.
        together: by node, the correlation of its submodules' frequencies over the steps; None for fewer than two
            submodules that are hit.
        responses, trainings: of the small models.
    """

    study: ClassVar[str] = "nodes"
    nodes: tuple[str, ...]
    seed: int
    rows: tuple[Compared, ...]
    predicted: Mapping[str, Predicted]
    estimates: Mapping[str, FittedValue]
    used: Mapping[str, FittedValue]
    together: Mapping[str, float | None]
    responses: tuple[Response, ...]
    trainings: tuple[Drifting, ...]
