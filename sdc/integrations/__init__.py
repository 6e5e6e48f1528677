"""The tools in training loops and displays of other packages, none of which is a requirement.

- `loops`: guards in the training loops of Tunix and MaxText
- `scalars`: results as scalars, for the writers that a loop has
- `tensorboard`: one such writer
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    from .loops import guard_maxtext as guard_maxtext, guard_trainer as guard_trainer
    from .scalars import ScalarWriter as ScalarWriter, scalars_of as scalars_of, write_scalars as write_scalars
    from .tensorboard import TensorBoardWriter as TensorBoardWriter

__getattr__, __dir__, __all__ = facade(__name__)
