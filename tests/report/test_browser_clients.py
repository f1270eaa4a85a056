"""The table of clients in a real Chromium: its order, lines of trust, hostile names, live."""

import json
import re
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, expect

from fedglad.analysis import clients
from fedglad.report.figures import payload
from fedglad.report.page import write as write_page
from fedglad.report.watch import serve

from .browser import Opened, opened, started
from .made import changed, read, record, write

pytestmark = pytest.mark.slow

ROUNDS = 6
HOSTILE = (
    "<script>document.hacked = 1</script>",
    "<img src=x onerror='document.hacked = 1'>",
    "\u202etxt.evil\u2069 \u05d0\u05d1",
    "n" * 300,
)


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with started() as found:
        yield found


def member(name: Any, trust: float | None, *flags: str, **more: Any) -> dict[str, Any]:
    one = {"id": name, "weight": 0.1, "loss": 1.0, "sq_norm": 1.0, **more}
    judged = {} if trust is None else {"trust": trust}
    return {**one, **judged, **({"flags": list(flags)} if flags else {})}


def rounds_of(many: int) -> list[dict[str, Any]]:
    """Client 3 is opposed in every round, 5 is boosted in half of them, 4 is rejected in one."""
    told: list[dict[str, Any]] = []
    for t in range(ROUNDS):
        cohort = [member(k, 0.9 + k / (20 * many), sq_norm=1 + k / many) for k in range(many)]
        cohort[3] = member(3, 0.3 - 0.04 * t, "opposed", loss=2.0)
        if t % 2:
            cohort[5] = member(5, 0.2, "boosted", "copied", sq_norm=100.0, clipped=0.1)
        if t == 2:
            cohort[4] = member(4, None, rejected="its norm is no number", sq_norm=None)
        told.append(record(t, clients=cohort))
    return told


def made(folder: Path, records: list[dict[str, Any]], page: str = "report.html") -> Path:
    run = write(folder / "run", records, config=changed(rounds=len(records)), finish=True)
    write_page(payload([read(run)]), folder / page)
    return folder / page


def column(seen: Opened, head: str) -> list[str]:
    """The texts of a column, by its head; the first line of each cell."""
    heads = [text.strip() for text in seen.page.locator("#clients th").all_inner_texts()]
    cells = seen.page.locator(f"#clients tbody td:nth-child({heads.index(head) + 1})")
    return [text.strip().partition("\n")[0] for text in cells.all_inner_texts()]


def head(seen: Opened, name: str) -> Locator:
    return seen.page.locator("#clients th").get_by_role("button", name=name, exact=True)


def test_the_worst_come_first_and_are_marked(browser: Browser, tmp_path: Path):
    records = rounds_of(12)
    with opened(browser, made(tmp_path, records)) as seen:
        assert column(seen, "Client") == [str(client.id) for client in clients(records)]
        assert column(seen, "Client")[:3] == ["3", "5", "4"]
        assert column(seen, "Flagged")[:3] == ["6 of 6", "3 of 6", "0 of 5"]
        assert column(seen, "Trust")[:2] == ["0.10", "0.20"]  # 0.3 − 5 · 0.04
        assert column(seen, "Mean trust")[0] == "0.20"
        assert column(seen, "Clipped")[:3] == ["0", "3", "0"]
        assert column(seen, "Rejected")[:3] == ["0", "0", "1"]
        assert column(seen, "Last reason")[:3] == ["", "", "its norm is no number"]
        assert set(column(seen, "Share")) == {"10.0 %"}
        rows = seen.page.locator("#clients tbody tr")
        assert [row.get_attribute("class") for row in rows.all()] == ["look"] * 2 + [None] * 10
        flags = rows.nth(1).locator(".doubt")
        assert flags.all_inner_texts() == ["boosted", "copied"]
        assert seen.page.locator("#clients th[aria-sort]").count() == 0
        expect(seen.page.locator("#clients .after")).to_have_text("12 clients, the worst first.")
        expect(seen.page.locator("#tiles")).to_contain_text("flagged often: 3, 5")


def test_a_line_shows_how_trust_went(browser: Browser, tmp_path: Path):
    with opened(browser, made(tmp_path, rounds_of(12))) as seen:
        lines = seen.page.locator("#clients tbody .spark")
        expect(lines).to_have_count(12)
        path = lines.first.locator(".line").get_attribute("d") or ""
        points = [tuple(map(float, pair.split())) for pair in re.split("[ML]", path)[1:]]
        assert len(points) == ROUNDS
        assert [x for x, _ in points] == sorted(x for x, _ in points)
        heights = [y for _, y in points]  # 0.3 down to 0.1, and down is larger
        assert heights == sorted(heights)
        assert heights[0] < heights[-1]
        assert lines.first.get_attribute("aria-label") == "Trust over 6 rounds, at last"
        assert lines.first.locator(".end.low").count() == 1
        assert lines.nth(5).locator(".end.low").count() == 0


