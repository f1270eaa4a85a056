"""The report's page in a real Chromium, of real runs of digits."""

import hashlib
import json
import math
import shutil
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from fedglad.config.schema import load
from fedglad.report.figures import payload
from fedglad.report.page import write
from fedglad.report.watch import serve
from fedglad.runs import Run, execute
from fedglad.trust import Alarm

from .browser import Opened, opened, started
from .made import read

pytestmark = pytest.mark.slow

ROUNDS = 24
QUICK = {"rounds": ROUNDS, "engine.name": "serial", "client.epochs": 1}
ECHARTS = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"  # 6.1.0
SHOWN_GROUPS = "fedgladReport.chart('heat').getOption().yAxis[0].data"
HOSTILE = (
    "<script>document.hacked = 1</script>",
    "<img src=x onerror='document.hacked = 1'>",
    '"><svg onload="document.hacked = 1">',
)


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with started() as found:
        yield found


def train(folder: Path, **more: Any) -> Path:
    settings = {**QUICK, **{key.replace("__", "."): value for key, value in more.items()}}
    execute("digits", load("digits", settings)[1], out=folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """glad with two seeds, none with two: glad's first run comes first."""
    root = tmp_path_factory.mktemp("runs")
    glad = [train(root / f"glad{seed}", seed=seed) for seed in (1, 2)]
    return glad + [train(root / f"none{seed}", seed=seed, adapter__name="none") for seed in (1, 2)]


def records(folder: Path) -> list[dict[str, Any]]:
    return Run(folder).rounds()


def rewritten(
    folder: Path, to: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> Path:
    """A copy of a run with other rounds."""
    shutil.copytree(folder, to)
    lines = [json.dumps(record) + "\n" for record in change(records(folder))]
    (to / "rounds.jsonl").write_text("".join(lines))
    return to


@pytest.fixture
def report(tmp_path: Path):
    """Makes the file of a report."""

    def make(*folders: Path, name: str = "report.html") -> Path:
        out = tmp_path / name
        write(payload([read(folder) for folder in folders]), out)
        return out

    return make


def test_the_chart_library_is_the_unmodified_one_that_its_readme_names(
    browser: Browser, runs: list[Path], report: Any
):
    folder = files("fedglad.report").joinpath("vendor")
    told = folder.joinpath("README.md").read_text("utf-8")
    found = hashlib.sha256(folder.joinpath("echarts.min.js").read_bytes()).hexdigest()
    assert found == ECHARTS
    assert found in told
    with opened(browser, report(runs[0])) as seen:
        assert f"| {seen.page.evaluate('echarts.version')}, `dist/echarts.min.js`" in told


def test_every_round_is_drawn(browser: Browser, runs: list[Path], report: Any):
    told = records(runs[0])
    with opened(browser, report(runs[0])) as seen:
        for series, field in [("accuracy", "test_accuracy"), ("test loss", "test_loss")]:
            points = seen.points("rounds", series)
            assert [x for x, _ in points] == list(range(1, ROUNDS + 1))
            scale = 100 if series == "accuracy" else 1
            expected = [scale * record[field] for record in told]
            assert [y for _, y in points] == pytest.approx(expected, rel=1e-4)
        gsi = seen.points("rounds", "GSI")
        assert [y for _, y in gsi] == pytest.approx(
            [record["gsi_all"] for record in told], rel=1e-4
        )
        assert len(seen.points("rounds", "usual GSI")) == ROUNDS
        assert len(seen.points("fit", "rounds")) == ROUNDS
        assert len(seen.points("labels", "cohort")) == 10
        axes = seen.page.evaluate(
            "(({xAxis, yAxis}) => [xAxis[0].data, yAxis[0].data])"
            "(fedgladReport.chart('heat').getOption())"
        )
        assert axes == [[str(t + 1) for t in range(ROUNDS)], list(told[0]["groups"])]
        expect(seen.page.locator("#compare-section")).to_be_hidden()


def test_flagged_rounds_have_a_colour_and_a_shape_of_their_own(
    browser: Browser, runs: list[Path], tmp_path: Path, report: Any
):
    def flag(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
        flags = {5: "one-sided", 9: "outlier", 12: "outlier"}
        return [{**record, "alarm": flags.get(record["round"])} for record in rounds]

    folder = rewritten(runs[0], tmp_path / "flagged", flag)
    with opened(browser, report(folder)) as seen:
        series = seen.page.evaluate(
            "fedgladReport.chart('rounds').getOption().series"
            ".filter((one) => one.type === 'scatter' && one.yAxisIndex === 2)"
            ".map((one) => [one.name, one.data.map(([x]) => x), one.symbol, one.itemStyle.color])"
        )
        assert [(name, rounds) for name, rounds, *_ in series] == [
            ("one-sided", [6]),
            ("outlier", [10, 13]),
        ]
        assert series[0][2] != series[1][2]
        assert series[0][3] != series[1][3]
        seen.page.locator("#rounds").press("Home")
        for shown in (6, 10, 13, 6):
            seen.page.get_by_role("button", name="Next distrusted").click()
            expect(seen.page.locator("#panel h3")).to_have_text(f"Round {shown}")
        expect(seen.page.locator("#panel .flag")).to_have_text("one-sided")


def test_rounds_that_could_not_be_judged_are_not_called_usual(
    browser: Browser, runs: list[Path], tmp_path: Path, report: Any
):
    def some(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rounds = [{**record, "alarm": None} for record in rounds]
        rounds[9] |= {"gsi_all": None}
        rounds[11] |= {"status": "skipped", "reason": "nobody came", "gsi_all": None}
        return rounds

    verdicts = ["not judged"] * Alarm().warmup + ["usual"] * (ROUNDS - Alarm().warmup)
    verdicts[9], verdicts[11] = "not judged", "skipped"
    with opened(browser, report(rewritten(runs[0], tmp_path / "some", some))) as seen:
        seen.page.get_by_text("All rounds as a table").click()
        expect(seen.page.locator("#table tbody .flag")).to_have_text(verdicts)
        lines = seen.page.evaluate(
            "fedgladReport.chart('rounds').getOption().series[0].markLine.data"
            ".map(({xAxis}) => xAxis)"
        )
        assert lines == [12]
        seen.hover("rounds", 2)
        expect(seen.page.locator("#panel .flag")).to_have_text("not judged")
        expect(seen.page.locator("#panel .words")).to_contain_text("too little history")
        expect(seen.page.locator("#tip .flag")).to_have_text("not judged")


def test_a_cohort_that_is_listed_in_part_has_its_full_size(
    browser: Browser, runs: list[Path], tmp_path: Path, report: Any
):
    def large(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
        one: dict[str, Any] = {"weight": 0.01, "loss": 1.0, "sq_norm": 1.0}
        why = ["its norm is 900"] * 90 + ["left out by Krum(f=1)"] * 5
        cohort = [{**one, "id": k} for k in range(100)]
        for client, reason in zip(cohort, why, strict=False):
            client["rejected"] = reason
        small = [{**one, "id": k} for k in range(8)] + cohort[89:91]
        return [
            {**rounds[t % ROUNDS], "round": t, "clients": cohort if t else small}
            for t in range(500)
        ]

    with opened(browser, report(rewritten(runs[0], tmp_path / "large", large))) as seen:
        panel = seen.page.locator("#panel")
        seen.hover("rounds", 250)
        expect(panel.locator("h3")).to_have_text("Round 250")
        listed = panel.locator("tbody tr").count()
        assert 8 < listed < 90  # not even the rejected ones are all listed
        expect(panel.locator("h4")).to_have_text(
            f"Cohort: 100 clients, 90 rejected, {listed} listed"
        )
        expect(seen.page.locator("#tip")).to_contain_text("0, 1, 2, 3, 4, 5, 6, 7 and 92 more")
        seen.page.get_by_text("All rounds as a table").click()
        rows = seen.page.locator("#table tbody tr")
        expect(rows).to_have_count(500)  # it is filled when it is opened, a moment after the click
        assert rows.nth(0).locator("td").all_inner_texts()[-2:] == ["10", "1"]
        assert rows.nth(249).locator("td").all_inner_texts()[-2:] == ["100", "90"]
        seen.page.locator("#rounds").press("Home")
        expect(panel.locator("h4")).to_have_text("Cohort: 10 clients, 1 rejected")
        told = panel.locator(".why").all_inner_texts()
        assert told == ["rejected: its norm is 900", "left out by Krum(f=1)"]


def test_the_axis_of_labels_holds_for_all_rounds(browser: Browser, runs: list[Path], report: Any):
    counts = np.array(json.loads((runs[0] / "labels.json").read_text())["counts"])
    cohorts = [counts[[client["id"] for client in told["clients"]]] for told in records(runs[0])]
    most = max((rows.sum(axis=0) / rows.sum()).max() for rows in [counts, *cohorts])
    with opened(browser, report(runs[0])) as seen:
        for key in ("Home", "End"):
            seen.page.locator("#rounds").press(key)
            top = seen.page.evaluate("fedgladReport.chart('labels').getOption().yAxis[0].max")
            assert top == min(100, 10 * math.ceil(10 * most))


def test_hovering_shows_the_cohort(browser: Browser, runs: list[Path], report: Any):
    told = records(runs[0])
    with opened(browser, report(runs[0])) as seen:
        for t in (6, 17):
            seen.hover("rounds", t + 1)
            panel, tip = seen.page.locator("#panel"), seen.page.locator("#tip")
            expect(panel.locator("h3")).to_have_text(f"Round {t + 1}")
            shown = panel.locator("tbody td.text").all_inner_texts()
            assert shown == [str(client["id"]) for client in told[t]["clients"]]
            norm = told[t]["clients"][0]["sq_norm"] ** 0.5
            assert float(panel.locator("tbody td").nth(3).inner_text()) == pytest.approx(norm, 0.01)
            expect(tip).to_contain_text(", ".join(shown))
            expect(seen.page.locator("#labels-words")).to_contain_text(f"Round {t + 1}")
        seen.hover("heat", 2, height=0.3)
        expect(seen.page.locator("#tip b")).to_have_text(list(told[0]["groups"])[1])
        expect(seen.page.locator("#panel h3")).to_have_text("Round 3")
        seen.page.mouse.move(2, 2)
        expect(seen.page.locator("#tip")).to_be_hidden()


def test_the_filter_filters(browser: Browser, runs: list[Path], report: Any):
    groups = list(records(runs[0])[0]["groups"])
    with opened(browser, report(runs[0])) as seen:
        box = seen.page.get_by_label("Filter")
        box.fill("WEIGHT  1")
        wanted = [name for name in groups if "weight" in name and "1" in name]
        assert wanted != groups
        assert seen.page.evaluate(SHOWN_GROUPS) == wanted
        expect(seen.page.locator("#filtered")).to_have_text(
            f"{len(wanted)} of {len(groups)} groups"
        )
        seen.page.get_by_text("GSI/B", exact=True).first.click()
        assert seen.page.evaluate(SHOWN_GROUPS) == wanted
        box.fill("nothing is called so")
        expect(seen.page.locator("#heat")).to_contain_text("No group")
        box.fill("")
        assert seen.page.evaluate(SHOWN_GROUPS) == groups


@pytest.mark.parametrize("chart", ["rounds", "heat", "fit", "labels"])
def test_the_keyboard_moves_the_round(browser: Browser, runs: list[Path], report: Any, chart: str):
    with opened(browser, report(runs[0])) as seen:
        box, title = seen.page.locator(f"#{chart}"), seen.page.locator("#panel h3")
        while seen.page.evaluate("document.activeElement.id") != chart:
            before = seen.page.evaluate("document.activeElement.outerHTML")
            seen.page.keyboard.press("Tab")
            assert seen.page.evaluate("document.activeElement.outerHTML") != before
        assert box.evaluate("(box) => getComputedStyle(box).outlineStyle") == "solid"
        for pressed, shown in [
            ("Home", 1), ("ArrowLeft", 1), ("ArrowRight", 2), ("Shift+ArrowRight", 12),
            ("End", ROUNDS), ("ArrowRight", ROUNDS), ("ArrowLeft", ROUNDS - 1),
        ]:  # fmt: skip
            seen.page.keyboard.press(pressed)
            expect(title).to_have_text(f"Round {shown}")
            assert box.get_attribute("aria-valuenow") == str(shown)
        seen.page.keyboard.press("Escape")
        expect(title).to_have_text("No round chosen")


def test_the_rounds_are_a_table_too(browser: Browser, runs: list[Path], report: Any):
    with opened(browser, report(runs[0])) as seen:
        seen.page.get_by_text("All rounds as a table").click()
        rows = seen.page.locator("#table tbody tr")
        expect(rows).to_have_count(ROUNDS)
        gsi = records(runs[0])[3]["gsi_all"]
        place = seen.page.locator("#table thead th").all_inner_texts().index("GSI")
        cells = rows.nth(3).locator("th, td").all_inner_texts()
        assert float(cells[place]) == pytest.approx(gsi, 0.01)


def test_clients_are_sorted(browser: Browser, runs: list[Path], report: Any):
    with opened(browser, report(runs[0])) as seen:
        heads = seen.page.locator("#clients th").all_inner_texts()
        cells = seen.page.locator(f"#clients tbody tr td:nth-child({heads.index('Norm') + 1})")
        head = seen.page.locator("#clients").get_by_role("button", name="Norm")
        head.click()
        norms = [float(text) for text in cells.all_inner_texts()]
        assert norms == sorted(norms, reverse=True)
        assert len(set(norms)) > 1
        head.click()
        assert [float(text) for text in cells.all_inner_texts()] == sorted(norms)
        expect(seen.page.locator("th[aria-sort=ascending]")).to_have_text("Norm")


def test_the_theme_is_the_systems_until_it_is_switched(
    browser: Browser, runs: list[Path], report: Any
):
    colours = "[getComputedStyle(document.body).backgroundColor, " + (
        "fedgladReport.chart('rounds').getOption().series[0].lineStyle.color]"
    )
    with opened(browser, report(runs[0]), theme="dark") as seen:
        dark = seen.page.evaluate(colours)
        seen.page.get_by_role("button", name="Switch to the light theme").click()
        light = seen.page.evaluate(colours)
        assert dark[0] != light[0]
        assert dark[1] != light[1]
    with opened(browser, report(runs[0])) as seen:
        assert seen.page.evaluate(colours) == light
        seen.page.get_by_role("button", name="Switch to the dark theme").click()
        assert seen.page.evaluate(colours) == dark


def test_hostile_names_are_shown_and_not_run(
    browser: Browser, runs: list[Path], tmp_path: Path, report: Any
):
    script, image, svg = HOSTILE

    def poison(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for record in rounds:
            names = [script, image, "a\u2028b"]
            for name, client in zip(names, record["clients"], strict=False):
                client["id"] = name
            record["clients"][0]["rejected"] = svg
            record["groups"] = {f"{image}{name}": one for name, one in record["groups"].items()}
        rounds[3] |= {"status": "skipped", "reason": image, "groups": {}, "gsi_all": None}
        return rounds

    poisoned = rewritten(runs[0], tmp_path / image, poison)
    other = rewritten(runs[2], tmp_path / "other", poison)
    with opened(browser, report(poisoned, other)) as seen:
        seen.hover("rounds", 8)
        panel = seen.page.locator("#panel")
        expect(panel).to_contain_text(script)
        expect(panel).to_contain_text(f"rejected: {svg}")
        expect(seen.page.locator("#tip")).to_contain_text(image)
        expect(seen.page.locator("#clients")).to_contain_text(script)
        seen.page.locator("#heat").scroll_into_view_if_needed()
        seen.hover("heat", 4, height=0.2)
        expect(seen.page.locator("#tip")).to_contain_text(image)
        seen.hover("compare", 4)
        seen.page.locator("#rounds").press("Home")
        for _ in range(3):
            seen.page.locator("#rounds").press("ArrowRight")
        expect(panel).to_contain_text(image)
        seen.page.get_by_text("All rounds as a table").click()
        seen.page.get_by_text("All settings of this run").click()
        assert seen.page.evaluate("document.hacked") is None
        # The page's own elements only: no name became an element.
        assert seen.page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert seen.page.evaluate("document.scripts.length") == 3


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(
    browser: Browser, runs: list[Path], report: Any, width: int
):
    with opened(browser, report(*runs), width=width) as seen:
        assert seen.overflow() == 0
        seen.page.get_by_text("All rounds as a table").click()
        expect(seen.page.locator("#table tbody tr")).to_have_count(ROUNDS)
        seen.page.get_by_text("All settings of this run").click()
        seen.hover("rounds", ROUNDS)
        expect(seen.page.locator("#tip")).to_be_visible()
        assert seen.overflow() == 0
        seen.page.set_viewport_size({"width": 700, "height": 900})
        expect(seen.page.locator("#rounds canvas")).to_be_visible()
        seen.page.wait_for_function(
            "fedgladReport.chart('rounds').getWidth()"
            " <= document.getElementById('rounds').clientWidth"
        )
        assert seen.overflow() == 0


def test_runs_overlay_and_seeds_are_a_band(browser: Browser, runs: list[Path], report: Any):
    told = [[100 * record["test_accuracy"] for record in records(folder)] for folder in runs]
    with opened(browser, report(*runs)) as seen:
        drawn = seen.page.evaluate(
            "fedgladReport.chart('compare').getOption().series"
            ".map(({type, data}) => ({type, data}))"
        )
        bands = [one["data"] for one in drawn if one["type"] == "custom"]
        lines = [one["data"] for one in drawn if one["type"] == "line"]
        assert len(bands) == len(lines) == 2
        expected = {"glad": told[:2], "none": told[2:]}
        order = seen.page.locator("#legend button").all_inner_texts()
        for label, band, line in zip(order, bands, lines, strict=True):
            one, two = expected["none" if "none" in label else "glad"]
            assert "2 seeds" in label
            for i, (x, y) in enumerate(line):
                assert x == i + 1
                assert y == pytest.approx((one[i] + two[i]) / 2, rel=1e-4)
                ends = [min(one[i], two[i]), max(one[i], two[i])]
                assert band[i] == [i + 1, *(pytest.approx(end, rel=1e-4) for end in ends)]
        seen.page.locator("#legend button").first.click()
        assert seen.page.evaluate("fedgladReport.chart('compare').getOption().series.length") == 2


def test_the_chosen_runs_details_are_shown(browser: Browser, runs: list[Path], report: Any):
    with opened(browser, report(*runs)) as seen:
        names = seen.page.locator("#run option").all_inner_texts()
        assert len(names) == len(runs)
        for place, folder in enumerate(runs):
            index = next(i for i, name in enumerate(names) if folder.name in name)
            seen.page.locator("#run").select_option(str(index))
            seen.page.locator("#rounds").press("Home")
            accuracy = 100 * records(folder)[0]["test_accuracy"]
            expect(seen.page.locator("#panel dd").first).to_have_text(f"{accuracy:.1f} %")
            if place > 1:
                expect(seen.page.locator("#heat")).to_contain_text("adapter.name is none")


def test_what_is_missing_is_said(browser: Browser, runs: list[Path], tmp_path: Path, report: Any):
    def bare(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
        gone = {"test_accuracy": None, "test_loss": None, "label_similarity": None}
        return [{**record, **gone} for record in rounds]

    folder = rewritten(runs[0], tmp_path / "bare", bare)
    (folder / "labels.json").unlink()
    (folder / "summary.json").unlink()
    empty = rewritten(runs[0], tmp_path / "empty", lambda rounds: [])
    with opened(browser, report(folder)) as seen:
        assert len(seen.points("rounds", "GSI")) == ROUNDS
        expect(seen.page.locator("#fit")).to_contain_text(
            "labels of this run’s clients are not known"
        )
        expect(seen.page.locator("#labels")).to_contain_text("no labels.json")
    with opened(browser, report(empty, name="empty.html")) as seen:
        for chart in ("rounds", "heat", "labels"):
            expect(seen.page.locator(f"#{chart}")).to_contain_text("No round is recorded yet")
        expect(seen.page.locator("#clients")).to_contain_text("No client is recorded yet")


def test_a_run_without_labels_beside_one_that_has_them(
    browser: Browser, runs: list[Path], tmp_path: Path, report: Any
):
    bare = shutil.copytree(runs[2], tmp_path / "bare")
    (bare / "labels.json").unlink()
    with opened(browser, report(runs[0], bare)) as seen:
        names = seen.page.locator("#run option").all_inner_texts()
        for folder in (runs[0], bare, runs[0]):  # there, away and back, without an error
            index = next(i for i, name in enumerate(names) if folder.name in name)
            seen.page.locator("#run").select_option(str(index))
            has = folder is not bare
            expect(seen.page.locator("#labels canvas")).to_have_count(1 if has else 0)
            if has:
                assert seen.page.locator("#labels").get_attribute("aria-valuenow") is not None


def test_500_rounds_of_200_groups_open(
    browser: Browser, runs: list[Path], tmp_path: Path, report: Any
):
    def many(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
        some = next(iter(rounds[5]["groups"].values()))
        scales = [0.8 + 0.002 * g for g in range(200)]
        groups = [{f"block{g}.weight": {**some, "scale": s} for g, s in enumerate(scales)}]
        return [{**rounds[t % ROUNDS], "round": t, "groups": groups[0]} for t in range(500)]

    folder = rewritten(runs[0], tmp_path / "many", many)
    with opened(browser, report(folder)) as seen:
        assert len(seen.points("rounds", "GSI")) == 500
        seen.hover("heat", 249, height=0.5)
        expect(seen.page.locator("#panel h3")).to_have_text("Round 250")
        window = "fedgladReport.chart('rounds').getOption().dataZoom[0]"
        seen.page.evaluate(
            "fedgladReport.chart('rounds')"
            ".dispatchAction({type: 'dataZoom', startValue: 101, endValue: 150})"
        )
        seen.page.get_by_role("button", name="Switch to the dark theme").click()
        kept = seen.page.evaluate(f"(({{startValue: a, endValue: b}}) => [a, b])({window})")
        assert kept == [101, 150]
        seen.page.get_by_label("Filter").fill("block19")
        shown = seen.page.evaluate(SHOWN_GROUPS)
        assert shown == ["block19.weight", *(f"block{g}.weight" for g in range(190, 200))]


@contextmanager
def served(folder: Path) -> Generator[str]:
    with serve(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def ticking(seen: Opened) -> Callable[[], int]:
    """Loads the page again with a clock that stands; what is returned lets it poll once."""
    seen.page.clock.install()
    seen.page.reload()
    seconds = seen.page.evaluate("fedgladReport.payload.live.seconds")

    def polled() -> int:
        with seen.page.expect_response("**/data.json") as answer:
            seen.page.clock.run_for(1000 * seconds)
        return answer.value.status

    return polled


def test_a_live_page_follows_the_run_and_keeps_what_was_chosen(
    browser: Browser, runs: list[Path], tmp_path: Path
):
    folder = rewritten(runs[0], tmp_path / "live", lambda told: told[:5])
    (folder / "summary.json").unlink()
    lines = (runs[0] / "rounds.jsonl").read_text().splitlines(keepends=True)

    def grow(first: int, last: int) -> None:
        with (folder / "rounds.jsonl").open("a") as file:
            file.writelines(lines[first:last])

    with serve(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with opened(browser, server.url) as seen:
                state, title = seen.page.locator("#state"), seen.page.locator("#panel h3")
                box = seen.page.get_by_label("Filter")
                expect(state).to_have_text(f"Live: round 5 of {ROUNDS}")
                expect(title).to_have_text("Round 5")
                grow(5, 9)
                expect(title).to_have_text("Round 9", timeout=20_000)
                seen.page.locator("#rounds").press("Home")
                box.fill("weight")
                grow(9, ROUNDS - 1)
                expect(state).to_have_text(f"Live: round {ROUNDS - 1} of {ROUNDS}", timeout=20_000)
                expect(title).to_have_text("Round 1")
                expect(box).to_have_value("weight")
                assert len(seen.points("rounds", "GSI")) == ROUNDS - 1
                groups = seen.page.evaluate(SHOWN_GROUPS)
                assert groups
                assert all("weight" in name for name in groups)
                server.shutdown()
                server.server_close()
                expect(state).to_contain_text("does not answer", timeout=20_000)
                seen.errors.clear()  # Chromium itself logs the refused connection
        finally:
            server.shutdown()
            thread.join()


def test_a_live_page_waits_for_the_summary_and_then_asks_no_more(
    browser: Browser, runs: list[Path], tmp_path: Path
):
    folder = rewritten(runs[0], tmp_path / "live", lambda told: told[:-1])
    (folder / "summary.json").unlink()
    with served(folder) as url, opened(browser, url) as seen:
        polled = ticking(seen)
        state, notes = seen.page.locator("#state"), seen.page.locator("#notes")
        expect(state).to_contain_text("Live: round")
        shutil.copy(runs[0] / "rounds.jsonl", folder)
        assert polled() == 200
        expect(state).to_have_text("The run is finished")
        expect(notes).to_contain_text("no summary.json")
        for _ in range(3):  # the last checkpoint is written before the summary, and may be large
            assert polled() == 304
        shutil.copy(runs[0] / "summary.json", folder)
        assert polled() == 200
        expect(notes).not_to_contain_text("summary.json")
        assert polled() == 304
        asked = len(seen.requests)
        seen.page.clock.run_for(60_000)
        expect(state).to_have_text("The run is finished")
        assert len(seen.requests) == asked


def test_a_live_page_that_cannot_draw_does_not_blame_the_server(
    browser: Browser, runs: list[Path], tmp_path: Path
):
    folder = rewritten(runs[0], tmp_path / "live", lambda told: told[:5])
    (folder / "summary.json").unlink()
    with served(folder) as url, opened(browser, url) as seen:
        polled = ticking(seen)
        state = seen.page.locator("#state")
        told = seen.page.evaluate("fedgladReport.payload")
        told["runs"][0]["cohorts"] = None
        headers = {"ETag": '"odd"'}
        seen.page.route("**/data.json", lambda route: route.fulfill(json=told, headers=headers))
        with seen.page.expect_event("pageerror"):
            polled()
        expect(state).to_have_text(f"Live: round 5 of {ROUNDS}")
        seen.page.unroute("**/data.json")
        shutil.copy(runs[0] / "rounds.jsonl", folder)
        with seen.page.expect_request("**/data.json") as asked:
            assert polled() == 200
        assert asked.value.headers["if-none-match"] == '"odd"'
        expect(state).to_have_text("The run is finished")
        expect(seen.page.locator("#panel h3")).to_have_text(f"Round {ROUNDS}")
        assert all("null" in error for error in seen.errors)
        seen.errors.clear()
