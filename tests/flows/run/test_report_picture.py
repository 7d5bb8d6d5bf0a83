"""The report page of a real run in a real Chromium: on a phone and on a desk, in light and in dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.r1 import R1

pytest.importorskip("playwright.sync_api", reason="playwright is missing: make install")

from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.pages import CHROMIUM, QUIET

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium"),
]

PHONE, DESK = 390, 1280
OUTSIDE = """() => [...document.querySelectorAll('body *')].filter(
  e => !e.closest('.scroll') && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1
).map(e => e.outerHTML.slice(0, 80))"""
SCROLLING = """() => [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)
  .map(e => e.getAttribute('aria-label'))"""
OVERLAPPING = """() => [...document.querySelectorAll('svg.picture')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
    p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 4 && q.top < p.bottom - 4).map(([b]) => [a, b]));
})"""
ESCAPING = """() => [...document.querySelectorAll('svg.picture')].filter(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('polyline, text')].some(e => { const b = e.getBoundingClientRect();
    return b.left < frame.left - 2 || b.right > frame.right + 2 || b.top < frame.top - 2 || b.bottom > frame.bottom + 2;
  });
}).map(svg => svg.textContent.slice(0, 60))"""
COLOURS = """() => ['body', '.soft', '.ran', 'a'].map(s => getComputedStyle(document.querySelector(s)).color)
  .concat(getComputedStyle(document.body).backgroundColor)"""


@pytest.fixture(scope="module")
def report(r1: R1, first_run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("report") / "page.html"
    r1("report", first_run["run_id"], "--out", str(page))
    return page


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(params=[(PHONE, "light"), (PHONE, "dark"), (DESK, "light"), (DESK, "dark")], ids=str)
def seen(request: pytest.FixtureRequest, chromium: Browser, report: Path) -> Iterator[tuple[Page, int, str]]:
    """The page, open; nothing may be said on the console."""
    width, scheme = request.param
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda asked: said.append(asked.url) if not asked.url.startswith("file:") else None)
    page.goto(report.as_uri())
    yield page, width, scheme
    page.close()
    assert said == []


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as WCAG has it."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_nothing_is_cut_off_and_everything_can_be_read(seen: tuple[Page, int, str]) -> None:
    page, width, scheme = seen
    whole, shown = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert whole <= shown == width
    assert page.evaluate(OUTSIDE) == []
    if width == DESK:
        assert page.evaluate(SCROLLING) == []
    assert page.evaluate(OVERLAPPING) == [] and page.evaluate(ESCAPING) == []
    *inks, paper = (luminance(colour) for colour in page.evaluate(COLOURS))
    assert paper < 0.05 if scheme == "dark" else paper > 0.9
    for ink in inks:
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5


def test_columns_differ_and_curves_are_lines(seen: tuple[Page, int, str]) -> None:
    page, _, _ = seen
    for head in page.locator("thead").all():
        titles = head.locator("th").all_text_contents()
        assert len(set(titles)) == len(titles) > 1, titles
    for table in page.locator(".paper").all():
        titles = table.locator("tbody th").all_text_contents()
        assert len(set(titles)) == len(titles), titles
    learning = page.locator("#learning")
    assert learning.locator("svg.picture").count() == learning.locator("figure").count() > 8
    assert learning.locator("svg.picture circle").count() == 0
    assert "final" not in learning.inner_text()
    for title in ("Reward", "Reward, accuracy", "Reward, helpful", "KL to the reference, nats"):
        assert learning.get_by_role("heading", name=title, exact=True).count() >= 1, title
    assert "its 95% bootstrap interval" in page.locator("#checkpoints").inner_text()
