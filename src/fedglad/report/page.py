"""One self-contained HTML file: the page, its style, the chart library, its script, the data."""

import base64
import hashlib
import html as markup
import json
import os
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedglad.core.files import replacing
from fedglad.report import ReportError

# In page.html: a file that is put in there, or what it is made for.
_PLACE = re.compile(r"/\*([\w./]+\.(?:css|js)|DATA|POLICY)\*/|\bTITLE\b")
_SCRIPT = re.compile("<script>(.*?)</script>", re.DOTALL)
_UNSAFE = re.compile("[<>&\u2028\u2029]")  # may end the element, or a line of a script


def policy(*, live: bool) -> str:
    """What the page may run and load: its scripts, by their hashes, and nothing else.

    A live one may ask the server that it comes from for new data.
    """
    asks = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {' '.join(_hashes())}; style-src 'unsafe-inline'; "
        f"img-src data:; form-action 'none'; base-uri 'none'; connect-src {asks}"
    )


@cache
def _hashes() -> list[str]:
    """The hashes of the scripts in the page; the data are no script."""
    scripts = _SCRIPT.findall(_file("page.html"))
    whole = [_PLACE.sub(lambda place: _file(place.group(1)), one) for one in scripts]
    digests = [hashlib.sha256(script.encode()).digest() for script in whole]
    return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]


@cache
def _file(name: str) -> str:
    """Read once: a hash is that of the text in the page."""
    return files("fedglad.report").joinpath(name).read_text("utf-8")


def html(payload: dict[str, Any]) -> str:
    """The whole page; nothing in the payload can leave its element."""
    live = payload["live"] is not None

    def part(place: re.Match[str]) -> str:
        name = place.group(1)
        if name is None:
            return markup.escape(payload["title"])
        if name == "DATA":
            return data(payload)
        return policy(live=live) if name == "POLICY" else _file(name)

    # In one pass: a placeholder in somebody's name, or in the library, stays text.
    return _PLACE.sub(part, _file("page.html"))


def data(payload: dict[str, Any]) -> str:
    """JSON that may stand inside a script element; plain ASCII."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda unsafe: f"\\u{ord(unsafe.group()):04x}", text)


def write(payload: dict[str, Any], path: Path) -> None:
    """Writes the page; the file is whole or not there."""
    page = html(payload).encode("utf-8")
    if os.path.isdir(path):
        raise ReportError(f"{path} is a folder: name a file, for example {path / 'report.html'}")
    try:
        with replacing(path, durable=False) as temporary:
            temporary.write_bytes(page)
    except OSError as error:
        raise ReportError(
            f"{path} cannot be written: {error.strerror}; choose another --out"
        ) from None
