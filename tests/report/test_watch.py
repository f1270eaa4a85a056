"""The live page: a real server and real requests."""

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedglad.report import ReportError, watch
from fedglad.runs import RunError
from tests.report.made import changed, hear_ctrl_c, record, write


@contextmanager
def serving(folder: Path) -> Generator[watch.Server]:
    with watch.serve(folder, 0) as server:
        server.daemon_threads = False  # so that closing waits for them
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: watch.Server, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    port = server.server_address[1]
    with closing(http.client.HTTPConnection(watch.ADDRESS, port, timeout=30)) as connection:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=sent)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def rounds_of(body: bytes) -> list[int]:
    (run,) = json.loads(body)["runs"]
    return run["rounds"]


def grow(folder: Path, *records: dict[str, Any]) -> None:
    with open(folder / "rounds.jsonl", "a") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)


def test_the_page_and_its_data(tmp_path: Path):
    folder = write(tmp_path, [record(0)])
    with serving(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, headers, body = ask(server, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert b'"live":{"seconds":2}' in body
        assert b"connect-src 'self'" in body
        status, headers, body = ask(server, "/data.json")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert rounds_of(body) == [1]
        assert json.loads(body)["live"] == {"seconds": 2}


@pytest.mark.parametrize("path", ["/", "/data.json", "/absent"])
def test_every_answer_has_the_headers(tmp_path: Path, path: str):
    with serving(write(tmp_path, [record(0)])) as server:
        _, headers, _ = ask(server, path)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    assert "connect-src 'self'; frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Server"].strip() == "fedglad"  # and no version of Python


def test_new_rounds_are_there_at_once_and_nothing_is_built_twice(tmp_path: Path):
    folder = write(tmp_path, [record(0)])
    with serving(folder) as server:
        _, headers, body = ask(server, "/data.json")
        tag = headers["ETag"]
        for path in ("/data.json", "/", "/data.json"):
            ask(server, path)
        assert server.live.builds == 1
        assert ask(server, "/data.json", If_None_Match=tag)[::2] == (304, b"")
        assert ask(server, "/data.json", If_None_Match=f'"x", {tag}')[0] == 304
        assert server.live.builds == 1

        grow(folder, record(1), record(2))
        status, headers, body = ask(server, "/data.json", If_None_Match=tag)
        assert (status, rounds_of(body)) == (200, [1, 2, 3])
        assert headers["ETag"] != tag
        assert server.live.builds == 2


def test_a_run_that_begins_and_ends(tmp_path: Path):
    folder = write(tmp_path)
    (folder / "rounds.jsonl").unlink()
    with serving(folder) as server:
        told = json.loads(ask(server, "/data.json")[2])
        assert told["verdict"] == "Waiting for the first round."
        assert ask(server, "/")[0] == 200
        write(folder, [record(t) for t in range(3)], finish=True)
        told = json.loads(ask(server, "/data.json")[2])
        assert (told["runs"][0]["finished"], rounds_of(json.dumps(told).encode())) == (
            True,
            [1, 2, 3],
        )


def test_a_folder_that_goes_away_is_said(tmp_path: Path):
    folder = write(tmp_path / "run", [record(0)])
    with serving(folder) as server:
        assert ask(server, "/data.json")[0] == 200
        shutil.rmtree(folder)
        status, _, body = ask(server, "/data.json")
        assert (status, body) == (503, f"there is no folder {folder}\n".encode())
        write(folder, [record(0), record(1)])
        assert rounds_of(ask(server, "/data.json")[2]) == [1, 2]


@pytest.mark.parametrize(
    "path",
    [
        "/config.toml",
        "/rounds.jsonl",
        "/../config.toml",
        "/..%2fconfig.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/data.json/../config.toml",
        "/./",
        "/data.json?x",
        "/%00",
        "http://127.0.0.1/config.toml",
        "/page.js",
        "*",
    ],
)
def test_nothing_else_is_served(tmp_path: Path, path: str):
    with serving(write(tmp_path, [record(0)])) as server:
        status, _, body = ask(server, path)
    assert (status, body) == (404, b"There are /, /data.json and /metrics only.\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(tmp_path: Path, method: str):
    with serving(write(tmp_path, [record(0)])) as server:
        status, headers, _ = ask(server, "/", method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
        assert ask(server, "/", "TRACE")[0] == 501


def test_head_has_the_length_and_no_body(tmp_path: Path):
    with serving(write(tmp_path, [record(0)])) as server:
        for path in ("/", "/data.json"):
            status, headers, body = ask(server, path, "HEAD")
            assert (status, body) == (200, b"")
            assert int(headers["Content-Length"]) == len(ask(server, path)[2])


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:8756", 200),
        ("LocalHost", 200),
        ("evil.example", 403),
        ("evil.example:8756", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1@evil.example", 403),
        ("", 403),
    ],
)
def test_another_sites_name_for_this_machine_is_refused(tmp_path: Path, host: str, status: int):
    with serving(write(tmp_path, [record(0)])) as server:
        for path in ("/", "/data.json"):
            found, _, body = ask(server, path, Host=host)
            assert found == status
            assert (b"digits" in body) == (status == 200)


@pytest.mark.parametrize(
    "request_",
    [b"\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x00\x05abcde\r\n"],
)
def test_what_is_no_request_harms_nothing(
    tmp_path: Path, request_: bytes, capsys: pytest.CaptureFixture[str]
):
    with serving(write(tmp_path, [record(0)])) as server:
        with socket.create_connection((watch.ADDRESS, server.server_address[1]), timeout=30) as raw:
            raw.sendall(request_)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(4096):
                pass
        assert ask(server, "/data.json")[0] == 200
    assert capsys.readouterr().err == ""


def test_a_browser_that_goes_away_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(write(tmp_path, [record(t) for t in range(200)])) as server:
        with socket.create_connection((watch.ADDRESS, server.server_address[1]), timeout=30) as raw:
            raw.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset
        assert ask(server, "/data.json")[0] == 200
    assert capsys.readouterr().err == ""


def test_many_browsers_at_once_build_once(tmp_path: Path):
    folder = write(tmp_path, [record(t) for t in range(50)])
    with serving(folder) as server:
        grow(folder, record(50))
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.append(ask(server, "/data.json")[0]))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (found, server.live.builds) == ([200] * 8, 2)


def test_a_port_that_is_taken_gives_the_next(tmp_path: Path):
    folder = write(tmp_path, [record(0)])
    with watch.serve(folder, 0) as first:
        port = first.server_address[1]
        if port > 65000:
            pytest.skip("there are too few ports above")
        with watch.serve(folder, port) as second:
            assert port < second.server_address[1] < port + watch.TRIED
            assert second.url == f"http://127.0.0.1:{second.server_address[1]}/"


def test_all_ports_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "TRIED", 1)
    folder = write(tmp_path, [record(0)])
    with watch.serve(folder, 0) as first:
        port = first.server_address[1]
        with pytest.raises(ReportError, match=f"the ports {port} to {port} are all taken"):
            watch.serve(folder, port)


