"""Settings of the studies: what to run, checked before JAX is imported."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from sdc.nodes import NODES
from sdc.program import as_selector
from sdc.settings import LARGEST_SEED, Flag, SettingError, Within, check_fields

from ..programs import DType

MOST = 1_000_000
"""Steps of a study, which keeps what it measures of each."""
LEAST = 10
"""Steps of a training of which the last tell the result."""
MOST_NODES, MOST_TRIALS = 1000, 100_000
"""Runs and steps of the study of nodes, and trials of that of SCAR, of which all are kept in memory."""
LEAST_STARTS = 5
"""First states of which an interval can be told."""
WINDOW = 8
"""Steps for which each kind of error lasts, where responses of small models are measured."""


def check_training(steps: int, seed: int) -> None:
    """Checks the settings of a study that trains."""
    if steps < LEAST:
        raise SettingError("steps", steps, f"expected at least {LEAST}, of which the last tell the result")
    _check_most(steps)
    if not 0 <= seed <= LARGEST_SEED:
        raise SettingError("seed", seed, f"expected a number from 0 to {LARGEST_SEED}")


def check_measurement(steps: int, dtypes: Sequence[str]) -> None:
    """Checks the settings of a measurement of products."""
    if steps < 1:
        raise SettingError("steps", steps, "expected at least 1")
    _check_most(steps)
    if not dtypes:
        raise SettingError("dtypes", None, "expected float32, bfloat16 or both")


def _check_most(steps: int) -> None:
    if steps > MOST:
        raise SettingError("steps", steps, f"expected at most {MOST:,}, since what is measured of each is kept")


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where data come from."""

    images: str = "auto"
    """Images: fashion-mnist, digits, auto (fashion-mnist if installed, else digits), or a folder of idx files."""
    table: Path | None = None
    """A CSV file of numbers, the class last (CoverType's, for instance), for the regression in the place of images."""
    ratings: Annotated[str | Path, Flag(type=str)] = "movielens-100k"
    """Ratings: movielens-100k, or a file of users, items and ratings, or of a matrix as Jester's."""
    documents: Annotated[str | Path, Flag(type=str)] = "reuters"
    """Documents: reuters, plays, or a folder of texts, such as that of the 20 Newsgroups."""
    corpus: tuple[str, ...] = ("python",)
    """Text: python (the standard library's source), or files and folders of text or JSONL."""
    archives: Path | None = None
    """Folder of the archives that movielens-100k, reuters and plays are read from; by default one in the cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScarSettings:
    """How the study of SCAR draws failures."""

    trials: int = 100
    """Failures of each training and case, a multiple of the starts."""
    starts: int = 20
    """First states of each training, at least 5: intervals are over them."""
    seed: Annotated[int, Within(0, LARGEST_SEED)] = 0
    """Seed of first states, data and everything simulated."""

    def check(self) -> None:
        """Checks the settings."""
        check_fields(self)
        if self.starts < LEAST_STARTS:
            problem = f"expected at least {LEAST_STARTS}, of which an interval can be told"
            raise SettingError("starts", self.starts, problem)
        if self.trials > MOST_TRIALS:
            problem = f"expected at most {MOST_TRIALS:,}, since the outcome of each is kept"
            raise SettingError("trials", self.trials, problem)
        if self.trials < self.starts or self.trials % self.starts:
            raise SettingError("trials", self.trials, f"expected a multiple of the {self.starts} starts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodesSettings:
    """Which nodes the study of nodes compares, by how many runs."""

    nodes: tuple[str, ...] = NODES
    """Nodes to compare, node1 to node15; by default all."""
    runs: int = 100
    """Simulated runs of each node at the study's size, at least 20: intervals are over them."""
    steps: int = 80
    """Steps of the small models, at least 40."""
    seed: Annotated[int, Within(0, LARGEST_SEED)] = 0
    """Seed of everything simulated."""

    def check(self) -> None:
        """Checks the settings."""
        check_fields(self)
        if unknown := [node for node in self.nodes or (None,) if node not in NODES]:
            raise SettingError("nodes", unknown[0], f"expected one or several of {NODES[0]} ... {NODES[-1]}")
        if not 20 <= self.runs <= MOST_NODES:
            raise SettingError("runs", self.runs, f"expected 20 to {MOST_NODES:,}; fewer are too few for an interval")
        least = WINDOW * 5
        if not least <= self.steps <= MOST_NODES:
            problem = f"expected {least} to {MOST_NODES:,}; fewer are too short for a statement"
            raise SettingError("steps", self.steps, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsSettings:
    """Which products the study of checked products judges."""

    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    """Types of activations and compute parameters to study."""
    steps: int = 20
    """Optimizer steps; every scheme judges every product of every step, and those of the first and last get errors."""
    where: str = "products"
    """Which matrix products to study, a selector such as 'scope("*/ffn/*")'."""
    seed: int = 0
    """Seed of the parameters and the errors."""

    def check(self) -> None:
        """Checks the settings."""
        check_measurement(self.steps, self.dtypes)
        as_selector(self.where)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """How a device's rounding is measured."""

    dtypes: tuple[DType, ...] = ("float32", "bfloat16")
    """Types to measure."""
    steps: int = 5
    """Optimizer steps of the configuration, for each type, whose products are checked by what was measured."""
    seed: int = 0
    """Seed of the parameters and the synthetic factors."""

    def check(self) -> None:
        """Checks the settings."""
        check_measurement(self.steps, self.dtypes)
