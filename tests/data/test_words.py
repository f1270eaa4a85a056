"""Texts as words: by hand, and what holds for any text."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedglad.data import words


def test_words_are_lower_case_runs_of_letters_and_digits():
    assert list(words.words("The PUCK-drop: 3rd_goal, Caf\u00e9's e-mail\tx2")) == [
        *("puck", "drop", "3rd", "goal", "caf\u00e9", "e", "mail", "x2"),
    ]


def test_stop_words_are_left_out_and_of_contractions_both_halves():
    assert list(words.words("I don't think it's what they'd've wanted; we'll NOT go")) == [
        *("think", "wanted", "go"),
    ]
    assert len(words.STOP) == 153  # NLTK's 179 without the 26 that have an apostrophe
    assert all(list(words.WORD.findall(word)) == [word] for word in words.STOP)


def test_the_vocabulary_by_hand():
    texts = ["goal goal puck", "goal puck orbit the the the the the", "goal puck goal", "puck puck"]
    # goal: 2 + 1 + 2 = 5; puck: 1 + 1 + 1 + 2 = 5; orbit: 1; "the", five times, is a stop word.
    assert words.vocabulary(texts) == ["goal", "puck"]
    # Without the last text puck has 3 left: too rare.
    assert words.vocabulary(texts[:3]) == ["goal"]
    assert words.vocabulary(texts, rare=1) == ["goal", "puck", "orbit"]
    assert words.vocabulary([]) == []


def test_ids_by_hand():
    known = ["goal", "puck", "ice"]  # 1, 2, 3
    texts = ["Puck on the ice! A zebra. GOAL", "the zebra", "ice ice ice puck ice"]
    ids, lengths = words.encode(texts, known, 4)
    # "on", "the", "a" stop, "zebra" is unknown: puck ice goal; nothing; the fifth word is cut off.
    assert ids.tolist() == [[2, 3, 1, 0], [0, 0, 0, 0], [3, 3, 3, 2]]
    assert lengths.tolist() == [3, 0, 4]
    assert ids.dtype == lengths.dtype == np.int32


def test_padding_is_the_id_that_is_asked_for():
    ids, lengths = words.padded(iter([[5], [1, 1]]), 2, 2, 1)
    assert ids.tolist() == [[5, 1], [1, 1]]
    assert lengths.tolist() == [1, 2]


@settings(max_examples=60)
@given(st.lists(st.text(alphabet="ab cB,'\u00c9\n_1", max_size=30), max_size=6), st.integers(1, 6))
def test_ids_give_the_known_words_back(texts: list[str], length: int):
    known = words.vocabulary(texts, rare=2)
    assert len(set(known)) == len(known)
    ids, lengths = words.encode(texts, known, length)
    assert ids.shape == (len(texts), length)
    for text, row, count in zip(texts, ids.tolist(), lengths.tolist(), strict=True):
        kept = [word for word in words.words(text) if word in known][:length]
        assert [known[k - 1] for k in row[:count]] == kept
        assert row[count:] == [0] * (length - count)


@settings(max_examples=40)
@given(st.lists(st.text(alphabet="abc ", max_size=20), max_size=6), st.randoms())
def test_the_vocabulary_does_not_depend_on_the_order_of_the_texts(texts: list[str], random: object):
    shuffled = sorted(texts, key=lambda _: random.random())  # pyright: ignore
    assert words.vocabulary(shuffled, rare=1) == words.vocabulary(texts, rare=1)