def test_a_folder_that_is_no_run(tmp_path: Path):
    with pytest.raises(RunError, match="is not a run"):
        watch.serve(tmp_path, 0)
    with pytest.raises(RunError, match="there is no folder"):
        watch.serve(tmp_path / "absent", 0)


@contextmanager
def watching(
    folder: Path, *options: str, **environment: str
) -> Generator[tuple[subprocess.Popen[str], str]]:
    """The command in a process, and the address that it said."""
    script = "from fedglad.cli import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, "watch", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        preexec_fn=hear_ctrl_c,
    )
    assert process.stdout
    assert process.stderr
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, line.split()[0]
    finally:
        process.kill()
        process.communicate()


def fetch(url: str) -> list[int]:
    with closing(http.client.HTTPConnection(url.split("/")[2], timeout=60)) as connection:
        connection.request("GET", "/data.json")
        return rounds_of(connection.getresponse().read())


@pytest.mark.slow
def test_a_process_beside_a_growing_run(tmp_path: Path):
    folder = write(tmp_path / "run", config=changed(rounds=30))
    with watching(folder, "--port", "0", "--no-browser") as (process, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        assert fetch(url) == []
        for t in range(30):
            text = json.dumps(record(t)) + "\n"
            with open(folder / "rounds.jsonl", "a") as file:  # in two pieces, as a disk may show it
                file.write(text[:40])
                file.flush()
                assert fetch(url) == list(range(1, t + 1))
                file.write(text[40:])
            assert fetch(url) == list(range(1, t + 2))
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=60)
        assert (process.returncode, complaint) == (0, "")


@pytest.mark.slow
def test_a_browser_is_opened(tmp_path: Path):
    browser, told = tmp_path / "browser", tmp_path / "told"
    written = shlex.quote(str(tmp_path / "part"))
    browser.write_text(f'#!/bin/sh\necho "$1" >{written}; mv {written} {shlex.quote(str(told))}\n')
    browser.chmod(0o755)
    folder = write(tmp_path / "run", [record(0)])
    with watching(folder, "--port", "0", BROWSER=str(browser)) as (_, url):
        until = time.monotonic() + 60
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert told.read_text() == f"{url}\n"
        assert fetch(url) == [1]
