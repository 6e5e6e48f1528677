"""The standing of a host: whether its devices may be used, by what burn-ins, pairs and people have said about them.

ledger      the history of a host's devices and what follows from it, in a SQLite file
assessment  the standing that follows from a ledger, or from files of results
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .assessment import standing_here as standing_here, standing_of as standing_of
    from .ledger import (
        Announcement as Announcement, Ledger as Ledger, LedgerEntry as LedgerEntry, ledger_path as ledger_path,
    )  # fmt: skip

__getattr__, __dir__, __all__ = facade(__name__, public=False)
