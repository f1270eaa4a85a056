"""The averaged model in a real Chromium: its line, its words, the tables, several runs, live."""

import json
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, expect

from fedglad.report.figures import payload
from fedglad.report.page import write as write_page
from fedglad.report.watch import serve

from .browser import Opened, opened, started
from .made import changed, read, record, write

pytestmark = pytest.mark.slow

EMA = {"name": "ema", "beta": 0.9, "test": True}
SENTENCE = (
    "Averaged: a running mean of the models that the server has had, the last 10 or so count most. "
    "It is what you may deploy; clients train on the newest model."
)


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with started() as found:
        yield found


def rounds_of(*, averaged: bool = True, seed: int = 1) -> list[dict[str, Any]]:
    """Accuracy goes up and down between .5 and .7; the average is .75 from the third round on."""
    told: list[dict[str, Any]] = []
    for t in range(12):
        more = {"averaged_accuracy": min(0.75, 0.55 + 0.1 * t), "averaged_loss": 0.4}
        accuracy = 0.5 + 0.2 * (t % 2) + 0.01 * seed
        told.append(record(t, test_accuracy=accuracy, **(more if averaged else {})))
    return told


def run_of(folder: Path, *, averaged: bool = True, seed: int = 1) -> Path:
    config = changed(rounds=12, seed=seed)
    config |= {"average": EMA if averaged else {"name": "none"}}
    return write(folder, rounds_of(averaged=averaged, seed=seed), config=config, finish=True)


def page_of(tmp_path: Path, *runs: Path) -> Path:
    write_page(payload([read(run) for run in runs]), tmp_path / "report.html")
    return tmp_path / "report.html"


def switch(seen: Opened) -> Locator:
    return seen.page.locator("#metric label", has_text="Averaged accuracy")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_second_line_in_the_same_colour(browser: Browser, tmp_path: Path, theme: str):
    with opened(browser, page_of(tmp_path, run_of(tmp_path / "run")), theme=theme) as seen:
        assert [y for _, y in seen.points("rounds", "averaged")][:4] == [55, 65, 75, 75]
        assert len(seen.points("rounds", "accuracy")) == 12
        looks = seen.page.evaluate(
            "fedgladReport.chart('rounds').getOption().series"
            ".filter((one) => ['accuracy', 'averaged'].includes(one.name))"
            ".map(({ lineStyle }) => [lineStyle.color, String(lineStyle.type)])"
        )
        assert looks[0][0] == looks[1][0]  # its colour
        assert looks[0][1] != looks[1][1] == "2,3"  # its dots
        expect(seen.page.locator("#keys")).to_contain_text("accuracy of the averaged model")
        expect(seen.page.locator("#average")).to_have_text(SENTENCE)
        tile = seen.page.locator(".tile", has_text="Averaged model")
        expect(tile.locator(".value")).to_have_text("75.0 %")
        # the last ten: .51 and .71 five times each, .61; the average is .75 in all of them
        expect(tile.locator(".detail")).to_have_text(
            "final 75.0 %; +14.00 points over the newest model"
        )
        seen.page.locator("#table summary").click()
        heads = seen.page.locator("#table th").all_inner_texts()
        assert heads[2:4] == ["Accuracy", "Averaged"]
        cells = seen.page.locator("#table tbody tr").nth(1).locator("td").all_inner_texts()
        assert cells[2:4] == ["71.0 %", "65.0 %"]
        seen.hover("rounds", 2)
        expect(seen.page.locator("#tip")).to_contain_text("Accuracy, averaged")
        expect(seen.page.locator("#panel")).to_contain_text("Test loss, averaged")
        assert seen.overflow() <= 0


def test_a_run_without_an_average_shows_none_of_it(browser: Browser, tmp_path: Path):
    with opened(browser, page_of(tmp_path, run_of(tmp_path / "run", averaged=False))) as seen:
        expect(seen.page.locator("#average")).to_be_hidden()
        assert "veraged" not in seen.page.locator("main").inner_text()


def test_runs_side_by_side_can_be_compared_by_it(browser: Browser, tmp_path: Path):
    runs = [run_of(tmp_path / f"ema-{seed}", seed=seed) for seed in (1, 2, 3)]
    plain = run_of(tmp_path / "plain", averaged=False)
    with opened(browser, page_of(tmp_path, *runs, plain), width=400) as seen:
        assert seen.overflow() <= 0
        row = seen.page.locator("#results tr", has_text="average.name=ema · averaged")
        expect(row).to_have_count(1)
        expect(row.locator(".score")).to_have_text("75.00 ± 0.00")
        # seed k: .75 − (.60 + .01 k), that is +14, +13, +12 points; 13 ± 4.3027/√3 = 13 ± 2.484
        seen.page.locator("#results summary").click()
        expect(seen.page.locator("#results li", has_text="average.name=ema   +13.00")).to_have_text(
            "average.name=ema   +13.00 [+10.52, +15.48]   by seed 1: +14.00,  2: +13.00,  3: +12.00"
        )
        switch(seen).click()
        expect(seen.page.locator("#compare canvas").first).to_be_visible()
        label = seen.page.evaluate("fedgladReport.payload.groups.map(({ label }) => label)")
        assert "average.name=ema" in label
        assert [y for _, y in seen.points("compare", "average.name=ema")][:3] == [55, 65, 75]
    with opened(browser, page_of(tmp_path, plain, run_of(tmp_path / "b", seed=2))) as seen:
        expect(switch(seen)).to_be_visible()
    none = run_of(tmp_path / "c", averaged=False, seed=3)
    with opened(browser, page_of(tmp_path, plain, none)) as seen:
        expect(switch(seen)).to_be_hidden()


def test_a_live_page_shows_it_as_soon_as_it_is_tested(browser: Browser, tmp_path: Path):
    config = changed(rounds=12) | {"average": EMA}
    run = write(tmp_path / "run", [], config=config)
    with serve(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with opened(browser, server.url) as seen:
                expect(seen.page.locator("#average")).to_be_hidden()
                with (run / "rounds.jsonl").open("a") as file:
                    file.writelines(json.dumps(one) + "\n" for one in rounds_of()[:5])
                expect(seen.page.locator("#average")).to_have_text(SENTENCE, timeout=20_000)
                assert len(seen.points("rounds", "averaged")) == 5
        finally:
            server.shutdown()
            thread.join()