def test_heads_sort_by_click_and_by_key(browser: Browser, tmp_path: Path):
    with opened(browser, made(tmp_path, rounds_of(12))) as seen:
        worst = column(seen, "Client")
        head(seen, "Norm").click()
        norms = [float(text) for text in column(seen, "Norm")]
        assert norms == sorted(norms, reverse=True)
        assert len(set(norms)) > 2
        sorted_by = seen.page.locator("#clients th[aria-sort]")
        expect(sorted_by).to_have_count(1)
        expect(sorted_by).to_have_attribute("aria-sort", "descending")
        expect(sorted_by).to_have_text("Norm")

        head(seen, "Trust").focus()
        for key, order, way in [("Enter", 1, "ascending"), ("Space", -1, "descending")]:
            seen.page.keyboard.press(key)
            expect(sorted_by).to_have_text("Trust")
            expect(sorted_by).to_have_attribute("aria-sort", way)
            trust = [float(text) for text in column(seen, "Trust")]
            assert trust == sorted(trust)[::order]
            expect(head(seen, "Trust")).to_be_focused()
        seen.page.keyboard.press("Enter")  # back to the worst first
        expect(sorted_by).to_have_count(0)
        assert column(seen, "Client") == worst

        seen.page.keyboard.press("Shift+Tab")
        expect(head(seen, "Client")).to_be_focused()
        seen.page.keyboard.press("Enter")
        assert column(seen, "Client") == [str(k) for k in range(12)]


def test_what_is_not_known_comes_last_in_both_directions(browser: Browser, tmp_path: Path):
    cohort = [member(k, None if k == 1 else 0.9 - k / 10, loss=None) for k in range(3)]
    with opened(browser, made(tmp_path, [record(0, clients=cohort)])) as seen:
        for expected in (["2", "0", "1"], ["0", "2", "1"]):
            head(seen, "Trust").click()
            assert column(seen, "Client") == expected
        assert column(seen, "Trust") == ["0.90", "0.70", "–"]
        assert column(seen, "Loss") == ["–"] * 3


def test_fifty_are_shown_until_all_are_asked_for(browser: Browser, tmp_path: Path):
    with opened(browser, made(tmp_path, rounds_of(120))) as seen:
        rows, more = seen.page.locator("#clients tbody tr"), seen.page.locator("#everybody")
        expect(rows).to_have_count(50)
        more.focus()
        seen.page.keyboard.press("Enter")
        expect(rows).to_have_count(120)
        expect(more).to_be_focused()
        expect(more).to_have_text("Show 50 only")
        head(seen, "Client").click()
        assert column(seen, "Client") == [str(k) for k in range(120)]
        more.click()
        assert column(seen, "Client") == [str(k) for k in range(50)]
        expect(more).to_have_text("Show all 120 clients")


def test_thousands_of_clients_are_quick_and_small(browser: Browser, tmp_path: Path):
    random = np.random.default_rng(3)
    told = []
    for t in range(20):  # 100,000 entries
        numbers = random.random((4, 5000)).round(5).tolist()
        cohort = [
            {"id": k, "weight": 0.0002, "loss": 1 + x, "sq_norm": 9 + y, "trust": z}
            | ({"flags": ["opposed"]} if f < 0.05 else {})
            for k, (x, y, z, f) in enumerate(zip(*numbers, strict=True))
        ]
        told.append(record(t, clients=cohort))
    path = made(tmp_path, told)
    empty = made(tmp_path / "empty", [record(0)])
    assert path.stat().st_size - empty.stat().st_size < 2_500_000  # of which 25,000 in the cohorts
    with opened(browser, path) as seen:
        expect(seen.page.locator("#clients tbody tr")).to_have_count(50)
        sort = "(button) => { const start = performance.now(); button.click(); %s }"
        taken = sort % "return performance.now() - start"
        assert head(seen, "Loss").evaluate(taken) < 1000
        assert seen.page.locator("#everybody").evaluate(taken) < 5000
        expect(seen.page.locator("#clients tbody tr")).to_have_count(5000)


