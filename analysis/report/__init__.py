"""Reports for pages and terminals, and their renderers. This package depends on no other part of `analysis`.

sections   a report, its sections, and the tables, figures and texts in them
page       the page of one record: headline, answers, actions, figures, tables, settings, definitions; also the findings
           of a study as data, and the page of a study
canvas     figures as SVG
render     HTML and Markdown
"""

from typing import TYPE_CHECKING

from sdc._lazy import facade

if TYPE_CHECKING:  # for the other packages of this project
    from .canvas import COLOURS as COLOURS, DASHES as DASHES, FULL as FULL, HEAT as HEAT, INK as INK
    from .canvas import MARKERS as MARKERS, PAPER as PAPER, ZERO as ZERO
    from .canvas import Drawing as Drawing, line_figure as line_figure, powers as powers, short as short
    from .canvas import whole_numbers as whole_numbers
    from .page import Check as Check, Finding as Finding, Findings as Findings, StudyFindings as StudyFindings
    from .page import Conclusion as Conclusion, IndexEntry as IndexEntry
    from .page import headline_of_study as headline_of_study
    from .page import study_page as study_page, summarize_findings as summarize_findings
    from .page import Action as Action, Definition as Definition, Headline as Headline, record_page as record_page
    from .render import sentence as sentence, to_html as to_html, to_markdown as to_markdown, write_page as write_page
    from .sections import Banner as Banner, Chart as Chart, Facts as Facts, Figure as Figure, Items as Items
    from .sections import (
        LeftOut as LeftOut,
        Line as Line,
        Link as Link,
        NOT_MEASURED as NOT_MEASURED,
        Part as Part,
    )
    from .sections import Report as Report, Section as Section, Table as Table, Text as Text, flat as flat
    from .sections import cell as cell, filled as filled, marked as marked, moment as moment, show as show

__getattr__, __dir__, __all__ = facade(__name__, public=False)
