"""Renders reports as HTML (a single page without images or external links, and legible without scripts) and as
Markdown."""

import base64
import hashlib
import importlib.resources
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from sdc._lazy import missing, remedy
from sdc.records import Record, RecordError, write_text

from .sections import Banner, Facts, Figure, Items, Part, Report, Section, Table, Text, cell


def to_html(report: Report) -> str:
    """Renders the report as one HTML page; all text is escaped."""
    if missing("report"):
        raise ModuleNotFoundError(f"a page {remedy('report')}")
    import jinja2
    from markupsafe import Markup

    from .canvas import svg

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    numbers = itertools.count(1)  # all figures are on one page, where ids must be unique
    environment.filters["drawing"] = lambda figure: Markup(svg(figure, f"figure{next(numbers)}"))
    environment.filters["kind"] = lambda part: type(part).__name__
    environment.filters["cell"] = cell
    environment.filters["sentence"] = sentence
    style = Markup(_read("style.css"))  # our own file, not user input
    script = Markup(_read("tables.js")) if report.interactive else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()  # the browser runs no other script
    page = environment.get_template("page.html.jinja")
    return page.render(report=report, style=style, script=script, script_hash=f"sha256-{digest}").lstrip()


def to_markdown(report: Report) -> str:
    """Renders the report as Markdown, without the figures."""
    banner, title = report.banner, escape(report.title)
    parts = [f"# {title}" + (f": {escape(banner.label)}" if banner else "")]
    if banner is not None:
        parts += _lines(Banner(None, "", banner.sentence, banner.simulated))
    parts += [line for section in report.sections for line in _lines(section)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _lines(part: Part) -> Iterator[str]:
    if isinstance(part, Section):
        inside = [line for each in part.parts for line in _lines(each)]
        if inside and part.heading and part.style not in ("folded", "open"):
            yield f"## {escape(str(part.heading))}"
        yield from inside
    elif isinstance(part, Table):
        lines = [f"| {' | '.join(escape(cell(value)) for value in row)} |" for row in (part.header, *part.rows)]
        lines.insert(1, f"| {' | '.join(['---', *['---:'] * (len(part.header) - 1)])} |")
        yield "\n".join([f"**{escape(part.caption)}**", "", *lines, *(["", escape(part.note)] if part.note else [])])
    elif isinstance(part, Banner):
        yield f"**{escape(f'{part.label} {sentence(part.sentence)}')}**"
        if part.simulated:
            yield f"> **SIMULATED FAULTS**: {escape(part.simulated)}"
    elif isinstance(part, Facts):
        yield "\n".join(f"- **{escape(name)}**: {escape('. '.join(rest))}" for name, *rest in part.entries)
    elif isinstance(part, Items):
        bullets = (f"{n}." for n in itertools.count(1)) if part.numbered else itertools.repeat("-")
        texts = ([escape(text) for text in item] for item in part.items)
        yield "\n".join(
            f"{bullet} " + (f"**{text[0]}**: {text[1]}" if len(text) > 1 else text[0])
            for bullet, text in zip(bullets, texts, strict=False)
        )
    elif isinstance(part, Text) and part.style == "code":
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", part.text)), default=0))
        yield f"{fence}\n{part.text}\n{fence}"
    elif isinstance(part, Text):
        yield ("> " if part.style == "note" else "") + escape(f"{part.lead} {part.text}")
    else:
        assert isinstance(part, Figure)


def escape(text: str) -> str:
    """Escapes text for Markdown and joins its lines."""
    return re.sub(r"([\\`*_\[\]<>|&~#$])", r"\\\1", " ".join(text.split()))


def sentence(reason: str) -> str:
    """Formats a reason as a sentence, with a capital letter and a period."""
    return f"{reason[:1].upper()}{reason[1:]}{'' if reason.endswith('.') else '.'}"


def write_page(report: Report, path: Path, *, markdown: bool = True) -> Path:
    """Writes a report atomically as HTML to a path, and as Markdown to a file beside it; returns the path. Raises
    RecordError if that fails, or if another user may have planted the path."""
    Record.check_owner(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if markdown:
            write_text(path.with_suffix(".md"), to_markdown(report))
        write_text(path, to_html(report))
    except OSError as error:
        raise RecordError(
            f"cannot write a report into {path.parent}: {error.strerror}; free some space or make the folder writable"
        ) from error
    return path


def _read(name: str) -> str:
    return importlib.resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")