def test_hostile_names_are_text(browser: Browser, tmp_path: Path):
    cohort = [member(name, 0.2, "opposed") for name in HOSTILE] + [member("ok", 1.0)]
    records = [record(t, clients=cohort) for t in range(2)]
    records[1]["clients"][0]["rejected"] = HOSTILE[1]
    for width in (390, 1280):
        with opened(browser, made(tmp_path, records), width=width) as seen:
            names = column(seen, "Client")
            assert set(HOSTILE[:2]) <= set(names)
            assert "�txt.evil� \u05d0\u05d1" in names  # nothing turns the text around
            assert "n" * 99 + "…" in names
            panel = seen.page.locator("#panel")
            for name in HOSTILE[:2]:
                expect(panel).to_contain_text(name)
            assert panel.locator(".doubt.opposed").count() == 4
            expect(seen.page.locator("#tiles")).to_contain_text(HOSTILE[0])
            assert seen.page.evaluate("document.hacked") is None
            assert seen.page.locator("main img, main script").count() == 0
            assert seen.overflow() == 0


def test_a_rounds_cohort_marks_flagged_clients(browser: Browser, tmp_path: Path):
    with opened(browser, made(tmp_path, rounds_of(12))) as seen:
        seen.hover("rounds", 2)
        panel = seen.page.locator("#panel")
        expect(panel.locator("h4")).to_have_text("Cohort: 12 clients, 2 flagged")
        assert panel.locator("th").all_inner_texts()[-1] == "Trust"
        marked = panel.locator("tbody tr", has=seen.page.locator(".doubt"))
        assert [row.locator("bdi").inner_text() for row in marked.all()] == ["3", "5"]
        assert marked.nth(1).locator(".doubt").all_inner_texts() == ["boosted", "copied"]
        assert marked.nth(0).locator("td").last.inner_text() == "0.26"
        expect(seen.page.locator("#tip")).to_contain_text("Flagged3, 5")


def test_without_trust_its_columns_are_left_out_and_it_is_said(browser: Browser, tmp_path: Path):
    with opened(browser, made(tmp_path, [record(0), record(1)])) as seen:
        heads = seen.page.locator("#clients th").all_inner_texts()
        assert heads == ["Client", "Rounds", "Share", "Norm", "Loss", "Rejected"]
        expect(seen.page.locator("#clients .after")).to_contain_text("No trust was recorded")
        assert seen.page.locator("#clients .spark").count() == 0
        assert seen.page.locator("#panel th").all_inner_texts()[-1] == "Norm"


def test_without_ids_there_is_no_table(browser: Browser, tmp_path: Path):
    cohort = [member(None, 0.9), member(None, 0.8)]
    with opened(browser, made(tmp_path, [record(0, clients=cohort)])) as seen:
        assert seen.page.locator("#clients table").count() == 0
        expect(seen.page.locator("#clients")).to_contain_text("have no ids")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_marks_can_be_read_in_both_themes(browser: Browser, tmp_path: Path, theme: str):
    """A contrast of 4.5 is what WCAG asks of text."""
    with opened(browser, made(tmp_path, rounds_of(12)), theme=theme) as seen:
        box = seen.page.locator("#clients .scroll")
        behind = box.evaluate("(box) => getComputedStyle(box).backgroundColor")
        for mark in ("#clients .doubt.opposed", "#clients th button", "#clients tbody bdi"):
            colour = seen.page.locator(mark).first.evaluate("(it) => getComputedStyle(it).color")
            assert contrast(colour, behind) >= 4.5, mark


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_a_live_table_grows_and_keeps_its_order_and_the_focus(browser: Browser, tmp_path: Path):
    told = rounds_of(12)
    folder = write(tmp_path / "run", told[:1], config=changed(rounds=ROUNDS))
    with serve(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with opened(browser, server.url) as seen:
                marked = seen.page.locator("#clients tr.look")
                expect(marked).to_have_count(0)  # one round says nothing
                head(seen, "Loss").focus()
                seen.page.keyboard.press("Enter")
                with (folder / "rounds.jsonl").open("a") as file:
                    file.writelines(json.dumps(one) + "\n" for one in told[1:4])
                expect(marked).to_have_count(2, timeout=20_000)
                expect(head(seen, "Loss")).to_be_focused()
                expect(seen.page.locator("#clients th[aria-sort]")).to_have_text("Loss")
                assert column(seen, "Flagged")[0] == "4 of 4"
                assert column(seen, "Client")[0] == "3"  # which has the largest loss
        finally:
            server.shutdown()
            thread.join()
