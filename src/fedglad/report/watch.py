"""The page of a run that goes on: `/`, `/data.json`, and `/metrics` for Prometheus.

It is served on this machine alone, unless a host is given: then to whoever has the token.
"""

import errno
import hmac
import re
import secrets
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedglad.report import ReportError, metrics, page
from fedglad.report.figures import payload
from fedglad.runs.reader import Run, RunError

ADDRESS = "127.0.0.1"
PORT = 8756
TRIED = 20  # ports from the first on
COOKIE = "fedglad_token"

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
        self._metrics = metrics.Metrics()
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

    def metrics(self) -> str:
        """All rounds so far as metrics; a round counts as written when its file last changed."""
        with self._lock:
            rounds = self.run.read().rounds
            if len(rounds) < self._metrics.rounds:  # the run went back to a checkpoint
                self._metrics = metrics.Metrics()
            new = [record for record in rounds if record["round"] >= self._metrics.rounds]
            for record in new:
                self._metrics.add(record, self._written())
            return self._metrics.text()

    def _written(self) -> float:
        path = self.run.folder / "rounds.jsonl"  # which somebody may have removed beside its parts
        return (path if path.is_file() else self.run.folder).stat().st_mtime


class Server(ThreadingHTTPServer):
    """Listens on 127.0.0.1, or on a host with a token; `url` is what to open."""

    daemon_threads = True

    def __init__(self, live: Live, port: int, host: str = ADDRESS, token: str = "") -> None:
        self.live, self.host, self.token = live, host, token
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has closed its connection is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        asked = f"?token={self.token}" if self.token else ""
        return f"http://{self.host}:{self.server_address[1]}/{asked}"


def serve(folder: Path, port: int = PORT, host: str = ADDRESS, token: str = "") -> Server:
    """A server for a run's folder on this port, or the next that is free; 0 is any.

    On another host than 127.0.0.1 it answers to whoever has the token, by default a new one. The
    caller calls `serve_forever()`, and `server_close()` at the end.
    """
    live = Live(folder)
    if host != ADDRESS:
        token = token or secrets.token_urlsafe(24)
    last = port + (TRIED if port else 1)
    for one in range(port, min(last, 65536)):
        try:
            return Server(live, one, host, token)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ReportError(
                    f"port {one} of {host} cannot be used: {error.strerror}; choose another --port"
                ) from None
    raise ReportError(f"the ports {port} to {last - 1} are all taken: choose another --port")


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "fedglad", ""
    timeout = 30  # seconds for a browser that sends nothing

    def do_GET(self) -> None:
        # Another site's name may be made to lead here: its pages then ask with that name. With a
        # token that is no matter, as they do not have it.
        if not (self.server.token or _HOST.fullmatch(self.headers.get("Host", ""))):
            self._plain(HTTPStatus.FORBIDDEN, "This server answers to 127.0.0.1 and localhost.")
            return
        if not self._allowed():
            self._plain(HTTPStatus.UNAUTHORIZED, "Open the address that `fedglad watch` printed.")
            return
        path = urlsplit(self.path).path if self.server.token else self.path
        if path == "/metrics":
            self._metrics()
            return
        shown = {
            "/": (page.html, "text/html; charset=utf-8"),
            "/data.json": (page.data, "application/json"),
        }.get(path)
        if shown is None:
            self._plain(HTTPStatus.NOT_FOUND, "There are /, /data.json and /metrics only.")
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

    def _metrics(self) -> None:
        try:
            body = self.server.live.metrics().encode()
        except (RunError, OSError) as error:
            self._plain(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        self._answer(HTTPStatus.OK, metrics.CONTENT_TYPE, body)

    def _allowed(self) -> bool:
        """Whether the request has the token, where one is needed: in its address, as the page is
        opened, in the cookie that it got with the page, or in its header, as a scraper sends it."""
        if not (token := self.server.token):
            return True
        sent = parse_qs(urlsplit(self.path).query).get("token", [])
        kind, _, bearer = self.headers.get("Authorization", "").partition(" ")
        sent += [bearer] * (kind.lower() == "bearer")
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            cookies = SimpleCookie()
        sent += [cookie.value for name, cookie in cookies.items() if name == COOKIE]
        return any(hmac.compare_digest(one.encode(), token.encode()) for one in sent)

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
        if self.server.token and status == HTTPStatus.OK:
            cookie = f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self.send_header("Set-Cookie", cookie)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if body is not None:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body is not None and self.command != "HEAD":
            self.wfile.write(body)
