"""Is this environment fit for bitwise comparison? The same operations again, in other processes, caches and orders.

diagnosis        all checks, and the verdict
operations       what is run
laboratory       child processes that measure, each in an environment of its own; `child` is their main program
causes           the settings that explain a difference
surroundings     what can be seen without running anything
host_comparison  the same on another host
results          what the doctor writes
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .diagnosis import MOST_SECONDS as MOST_SECONDS, examine as examine
    from .results import Examined as Examined, read_examined as read_examined
    from .host_comparison import check_alike as check_alike

__getattr__, __dir__, __all__ = facade(__name__, public=False)
