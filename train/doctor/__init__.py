"""Checks whether an environment is suitable for bitwise comparison, by repeating operations in other processes, with
other caches and in other device orders.

diagnosis        all checks, explanations of differences, comparison with another host, and the verdict
operations       the operations that are run
laboratory       child processes that run them, each in its own environment
surroundings     checks that run no operation
results          the format of the results
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .diagnosis import Examination as Examination, examine as examine
    from .results import Examined as Examined

__getattr__, __dir__, __all__ = facade(__name__, public=False)
