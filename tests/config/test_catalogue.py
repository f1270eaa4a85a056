"""What is told of the methods is what the classes say, and is current."""

import re
from pathlib import Path

import pytest

from fedglad.config.catalogue import FAMILIES, Row, markdown, rows

ROOT = Path(__file__).parents[2]
ROWS = [row for section in FAMILIES for row in rows(section)]
OURS = {
    *("uniform", "scripted", "none", "fixed", "equal"),  # there is nobody to name
    *("pooled", "aligned"),  # these are our own
}


def test_the_page_on_methods_is_current():
    page = (ROOT / "docs/methods.md").read_text("utf-8")
    assert page == markdown(), "run `make docs`"


def by_name(row: Row) -> str:
    return f"{row.section}-{row.name}"


@pytest.mark.parametrize("row", ROWS, ids=by_name)
def test_a_method_has_a_line_and_its_reference(row: Row):
    assert 20 < len(row.about) <= 100
    if row.name not in OURS:
        assert re.search(r"[A-Z]\w+.* \d{4}", row.reference), "name its authors and year"
        assert re.search(r"arXiv:\d{4}\.\d{4,5}", row.reference), "and its arXiv number"


def test_the_page_has_every_row_with_its_settings():
    page = markdown()
    for row in ROWS:
        assert f"### {row.name}\n" in page
    assert "| `gamma` | `0.02` |" in page
