"""The clients' own scores in a real Chromium: the chart, the table's column, and neither."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from fedglad.report.figures import payload
from fedglad.report.page import write as write_page

from .browser import opened, started
from .made import changed, read, record, write

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with started() as found:
        yield found


def own(t: int) -> dict[str, Any]:
    figures = {"mean": 0.5 + t / 10, "worst_decile": 0.25 + t / 20, "std": 0.125}
    return {"score": "accuracy", "count": 2, **figures}


def test_the_panel_and_the_column(browser: Browser, tmp_path: Path):
    records = [record(t, **({} if t % 2 else {"client_scores": own(t)})) for t in range(5)]
    run = write(tmp_path / "run", records, config=changed(rounds=5), finish=True)
    line = {"round": 4, "ids": [0, 1], "scores": [0.875, 0.25]}
    (run / "client_scores.jsonl").write_text(json.dumps(line) + "\n")
    write_page(payload([read(run)]), tmp_path / "report.html")
    for width in (390, 1280):
        with opened(browser, tmp_path / "report.html", width=width) as seen:
            section = seen.page.locator("#own-section")
            expect(section).to_be_visible()
            expect(section.locator("h2")).to_have_text("Clients’ own scores")
            assert seen.points("own", "mean") == [[1, 50], [3, 70], [5, 90]]
            assert seen.points("own", "worst tenth") == [[1, 25], [3, 35], [5, 45]]
            assert seen.points("own", "band") == [[1, 37.5, 62.5], [3, 57.5, 82.5], [5, 77.5, 100]]
            expect(section.locator(".keys")).to_contain_text("worst tenth")
            seen.hover("own", 3)
            expect(seen.page.locator("#panel")).to_contain_text("Clients’ own, worst tenth35.0 %")
            expect(seen.page.locator("#tip")).to_contain_text("Clients’ own, mean70.0 %")
            heads = [text.strip() for text in seen.page.locator("#clients th").all_inner_texts()]
            cells = f"#clients tbody td:nth-child({heads.index('Own score') + 1})"
            seen.page.get_by_role("button", name="Own score", exact=True).click()
            assert seen.page.locator(cells).all_inner_texts() == ["25.0 %", "87.5 %"]
            assert seen.overflow() == 0


def test_a_run_without_them_has_no_panel(browser: Browser, tmp_path: Path):
    run = write(tmp_path / "run", [record(0)])
    write_page(payload([read(run)]), tmp_path / "report.html")
    with opened(browser, tmp_path / "report.html") as seen:
        expect(seen.page.locator("#own-section")).to_be_hidden()
        assert "Own score" not in seen.page.locator("#clients th").all_inner_texts()
