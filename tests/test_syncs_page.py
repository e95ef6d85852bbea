"""The page: well formed, safe against what a source line holds, and working in a browser."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the page's words come from the table, which needs rich")

from syncfree_ext.syncs import Report, page
from syncs_samples import NASTY, random_report

VOID = {"meta", "br", "rect"}


@pytest.fixture
def draw(rng: torch.Generator) -> random.Random:
    return random.Random(int(torch.randint(2**31, (), generator=rng)))


class Nesting(HTMLParser):
    """Checks that what opens closes, and collects tags and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(text: str) -> Nesting:
    parser = Nesting()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def test_well_formed_and_complete(draw: random.Random, tmp_path: Path) -> None:
    report = random_report(draw)
    text = report.to_html(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == text
    page_ = parsed(text)
    assert not re.search(r"<!-- [A-Z]+ -->", text)
    for row in report.rows:
        assert f"{row.idle_ms:.3f}" in page_.text
        assert row.where in page_.text
        assert row.advice in page_.text
    assert page_.tags.count("figure") == len(report.timelines)


def test_nothing_of_a_source_line_is_run(draw: random.Random) -> None:
    text = random_report(draw).to_html()
    assert parsed(text).tags.count("script") == 1
    assert NASTY not in text


def test_nothing_is_fetched(draw: random.Random) -> None:
    page_ = parsed(random_report(draw).to_html())
    assert not [value for name, value in page_.attributes if name in ("src", "href", "srcset")]
    assert "url(" not in page.files("syncfree_ext.syncs").joinpath("page.html").read_text(encoding="utf-8")


def test_empty_reports() -> None:
    assert "Nothing was measured." in parsed(Report().to_html()).text
    assert "No line made the host wait." in parsed(Report(steps=3, step_ms=1.0).to_html()).text


def test_every_kind_has_a_colour() -> None:
    from syncfree_ext.syncs import Kind, table

    style = page.files("syncfree_ext.syncs").joinpath("page.html").read_text(encoding="utf-8")
    for kind in Kind:
        name = str(kind).replace(" ", "-")
        assert style.count(f"--{name}: #") == 2  # light and dark
        assert f".{name} {{" in style
        assert str(kind) in table.COLOURS


# In a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on the PATH: the page is not tried in a browser")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


def shown(browser: Any, text: str, **options: Any) -> tuple[Any, list[str]]:
    """A page with the text, and the errors of its scripts and its requests."""
    tab = browser.new_page(**options)
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.on("dialog", lambda dialog: (problems.append("dialog"), dialog.dismiss()))
    tab.on("request", lambda request: problems.append(request.url) if request.url != "about:blank" else None)
    tab.set_content(text)
    return tab, problems


def test_rows_open_and_light_their_waits(browser: Any, draw: random.Random) -> None:
    report = random_report(draw)
    tab, problems = shown(browser, report.to_html())
    bodies = tab.locator("tbody[data-row]")
    assert bodies.count() == len(report.rows)
    assert [tab.locator("tbody.open").count(), tab.locator(".more:visible").count()] == [3, 3]
    last = bodies.nth(len(report.rows) - 1)
    assert not last.locator(".more").is_visible()
    last.locator("tr").first.click()
    assert last.locator(".advice").inner_text() == report.rows[-1].advice
    last.focus()
    tab.keyboard.press("Enter")
    assert last.get_attribute("aria-expanded") == "false"
    last.locator("tr").first.hover()
    count = sum(index == len(report.rows) - 1 for line in report.timelines for *_, index in line.waits)
    assert tab.locator("rect.wait.lit").count() == count
    assert problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380])
def test_contrast_and_width(browser: Any, draw: random.Random, scheme: str, width: int) -> None:
    """Text is legible in light and dark (WCAG AA, 4.5 to 1), and the page itself never scrolls sideways."""
    tab, problems = shown(
        browser, random_report(draw).to_html(), color_scheme=scheme, viewport={"width": width, "height": 800}
    )
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    ratios = tab.evaluate(
        """() => {
          const light = (rgb) => rgb.match(/[\\d.]+/g).slice(0, 3).map(Number).map((c) => c / 255)
            .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
          const back = (e) => {
            for (; e; e = e.parentElement) {
              const color = getComputedStyle(e).backgroundColor;
              if (!/rgba\\(.*, 0\\)/.test(color)) return color;
            }
          };
          return "h1,dt,dd,th,.tag,.line code,pre span,pre i,pre .hit,.advice,.about,li".split(",").flatMap((s) =>
             [...document.querySelectorAll(s)].map((e) => {
              const [a, b] = [light(getComputedStyle(e).color), light(back(e))];
              return [s, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
            }));
        }"""
    )
    assert len(ratios) > 30
    assert [pair for pair in ratios if pair[1] < 4.5] == []
    assert problems == []
