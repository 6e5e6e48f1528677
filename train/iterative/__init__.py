"""Iterative-convergent trainings on one small interface, their data, and failures of them, simulated."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Trainings.
    from .protocol import Iterative as Iterative
    from .models import logistic_regression as logistic_regression
    from .models import matrix_factorization as matrix_factorization
    from .models import topic_model as topic_model
    from .networks import convolutional_network as convolutional_network
    from .networks import transformer_decoder as transformer_decoder

    # Data.
    from .archives import DataError as DataError
    from .corpora import Documents as Documents, read_documents as read_documents, shortened as shortened
    from .corpora import Ratings as Ratings, most_active as most_active, read_ratings as read_ratings
    from .corpora import Table as Table, read_table as read_table

if TYPE_CHECKING:  # for the other packages of this project
    from .networks import By as By
    from .protocol import State as State, rows_of as rows_of

__getattr__, __dir__, __all__ = facade(__name__)
