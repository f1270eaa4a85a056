"""What is told of the methods is what the classes say, and is current."""

import re
from pathlib import Path

import pytest

from fedglad.config.catalogue import FAMILIES, markdown, reference, text
from fedglad.config.schema import REGISTRIES

ROOT = Path(__file__).parents[2]
ROWS = [(section, name) for section in FAMILIES for name in REGISTRIES[section]]
OURS = {
    *("uniform", "scripted", "none", "fixed", "equal"),  # there is nobody to name
    *REGISTRIES["task"],
    *("pooled", "aligned", "clients", "distrust", "strat"),  # these are our own
}


def test_the_page_on_methods_is_current():
    page = (ROOT / "docs/methods.md").read_text("utf-8")
    assert page == markdown(), "run `make docs`"


@pytest.mark.parametrize(("section", "name"), ROWS)
def test_a_method_has_a_line_and_its_reference(section: str, name: str):
    described = text(section, name)
    assert 20 < len(described.splitlines()[0]) <= 100
    if name not in OURS:
        assert re.search(r"[A-Z]\w+.* \d{4}", reference(described)), "name its authors and year"
        assert re.search(r"arXiv:\d{4}\.\d{4,5}", reference(described)), "and its arXiv number"


def test_the_page_has_every_row_with_its_settings():
    page = markdown()
    for _, name in ROWS:
        assert f"### {name}\n" in page
    assert "| `gamma` | `0.02` |" in page
