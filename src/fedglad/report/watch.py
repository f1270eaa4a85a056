"""The page of a run that goes on, served on this machine alone: `/` and `/data.json`."""

import errno
import re
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedglad.report import ReportError, page
from fedglad.report.figures import payload
from fedglad.runs.reader import Run, RunError

ADDRESS = "127.0.0.1"
PORT = 8756
TRIED = 20  # ports from the first on

_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.IGNORECASE)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


Form = Callable[[dict[str, Any]], str]


class Live:
    """A run's payload as JSON, built anew only when a file of its folder has changed."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder)
        self.builds = 0
        self._lock = threading.Lock()  # browsers ask side by side
        self._version, self._payload = "", dict[str, Any]()
        self._made: dict[Form, bytes] = {}
        self.get(page.data)  # raises at once if the folder is no run

    def get(self, form: Form) -> tuple[str, bytes]:
        """The version of the files, and the payload as `page.data` or `page.html` writes it."""
        with self._lock:
            # Before it is read: what is written meanwhile is a newer version.
            version = self.run.version()
            if version != self._version:
                self._payload = payload([self.run.read()], live=True)
                self._version, self._made = version, {}
                self.builds += 1
            if form not in self._made:
                self._made[form] = form(self._payload).encode()
            return self._version, self._made[form]


class Server(ThreadingHTTPServer):
    """Listens on 127.0.0.1; `url` is what to open."""

    daemon_threads = True

    def __init__(self, live: Live, port: int) -> None:
        self.live = live
        super().__init__((ADDRESS, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has closed its connection is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"


def serve(folder: Path, port: int = PORT) -> Server:
    """A server for a run's folder on this port, or the next that is free; 0 is any.

    The caller calls `serve_forever()`, and `server_close()` at the end.
    """
    live = Live(folder)
    last = port + (TRIED if port else 1)
    for one in range(port, min(last, 65536)):
        try:
            return Server(live, one)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ReportError(
                    f"port {one} of {ADDRESS} cannot be used: {error.strerror}; choose another "
                    "--port"
                ) from None
    raise ReportError(f"the ports {port} to {last - 1} are all taken: choose another --port")


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "fedglad", ""
    timeout = 30  # seconds for a browser that sends nothing

    def do_GET(self) -> None:
        # Another site's name may be made to lead here: its pages then ask with that name.
        if not _HOST.fullmatch(self.headers.get("Host", "")):
            self._plain(HTTPStatus.FORBIDDEN, "This server answers to 127.0.0.1 and localhost.")
            return
        shown = {
            "/": (page.html, "text/html; charset=utf-8"),
            "/data.json": (page.data, "application/json"),
        }.get(self.path)
        if shown is None:
            self._plain(HTTPStatus.NOT_FOUND, "There are / and /data.json only.")
            return
        form, kind = shown
        try:
            version, body = self.server.live.get(form)
        except RunError as error:  # the folder was removed
            self._plain(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        tag = f'"{version}"'
        if tag in [one.strip() for one in self.headers.get("If-None-Match", "").split(",")]:
            self._answer(HTTPStatus.NOT_MODIFIED, kind, None, tag)
        else:
            self._answer(HTTPStatus.OK, kind, body, tag)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._plain(HTTPStatus.METHOD_NOT_ALLOWED, "There is nothing to change here.")

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A request that is none, in plain words."""
        self._plain(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: object) -> None:
        """The terminal is not filled with requests."""

    def _plain(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", f"{text}\n".encode(errors="replace"))

    def _answer(self, status: HTTPStatus, kind: str, body: bytes | None, tag: str = "") -> None:
        self.send_response(status)
        allowed = f"{page.policy(live=True)}; frame-ancestors 'none'"
        self.send_header("Content-Security-Policy", allowed)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if tag:
            self.send_header("ETag", tag)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if body is not None:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body is not None and self.command != "HEAD":
            self.wfile.write(body)
