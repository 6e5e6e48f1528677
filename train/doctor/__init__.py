"""Is this environment fit for bitwise comparison? The same operations again, in other processes, caches and orders.

diagnosis        all checks, what explains a difference, the same on another host, and the verdict
operations       what is run
laboratory       child processes that measure, each in an environment of its own
surroundings     what can be seen without running anything
results          what the doctor writes
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .diagnosis import Examination as Examination, examine as examine
    from .results import Examined as Examined

__getattr__, __dir__, __all__ = facade(__name__, public=False)
