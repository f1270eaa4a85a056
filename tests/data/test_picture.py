"""How a partition is shown: the numbers by hand, and what fits on a screen."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedglad.data.digits import Digits
from fedglad.data.federation import Partitioned
from fedglad.data.picture import class_counts, sentence, summary, text
from fedglad.data.split import Split
from fedglad.rng import stream

COUNTS = np.array([[8, 0, 0], [4, 4, 0], [1, 1, 2]])


def skewed(clients: int, classes: int, **settings) -> np.ndarray:
    labels = np.repeat(np.arange(classes), 60_000 // classes)
    owners = Split(clients=clients, **settings).owners(labels)
    return np.stack([np.bincount(labels[part], minlength=classes) for part in owners])


def test_the_summary_by_hand():
    # Shares 1; ½ ½; ¼ ¼ ½. Largest: (1 + ½ + ½)/3 = 2/3. Entropies 0; log 2; ½·log 4 + ½·log 2 =
    # 1.5·log 2. Their exponentials 1, 2, 2^1.5 = 2.828: mean 1.943.
    found = summary(COUNTS)
    assert found["sizes"] == [8, 8, 4]
    assert found["counts"] == COUNTS.tolist()
    assert (found["min_size"], found["max_size"]) == (4, 8)
    assert found["top_share"] == pytest.approx(2 / 3)
    assert found["effective_classes"] == pytest.approx((1 + 2 + 2**1.5) / 3)
    assert json.loads(json.dumps(found)) == found


def test_the_summary_in_words():
    assert sentence(COUNTS) == (
        "3 clients × 3 classes, 4 to 8 samples; largest class 67 % of a client on average, "
        "1.9 effective classes"
    )
    assert sentence(np.array([[1000]])).startswith("1 client × 1 class, 1,000 samples each; ")


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=1))
def test_the_summary_has_its_bounds(rows):
    found = summary(np.array(rows))
    assert 1 / 4 <= found["top_share"] <= 1
    assert 1 - 1e-9 <= found["effective_classes"] <= 4 + 1e-9


def test_counts_come_from_a_federation():
    counts = class_counts(Digits(clients=9).load_federation())
    assert counts.shape == (9, 10)
    assert counts.sum() == 1437


def test_targets_that_are_not_labels_have_no_picture():
    inputs, targets = torch.zeros(2, 1), torch.zeros(2)
    data = Partitioned(inputs, targets, inputs, targets, [np.array([0, 1])])
    with pytest.raises(ValueError, match="the targets are not labels"):
        class_counts(data)


@pytest.mark.parametrize("counts", [np.zeros((0, 3)), np.array([[1, 0], [0, 0]]), np.ones(3)])
def test_a_table_with_an_empty_client_is_refused(counts):
    for show in (summary, text):
        with pytest.raises(ValueError, match="clients × classes in which no client is empty"):
            show(counts)


def test_the_picture_by_hand():
    # Shares of the last client: ¼ is the first shade, ½ the second. Sizes 8, 8, 4 in sevenths of
    # the largest: 7, 7 and ⌈3.5⌉ = 4. Two columns a client, as there is room.
    assert text(COUNTS, title="by hand").plain.splitlines() == [
        "by hand",
        "3 clients × 3 classes, 4 to 8 samples",
        "largest class 67 % of a client on average, 1.9 effective classes",
        "  client 0",
        "       0 ██▒▒░░",
        "       1 ··▒▒░░",
        "       2 ····▒▒",
        "    size ▇▇▇▇▄▄",
        "         · none  ░ to 25  ▒ 50  ▓ 75  █ 100 % of a client's samples",
    ]
    assert text(COUNTS, plain=True).plain.splitlines()[2:] == [
        "  client 0",
        "       0 ##++--",
        "       1 ..++--",
        "       2 ....++",
        "    size 777744",
        "         . none  - to 25  + 50  x 75  # 100 % of a client's samples",
    ]


def test_a_hundred_clients_stand_in_two_bands():
    lines = text(skewed(100, 10), title=Split().words(10)).plain.splitlines()
    assert len(lines) == 3 + 2 * 11 + 1
    assert lines[3] == "  client 0         10        20        30        40"
    assert lines[14] == "  client 50        60        70        80        90"
    assert all(len(line) == 9 + 50 for line in [*lines[4:14], *lines[15:25]])


@given(
    clients=st.integers(1, 1000),
    classes=st.integers(1, 120),
    width=st.integers(67, 200),  # 67: the legend
    height=st.integers(14, 100),
    plain=st.booleans(),
)
def test_any_picture_fits_its_screen(clients, classes, width, height, plain):
    counts = stream(0, "counts").integers(0, 3, (clients, classes)) + 1
    title = Split().words(classes)
    drawn = text(counts, title=title, width=width, height=height, plain=plain).plain
    lines = drawn.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert drawn.isascii() == plain


def test_what_is_left_out_is_said():
    counts = skewed(1000, 100)
    drawn = text(counts, height=30).plain
    # 30 lines less 2 of head and 2 at the end: 26, one of them the axis, so 4 classes a row; and
    # 1,000 clients in 71 columns: ⌈1000/71⌉ = 15.
    assert drawn.splitlines()[-1].strip() == "1 in 15 of the 1,000 clients is shown: 0, 15, 30, …"
    assert "    0–3 " in drawn
    assert "  96–99 " in drawn
    assert "is shown" not in text(skewed(100, 10)).plain


def test_an_axis_never_shows_half_a_number():
    # 122 clients in two bands of 61: client 121 has the last column, where 121 has no room.
    lines = text(np.ones((122, 10), dtype=int)).plain.splitlines()
    assert [line for line in lines if line.startswith("  client")] == [
        "  client 0         10        20        30        40        50",
        "  client 61        71        81        91        101       111",
    ]


def test_it_reads_the_same_without_colours():
    counts, outputs = skewed(100, 10), []
    for colours in (None, "truecolor"):
        file = io.StringIO()
        console = Console(
            file=file, width=80, force_terminal=colours is not None, color_system=colours
        )
        console.print(text(counts))
        outputs.append(file.getvalue())
    assert outputs[0] == text(counts).plain + "\n"
    assert "\x1b[36m" in outputs[1]


def test_importing_it_loads_neither_rich_nor_matplotlib():
    script = "import sys, fedglad.data.picture; print({'rich', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
