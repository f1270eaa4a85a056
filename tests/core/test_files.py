"""Temporary files: no link is followed; what a killed process left is removed when it is safe."""

import fcntl
import os
import signal
from pathlib import Path

import pytest

from fedglad.core import checksums, files


def test_a_link_in_the_way_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As somebody's folder may have one for every number that a process can have."""
    precious, path = tmp_path / "precious", tmp_path / "run" / "config.toml"
    precious.write_text("mine")
    path.parent.mkdir()
    for name in (f".config.toml.{os.getpid()}.tmp", ".config.toml.0123456789abcdef.tmp"):
        (path.parent / name).symlink_to(precious)
    files.write_text(path, "new")
    assert (precious.read_text(), path.read_text()) == ("mine", "new")
    # Even a name that was guessed does not help.
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "0123456789abcdef")
    (path.parent / ".config.toml.0123456789abcdef.tmp").unlink(missing_ok=True)
    (path.parent / ".config.toml.0123456789abcdef.tmp").symlink_to(precious)
    with pytest.raises(FileExistsError):
        files.write_text(path, "newer")
    assert (precious.read_text(), path.read_text()) == ("mine", "new")


def test_names_cannot_be_guessed(tmp_path: Path):
    names: set[str] = set()
    for _ in range(5):
        with files.replacing(tmp_path / "a") as temporary:
            names.add(temporary.name)
    assert len(names) == 5


def test_what_a_killed_process_left_is_removed_by_the_next_who_writes(tmp_path: Path):
    path, other = tmp_path / "state", tmp_path / "state2"
    for target in (path, other):
        if (child := os.fork()) == 0:
            with files.replacing(target) as temporary:
                temporary.write_text("half")
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
    assert len(files.leftovers(tmp_path)) == 2
    files.write_text(path, "whole")
    (left,) = files.leftovers(tmp_path)
    assert left.name.startswith(".state2.")  # another file's: not ours to judge
    files.write_text(other, "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", "state2"]


def test_what_another_process_is_writing_stays(tmp_path: Path):
    path = tmp_path / "state"
    with files.replacing(path) as first:
        first.write_text("first")
        with files.replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
        assert first.exists()
    assert path.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_one_that_is_taken_for_abandoned_at_its_birth_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lock, taken = fcntl.flock, list[str]()

    def late(handle: int, how: int) -> None:
        if not taken:  # between its making and its lock, another process removes it
            (left,) = files.leftovers(tmp_path)
            taken.append(left.name)
            left.unlink()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    files.write_text(tmp_path / "state", "whole")
    assert taken
    assert (tmp_path / "state").read_text() == "whole"


def test_a_file_has_the_usual_permissions(tmp_path: Path):
    (tmp_path / "usual").write_text("")
    files.write_text(tmp_path / "ours", "")
    modes = [(tmp_path / name).stat().st_mode for name in ("usual", "ours")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("text", ['{"a": 1}', '{\n  "a": [1, 2]\n}', '{\n  "a": 1\n}\n'])
def test_every_changed_byte_of_a_small_file_shows(text: str):
    data = checksums.json_with_crc(text).encode()
    assert checksums.verify(data) == "good"
    body = len(text.rstrip().removesuffix("}").rstrip())
    for at in range(body):
        for flip in (1, 32, 128):
            changed = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            assert checksums.verify(changed) == "damaged"
    assert checksums.verify(text.encode()) == "no checksum"
    toml = checksums.toml_with_crc("a = 1\n").encode()
    assert checksums.verify(toml) == "good"
    assert checksums.verify(toml.replace(b"1", b"2", 1)) == "damaged"
