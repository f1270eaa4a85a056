"""The table of results on the page of several runs: the rows, blocks and differences of compare."""

import json
from collections.abc import Generator, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from fedglad.analysis import compare
from fedglad.analysis.tables import columns
from fedglad.report import page
from fedglad.report.figures import payload

from .browser import opened, started
from .made import changed, read, record, rounds, write

SCORES = {
    (0.1, "none"): (0.70, 0.72, 0.74),
    (0.1, "glad"): (0.73, 0.74, 0.78),
    (1.0, "none"): (0.90, 0.90, 0.90),
    (1.0, "glad"): (0.80, 0.81, 0.79),
}


def run_of(folder: Path, score: float, many: int = 3, **settings: Any) -> Path:
    config = changed(rounds=3, **settings)
    finish = many == config["rounds"]
    return write(folder, rounds([score] * many), config=config, finish=finish)


@pytest.fixture
def crossed(tmp_path: Path) -> list[Path]:
    """none and glad on two partitions, with seeds 1, 2, 3; alpha=1 is worse with glad."""
    return [
        run_of(
            tmp_path / f"{name}-{alpha}-{seed}",
            SCORES[alpha, name][seed - 1],
            seed=seed,
            data__alpha=alpha,
            adapter__name=name,
        )
        for alpha, name, seed in product((0.1, 1.0), ("none", "glad"), (1, 2, 3))
    ]


def told(*folders: Path, **how: Any) -> dict[str, Any]:
    return payload([read(folder) for folder in folders], **how)


