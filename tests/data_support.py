"""What the tests of getting data share: a server on this machine, and a small data set."""

import gzip
import hashlib
import io
import os
import re
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from fedglad.data.sources import RECIPES, File, Place, Progress, Recipe

CONTENT = np.random.default_rng(0).bytes(300_000)
NAME = "a.bin"


def md5(content: bytes) -> str:
    return f"md5:{hashlib.md5(content).hexdigest()}"


RAW = File(name=NAME, checksum=md5(CONTENT), size=len(CONTENT))
PLAIN = File(name=NAME, checksum=RAW.checksum)


def prepare(raw: Path) -> dict[str, np.ndarray]:
    """Thrice the content, so that the arrays need more room than the raw file."""
    x = np.fromfile(raw / NAME, dtype=np.uint8)
    return {"x": np.tile(x, 3), "y": np.arange(3)}


def recipe(*places: Place, files: tuple[File, ...] = (RAW,)) -> Recipe:
    return Recipe(name="tiny", about="Bytes.", files=files, places=places, prepare=prepare)


def register(*places: Place) -> None:
    """Makes the set `tiny` known, in this process."""
    RECIPES["tiny"] = recipe(*places)


def web(address: str, *packs: File) -> Place:
    return Place(kind="web", where=address, packs=packs or (PLAIN,))


class Server(ThreadingHTTPServer):
    """Serves `files`, and misbehaves as told.

    | attribute | meaning |
    |---|---|
    | `ranges` | whether a Range is honoured |
    | `shift` | a Range is answered with a part that starts so many bytes later |
    | `announce` | whether the length is |
    | `cuts` | after how many bytes each of the next answers ends, whatever it had announced |
    | `hold` | after so many bytes, an answer waits for `go` |
    | `asked`, `sent` | the Range of every request, and the number of bytes of all bodies |
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(files)
        self.ranges, self.shift, self.hold, self.announce = True, 0, -1, True
        self.cuts: list[int] = []
        self.asked: list[str | None] = []
        self.sent = 0
        self.go = threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self.shutdown()
        self.thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error here."""


class Handler(BaseHTTPRequestHandler):
    """One answer."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        wanted = self.headers.get("Range")
        server.asked.append(wanted)
        content = server.files.get(self.path[1:])
        if content is None:
            self.send_error(404)
            return
        start = 0
        if wanted and server.ranges:
            found = re.fullmatch(r"bytes=(\d+)-", wanted)
            assert found
            start = int(found[1]) + server.shift
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if server.announce:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        body = body[: server.cuts.pop(0)] if server.cuts else body
        if 0 <= server.hold < len(body):
            self.wfile.write(body[: server.hold])
            server.go.wait(60)
            body, server.sent = body[server.hold :], server.sent + server.hold
        server.sent += len(body)  # before the client can have read it
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not shown."""


class Told(Progress):
    """Progress that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.begun: list[tuple[str, int | None]] = []
        self.done = 0

    def begin(self, what: str, total: int | None) -> None:
        self.begun.append((what, total))
        self.done = 0

    def advance(self, count: int) -> None:
        self.done += count

    def report(self, text: str) -> None:
        self.said.append(text)


class Printed(Told):
    """For a process whose parent listens."""

    def report(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def snapshot(cache: Path) -> dict[str, bytes]:
    """Every file in the cache but the locks."""
    paths = [path for path in cache.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(cache)): path.read_bytes() for path in paths}


def tar(*members: tuple[str, bytes | tarfile.TarInfo]) -> bytes:
    """A .tar.gz of files by path, or of members as they are given."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def zipped(content: bytes) -> bytes:
    return gzip.compress(content, compresslevel=1, mtime=0)


def child(script: str, *args: str) -> list[str]:
    """The command for a process in which `tiny` comes from the server of the first argument."""
    start = "import sys, data_support as d; from fedglad.data import store\n"
    start += "d.register(d.web(sys.argv.pop(1)))\n"
    return [sys.executable, "-c", start + script, *args]


def environment(cache: Path) -> dict[str, str]:
    path = str(Path(__file__).parent)
    return {**os.environ, "PYTHONPATH": path, "FEDGLAD_CACHE": str(cache), "COLUMNS": "80"}


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
