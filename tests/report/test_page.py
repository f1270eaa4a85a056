"""One file that loads nothing and in which nobody's name is run."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedglad.report import ReportError, page
from fedglad.report.figures import payload
from tests.report.made import changed, read, record, write

HOSTILE = "</script><script>alert(1)</script><!-- /*page.css*/ /*DATA*/ TITLE &amp; \u2028"


class Elements(HTMLParser):
    """What a browser would see: the elements, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open][-1] += data


def told(folder: Path, **changes: Any) -> dict[str, Any]:
    config = changed(adapter__name=HOSTILE.replace("\u2028", ""))
    clients = [{"id": HOSTILE, "weight": 1.0, "loss": 1.0, "sq_norm": 1.0, "rejected": HOSTILE}]
    return payload([read(write(folder, [record(0, clients=clients)], config=config))], **changes)


def test_the_placeholders_are_there_once():
    template = files("fedglad.report").joinpath("page.html").read_text("utf-8")
    for name in ("page.css", "vendor/echarts.min.js", "page.js", "DATA"):
        assert template.count(f"/*{name}*/") == 1
    assert len(re.findall(r"\bTITLE\b", template)) == 1
    assert template.count('http-equiv="Content-Security-Policy" content="/*POLICY*/"') == 1


def test_the_page_holds_every_file_and_the_data_unchanged(tmp_path: Path):
    made = told(tmp_path / "run")
    found = Elements(page.html(made))
    data, library, script = found.texts["script"]
    assert json.loads(data) == made
    folder = files("fedglad.report")
    assert library == folder.joinpath("vendor/echarts.min.js").read_text("utf-8")
    names = "text state charts rounds compare own heat labels panels clients page"
    assert script == "\n".join(
        folder.joinpath(f"{name}.js").read_text("utf-8") for name in names.split()
    )
    assert found.texts["style"] == [folder.joinpath("page.css").read_text("utf-8")]
    assert found.texts["title"] == ["run"]


def test_nothing_hostile_leaves_the_data(tmp_path: Path):
    made = told(tmp_path / "run")
    made["title"] = HOSTILE
    plain = payload([read(write(tmp_path / "plain", [record(0)]))])
    own, other = (Elements(page.html(one)) for one in (made, plain))
    assert own.tags == other.tags  # not one element more
    assert json.loads(own.texts["script"][0]) == made
    assert own.texts["title"] == [HOSTILE]
    assert own.texts["script"][1:] == other.texts["script"][1:]
    assert "alert(1)</script>" not in page.html(made)


def test_the_page_loads_nothing(tmp_path: Path):
    found = Elements(page.html(told(tmp_path / "run")))
    for tag, attributes in found.tags:
        assert tag not in ("iframe", "object", "embed", "base")
        for name in ("src", "href", "action"):
            target = attributes.get(name) or ""
            assert target.startswith(("#", "data:")) or not target, (tag, target)
    policies = [a["content"] for _, a in found.tags if a.get("http-equiv")]
    _, *scripts = found.texts["script"]  # the data are no script
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    assert policies == [
        f"default-src 'none'; script-src {hashes[0]} {hashes[1]}; style-src 'unsafe-inline'; "
        "img-src data:; form-action 'none'; base-uri 'none'; connect-src 'none'"
    ]
    assert not [name for _, a in found.tags for name in a if name.startswith("on")]
    assert "@import" not in found.texts["style"][0]
    assert not re.search(r"url\((?!['\"]?data:)", found.texts["style"][0])


def test_a_live_page_may_ask_its_own_server_alone(tmp_path: Path):
    found = Elements(page.html(told(tmp_path / "run", live=True)))
    (policy,) = [a["content"] or "" for _, a in found.tags if a.get("http-equiv")]
    assert policy.endswith("connect-src 'self'")
    assert policy.startswith("default-src 'none'")


@given(st.text())
def test_data_is_ascii_without_a_way_out(text: str):
    made = page.data({"x": text})
    assert json.loads(made) == {"x": text}
    assert made.isascii()
    assert not set("<>&") & set(made)


def test_numbers_that_json_has_not_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        page.data({"x": float("nan")})


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path: Path):
    made = told(tmp_path / "run")
    path = tmp_path / "out" / "a page.html"
    path.parent.mkdir()
    for _ in range(2):
        page.write(made, path)
    assert [found.name for found in path.parent.iterdir()] == ["a page.html"]
    assert path.read_bytes() == page.html(made).encode("utf-8")


def test_a_place_that_cannot_be_written(tmp_path: Path):
    made = told(tmp_path / "run")
    with pytest.raises(ReportError, match=r"is a folder: name a file, .*report\.html"):
        page.write(made, tmp_path)
    with pytest.raises(ReportError, match="cannot be written: No such file"):
        page.write(made, tmp_path / "absent" / "x.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot be written: Not a directory"):
        page.write(made, tmp_path / "file" / "x.html")
