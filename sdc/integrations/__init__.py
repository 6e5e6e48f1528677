"""The tools in training loops and displays of other packages, none of which is a requirement.

- `tunix`: a guard in Tunix's trainers
- `scalars`: results as scalars, for the writers that a loop has
- `tensorboard`: one such writer
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    from .scalars import ScalarWriter as ScalarWriter, scalars_of as scalars_of, write_scalars as write_scalars
    from .tensorboard import TensorBoardWriter as TensorBoardWriter
    from .tunix import guard_trainer as guard_trainer

__getattr__, __dir__, __all__ = facade(__name__)
