"""A score that is no percentage, in a real Chromium: its name, its numbers, the validation set."""

from collections.abc import Generator
from pathlib import Path

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


def run_of(folder: Path, seed: int = 1) -> Path:
    """The perplexity falls from 200 to 90, that of the validation set is 5 above it."""
    score = {"name": "perplexity", "higher": False}
    told = [
        record(
            t,
            test_accuracy=None,
            score=score,
            test_perplexity=200.0 - 10 * t,
            validation_perplexity=205.0 - 10 * t,
        )
        for t in range(12)
    ]
    return write(folder, told, config=changed(rounds=12, seed=seed))


def test_labels_and_numbers_follow_the_score(browser: Browser, tmp_path: Path):
    write_page(payload([read(run_of(tmp_path / "run"))]), tmp_path / "report.html")
    with opened(browser, tmp_path / "report.html") as seen:
        expected = [[t + 1, 200 - 10 * t] for t in range(12)]
        assert [point[:2] for point in seen.points("rounds", "perplexity")] == expected
        held_out = [[t + 1, 205 - 10 * t] for t in range(12)]
        assert [point[:2] for point in seen.points("rounds", "validation")] == held_out
        expect(seen.page.locator("#good-score")).to_have_text("perplexity falls")
        expect(seen.page.locator("#keys")).to_contain_text("validation perplexity, training loss")
        tile = seen.page.locator("#tiles li").first
        expect(tile).to_contain_text("Perplexity, last 10 rounds")
        expect(tile).to_contain_text("135")  # the mean of 180, 170 … 90
        seen.hover("rounds", 6)
        expect(seen.page.locator("#tip")).to_contain_text("Perplexity, validation")
        assert "%" not in tile.inner_text()


def test_several_runs_are_compared_by_it(browser: Browser, tmp_path: Path):
    runs = [read(run_of(tmp_path / str(seed), seed)) for seed in (1, 2)]
    write_page(payload(runs), tmp_path / "report.html")
    with opened(browser, tmp_path / "report.html") as seen:
        choices = seen.page.locator("#metric label:visible").all_inner_texts()
        assert choices[:3] == ["Perplexity", "Validation perplexity", "Test loss"]
