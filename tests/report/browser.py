"""A real Chromium for the report's page, which writes down what went wrong."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """What FEDGLAD_CHROMIUM names, or else the first of NAMES on the PATH."""
    return os.environ.get("FEDGLAD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def started() -> Generator[Browser]:
    """A browser of the machine's own: Playwright downloads none."""
    path = chromium()
    if path is None:
        pytest.skip(
            "no Chromium: install it (Debian: apt-get install chromium) or name it in "
            "FEDGLAD_CHROMIUM"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Opened:
    """A page, with the requests that it made and the complaints of its console."""

    page: Page
    requests: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])

    def points(self, chart: str, series: str) -> list[Any]:
        """The data of a series, as ECharts itself has them."""
        return self.page.evaluate(
            "([chart, name]) => fedgladReport.chart(chart).getOption().series"
            ".filter((one) => one.name === name)[0].data",
            [chart, series],
        )

    def hover(self, chart: str, round: int, height: float = 0.2) -> None:
        """Moves the mouse over a round, at this part of the chart's height."""
        box = self.page.locator(f"#{chart} canvas").first
        box.scroll_into_view_if_needed()
        where = box.bounding_box()
        assert where is not None
        x = self.page.evaluate(
            "([chart, x]) => fedgladReport.chart(chart).convertToPixel({xAxisIndex: 0}, x)",
            [chart, round],
        )
        self.page.mouse.move(where["x"] + x + 1, where["y"] + height * where["height"])
        self.page.mouse.move(where["x"] + x, where["y"] + height * where["height"])

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )


@contextmanager
def opened(
    browser: Browser, address: str | Path, width: int = 1280, theme: str = "light"
) -> Generator[Opened]:
    """A page of this width; at the end it must have logged nothing and asked for nothing else."""
    scheme = "dark" if theme == "dark" else "light"
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    seen = Opened(page)
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on(
        "console",
        lambda said: seen.errors.append(said.text) if said.type in ("error", "warning") else None,
    )
    url = address.resolve().as_uri() if isinstance(address, Path) else address
    try:
        page.goto(url)
        yield seen
        assert seen.errors == []
        if isinstance(address, Path):
            assert seen.requests == [url]
    finally:
        context.close()
