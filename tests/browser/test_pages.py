"""Every kind of page in a browser without script and network, on a desktop and a phone, on light and dark paper."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .pages import write_pages

pytestmark = pytest.mark.browser
LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")
SCREENS = {"desktop": (1280, 800), "phone": (360, 800)}
KINDS = (
    "clean", "corrupt", "simulated", "deep", "three twins", "free", "products", "training", "empty", "under way",
    "campaign", "lossy", "paft", "trace", "diff", "diff clean", "side by side", "burn-in", "fleet", "index",
)  # fmt: skip
SEVERAL = ("side by side", "fleet", "index")
"""Pages of more than one run: the first screen has the sentences."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A container has no namespaces to build the sandbox of; the pages are our own.
        opened = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])
        yield opened
        opened.close()


def test_a_page_of_every_kind_is_looked_at(pages: dict[str, Path]) -> None:
    assert set(pages) == set(KINDS)


@pytest.mark.parametrize("paper", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_legible(
    pages: dict[str, Path], browser: Any, kind: str, screen: str, paper: str, tmp_path: Path
) -> None:
    width, height = SCREENS[screen]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=paper, java_script_enabled=False, offline=True
    )
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.goto(pages[kind].as_uri())
    if shots := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(shots) / f"{kind}-{screen}-{paper}.png", full_page=True)
    found = page.evaluate(LOOK)
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    context.close()
    assert asked == [pages[kind].as_uri()]
    for fault in ("faint", "cut", "small", "levels"):
        assert found[fault] == [], fault
    assert found["overflow"] == 0
    if screen == "desktop" and kind != "side by side":  # where each page has half of the width
        assert found["scrolled"] == []
    names = [node["name"]["value"] for node in tree if node.get("role", {}).get("value") in ("image", "img")]
    assert len([name for name in names if name]) == found["figures"]
    assert {"main", "banner"} <= {node.get("role", {}).get("value") for node in tree}
    first = ["sentence"] if kind in SEVERAL else ["sentence", "answers"]
    if screen == "desktop" and kind not in SEVERAL:
        first += ["actions", *(["figure"] if found["bottoms"]["figure"] else [])]
    assert {name: found["bottoms"][name] for name in first if not 0 < found["bottoms"][name] <= height} == {}
