"""Is this environment fit for bitwise comparison? The same operations again, in other processes, caches and orders.

Everything is measured in child processes (`child`, asked by `children`), so that each has an environment of its own.
`examine` puts the questions, `narrowing` finds the setting that makes the difference, `layout` has what comes of it.
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .examining import MOST_SECONDS as MOST_SECONDS, examine as examine
    from .layout import Examined as Examined, read_examined as read_examined
    from .pairing import check_alike as check_alike

__getattr__, __dir__, __all__ = facade(__name__, public=False)
