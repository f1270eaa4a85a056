"""`fedglad data`: what it prints, to whom, and with which exit code."""

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data_support import (
    CONTENT,
    NAME,
    Server,
    child,
    environment,
    recipe,
    register,
    until,
    web,
)
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.cli import data as cli_data
from fedglad.cli.options import among
from fedglad.data import REGISTRY, store
from fedglad.data.sources import RECIPES


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(RECIPES, "tiny", recipe())  # so that it is forgotten afterwards
    monkeypatch.delenv("FEDGLAD_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def server(cache: Path) -> Iterator[Server]:
    with Server({NAME: CONTENT}) as running:
        register(web(running.address))
        yield running


def call(*args: str | Path) -> Any:
    result = CliRunner().invoke(app, ["data", *map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_list_tells_what_there_is_and_what_is_here(cache: Path):
    rows = [line.split() for line in call("list").stdout.splitlines()]
    assert rows[0][:3] == ["name", "here", "size"]
    assert {row[0]: row[1] for row in rows[1:-1]} == {
        **dict.fromkeys(RECIPES, "no"),
        **dict.fromkeys(["digits", "synthetic"], "always"),
    }
    assert rows[-1] == ["Cache:", str(cache)]
    call("get", "tiny")
    rows = {line.split()[0]: line.split() for line in call("list").stdout.splitlines()}
    assert rows["tiny"] == ["tiny", "yes", "0.9", "MB", "Bytes."]
    (cache / "tiny" / "v1" / "meta.json").unlink()
    rows = {line.split()[0]: line.split() for line in call("list").stdout.splitlines()}
    assert rows["tiny"][:2] == ["tiny", "damaged"]


def test_list_as_json(cache: Path, server: Server):
    call("get", "tiny")
    told = json.loads(call("list", "--json").stdout)
    assert set(told) == {*RECIPES, *REGISTRY}
    assert told["tiny"] == {
        "about": "Bytes.",
        "state": "yes",
        "bytes": store.get("tiny").size,
        "folder": str(cache / "tiny" / "v1"),
        "source": server.address,
    }
    assert told["mnist"]["state"] == "no"
    assert told["digits"]["state"] == "always"


def test_get_says_which_source_served_and_then_that_it_is_here(cache: Path, server: Server):
    result = call("get", "tiny", "digits")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"tiny: from {server.address}, 0.9 MB in {cache}/tiny/v1",
        "digits: always here, nothing to get",
    ]
    assert result.stderr.splitlines() == [
        f"tiny: {NAME} (0.3 MB)",
        f"tiny: reading {NAME}",
        "tiny: preparing tiny",
    ]
    again = call("get", "tiny")
    assert again.stdout == f"tiny: already here, 0.9 MB in {cache}/tiny/v1\n"
    assert not again.stderr
    assert call("get", "tiny", "--force").stdout == result.stdout.splitlines()[0] + "\n"


def test_get_from_a_folder(tmp_path: Path, server: Server):
    (tmp_path / "mine").mkdir()
    result = call("get", "tiny", "--from", tmp_path / "mine")
    assert result.exit_code == 2
    assert f"{tmp_path}/mine: has no file of the set" in result.stderr
    (tmp_path / "mine" / NAME).write_bytes(CONTENT)
    assert f"from {tmp_path}/mine" in call("get", "tiny", "--from", tmp_path / "mine").stdout
    assert not server.asked


def test_mistakes_are_told_before_anything_is_fetched(server: Server):
    result = call("get", "tiny", "minst")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: unknown data set 'minst': did you mean 'mnist'?  (fedglad data list)\n"
    )
    assert call("check", "minst").exit_code == 2
    result = call("get", "tiny", "--via", "ftp")
    assert result.exit_code == 2
    assert result.stderr == "error: tiny does not come via 'ftp': choose from folder, web\n"
    assert not server.asked


def test_a_set_that_fails_does_not_stop_the_next(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(RECIPES, "mnist", RECIPES["tiny"])
    failing = iter([True, False])
    original = store.get

    def get(name: str, **options: Any) -> store.Entry:
        server.files = {} if next(failing) else {NAME: CONTENT}
        return original(name, **options)

    monkeypatch.setattr(store, "get", get)
    result = call("get", "mnist", "tiny")
    assert result.exit_code == 2
    assert "404 Not Found" in result.stderr
    assert result.stdout.startswith("tiny: from ")


def test_check_tells_good_from_damaged(cache: Path):
    assert call("check").stdout == ""
    missing = call("check", "tiny")
    assert missing.exit_code == 1
    assert "error: tiny is not in the cache\nGet it again: fedglad data get tiny" in missing.stderr
    call("get", "tiny")
    good = call("check")
    assert (good.exit_code, good.stdout, good.stderr) == (0, "tiny: good\n", "")
    path = cache / "tiny" / "v1" / "x.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    bad = call("check", "digits")
    assert (bad.exit_code, bad.stdout) == (0, "digits: good\n")
    bad = call("check")
    assert bad.exit_code == 1
    assert f"{path} has the wrong checksum" in bad.stderr
    assert "Get it again: fedglad data get tiny --force" in bad.stderr
    assert call("get", "tiny", "--force").exit_code == 0
    assert call("check", "tiny").exit_code == 0


def test_names_are_completed():
    assert cli_data._complete_name("mn") == ["mnist"]
    assert cli_data._complete_name("glove-6b-1") == ["glove-6b-100d", "glove-6b-100d-341k"]
    assert cli_data._complete_name("sy") == ["synthetic"]
    assert among("fedglad.data.fetch:VIA")("w") == ["web"]


CLI = "from fedglad.cli import app; app()"


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(server: Server, cache: Path):
    server.hold = 100_000
    args = child(CLI, server.address, "data", "get", "tiny")
    with subprocess.Popen(
        args,
        env=environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # In a shell's background Ctrl-C is ignored, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        part = cache / "tiny" / "part" / f"{NAME}.part"
        until(lambda: part.exists() and part.stat().st_size == 100_000)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; go on with the same command" in err
    assert "Traceback" not in out + err
    assert sorted(p.name for p in (cache / "tiny").iterdir()) == ["lock", "part"]
    server.hold = -1
    assert call("get", "tiny").exit_code == 0
    assert server.asked == [None, "bytes=100000-"]


@pytest.mark.slow
def test_a_terminal_shows_a_bar(server: Server, cache: Path):
    ours, theirs = pty.openpty()
    env = {**environment(cache), "TERM": "xterm-256color"}
    args = child(CLI, server.address, "data", "get", "tiny")
    shown = b""
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=theirs, env=env) as process:
        os.close(theirs)
        server.hold = 150_000
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # how a terminal says that it is closed
                break
            if b"150.0/300.0 kB" in shown:
                server.go.set()
        assert process.stdout
        said = process.stdout.read().decode()
    os.close(ours)
    assert process.returncode == 0
    assert b"\x1b[" in shown
    assert b"150.0/300.0 kB" in shown
    assert said == f"tiny: from {server.address}, 0.9 MB in {cache}/tiny/v1\n"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.name=agnews-76k", "data.name = '20news', and not 'agnews-76k'"),
        ("data.tokenizer=minilm", "data.tokenizer = 'words', and not 'minilm'"),
        ("data.strip=true", "data.strip = False, and not True"),
    ],
)
def test_a_model_for_other_words_is_refused_before_anything_is_fetched(
    setting: str, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "get", lambda *_, **__: pytest.fail("fetched"))
    done = CliRunner().invoke(app, ["run", "20news-bilstm", "--set", setting])
    assert (done.exit_code, f"the model reads {said}" in done.output) == (2, True), done.output