def rows(made: dict[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    for block in made["blocks"]:
        yield from ((block["label"], row["label"], row["cells"]) for row in block["rows"])


def test_the_table_is_that_of_compare(crossed: list[Path]):
    made = told(*crossed)["table"]
    found = compare(crossed)
    theirs = columns(found)
    assert made["heads"] == [column.head for column in theirs]
    assert made["columns"] == ["n", "score", "final", "difference", "interval"]
    assert [*rows(made)] == [
        (group.block, group.label, [column.texts[k] for column in theirs])
        for k, group in enumerate(found.groups)
    ]
    # alpha .1: .03, .02, .04: +3.00 ± 2.48; alpha 1: −.10, −.09, −.11: −10.00 ± 2.48
    assert [row[2][3:] for row in rows(made)][1::2] == [
        ["+3.00", "[+0.52, +5.48]"],
        ["-10.00", "[-12.48, -7.52]"],
    ]
    tones = [row["tone"] for block in made["blocks"] for row in block["rows"]]
    assert tones == ["plain", "good", "plain", "bad"]
    assert made["remarks"] == [
        "Baseline in each block: adapter.name=none; last10_accuracy is over the last 3 tests, as "
        "runs have no more."
    ]
    assert made["details"][0]["lines"][0] == (
        "data.alpha=0.1: adapter.name=glad   1: +3.00,  2: +2.00,  3: +4.00"
    )


def test_rows_know_their_lines(crossed: list[Path]):
    whole = told(*crossed[::-1])
    lines = [group["label"] for group in whole["groups"]]
    shown = [
        (b["label"], r["label"], r["group"]) for b in whole["table"]["blocks"] for r in b["rows"]
    ]
    assert [group for _, _, group in shown] == [0, 1, 2, 3]
    for block, label, group in shown:
        assert {block, label} == {*lines[group].split()}
    assert [run["group"] for run in whole["runs"]] == [1] * 3 + [0] * 3 + [3] * 3 + [2] * 3
    assert not any(group["baseline"] for group in whole["groups"])  # each has a colour


def test_a_gain_is_over_the_baseline_of_the_block(crossed: list[Path]):
    whole = told(*crossed)
    gains = {t["label"]: t["value"] for t in whole["headline"] if "gain over" in t["label"]}
    assert gains == {
        "adapter.name=glad data.alpha=0.1: gain over adapter.name=none data.alpha=0.1": (
            "+3.00 points"
        ),
        "adapter.name=glad data.alpha=1.0: gain over adapter.name=none data.alpha=1.0": (
            "−10.00 points"
        ),
    }
    assert whole["table"]["tiles"] == len(whole["headline"]) - 3  # distrusted, rejected, time
    other = told(*crossed, baseline="glad")["table"]
    assert [row[:2] for row in rows(other)][::2] == [
        ("data.alpha=0.1", "adapter.name=glad"),
        ("data.alpha=1.0", "adapter.name=glad"),
    ]


def test_one_configuration_has_its_tiles(crossed: list[Path]):
    assert told(*crossed[:3])["table"] is None
    assert told(crossed[0])["table"] is None


def test_one_block_has_no_label(crossed: list[Path]):
    made = told(*crossed[:6])["table"]
    assert [row[:2] for row in rows(made)] == [("", "adapter.name=none"), ("", "adapter.name=glad")]


def test_runs_with_several_scores_have_their_tiles(tmp_path: Path, crossed: list[Path]):
    mae = [record(t, score={"name": "mae", "higher": False}, test_mae=0.5) for t in range(3)]
    other = write(tmp_path / "mae", mae, config=changed(adapter__name="other"))
    assert told(crossed[0], other)["table"] is None


def test_while_a_run_goes_on_the_round_is_said(tmp_path: Path):
    none = run_of(tmp_path / "none", 0.5, adapter__name="none")
    glad = run_of(tmp_path / "glad", 0.75, many=2)
    made = told(none, glad)["table"]
    assert [row[2][3] for row in rows(made)] == ["baseline", "+25.00"]
    assert "The difference of adapter.name=glad is up to round 2." in made["remarks"]


def test_what_was_never_tested_has_a_row_without_numbers(tmp_path: Path):
    none = run_of(tmp_path / "none", 0.5, adapter__name="none")
    bare = write(tmp_path / "bare", rounds([None] * 3), config=changed())
    empty = write(tmp_path / "odd", [], config=None)
    made = told(none, bare, empty)["table"]
    assert [(label, cells[0]) for _, label, cells in rows(made)] == [
        ("adapter.name=none", "1"),
        ("adapter.name=glad", "–"),
        ("odd (settings not known)", "–"),
    ]
    assert told(bare, empty)["table"] is None


def test_a_run_without_settings_is_a_block_of_its_own(crossed: list[Path], tmp_path: Path):
    odd = write(tmp_path / "odd", rounds([0.5] * 3), config=None)
    made = told(*crossed, odd)["table"]
    assert [*rows(made)][-1][:2] == ("settings not known", "odd (settings not known)")


def test_hostile_labels_are_data(crossed: list[Path], tmp_path: Path):
    name = "</script><b>x\u2028"
    odd = [
        run_of(tmp_path / f"odd-{alpha}", 0.5, data__alpha=alpha, adapter__name=name)
        for alpha in (0.1, 1.0)
    ]
    whole = told(*crossed, *odd)
    assert len(whole["table"]["blocks"]) == 2
    assert json.loads(page.data(whole)) == whole
    assert "<b>" not in page.data(whole)


# ---------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with started() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
def test_the_table_takes_the_place_of_the_tiles(
    browser: Browser, crossed: list[Path], tmp_path: Path, width: int, theme: str
):
    path = tmp_path / "report.html"
    page.write(told(*crossed), path)
    with opened(browser, path, width=width, theme=theme) as seen:
        table = seen.page.locator("#results table")
        expect(table).to_be_visible()
        assert table.locator("thead th").all_inner_texts() == [
            *("", "n", "last10_accuracy %", "final %", "difference", "95 % interval")
        ]
        assert [text.strip() for text in table.locator("tbody th").all_inner_texts()] == [
            *("data.alpha=0.1", "adapter.name=none", "adapter.name=glad"),
            *("data.alpha=1.0", "adapter.name=none", "adapter.name=glad"),
        ]
        good, bad = table.locator("tr.good"), table.locator("tr.bad")
        expect(good.locator(".difference")).to_have_text("+3.00")
        expect(bad.locator(".interval")).to_have_text("[-12.48, -7.52]")
        colours = [
            row.locator(".difference").evaluate("(cell) => getComputedStyle(cell).color")
            for row in (good, bad)
        ]
        assert colours[0] != colours[1]
        assert seen.page.locator("#tiles .label").all_inner_texts() == [
            *("Rounds distrusted", "Updates rejected", "Time")
        ]
        expect(seen.page.locator("#results .after")).to_contain_text("Baseline in each block")
        seen.page.locator("#results summary").click()
        expect(seen.page.locator("#results li").first).to_be_visible()
        assert seen.overflow() <= 0
        lines = table.locator("tbody tr svg path")
        if width > 600:  # each row has the colour of its line
            strokes = [one.get_attribute("style") for one in lines.all()]
            legend = seen.page.locator("#legend svg path").all()
            assert strokes == [one.get_attribute("style") for one in legend]
            assert len(set(strokes)) == 4


@pytest.mark.slow
def test_one_run_keeps_its_tiles(browser: Browser, crossed: list[Path], tmp_path: Path):
    path = tmp_path / "report.html"
    page.write(told(crossed[0]), path)
    with opened(browser, path) as seen:
        expect(seen.page.locator("#results")).to_be_hidden()
        expect(seen.page.locator("#tiles .label").first).to_have_text("Accuracy, last 3 tests")
