"""Findings of studies, next to published values: tables, figures and claims from the measurements of `sdc.train`."""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:
    from ..report import Chart as Chart, Check as Check, Findings as Findings, Line as Line, Table as Table
    from ..report import summarize_findings as summarize_findings
    from .records import findings_of as findings_of, write_estimate as write_estimate, write_study as write_study
    from .products import summarize_products as summarize_products

if TYPE_CHECKING:  # for the other packages of this project
    from .estimates import size as size
    from .records import conclude_study as conclude_study

__getattr__, __dir__, __all__ = facade(__name__)
