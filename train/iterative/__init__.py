"""Iterative-convergent training algorithms with a small common interface, and their data.

models     the interface, and six algorithms
corpora    documents, ratings and tables
images     small labeled images, and batches of images
archives   files, archives from a package index, and rows of numbers
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    # Training algorithms.
    from .models import Iterative as Iterative
    from .models import convolutional_network as convolutional_network, transformer_decoder as transformer_decoder
    from .models import logistic_regression as logistic_regression, topic_model as topic_model
    from .models import matrix_factorization as matrix_factorization

    # Data.
    from .. import DataError as DataError
    from .corpora import Documents as Documents, read_documents as read_documents, shortened as shortened
    from .corpora import Ratings as Ratings, most_active as most_active, read_ratings as read_ratings
    from .corpora import LabelledTable as LabelledTable, read_table as read_table

if TYPE_CHECKING:  # for the other packages of this project
    from .archives import Archive as Archive, fixed_order as fixed_order, read_member as read_member
    from .images import Images as Images, ImagesError as ImagesError
    from .images import image_batches as image_batches, read_images as read_images
    from .models import DECODER as DECODER, LENGTH as LENGTH, decoder_loss as decoder_loss
    from .models import By as By, State as State, patches as patches, pool as pool, pooled_pixels as pooled_pixels
    from .models import rows_of as rows_of

__getattr__, __dir__, __all__ = facade(__name__)
