"""Pages of the documentation as `make docs` builds them."""

import runpy
from pathlib import Path
from typing import Any

import msgspec

DOCS = Path(__file__).parents[1] / "docs"
HEAD = "| field | meaning |\n|---|---|\n"


def built(page: str) -> str:
    """Returns a page as Sphinx parses it, after all handlers that docs/conf.py connects to the event `source-read`."""
    handlers: list[tuple[str, Any]] = []

    class App:
        def connect(self, event: str, handler: Any) -> None:
            handlers.append((event, handler))

    app, source = App(), [(DOCS / f"{page}.md").read_text(encoding="utf-8")]
    runpy.run_path(str(DOCS / "conf.py"))["setup"](app)
    for event, handler in handlers:
        assert event == "source-read"
        handler(app, page, source)
    return source[0]


def check_table(page: str, type: Any) -> None:
    """Asserts that a page's source has the type's marker once, and the built page a table row for each own field."""
    marker = f"<!-- fields: {type.__name__} -->"
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert text.count(marker) == 1, f"docs/{page}.md: expected one line {marker}"
    above = text[: text.index(marker)]
    before = above.count("<!-- fields:") + above.count(HEAD)  # tables written by hand may have the same head
    tables = built(page).split(HEAD)[1:]
    lines = tables[before].split("\n\n")[0].splitlines()
    found = {name.strip(" `"): meaning.strip() for name, meaning in (line.split("|", 2)[1:] for line in lines)}
    names = {field.encode_name for field in msgspec.structs.fields(type) if field.name in type.__annotations__}
    assert found.keys() - {"format"} == names
    assert all(meaning.rstrip("|").strip() for meaning in found.values())
