"""What the study of SCAR trains, at the size that its time allows."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sdc.settings import SettingError

from .. import Images, ImagesError, read_images
from ..iterative import (
    By,
    DataError,
    Iterative,
    convolutional_network,
    logistic_regression,
    matrix_factorization,
    most_active,
    read_documents,
    read_ratings,
    read_table,
    shortened,
    topic_model,
    transformer_decoder,
)
from .settings import Sources
from .workloads import halved

EXAMPLES = 10_000
"""Rows that the regression trains on."""
USERS, ITEMS = 300, 500
TOKENS = 128
"""Of each document."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A training, and after how many iterations its loss counts as converged.

    Attributes:
        name: its name on the command line.
        task: the training.
        iterations: that it is given: at the mean loss of all starts after so many, it counts as converged.
        interval: iterations in which a checkpoint writes everything once.
    """

    name: str
    task: Iterative
    iterations: int
    interval: int = 8


def _images(sources: Sources) -> Images:
    images = read_images(Path(sources.images) if os.sep in sources.images else sources.images)
    return halved(images) if images.shape[0] > 16 else images


def _regression(sources: Sources) -> Subject:
    if sources.table is not None:
        with _named("table"):
            table = read_table(sources.table)
        features, labels, source = table.features[:EXAMPLES], table.labels[:EXAMPLES], table.source
    else:
        images = _images(sources)
        features, labels = images.train_images[:EXAMPLES], images.train_labels[:EXAMPLES]
        features, source = features.reshape(len(features), -1), images.source
    task = logistic_regression(features, labels, source=source, batch=max(1, len(labels) // 5), rate=0.3)
    return Subject("regression", task, 60)


def _factorization(sources: Sources) -> Subject:
    with _named("ratings"):
        ratings = read_ratings(sources.ratings, sources.archives)
    users, items = ratings.shape
    if users > USERS and items > ITEMS:
        ratings = most_active(ratings, USERS, ITEMS)
    return Subject("factorization", matrix_factorization(ratings, factors=10, decay=1.0), 20)


def _topics(sources: Sources) -> Subject:
    with _named("documents"):
        documents = read_documents(sources.documents, sources.archives)
    return Subject("topics", topic_model(shortened(documents, TOKENS)), 16)


def _network(name: str, by: By, sources: Sources) -> Subject:
    try:
        return Subject(name, convolutional_network(_images(sources), by=by), 20)
    except ImagesError:
        raise
    except ValueError as error:
        raise SettingError("images", sources.images, str(error)) from error


def _transformer(sources: Sources) -> Subject:
    return Subject("transformer", transformer_decoder(sources.corpus), 20)


SUBJECTS: Mapping[str, Callable[[Sources], Subject]] = {
    "regression": _regression,
    "factorization": _factorization,
    "topics": _topics,
    "cnn-layers": functools.partial(_network, "cnn-layers", "layers"),
    "cnn-shards": functools.partial(_network, "cnn-shards", "shards"),
    "transformer": _transformer,
}


def subjects(names: Sequence[str], sources: Sources) -> list[Subject]:
    """Reads the data of trainings by name.

    Raises:
        SettingError: there is no such training, or data are missing or damaged.
    """
    for name in names:
        if name not in SUBJECTS:
            raise SettingError("workload", name, f"expected one of {', '.join(SUBJECTS)}")
    if sources.table is not None and "regression" not in names:
        raise SettingError("table", sources.table, "is for the workload regression; add that")
    return [SUBJECTS[name](sources) for name in dict.fromkeys(names)]


@contextlib.contextmanager
def _named(setting: str) -> Iterator[None]:
    """What is wrong with data is told under the name of the setting that they come from."""
    try:
        yield
    except DataError as error:
        raise SettingError(setting, error.given, error.problem) from error
