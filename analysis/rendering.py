"""From the parts of a report to HTML, one page without scripts, images or links to elsewhere, and to Markdown."""

import importlib.resources
import re
from typing import Any

import jinja2
from markupsafe import Markup

from .page import Report
from .tables import escape

STYLE = "style.css"


def render(template: str, **values: Any) -> str:
    """A page from one of the templates; every text in it is shown literally."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["drawing"] = Markup  # matplotlib has escaped the text within its drawings
    page = environment.get_template(template).render(style=_read(STYLE), **values)
    return page.lstrip()


def to_html(report: Report) -> str:
    """The report as one HTML page."""
    return render("report.html.jinja", report=report)


def to_markdown(report: Report) -> str:
    """The report as Markdown: everything but the figures."""
    parts = [f"# {escape(report.title)}: {escape(report.label)}", f"**{escape(report.sentence)}**"]
    if report.simulated:
        parts.append(f"> **SIMULATED FAULTS**: {escape(report.simulated)}")
    answers = report.headline.answers
    parts.append("\n".join(f"- **{escape(question)}**: {escape(answer)}" for question, answer in answers))
    parts.append("## What to do")
    listed = enumerate(report.headline.actions, start=1)
    parts.append("\n".join(f"{n}. **{escape(action.what)}**: {escape(action.how)}" for n, action in listed))
    parts += [f"> {escape(note)}" for note in report.notes]
    parts += ["## Measured", *(table.markdown() for table in report.measured)]
    if report.left_out:
        parts += [
            "## Left out",
            "\n".join(f"- {escape(item.title)}: {escape(item.reason)}" for item in report.left_out),
        ]
    parts += ["## How it was run", "\n".join(f"- {escape(name)}: {escape(value)}" for name, value in report.facts)]
    parts += ["\n".join(f"- {escape(fault)}" for fault in report.faults)]
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", report.command)), default=0))
    parts += ["## How to reproduce", f"{fence}\n{report.command}\n{fence}"]
    parts += [table.markdown() for table in report.settings]
    parts += ["## Definitions", escape(report.definitions_source), escape(report.bursts)]
    parts.append(
        "\n".join(
            f"- **{escape(item.name)}** {item.equation}: {escape(item.formula)}. {escape(item.text)}"
            for item in report.definitions
        )
    )
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _read(name: str) -> str:
    return importlib.resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")
